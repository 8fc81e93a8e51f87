"""Train a RetinaNet under precision schedules, on Pascal VOC, on COCO, or on small scenes composed of real images.

    python examples/object_detection.py --fast                        # seconds; scikit-learn's digits on noise
    python examples/object_detection.py                               # minutes on one core, the same scenes
    python examples/object_detection.py --data composed-fashion-mnist # fetched from Debian
    python examples/object_detection.py --preset voc-resnet18 --data VOCdevkit --backbone-weights resnet18-f37072fd.pth

--data is composed-digits, composed-mnist or composed-fashion-mnist, or a folder of Pascal VOC or of COCO. Results on
composed scenes are marked as such: they say nothing about photographs.
"""

from __future__ import annotations

import argparse
import importlib
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from support import detection_files
from support.boxes import Anchors, Found, detections, losses
from support.detection_metrics import average_precisions
from support.resnet import DEPTHS, ResNet
from support.retinanet import FrozenNorm, RetinaNet, SmallBackbone, load_backbone
from support.scenes import COMPOSED, Scene, SceneData, composed, some, stacked
from support.script import Script
from support.task import Task, epoch_order
from torch import Tensor, nn

import cpt_fx

SMALL_ANCHORS = Anchors(strides=(4, 8, 16), scales=(1.0, 1.5), ratios=(0.5, 1.0, 2.0))
PAPER_ANCHORS = Anchors()


