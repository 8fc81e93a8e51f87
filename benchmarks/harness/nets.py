"""The networks of the presets, in plain torch.nn."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class BasicBlock(nn.Module):
    """Two convolutions with a shortcut, which subsamples and pads where the size changes."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.stride, self.more = stride, outputs - inputs

    def forward(self, x: Tensor) -> Tensor:
        """Apply the block."""
        y = torch.relu(self.norm1(self.conv1(x)))
        y = self.norm2(self.conv2(y))
        if self.more:
            x = F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, self.more // 2, self.more - self.more // 2))
        return torch.relu(x + y)


class CifarResNet(nn.Module):
    """The residual net for small pictures, of 6 n + 2 layers."""

    def __init__(self, layers: int, classes: int = 10) -> None:
        super().__init__()
        blocks = (layers - 2) // 6
        self.conv = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(16)
        stages, inputs = [], 16
        for outputs, stride in ((16, 1), (32, 2), (64, 2)):
            for index in range(blocks):
                stages.append(BasicBlock(inputs, outputs, stride if index == 0 else 1))
                inputs = outputs
        self.blocks = nn.Sequential(*stages)
        self.head = nn.Linear(64, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Classify pictures."""
        x = self.blocks(torch.relu(self.norm(self.conv(x))))
        scores: Tensor = self.head(x.mean((2, 3)))
        return scores


class Bottleneck(nn.Module):
    """The block of ResNet-50: 1x1, 3x3 and 1x1 convolutions with a shortcut."""

    def __init__(self, inputs: int, width: int, stride: int = 1) -> None:
        super().__init__()
        outputs = 4 * width
        self.body = nn.Sequential(
            nn.Conv2d(inputs, width, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, outputs, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        same = inputs == outputs and stride == 1
        self.shortcut: nn.Module = (
            nn.Identity()
            if same
            else nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))
        )

    def forward(self, x: Tensor) -> Tensor:
        """Apply the block."""
        return torch.relu(self.body(x) + self.shortcut(x))


class EncoderLayer(nn.Module):
    """A layer of BERT without dropout: attention, then feed forward, each followed by a residual sum and a norm."""

    def __init__(self, width: int, inner: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer."""
        query, key, value = (
            layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        attended = F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)
        x = self.norm1(x + self.out(attended))
        result: Tensor = self.norm2(x + self.down(F.gelu(self.up(x))))
        return result


class PlainBert(nn.Module):
    """A BERT classifier in plain torch, used if transformers is not installed."""

    def __init__(self, layers: int, width: int, heads: int, words: int, length: int, classes: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(length, width)
        self.norm = nn.LayerNorm(width)
        self.layers = nn.Sequential(*(EncoderLayer(width, 4 * width, heads) for _ in range(layers)))
        self.pooler, self.head = nn.Linear(width, width), nn.Linear(width, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        """Classify sequences by their first token."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.layers(self.norm(self.words(tokens) + self.places(places)))
        scores: Tensor = self.head(torch.tanh(self.pooler(x[:, 0])))
        return scores
