"""Detection datasets as they are distributed: Pascal VOC's XML folders and COCO's JSON files."""

from __future__ import annotations

import json
import xml.etree.ElementTree
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from support.image_files import IMAGENET_MEAN, IMAGENET_STD, open_image
from support.scenes import Scene, SceneData

# fmt: off
VOC_CLASSES = (
    "aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair", "cow",
    "diningtable", "dog", "horse", "motorbike", "person", "pottedplant", "sheep", "sofa", "train", "tvmonitor",
)
# fmt: on
WHAT = (
    "It may be Pascal VOC's (the folder VOC2012 of VOCtrainval_11-May-2012.tar, from "
    "http://host.robots.ox.ac.uk/pascal/VOC/voc2012/, with Annotations, JPEGImages and ImageSets/Main/train.txt and "
    "val.txt), or COCO's (a folder with annotations/instances_train2017.json and instances_val2017.json, from "
    "https://cocodataset.org, and the images in train2017 and val2017)"
)


def read(path: Path) -> SceneData:
    """Read a dataset from a folder, whose files decide the format."""
    if not path.is_dir():
        raise FileNotFoundError(f"--data {path} is not a folder with scenes. {WHAT}")
    for folder in (path, *sorted(path.glob("VOC20*")), *sorted(path.glob("VOCdevkit/VOC20*"))):
        if (folder / "Annotations").is_dir():
            return read_voc(folder)
    if (path / "annotations").is_dir():
        return read_coco(path)
    raise FileNotFoundError(f"{path} has neither Annotations/ nor annotations/, so it is no dataset. {WHAT}")


@dataclass(frozen=True)
class VocScenes:
    """Scenes of Pascal VOC, read on access."""

    folder: Path
    names: tuple[str, ...]
    classes: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> Scene:
        name = self.names[index]
        path = self.folder / "Annotations" / f"{name}.xml"
        try:
            root = xml.etree.ElementTree.parse(path).getroot()
        except FileNotFoundError as error:
            raise FileNotFoundError(f"{path} is missing: ImageSets/Main names this image") from error
        except xml.etree.ElementTree.ParseError as error:
            raise ValueError(f"{path} is no XML: {error}") from error
        objects = []
        for item in root.iter("object"):
            label = item.findtext("name", "").strip()
            if label not in self.classes:
                raise ValueError(f"{path} has an object {label!r}; the classes are {', '.join(self.classes)}")
            try:
                left, top, right, bottom = (
                    float(item.findtext(f"bndbox/{edge}", "")) for edge in ("xmin", "ymin", "xmax", "ymax")
                )
            except ValueError as error:
                raise ValueError(
                    f"{path}: the bndbox of a {label} must have xmin, ymin, xmax and ymax, as numbers"
                ) from error
            # VOC counts pixels from 1, and its right and bottom edges are inside the object.
            objects.append(([left - 1, top - 1, right, bottom], label, item.findtext("difficult", "0").strip() == "1"))
        return _scene(
            self.folder / "JPEGImages" / root.findtext("filename", f"{name}.jpg"),
            [box for box, _, _ in objects],
            [self.classes.index(label) for _, label, _ in objects],
            [difficult for _, _, difficult in objects],
        )


def read_voc(folder: Path) -> SceneData:
    """Read Pascal VOC: its training images, and its validation images to evaluate on."""

    def names(part: str) -> tuple[str, ...]:
        path = folder / "ImageSets" / "Main" / f"{part}.txt"
        if not path.is_file():
            raise FileNotFoundError(f"{path} is missing: it names the images of that part, one in a line")
        found = tuple(line.split()[0] for line in path.read_text(encoding="utf-8").splitlines() if line.strip())
        if not found:
            raise ValueError(f"{path} names no image")
        return found

    train, test = (VocScenes(folder, names(part), VOC_CLASSES) for part in ("train", "val"))
    return _data(f"Pascal VOC at {folder}", train, test, VOC_CLASSES)


@dataclass(frozen=True)
class CocoScenes:
    """Scenes of COCO, read on access."""

    images: tuple[Path, ...]
    objects: tuple[tuple[tuple[list[float], int, bool], ...], ...]

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Scene:
        objects = self.objects[index]
        return _scene(
            self.images[index], [b for b, _, _ in objects], [k for _, k, _ in objects], [d for _, _, d in objects]
        )


def read_coco(folder: Path) -> SceneData:
    """Read COCO's instances. Crowds count as difficult."""
    parts = []
    for part in ("train", "val"):
        found = sorted((folder / "annotations").glob(f"instances_{part}*.json"))
        if len(found) != 1:
            names = ", ".join(path.name for path in found) or "none"
            raise FileNotFoundError(
                f"{folder / 'annotations'} must have one file instances_{part}*.json, and has {names}"
            )
        parts.append(_instances(found[0], folder / found[0].stem.removeprefix("instances_")))
    if parts[0][1] != parts[1][1]:
        raise ValueError(f"the categories of training and validation in {folder / 'annotations'} are not the same")
    return _data(f"COCO at {folder}", parts[0][0], parts[1][0], tuple(parts[0][1].values()))


def _instances(path: Path, images: Path) -> tuple[CocoScenes, dict[int, str]]:
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        categories = {item["id"]: item["name"] for item in sorted(content["categories"], key=lambda item: item["id"])}
        place = {identifier: index for index, identifier in enumerate(categories)}
        objects: dict[int, list[tuple[list[float], int, bool]]] = {item["id"]: [] for item in content["images"]}
        for item in content["annotations"]:
            left, top, width, height = item["bbox"]
            if width > 0 and height > 0:  # COCO has a few boxes without an area
                box = [left, top, left + width, top + height]
                objects[item["image_id"]].append((box, place[item["category_id"]], bool(item.get("iscrowd", 0))))
        files = tuple(images / item["file_name"] for item in content["images"])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is not in COCO's form: {type(error).__name__} {error}") from error
    if not files:
        raise ValueError(f"{path} names no image")
    return CocoScenes(files, tuple(tuple(found) for found in objects.values())), categories


def _scene(path: Path, boxes: list[list[float]], labels: list[int], difficult: list[bool]) -> Scene:
    with open_image(path) as image:
        pixels = torch.from_numpy(np.asarray(image.convert("RGB")).copy()).permute(2, 0, 1)
    edges = torch.tensor(boxes, dtype=torch.float32).view(-1, 4)
    if bool((edges[:, 2:] <= edges[:, :2]).any()):
        raise ValueError(f"{path} has a box without an area: {edges.tolist()}")
    return Scene(pixels, edges, torch.tensor(labels, dtype=torch.int64), torch.tensor(difficult, dtype=torch.bool))


def _data(
    title: str, train: VocScenes | CocoScenes, test: VocScenes | CocoScenes, classes: tuple[str, ...]
) -> SceneData:
    return SceneData(title, train, test, classes, 3, IMAGENET_MEAN, IMAGENET_STD, mirrors=True, composed=False)
