"""Boxes, scenes, files and measures of the detection example, each against what is known about it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from support import boxes, detection_files, images, scenes
from support.boxes import Anchors, Found
from support.detection_metrics import average_precisions, voc_ap50
from support.scenes import Scene
from torch import Tensor


def scene(objects: list[tuple[list[float], int]], difficult: tuple[int, ...] = (), size: int = 64) -> Scene:
    hard = torch.tensor([place in difficult for place in range(len(objects))], dtype=torch.bool)
    edges = torch.tensor([box for box, _ in objects]).view(-1, 4)
    return Scene(torch.zeros(1, size, size, dtype=torch.uint8), edges, torch.tensor([k for _, k in objects]), hard)


def claims(*objects: tuple[list[float], int, float]) -> Found:
    ordered = sorted(objects, key=lambda item: -item[2])
    edges = torch.tensor([box for box, _, _ in ordered]).view(-1, 4)
    return Found(
        edges, torch.tensor([k for _, k, _ in ordered], dtype=torch.int64), torch.tensor([s for *_, s in ordered])
    )


def some_boxes(count: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    corner = torch.rand(count, 2, generator=generator) * 40
    return torch.cat([corner, corner + 2 + torch.rand(count, 2, generator=generator) * 30], dim=1)


# Boxes


def test_anchors_lie_level_by_level_row_by_row() -> None:
    anchors = Anchors(strides=(8, 16), size=2.0, scales=(1.0,), ratios=(1.0,)).of(16, 32)
    assert anchors.shape == (2 * 4 + 1 * 2, 4)
    assert anchors[0].tolist() == [-4, -4, 12, 12]  # a 16 x 16 square around the middle of the first 8 x 8 place
    assert anchors[1].tolist() == [4, -4, 20, 12]  # one place to the right
    assert anchors[4].tolist() == [-4, 4, 12, 20]  # one row down
    assert anchors[8].tolist() == [-8, -8, 24, 24]
    published = Anchors().of(512, 512)
    assert len(published) == 9 * sum((512 // stride) ** 2 for stride in (8, 16, 32, 64, 128))
    sides = published[:, 2:] - published[:, :2]
    areas = sides.prod(1).sqrt().unique()
    assert float(areas.min()) == pytest.approx(32, rel=1e-4)
    assert float(areas.max()) == pytest.approx(512 * 2 ** (2 / 3), rel=1e-4)


def test_overlaps() -> None:
    found = boxes.overlaps(torch.tensor([[0.0, 0, 2, 2]]), torch.tensor([[0.0, 0, 2, 2], [1, 1, 3, 3], [2, 0, 4, 2]]))
    assert found[0].tolist() == pytest.approx([1.0, 1 / 7, 0.0])


def test_codes_are_undone() -> None:
    anchors, wanted = some_boxes(50), some_boxes(50, seed=1)
    assert torch.allclose(boxes.decode(anchors, boxes.encode(anchors, wanted)), wanted, atol=1e-4)
    assert torch.equal(boxes.encode(anchors, anchors), torch.zeros(50, 4))
    assert bool(boxes.decode(anchors, torch.full((50, 4), 1e4)).isfinite().all())


def test_suppression_keeps_what_no_surer_one_covers() -> None:
    many, labels = some_boxes(60), torch.arange(60) % 2
    kept = boxes.suppress(many, labels).tolist()
    expected: list[int] = []
    for place in range(60):
        rivals = [other for other in expected if labels[other] == labels[place]]
        if not rivals or float(boxes.overlaps(many[[place]], many[rivals]).max()) <= 0.5:
            expected.append(place)
    assert kept == expected
    assert 5 < len(kept) < 60


def test_detections_come_from_scores_and_codes() -> None:
    anchors = torch.tensor([[0.0, 0, 10, 10], [1, 0, 11, 10], [30, 30, 40, 40]])
    scores = torch.tensor([[4.0, -9.0], [3.0, -9.0], [-9.0, 2.0]])
    found = boxes.detections(scores, torch.zeros(3, 4), anchors)
    assert found.boxes.tolist() == [anchors[0].tolist(), anchors[2].tolist()]
    assert found.labels.tolist() == [0, 1]
    assert found.scores.tolist() == pytest.approx(torch.tensor([4.0, 2.0]).sigmoid().tolist())
    assert len(boxes.detections(scores - 20, torch.zeros(3, 4), anchors).scores) == 0


def test_losses_are_the_published_formulas() -> None:
    anchors = torch.tensor([[0.0, 0, 10, 10], [0, 0, 10, 4.5], [30, 30, 40, 40]])  # an object, neither, background
    scores, codes = torch.randn(1, 3, 2), torch.randn(1, 3, 4)
    target = (torch.tensor([[0.0, 0, 10, 10]]), torch.tensor([1]))
    p = scores[0].sigmoid()
    hit = -0.25 * (1 - p[0, 1]) ** 2 * p[0, 1].log()
    rest = sum(-0.75 * q**2 * (1 - q).log() for q in (p[0, 0], p[2, 0], p[2, 1]))
    error = codes[0, 0].abs()
    box = torch.where(error < 1 / 9, 4.5 * error**2, error - 1 / 18).mean()
    got = boxes.losses(scores, codes, anchors, [target])
    assert float(got) == pytest.approx(float(hit + rest + box), rel=1e-5)
    nothing = boxes.losses(scores, codes, anchors, [(torch.zeros(0, 4), torch.zeros(0, dtype=torch.int64))])
    assert float(nothing) == pytest.approx(float((-0.75 * p**2 * (1 - p).log()).sum()), rel=1e-5)
    both = boxes.losses(
        scores.expand(2, -1, -1), codes.expand(2, -1, -1), anchors, [target, (torch.zeros(0, 4), target[1][:0])]
    )
    assert float(both) == pytest.approx(float((got + nothing) / 2), rel=1e-5)


# Scenes


@pytest.mark.slow
def test_composed_scenes_hold_the_images_in_exact_boxes() -> None:
    data = scenes.composed("composed-digits")
    assert data.composed
    assert "composed" in data.title
    counts = set()
    for index in range(100):
        one = data.train[index]
        counts.add(len(one.boxes))
        assert one.image.shape == (1, 64, 64)
        outside = one.image[0].clone()
        for left, top, right, bottom in one.boxes.int().tolist():
            inside = one.image[0, top:bottom, left:right] > 32
            # A box touches what is in it on all four sides; noise is darker.
            assert bool(inside[0].any() and inside[-1].any() and inside[:, 0].any() and inside[:, -1].any())
            outside[top:bottom, left:right] = 0
        assert int(outside.max()) < 32
        overlap = boxes.overlaps(one.boxes, one.boxes)
        assert torch.equal(overlap, torch.eye(len(one.boxes)))
    assert counts == {1, 2, 3, 4}


def test_composed_scenes_are_functions_of_their_number() -> None:
    data = scenes.composed("composed-digits")
    source = images.load("digits").train
    assert isinstance(source, images.InMemory)
    again = scenes.compose(source, 7, 0, 64, (14, 28))
    assert torch.equal(again.image, data.train[7].image)
    assert torch.equal(again.boxes, data.train[7].boxes)
    assert not torch.equal(data.train[7].image, data.train[8].image)
    assert not torch.equal(data.train[7].image, data.test[7].image)


def test_a_mirrored_scene_has_mirrored_boxes() -> None:
    one = scenes.composed("composed-digits").train[3]
    other = one.mirrored()
    for (left, top, right, bottom), (other_left, *_, other_right, _) in zip(
        one.boxes.int().tolist(), other.boxes.int().tolist(), strict=True
    ):
        here = one.image[:, top:bottom, left:right]
        assert torch.equal(here.flip(2), other.image[:, top:bottom, other_left:other_right])
    assert torch.equal(other.mirrored().boxes, one.boxes)


def test_photographs_are_scaled_with_their_boxes_and_padded() -> None:
    one = Scene(torch.full((3, 50, 100), 200, dtype=torch.uint8), torch.tensor([[10.0, 5, 60, 45]]), torch.tensor([0]),
                torch.tensor([False]))  # fmt: skip
    larger = one.scaled(100, 1000)
    assert larger.image.shape == (3, 100, 200)
    assert larger.boxes.tolist() == [[20, 10, 120, 90]]
    assert one.scaled(100, 150).image.shape == (3, 75, 150)
    data = scenes.SceneData("", [], [], ("a",), 3, (0.5,) * 3, (0.5,) * 3, mirrors=True, composed=False)
    batch = scenes.stacked([one, larger], data, 32)
    assert batch.shape == (2, 3, 128, 224)
    assert float(batch[0, 0, 10, 10]) == pytest.approx((200 / 255 - 0.5) / 0.5)
    assert float(batch[0, :, 50:].abs().max()) == 0.0


# Files


def write_voc(root: Path) -> Path:
    folder = root / "VOC2012"
    for name in ("Annotations", "JPEGImages", "ImageSets/Main"):
        (folder / name).mkdir(parents=True)
    pixels = np.random.default_rng(0).integers(0, 256, (40, 60, 3), dtype=np.uint8)
    for number, name in enumerate(("2008_000002", "2008_000003", "2008_000007")):
        Image.fromarray(pixels).save(folder / "JPEGImages" / f"{name}.jpg")
        (folder / "Annotations" / f"{name}.xml").write_text(
            f"<annotation><folder>VOC2012</folder><filename>{name}.jpg</filename>"
            "<size><width>60</width><height>40</height><depth>3</depth></size>"
            "<object><name>dog</name><difficult>0</difficult><bndbox><xmin>1</xmin><ymin>2</ymin><xmax>30</xmax>"
            "<ymax>40.0</ymax></bndbox><part><name>head</name><bndbox><xmin>3</xmin><ymin>3</ymin><xmax>9</xmax>"
            "<ymax>9</ymax></bndbox></part></object>"
            f"<object><name>tvmonitor</name><difficult>{number % 2}</difficult><bndbox><xmax>60</xmax><xmin>31</xmin>"
            "<ymin>1</ymin><ymax>20</ymax></bndbox></object></annotation>"
        )
    (folder / "ImageSets/Main/train.txt").write_text("2008_000002\n2008_000003\n")
    (folder / "ImageSets/Main/val.txt").write_text("2008_000007\n")
    return folder


@pytest.mark.parametrize("inner", ["", "VOCdevkit"])
def test_voc(tmp_path: Path, inner: str) -> None:
    write_voc(tmp_path / "data" / inner)
    data = detection_files.read(tmp_path / "data")
    assert (len(data.train), len(data.test), len(data.classes)) == (2, 1, 20)
    one = data.train[1]
    assert one.image.shape == (3, 40, 60)
    assert one.boxes.tolist() == [[0, 1, 30, 40], [30, 0, 60, 20]]  # VOC counts from 1, and includes both ends
    assert [data.classes[label] for label in one.labels.tolist()] == ["dog", "tvmonitor"]
    assert one.difficult.tolist() == [False, True]
    assert not data.composed


def test_voc_says_what_is_wrong(tmp_path: Path) -> None:
    folder = write_voc(tmp_path)
    xml = folder / "Annotations" / "2008_000002.xml"
    text = xml.read_text()
    xml.write_text(text.replace("<name>dog</name>", "<name>unicorn</name>"))
    with pytest.raises(ValueError, match=r"2008_000002\.xml has an object 'unicorn'; the classes are aeroplane"):
        detection_files.read(tmp_path).train[0]
    xml.write_text(text.replace("<xmin>1</xmin>", ""))
    with pytest.raises(ValueError, match="bndbox of a dog must have xmin"):
        detection_files.read(tmp_path).train[0]
    xml.write_text(text.replace("<xmax>30</xmax>", "<xmax>0</xmax>"))
    with pytest.raises(ValueError, match=r"2008_000002\.jpg has a box without an area"):
        detection_files.read(tmp_path).train[0]
    xml.write_text("<annotation>")
    with pytest.raises(ValueError, match=r"2008_000002\.xml is no XML"):
        detection_files.read(tmp_path).train[0]
    xml.unlink()
    with pytest.raises(FileNotFoundError, match=r"2008_000002\.xml is missing"):
        detection_files.read(tmp_path).train[0]
    (folder / "JPEGImages" / "2008_000003.jpg").unlink()
    with pytest.raises(FileNotFoundError, match=r"2008_000003\.jpg is missing"):
        detection_files.read(tmp_path).train[1]
    (folder / "ImageSets/Main/val.txt").write_text("\n")
    with pytest.raises(ValueError, match=r"val\.txt names no image"):
        detection_files.read(tmp_path)
    (folder / "ImageSets/Main/val.txt").unlink()
    with pytest.raises(FileNotFoundError, match=r"val\.txt is missing"):
        detection_files.read(tmp_path)


def write_coco(folder: Path) -> None:
    (folder / "annotations").mkdir(parents=True)
    categories = [{"id": 90, "name": "toothbrush"}, {"id": 3, "name": "car"}]  # ids with gaps, in any order
    for part in ("train2017", "val2017"):
        (folder / part).mkdir()
        Image.fromarray(np.zeros((20, 30), np.uint8)).save(folder / part / "000000000009.png")  # gray, as some are
        annotations = [
            {"id": 1, "image_id": 9, "category_id": 90, "bbox": [1.5, 2, 10, 5], "iscrowd": 0, "area": 50},
            {"id": 2, "image_id": 9, "category_id": 3, "bbox": [0, 0, 30, 20], "iscrowd": 1, "area": 600},
            {"id": 3, "image_id": 9, "category_id": 3, "bbox": [4, 4, 0, 7], "iscrowd": 0, "area": 0},
        ]
        images = [{"id": 9, "file_name": "000000000009.png", "height": 20, "width": 30}]
        content = {"images": images, "annotations": annotations, "categories": categories}
        (folder / "annotations" / f"instances_{part}.json").write_text(json.dumps(content))


def test_coco(tmp_path: Path) -> None:
    write_coco(tmp_path / "coco")
    data = detection_files.read(tmp_path / "coco")
    assert data.classes == ("car", "toothbrush")
    (one,) = (data.train[index] for index in range(len(data.train)))
    assert one.image.shape == (3, 20, 30)
    assert one.boxes.tolist() == [[1.5, 2, 11.5, 7], [0, 0, 30, 20]]  # without the box that has no area
    assert one.labels.tolist() == [1, 0]
    assert one.difficult.tolist() == [False, True]


def test_coco_says_what_is_wrong(tmp_path: Path) -> None:
    write_coco(tmp_path)
    path = tmp_path / "annotations" / "instances_val2017.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | {"categories": [{"id": 3, "name": "car"}]}))
    with pytest.raises(ValueError, match=r"instances_val2017\.json is not in COCO's form: KeyError 90"):
        detection_files.read(tmp_path)
    path.write_text("{")
    with pytest.raises(ValueError, match="is not in COCO's form: JSONDecodeError"):
        detection_files.read(tmp_path)
    content["categories"][0]["name"] = "comb"
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"categories of training and validation .* not the same"):
        detection_files.read(tmp_path)
    path.unlink()
    with pytest.raises(FileNotFoundError, match=r"one file instances_val\*\.json, and has none"):
        detection_files.read(tmp_path)


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"nowhere is not a folder .*VOCtrainval_11-May-2012\.tar.*cocodataset"):
        detection_files.read(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match=r"neither Annotations/ nor annotations/.*VOCtrainval"):
        detection_files.read(tmp_path)


# Measures

TRUTH = [scene([([0, 0, 10, 10], 0), ([20, 20, 30, 30], 0)]), scene([([5, 5, 15, 15], 1)])]


def test_perfect_detections_have_precision_one() -> None:
    found = [claims(([0, 0, 10, 10], 0, 0.9), ([20, 20, 30, 30], 0, 0.8)), claims(([5, 5, 15, 15], 1, 0.7))]
    assert average_precisions(TRUTH, found, 3) == pytest.approx({"AP50": 1.0, "COCO mAP": 1.0, "COCO AP50": 1.0})


def test_no_detections_have_precision_zero() -> None:
    found = [claims(), claims()]
    assert set(average_precisions(TRUTH, found, 2).values()) == {0.0}
    with pytest.raises(ValueError, match="no object that counts"):
        voc_ap50([scene([])], [claims()], 2)


def test_precision_of_one_false_and_one_missed() -> None:
    """Class 0: wrong, right, and one of two never found: precision 1/2 up to recall 1/2. Class 1: 0."""
    found = [claims(([40, 40, 50, 50], 0, 0.9), ([0, 0, 10, 10], 0, 0.8)), claims(([5, 5, 15, 15], 0, 0.1))]
    values = average_precisions(TRUTH, found, 2)
    assert values["AP50"] == pytest.approx(0.25 / 2)
    assert values["COCO AP50"] == pytest.approx(0.5 * 51 / 101 / 2, rel=1e-3)  # at 101 recalls


def test_a_second_detection_of_an_object_is_wrong() -> None:
    twice = [claims(([0, 0, 10, 10], 0, 0.9), ([0, 0, 10, 9], 0, 0.8), ([20, 20, 30, 30], 0, 0.7)), claims()]
    assert voc_ap50(TRUTH[:1], twice[:1], 1) == pytest.approx(0.5 + 0.5 * 2 / 3)


def test_difficult_objects_do_not_count() -> None:
    hard = [scene([([0, 0, 10, 10], 0), ([20, 20, 30, 30], 0)], difficult=(1,))]
    without = [claims(([0, 0, 10, 10], 0, 0.5))]
    with_it = [claims(([0, 0, 10, 10], 0, 0.5), ([20, 20, 30, 30], 0, 0.9))]
    for found in (without, with_it):
        assert average_precisions(hard, found, 1) == pytest.approx({"AP50": 1.0, "COCO mAP": 1.0, "COCO AP50": 1.0})


def test_overlap_decides() -> None:
    """A box that overlaps by 0.6 is right at 0.5 and 0.55 and 0.6, and wrong at the seven higher ones."""
    found = [claims(([0, 0, 10, 6.04], 0, 0.9))]
    values = average_precisions([scene([([0, 0, 10, 10], 0)])], found, 1)
    assert values == pytest.approx({"AP50": 1.0, "COCO mAP": 0.3, "COCO AP50": 1.0})


def test_both_measures_agree_on_noisy_detections(capsys: pytest.CaptureFixture[str]) -> None:
    generator = torch.Generator().manual_seed(0)
    truth = [scenes.composed("composed-digits").test[index] for index in range(60)]
    found = []
    for one in truth:
        moved = one.boxes + torch.randn(one.boxes.shape, generator=generator) * 2
        lost = torch.rand(len(moved), generator=generator) < 0.8
        scores = torch.rand(len(moved), generator=generator)
        found.append(claims(*zip(moved[lost].tolist(), one.labels[lost].tolist(), scores[lost].tolist(), strict=True)))
    values = average_precisions(truth, found, 10)
    assert 0.4 < values["AP50"] < 0.9
    assert values["COCO AP50"] == pytest.approx(values["AP50"], abs=0.02)
    assert values["COCO mAP"] < values["COCO AP50"]
    assert capsys.readouterr().out == ""