class ObjectDetection(Task):
    """Focal loss and box loss, Adam at a constant rate, gradients clipped; everything convolutional is quantized."""

    better = "higher"

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.data: SceneData = (
            composed(options.data) if options.data in COMPOSED else detection_files.read(Path(options.data))
        )
        self.train_scenes = some(self.data.train, options.train_images, "--train-images")
        self.test_scenes = some(self.data.test, options.test_images, "--test-images")
        if not 1 <= options.batch <= len(self.train_scenes):
            raise ValueError(f"--batch must be between 1 and {len(self.train_scenes)}, the images, got {options.batch}")
        if options.frozen_norm and options.backbone_weights is None and not options.model.startswith("torchvision/"):
            raise ValueError(
                "--frozen-norm keeps the statistics of pretraining, so it needs --backbone-weights FILE: an ImageNet "
                "checkpoint of the ResNet, such as resnet101-63fe2227.pth of torchvision"
            )
        self.anchors = SMALL_ANCHORS if options.model == "small" else PAPER_ANCHORS
        self.library = options.model.startswith("torchvision/")
        self.steps_per_epoch = len(self.train_scenes) // options.batch
        self.recipe = cpt_fx.recipes.paper()
        self.prefix = "composed " if self.data.composed else ""
        self.metric = f"{self.prefix}AP50"

    def model(self) -> nn.Module:
        """Return a plain detector."""
        options, classes = self.options, len(self.data.classes)
        if self.library:
            # Torchvision's detectors keep label 0 for the background.
            return _torchvision(options.model, classes + 1)
        norm = FrozenNorm if options.frozen_norm else nn.BatchNorm2d
        if options.model == "small":
            width = options.width or 16
            backbone: ResNet | SmallBackbone = SmallBackbone(self.data.channels, width, norm)
            net = RetinaNet(backbone, classes, self.anchors.per_place, levels=2, more=1, width=2 * width, convs=2)
        else:
            found = re.fullmatch(r"resnet(\d+)", options.model)
            if found is None or int(found[1]) not in DEPTHS:
                raise ValueError(
                    f"unknown --model {options.model!r}; there are: small; "
                    f"{', '.join(f'resnet{depth}' for depth in DEPTHS)}; torchvision/retinanet_resnet50_fpn_v2"
                )
            backbone = ResNet(int(found[1]), 0, width=options.width or 64, channels=self.data.channels, norm=norm)
            net = RetinaNet(backbone, classes, self.anchors.per_place, width=options.pyramid_width)
        if options.backbone_weights is not None:
            load_backbone(backbone, options.backbone_weights)
        return net

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return Adam."""
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        return torch.optim.Adam(trained, lr=self.options.lr, weight_decay=self.options.weight_decay)

    def batch(self, step: int, seed: int) -> list[Scene]:
        """Return scenes, half of them mirrored where that makes sense."""
        epoch, place = divmod(step, self.steps_per_epoch)
        order = epoch_order(len(self.train_scenes), epoch, seed)
        scenes = [
            self._sized(self.train_scenes[int(index)])
            for index in order[place * self.options.batch :][: self.options.batch]
        ]
        flips = torch.rand(len(scenes), generator=torch.Generator().manual_seed(1_000_003 * seed + step)) < 0.5
        return [
            scene.mirrored() if flip and self.data.mirrors else scene
            for scene, flip in zip(scenes, flips.tolist(), strict=True)
        ]

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Return focal loss plus box loss."""
        if self.library:
            targets = [{"boxes": scene.boxes, "labels": scene.labels + 1} for scene in batch]
            parts: dict[str, Tensor] = model([_colours(scene) for scene in batch], targets)
            return torch.stack(list(parts.values())).sum()
        images = self._stacked(batch)
        scores, codes = model(images)
        anchors = self.anchors.of(images.shape[2], images.shape[3])
        return losses(scores, codes, anchors, [(scene.boxes, scene.labels) for scene in batch])

    def run(self, model: nn.Module, batch: Any) -> object:
        """Run the model on images alone: torchvision's have no loss in evaluation."""
        return model([_colours(scene) for scene in batch] if self.library else self._stacked(batch))

    def after_backward(self, model: nn.Module) -> None:
        """Clip the gradients' norm."""
        if self.options.clip:
            nn.utils.clip_grad_norm_(model.parameters(), self.options.clip)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Return average precisions."""
        truth: list[Scene] = []
        found: list[Found] = []
        for chosen in torch.arange(len(self.test_scenes)).split(self.options.batch):
            scenes = [self._sized(self.test_scenes[index]) for index in chosen.tolist()]
            found += self._detect(model, scenes)
            truth += [replace(scene, image=torch.empty(0)) for scene in scenes]  # photographs would fill the memory
        values = average_precisions(truth, found, len(self.data.classes))
        return {f"{self.prefix}{name}": value for name, value in values.items()}

    def _detect(self, model: nn.Module, scenes: list[Scene]) -> list[Found]:
        if self.library:
            results = model([_colours(scene) for scene in scenes])
            return [Found(one["boxes"], one["labels"] - 1, one["scores"]) for one in results]
        images = self._stacked(scenes)
        scores, codes = model(images)
        anchors = self.anchors.of(images.shape[2], images.shape[3])
        return [detections(one, code, anchors) for one, code in zip(scores, codes, strict=True)]

    def _sized(self, scene: Scene) -> Scene:
        """Return a photograph in the training size; composed scenes already have theirs."""
        return scene if self.data.composed else scene.scaled(self.options.image_size, self.options.longest)

    def _stacked(self, scenes: list[Scene]) -> Tensor:
        # The coarsest level, which is computed by repeated halving, must not be cut short.
        return stacked(scenes, self.data, self.anchors.strides[-1])


def _colours(scene: Scene) -> Tensor:
    return scene.image.float().expand(3, -1, -1) / 255


def _torchvision(name: str, classes: int) -> nn.Module:
    try:
        detection = importlib.import_module("torchvision.models.detection")
    except (ImportError, RuntimeError) as error:  # a torchvision built for another torch raises RuntimeError
        raise ImportError(
            f"--model {name} comes from torchvision, which could not be imported ({error}): pip install torchvision, "
            f"in the build for torch {torch.__version__}; or choose --model resnet18 or small, which need nothing"
        ) from error
    make = getattr(detection, name.removeprefix("torchvision/"), None)
    if make is None:
        raise ValueError(f"torchvision has no detector {name.removeprefix('torchvision/')!r}")
    model: nn.Module = make(weights=None, weights_backbone=None, num_classes=classes)
    return model


def add_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "detection", description="--model: small, resnet18, -34, -50, -101, or torchvision/retinanet_resnet50_fpn_v2"
    )
    group.add_argument("--width", type=int, help="channels of the backbone's first stage")
    group.add_argument("--pyramid-width", type=int, default=256, help="channels of pyramid and heads (default: 256)")
    group.add_argument("--backbone-weights", type=Path, metavar="FILE", help="pretrained weights of the ResNet")
    group.add_argument("--frozen-norm", action="store_true", help="batch norm as it was pretrained, never updated")
    group.add_argument("--clip", type=float, default=0.1, help="largest norm of the gradients; 0 for any")
    group.add_argument("--image-size", type=int, default=608, metavar="N", help="shorter side of photographs")
    group.add_argument("--longest", type=int, default=1024, metavar="N", help="and the longer side at most")
    group.add_argument("--train-images", type=int, metavar="N", help="train on N scenes only, always the same")
    group.add_argument("--test-images", type=int, metavar="N", help="evaluate on N scenes only, always the same")
    parser.set_defaults(data="composed-digits", model="small", epochs=16, batch=8, lr=1e-3)


# The pretrained weights are not in the preset: fetch them, and name them with --backbone-weights.
VOC: dict[str, Any] = {
    "data": "VOCdevkit", "epochs": 120, "cycles": 8, "period": "published", "eval_bits": "current", "lr": 3e-6,
    "clip": 0.1, "frozen_norm": True,
}  # fmt: skip
STATIC = VOC | {"schedule": "static", "lr": 1e-5}
PRESETS: dict[str, dict[str, Any]] = {
    "voc-resnet101": VOC | {"model": "resnet101", "q_min": 5, "q_max": 8, "batch": 2},
    "voc-resnet18": VOC | {"model": "resnet18", "q_min": 5, "q_max": 6, "batch": 8},
    "voc-resnet101-static": STATIC | {"model": "resnet101", "q_max": 8, "batch": 4},
    "voc-resnet18-static": STATIC | {"model": "resnet18", "q_max": 6, "batch": 8},
}
FAST = {"data": "composed-digits", "model": "small", "width": 8, "steps": 30, "batch": 8, "lr": 3e-3, "test_images": 16}

SCRIPT = Script(description=__doc__, presets=PRESETS, fast=FAST, add_options=add_options, make_task=ObjectDetection)


def train(schedule: cpt_fx.schedules.Schedule, seed: int = 0, **options: Any) -> dict[str, float]:
    """Train under a schedule and return the metrics; a study calls this."""
    return SCRIPT.train(schedule, seed, **options)


if __name__ == "__main__":
    SCRIPT.main()
