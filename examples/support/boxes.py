"""Boxes: anchors, their matching with objects and their codes, focal loss, non-maximum suppression. Plain torch.

A box is (left, top, right, bottom) in pixels, the right and bottom edge not included.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

# Offsets and log sizes are divided by these before they are learned, so that they are of the same order of magnitude.
SCALE = (0.1, 0.1, 0.2, 0.2)
POSITIVE, NEGATIVE = 0.5, 0.4  # an anchor is an object from the first overlap on, background below the second


@dataclass(frozen=True)
class Anchors:
    """Boxes of some sizes and shapes at every place of every level of a pyramid."""

    strides: tuple[int, ...] = (8, 16, 32, 64, 128)
    size: float = 4.0
    """The side of the smallest square, in strides of its level."""
    scales: tuple[float, ...] = (1.0, 2 ** (1 / 3), 2 ** (2 / 3))
    ratios: tuple[float, ...] = (0.5, 1.0, 2.0)

    @property
    def per_place(self) -> int:
        """How many anchors lie at one place."""
        return len(self.scales) * len(self.ratios)

    def of(self, height: int, width: int) -> Tensor:
        """Return all anchors for an image of this size, level by level, row by row."""
        levels = []
        for stride in self.strides:
            rows, columns = math.ceil(height / stride), math.ceil(width / stride)
            y, x = (torch.arange(rows) + 0.5) * stride, (torch.arange(columns) + 0.5) * stride
            sides = [self.size * stride * scale for scale in self.scales]
            half = torch.tensor([(side / r**0.5 / 2, side * r**0.5 / 2) for side in sides for r in self.ratios])
            centres = torch.cartesian_prod(y, x).flip(1)  # x before y
            levels.append(torch.cat([centres[:, None] - half, centres[:, None] + half], dim=2).flatten(0, 1))
        return torch.cat(levels)


def overlaps(first: Tensor, second: Tensor) -> Tensor:
    """Return the intersection over union of each box with each other box."""
    low = torch.maximum(first[:, None, :2], second[None, :, :2])
    high = torch.minimum(first[:, None, 2:], second[None, :, 2:])
    inner = (high - low).clamp(min=0).prod(dim=2)
    areas = [(boxes[:, 2:] - boxes[:, :2]).prod(dim=1) for boxes in (first, second)]
    return inner / (areas[0][:, None] + areas[1][None] - inner).clamp(min=1e-9)


def encode(anchors: Tensor, boxes: Tensor) -> Tensor:
    """Return where boxes lie relative to anchors: offsets of the centres and logarithms of the sizes."""
    size, centre = anchors[:, 2:] - anchors[:, :2], (anchors[:, 2:] + anchors[:, :2]) / 2
    sides, middle = boxes[:, 2:] - boxes[:, :2], (boxes[:, 2:] + boxes[:, :2]) / 2
    return torch.cat([(middle - centre) / size, torch.log(sides / size)], dim=1) / anchors.new_tensor(SCALE)


def decode(anchors: Tensor, codes: Tensor) -> Tensor:
    """Return the boxes that codes stand for; sizes are limited to a thousand times the anchor's."""
    size, centre = anchors[..., 2:] - anchors[..., :2], (anchors[..., 2:] + anchors[..., :2]) / 2
    codes = codes * codes.new_tensor(SCALE)
    middle = centre + codes[..., :2] * size
    half = size * torch.exp(codes[..., 2:].clamp(max=math.log(1000.0))) / 2
    return torch.cat([middle - half, middle + half], dim=-1)


def losses(scores: Tensor, codes: Tensor, anchors: Tensor, targets: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Return focal loss plus box loss, a mean over images.

    Args:
        scores: (images, anchors, classes), before the sigmoid.
        codes: (images, anchors, 4), as `encode` gives them.
        anchors: (anchors, 4).
        targets: boxes and labels of each image.
    """
    total = scores.new_zeros(())
    for image_scores, image_codes, (boxes, labels) in zip(scores, codes, targets, strict=True):
        wanted = torch.zeros_like(image_scores)
        if len(boxes) == 0:
            total = total + _focal(image_scores, wanted).sum()
            continue
        overlap, nearest = overlaps(anchors, boxes).max(dim=1)
        positive, counted = overlap >= POSITIVE, (overlap >= POSITIVE) | (overlap < NEGATIVE)
        wanted[positive, labels[nearest[positive]]] = 1.0
        found = max(int(positive.sum()), 1)
        total = total + _focal(image_scores, wanted)[counted].sum() / found
        if bool(positive.any()):
            aims = encode(anchors[positive], boxes[nearest[positive]])
            total = total + F.smooth_l1_loss(image_codes[positive], aims, reduction="sum", beta=1 / 9) / (4 * found)
    return total / len(targets)


def _focal(scores: Tensor, wanted: Tensor, alpha: float = 0.25, gamma: float = 2.0) -> Tensor:
    """Return cross entropies in which easy decisions have little weight."""
    chance = torch.sigmoid(scores)
    missed = torch.where(wanted > 0, 1 - chance, chance)
    weight = torch.where(wanted > 0, alpha, 1 - alpha)
    return weight * missed**gamma * F.binary_cross_entropy_with_logits(scores, wanted, reduction="none")


@dataclass(frozen=True)
class Found:
    """The detections in one image, highest score first."""

    boxes: Tensor
    labels: Tensor
    scores: Tensor


def detections(
    scores: Tensor, codes: Tensor, anchors: Tensor, *, least: float = 0.05, candidates: int = 400, most: int = 100
) -> Found:
    """Return the objects of one image: scores above `least` that overlap no higher score of their class."""
    chances = torch.sigmoid(scores).flatten()
    ranked, places = chances.sort(descending=True, stable=True)
    places = places[: min(candidates, int((ranked > least).sum()))]
    boxes = decode(anchors[places // scores.shape[1]], codes[places // scores.shape[1]])
    labels = places % scores.shape[1]
    kept = suppress(boxes, labels)[:most]
    return Found(boxes[kept], labels[kept], chances[places[kept]])


def suppress(boxes: Tensor, labels: Tensor, threshold: float = 0.5) -> Tensor:
    """Return the places of boxes that overlap no earlier kept box of their class by more than the threshold."""
    rivals = (overlaps(boxes, boxes) > threshold) & (labels[:, None] == labels[None])
    alive = torch.ones(len(boxes), dtype=torch.bool)
    for place in range(len(boxes)):
        if alive[place]:
            alive[place + 1 :] &= ~rivals[place, place + 1 :]
    return alive.nonzero().flatten()
