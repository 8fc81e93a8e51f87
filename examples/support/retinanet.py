"""RetinaNet in plain PyTorch: a residual net, a feature pyramid, and two heads shared by all levels."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from support.resnet import Basic, Norm, ResNet


class FrozenNorm(nn.Module):
    """Batch norm with the statistics and the scale of pretraining, which are neither trained nor updated."""

    weight: Tensor
    bias: Tensor
    running_mean: Tensor
    running_var: Tensor

    def __init__(self, channels: int) -> None:
        super().__init__()
        for name, value in (("weight", 1.0), ("bias", 0.0), ("running_mean", 0.0), ("running_var", 1.0)):
            self.register_buffer(name, torch.full((channels,), value))

    def forward(self, x: Tensor) -> Tensor:
        """Normalize."""
        return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias)


class SmallBackbone(nn.Module):
    """A residual net of three stages, at a half, a quarter and an eighth of the size: for small scenes."""

    def __init__(self, channels: int, width: int, norm: Norm) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 3, 2, padding=1, bias=False)
        self.bn1 = norm(width)
        self.layer1 = Basic(width, width, 1, norm)
        self.layer2 = Basic(width, 2 * width, 2, norm)
        self.layer3 = Basic(2 * width, 4 * width, 2, norm)
        self.widths = [width, 2 * width, 4 * width]

    def features(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the outputs of the three stages."""
        first = self.layer1(F.relu(self.bn1(self.conv1(images))))
        second = self.layer2(first)
        return first, second, self.layer3(second)


class Pyramid(nn.Module):
    """Levels of one width: each adds the next coarser level; further coarser levels follow on top."""

    def __init__(self, inputs: list[int], width: int, more: int) -> None:
        super().__init__()
        self.lateral = nn.ModuleList(nn.Conv2d(count, width, 1) for count in inputs)
        self.smooth = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1) for _ in inputs)
        self.more = nn.ModuleList(
            nn.Conv2d(width if index else inputs[-1], width, 3, 2, padding=1) for index in range(more)
        )

    def forward(self, features: list[Tensor]) -> list[Tensor]:
        """Return the levels, from fine to coarse."""
        levels: list[Tensor] = []
        above: Tensor | None = None
        for lateral, smooth, x in zip(reversed(self.lateral), reversed(self.smooth), reversed(features), strict=True):
            y = lateral(x)
            if above is not None:
                y = y + F.interpolate(above, size=y.shape[-2:], mode="nearest")
            above = y
            levels.insert(0, smooth(y))
        top = features[-1]
        for index, conv in enumerate(self.more):
            top = conv(F.relu(top) if index else top)
            levels.append(top)
        return levels


class Head(nn.Module):
    """Some 3x3 convolutions, and one that predicts `numbers` numbers for each anchor."""

    def __init__(self, width: int, convs: int, anchors: int, numbers: int) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1) for _ in range(convs))
        self.output = nn.Conv2d(width, anchors * numbers, 3, padding=1)
        self.numbers = numbers

    def forward(self, x: Tensor) -> Tensor:
        """Return (images, anchors of all places, numbers)."""
        for conv in self.convs:
            x = F.relu(conv(x))
        y: Tensor = self.output(x).permute(0, 2, 3, 1).flatten(1)
        return y.view(y.shape[0], -1, self.numbers)


class RetinaNet(nn.Module):
    """A score for each class and a box for each anchor; :mod:`support.boxes` defines them."""

    def __init__(
        self,
        backbone: ResNet | SmallBackbone,
        classes: int,
        anchors: int,
        *,
        levels: int = 3,
        more: int = 2,
        width: int = 256,
        convs: int = 4,
    ) -> None:
        super().__init__()
        self.backbone, self.levels = backbone, levels
        self.pyramid = Pyramid(backbone.widths[-levels:], width, more)
        self.classify = Head(width, convs, anchors, classes)
        self.locate = Head(width, convs, anchors, 4)
        for name, module in self.named_modules():
            if isinstance(module, nn.Conv2d) and not name.startswith("backbone"):
                nn.init.kaiming_uniform_(module.weight, a=1)
                nn.init.zeros_(module.bias)  # type: ignore[arg-type]
        for head in (self.classify, self.locate):
            nn.init.normal_(head.output.weight, std=0.01)
        # Initially everything is background with 99 %: otherwise the many empty anchors dominate the loss.
        nn.init.constant_(self.classify.output.bias, -math.log(99))  # type: ignore[arg-type]

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return scores before the sigmoid and box codes: (images, anchors, classes) and (images, anchors, 4)."""
        features = self.backbone.features(images)
        levels = self.pyramid(list(features[-self.levels :]))
        scores = torch.cat([self.classify(level) for level in levels], dim=1)
        return scores, torch.cat([self.locate(level) for level in levels], dim=1)


def load_backbone(backbone: nn.Module, path: Path) -> None:
    """Load pretrained weights into a backbone: a state_dict with torchvision's names, its classifier ignored."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"--backbone-weights {path} does not exist. Fetch the ImageNet checkpoint of that ResNet "
            "(torchvision's resnet18-f37072fd.pth, resnet50-0676ba61.pth or "
            "resnet101-63fe2227.pth), and give its path"
        ) from error
    except Exception as error:
        raise ValueError(f"--backbone-weights {path} is no file of plain tensors: {error}") from error
    if not isinstance(state, dict):
        raise ValueError(f"--backbone-weights {path} holds a {type(state).__name__}, not a state_dict")
    kept = {
        name: value
        for name, value in state.items()
        if not name.startswith("fc.") and not name.endswith("num_batches_tracked")
    }
    known = {name: tuple(v.shape) for name, v in backbone.state_dict().items() if not name.endswith("tracked")}
    if {name: tuple(value.shape) for name, value in kept.items()} != known:
        differing = sorted(name for name in kept.keys() | known if name not in kept or name not in known) or [
            name for name, value in kept.items() if tuple(value.shape) != known[name]
        ]
        raise ValueError(f"--backbone-weights {path} belongs to another net: {', '.join(differing[:4])} differ")
    backbone.load_state_dict(kept, strict=False)
