"""The ImageNet ResNets in plain PyTorch, with torchvision's parameter names, so that its checkpoints load.

A classifier for image_classification.py, and the backbone of the detector in object_detection.py.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn
from torch.nn import functional as F

Norm = Callable[[int], nn.Module]


class Basic(nn.Module):
    """Two 3x3 convolutions with a shortcut."""

    expansion = 1

    def __init__(self, inputs: int, width: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, width, 3, stride, padding=1, bias=False)
        self.bn1 = norm(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = norm(width)
        self.downsample = _shortcut(inputs, width * self.expansion, stride, norm)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the block."""
        y = F.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        return F.relu(y + (x if self.downsample is None else self.downsample(x)))


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions with a shortcut."""

    expansion = 4

    def __init__(self, inputs: int, width: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, width, 1, bias=False)
        self.bn1 = norm(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
        self.bn2 = norm(width)
        self.conv3 = nn.Conv2d(width, width * self.expansion, 1, bias=False)
        self.bn3 = norm(width * self.expansion)
        self.downsample = _shortcut(inputs, width * self.expansion, stride, norm)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the block."""
        y = F.relu(self.bn1(self.conv1(x)))
        y = F.relu(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        return F.relu(y + (x if self.downsample is None else self.downsample(x)))


# Blocks in each of the four stages.
DEPTHS: dict[int, tuple[type[Basic] | type[Bottleneck], tuple[int, int, int, int]]] = {
    10: (Basic, (1, 1, 1, 1)),
    18: (Basic, (2, 2, 2, 2)),
    34: (Basic, (3, 4, 6, 3)),
    50: (Bottleneck, (3, 4, 6, 3)),
    101: (Bottleneck, (3, 4, 23, 3)),
    152: (Bottleneck, (3, 8, 36, 3)),
}


class ResNet(nn.Module):
    """ResNet-18, -34, -50, -101 and -152 by depth; ResNet-10 has one block in each stage."""

    def __init__(
        self, depth: int, classes: int, *, width: int = 64, channels: int = 3, norm: Norm = nn.BatchNorm2d
    ) -> None:
        super().__init__()
        if depth not in DEPTHS:
            raise ValueError(f"there are ResNets of {', '.join(map(str, DEPTHS))} layers, got {depth}")
        block, counts = DEPTHS[depth]
        self.conv1 = nn.Conv2d(channels, width, 7, 2, padding=3, bias=False)
        self.bn1 = norm(width)
        self.maxpool = nn.MaxPool2d(3, 2, padding=1)
        self.widths: list[int] = []  # channels after each stage
        inputs, stages = width, []
        for index, count in enumerate(counts):
            blocks = []
            for place in range(count):
                blocks.append(block(inputs, width * 2**index, 2 if index > 0 and place == 0 else 1, norm))
                inputs = width * 2**index * block.expansion
            stages.append(nn.Sequential(*blocks))
            self.widths.append(inputs)
        self.layer1, self.layer2, self.layer3, self.layer4 = stages
        self.fc = nn.Linear(inputs, classes) if classes else None
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def features(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the outputs of the four stages, at a quarter to a thirty-second of the size."""
        x = self.maxpool(F.relu(self.bn1(self.conv1(images))))
        first = self.layer1(x)
        second = self.layer2(first)
        third = self.layer3(second)
        return first, second, third, self.layer4(third)

    def forward(self, images: Tensor) -> Tensor:
        """Return one score per class."""
        if self.fc is None:
            raise RuntimeError("a ResNet without classes is a backbone: call features()")
        scores: Tensor = self.fc(self.features(images)[-1].mean(dim=(2, 3)))
        return scores


def _shortcut(inputs: int, outputs: int, stride: int, norm: Norm) -> nn.Module | None:
    if stride == 1 and inputs == outputs:
        return None
    return nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), norm(outputs))
