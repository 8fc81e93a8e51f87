"""Plain PyTorch nets for images, and others by name. None of them contains quantization."""

from __future__ import annotations

import importlib
import math
import re
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from support.resnet import DEPTHS, ResNet

NAMES = (
    "resnet8, resnet20, resnet38, resnet74, resnet110, resnet152 and other CIFAR ResNets of 6 n + 2 layers; "
    "mobilenetv2; imagenet-resnet18, -resnet34, -resnet50, -resnet101; timm/NAME; torchvision/NAME"
)


class BasicBlock(nn.Module):
    """Two convolutions with a shortcut, which is a 1x1 convolution where the size changes."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        """Add the output of the convolutions to the shortcut."""
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


class CifarResNet(nn.Module):
    """The residual net for small images: 6 n + 2 layers in three stages of width, 2 width and 4 width channels."""

    def __init__(self, depth: int, classes: int, *, width: int = 16, channels: int = 3) -> None:
        super().__init__()
        if depth < 8 or (depth - 2) % 6:
            raise ValueError(f"a CIFAR ResNet has 6 n + 2 layers (8, 14, 20, 38, 74, 110, 152, ...), got {depth}")
        self.conv = nn.Conv2d(channels, width, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)
        blocks, inputs = [], width
        for outputs, stride in ((width, 1), (2 * width, 2), (4 * width, 2)):
            for index in range((depth - 2) // 6):
                blocks.append(BasicBlock(inputs, outputs, stride if index == 0 else 1))
                inputs = outputs
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(inputs, classes)
        _initialize(self)

    def forward(self, images: Tensor) -> Tensor:
        """Return one score per class."""
        x = self.blocks(F.relu(self.norm(self.conv(images))))
        scores: Tensor = self.head(x.mean(dim=(2, 3)))
        return scores


class InvertedResidual(nn.Module):
    """MobileNetV2's block: wider, a 3x3 convolution per channel, narrower; a shortcut at stride 1."""

    def __init__(self, inputs: int, outputs: int, expansion: int, stride: int) -> None:
        super().__init__()
        hidden = inputs * expansion
        self.body = nn.Sequential(
            nn.Conv2d(inputs, hidden, 1, bias=False),
            nn.BatchNorm2d(hidden),
            nn.ReLU(),
            nn.Conv2d(hidden, hidden, 3, stride, padding=1, groups=hidden, bias=False),
            nn.BatchNorm2d(hidden),
            nn.ReLU(),
            nn.Conv2d(hidden, outputs, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.keeps_size = stride == 1
        self.shortcut: nn.Module = nn.Identity()
        if self.keeps_size and inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        """Apply the block."""
        y: Tensor = self.body(x)
        return y + self.shortcut(x) if self.keeps_size else y


class CifarMobileNetV2(nn.Module):
    """MobileNetV2 with the strides for 32 x 32 images: three halvings, not five."""

    # expansion, channels, blocks, stride of the first
    STAGES = ((1, 16, 1, 1), (6, 24, 2, 1), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))

    def __init__(self, classes: int, *, width: float = 1.0, channels: int = 3) -> None:
        super().__init__()

        def scaled(count: int) -> int:
            return max(4, round(count * width))

        inputs = scaled(32)
        self.conv = nn.Conv2d(channels, inputs, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(inputs)
        blocks = []
        for expansion, count, repeats, stride in self.STAGES:
            for index in range(repeats):
                blocks.append(InvertedResidual(inputs, scaled(count), expansion, stride if index == 0 else 1))
                inputs = scaled(count)
        self.blocks = nn.Sequential(*blocks)
        self.last_conv = nn.Conv2d(inputs, scaled(1280), 1, bias=False)
        self.last_norm = nn.BatchNorm2d(scaled(1280))
        self.head = nn.Linear(scaled(1280), classes)
        _initialize(self)

    def forward(self, images: Tensor) -> Tensor:
        """Return one score per class."""
        x = F.relu(self.norm(self.conv(images)))
        x = F.relu(self.last_norm(self.last_conv(self.blocks(x))))
        scores: Tensor = self.head(x.mean(dim=(2, 3)))
        return scores


def build(name: str, classes: int, *, channels: int = 3, width: float | None = None) -> nn.Module:
    """Return a fresh model by its name; see NAMES. `width`: channels of a CIFAR ResNet, a factor for mobilenetv2."""
    library, _, rest = name.partition("/")
    if rest:
        if width is not None:
            raise ValueError(f"--width is for the models of this script, and has no effect on --model {name}")
        if library == "timm":
            made: nn.Module = _package("timm").create_model(rest, num_classes=classes, in_chans=channels)
            return made
        if library == "torchvision":
            return _torchvision(rest, classes, channels)
    elif name == "mobilenetv2":
        return CifarMobileNetV2(classes, width=1.0 if width is None else width, channels=channels)
    elif found := re.fullmatch(r"resnet(\d+)", name):
        return CifarResNet(int(found[1]), classes, width=_whole(16 if width is None else width), channels=channels)
    elif (found := re.fullmatch(r"imagenet-resnet(\d+)", name)) and int(found[1]) in DEPTHS:
        return ResNet(int(found[1]), classes, width=_whole(64 if width is None else width), channels=channels)
    raise ValueError(f"unknown --model {name!r}; there are: {NAMES}")


def full_precision(name: str, model: nn.Module) -> tuple[str, ...]:
    """Return what the paper leaves in full precision: the classifier, and in ImageNet nets stem and shortcuts.

    The classifier of a net from another library is taken to be its last linear layer.
    """
    linear = [path for path, module in model.named_modules() if isinstance(module, nn.Linear)][-1:]
    if not re.fullmatch(r"imagenet-resnet\d+|(torchvision|timm)/resnet(18|34|50|101|152)", name):
        return tuple(linear)
    shortcuts = [path for path, module in model.named_modules() if re.search(r"downsample\.\d+$", path)
                 and isinstance(module, nn.Conv2d)]  # fmt: skip
    return ("conv1", *shortcuts, *linear)


def _torchvision(name: str, classes: int, channels: int) -> nn.Module:
    if channels != 3:
        raise ValueError(f"--model torchvision/{name} wants colour images, and these have {channels} channel")
    model: nn.Module = _package("torchvision.models").get_model(name, weights=None, num_classes=classes)
    return model


def _package(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except (ImportError, RuntimeError) as error:  # a torchvision built for another torch raises RuntimeError
        package = name.partition(".")[0]
        raise ImportError(
            f"this --model comes from {package}, which could not be imported ({error}): "
            f"pip install {package}, in the build for torch {torch.__version__}"
        ) from error


def _whole(width: float) -> int:
    if width != int(width) or width < 1:
        raise ValueError(f"--width is a number of channels for a ResNet, a whole number from 1 up, got {width}")
    return int(width)


def _initialize(model: nn.Module) -> None:
    """Initialize convolutions by He et al., with mode fan_out."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            fan_out = module.kernel_size[0] * module.kernel_size[1] * module.out_channels // module.groups
            nn.init.normal_(module.weight, 0.0, math.sqrt(2.0 / fan_out))
