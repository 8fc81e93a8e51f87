"""Scenes with objects in boxes: their type, small composed scenes, and batches of scenes."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from support.images import InMemory, load

COMPOSED = {"composed-digits": "digits", "composed-mnist": "mnist", "composed-fashion-mnist": "fashion-mnist"}
TRAIN, TEST = 1000, 250
"""How many scenes are composed."""


@dataclass(frozen=True)
class Scene:
    """An image (channels, height, width) of bytes, and its objects; `difficult` ones do not count in an evaluation."""

    image: Tensor
    boxes: Tensor
    labels: Tensor
    difficult: Tensor

    def scaled(self, shorter: int, longer: int) -> Scene:
        """Return this scene scaled to a length of the shorter side, or less if the longer one would be too long."""
        height, width = self.image.shape[1:]
        factor = min(shorter / min(height, width), longer / max(height, width))
        size = (max(round(height * factor), 1), max(round(width * factor), 1))
        if size == (height, width):
            return self
        image = F.interpolate(self.image[None], size=size, mode="bilinear", antialias=True)[0]
        factors = torch.tensor([size[1] / width, size[0] / height]).repeat(2)
        return Scene(image, self.boxes * factors, self.labels, self.difficult)

    def mirrored(self) -> Scene:
        """Return this scene with left and right exchanged."""
        width = self.image.shape[2]
        boxes = torch.stack([width - self.boxes[:, 2], self.boxes[:, 1], width - self.boxes[:, 0], self.boxes[:, 3]], 1)
        return Scene(self.image.flip(2), boxes, self.labels, self.difficult)


class Scenes(Protocol):
    """A sequence of scenes."""

    def __len__(self) -> int:
        """Return how many there are."""

    def __getitem__(self, index: int) -> Scene:
        """Return a scene, always the same one for an index."""


@dataclass(frozen=True)
class SceneData:
    """Scenes to train on and to evaluate on."""

    title: str
    train: Scenes
    test: Scenes
    classes: tuple[str, ...]
    channels: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    mirrors: bool
    """Whether a mirrored scene is as valid as the original."""
    composed: bool


@dataclass(frozen=True)
class Some:
    """The first scenes of others, in a fixed random order."""

    scenes: Scenes
    chosen: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.chosen)

    def __getitem__(self, index: int) -> Scene:
        return self.scenes[self.chosen[index]]


def some(scenes: Scenes, wanted: int | None, option: str) -> Scenes:
    """Return all scenes, or `wanted` of them."""
    if wanted is None:
        return scenes
    if not 1 <= wanted <= len(scenes):
        raise ValueError(f"{option} must be between 1 and {len(scenes)}, the images there are, got {wanted}")
    order = torch.randperm(len(scenes), generator=torch.Generator().manual_seed(0))
    return Some(scenes, tuple(order[:wanted].tolist()))


@functools.cache
def composed(name: str) -> SceneData:
    """Return small scenes made of real images on noise. Test scenes are made of test images."""
    data = load(COMPOSED[name])
    assert isinstance(data.train, InMemory)
    assert isinstance(data.test, InMemory)
    small = data.train.images.shape[-1] < 16
    canvas, sides = (64, (14, 28)) if small else (80, (18, 36))
    splits = [
        tuple(compose(split, index, offset, canvas, sides) for index in range(count))
        for split, count, offset in ((data.train, TRAIN, 0), (data.test, TEST, 10_000_000))
    ]
    return SceneData(
        f"scenes composed of {data.title}", splits[0], splits[1], tuple(map(str, range(data.classes))), 1,
        (0.15,), (0.25,), mirrors=name == "composed-fashion-mnist", composed=True,
    )  # fmt: skip


def compose(source: InMemory, index: int, offset: int, canvas: int, sides: tuple[int, int]) -> Scene:
    """Return one to four images on noise, of different sizes, without overlap, in exact boxes.

    A box bounds the pixels that are brighter than an eighth after scaling.
    """
    generator = torch.Generator().manual_seed(offset + index)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=generator))

    image = torch.randint(0, 32, (canvas, canvas), generator=generator, dtype=torch.uint8)
    boxes: list[list[int]] = []
    labels: list[int] = []
    wanted = draw(1, 4)
    for _ in range(10 * wanted):  # an occupied place is drawn again; a crowded scene may get fewer
        if len(boxes) == wanted:
            break
        chosen, side = draw(0, len(source.labels) - 1), draw(*sides)
        thing = F.interpolate(source.images[chosen][None], size=(side, side), mode="bilinear", antialias=True)[0, 0]
        rows, columns = (thing > 32).nonzero().unbind(1)
        if len(rows) < 16:  # too few visible pixels at this size
            continue
        thing = thing[rows.min() : rows.max() + 1, columns.min() : columns.max() + 1]
        height, width = thing.shape
        top, left = draw(0, canvas - height), draw(0, canvas - width)
        box = [left, top, left + width, top + height]
        if any(box[0] < b[2] and b[0] < box[2] and box[1] < b[3] and b[1] < box[3] for b in boxes):
            continue
        place = image[top : top + height, left : left + width]
        torch.maximum(place, thing, out=place)
        boxes.append(box)
        labels.append(int(source.labels[chosen]))
    return Scene(
        image[None], torch.tensor(boxes).float(), torch.tensor(labels), torch.zeros(len(labels), dtype=torch.bool)
    )


def stacked(scenes: Sequence[Scene], data: SceneData, multiple: int) -> Tensor:
    """Return normalized images, padded at the right and at the bottom to one size that is a multiple of `multiple`."""
    height, width = (-(-max(scene.image.shape[dim] for scene in scenes) // multiple) * multiple for dim in (1, 2))
    mean, std = torch.tensor(data.mean).view(-1, 1, 1), torch.tensor(data.std).view(-1, 1, 1)
    batch = torch.zeros(len(scenes), data.channels, height, width)
    for row, scene in zip(batch, scenes, strict=True):
        row[:, : scene.image.shape[1], : scene.image.shape[2]] = (scene.image.float() / 255 - mean) / std
    return batch
