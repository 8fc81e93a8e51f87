"""Quality of detections: COCO's averages by pycocotools, and Pascal VOC's average precision."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Sequence

import torch

from support.boxes import Found, overlaps
from support.scenes import Scene


def average_precisions(scenes: Sequence[Scene], found: Sequence[Found], classes: int) -> dict[str, float]:
    """Return AP50 as Pascal VOC measures it, and COCO's mAP and AP50. Boxes are in the pixels of the given scenes."""
    return {"AP50": voc_ap50(scenes, found, classes), **coco_averages(scenes, found, classes)}


def coco_averages(scenes: Sequence[Scene], found: Sequence[Found], classes: int) -> dict[str, float]:
    """Return COCO's mAP (mean over overlaps from 0.5 to 0.95) and AP50. Difficult objects count like its crowds."""
    try:
        from pycocotools.coco import COCO
        from pycocotools.cocoeval import COCOeval
    except ImportError as error:
        raise ImportError('mean average precision needs pycocotools: pip install "cpt_fx[detection]"') from error

    def edges(box: list[float]) -> list[float]:
        return [box[0], box[1], box[2] - box[0], box[3] - box[1]]

    truth: list[dict[str, object]] = []
    claims: list[dict[str, object]] = []
    for image, (scene, one) in enumerate(zip(scenes, found, strict=True)):
        for box, label, hard in zip(scene.boxes.tolist(), scene.labels.tolist(), scene.difficult.tolist(), strict=True):
            sides = edges(box)
            truth.append(
                {"id": len(truth) + 1, "image_id": image, "category_id": label, "bbox": sides, "iscrowd": int(hard)}
                | {"area": sides[2] * sides[3]}
            )
        for box, label, score in zip(one.boxes.tolist(), one.labels.tolist(), one.scores.tolist(), strict=True):
            claims.append({"image_id": image, "category_id": label, "bbox": edges(box), "score": score})
    if not claims:
        return {"COCO mAP": 0.0, "COCO AP50": 0.0}
    with contextlib.redirect_stdout(io.StringIO()):  # it prints its progress
        objects = COCO()
        objects.dataset = {
            "info": {},
            "images": [{"id": image} for image in range(len(scenes))],
            "annotations": truth,
            "categories": [{"id": label} for label in range(classes)],
        }
        objects.createIndex()
        evaluation = COCOeval(objects, objects.loadRes(claims), "bbox")
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    return {"COCO mAP": float(evaluation.stats[0]), "COCO AP50": float(evaluation.stats[1])}


def voc_ap50(scenes: Sequence[Scene], found: Sequence[Found], classes: int) -> float:
    """Return the mean over classes of the area under precision over recall, at an overlap of 0.5.

    As Pascal VOC from 2010 on: each detection goes to the object it overlaps most; the first one there is right, later
    ones are wrong; difficult objects and detections of them do not count. Classes without objects are left out.
    """
    areas = []
    for label in range(classes):
        claims: list[tuple[float, bool]] = []
        objects = 0
        for scene, one in zip(scenes, found, strict=True):
            wanted = scene.boxes[scene.labels == label]
            hard = scene.difficult[scene.labels == label].tolist()
            objects += len(hard) - sum(hard)
            chosen = (one.labels == label).nonzero().flatten()
            chosen = chosen[one.scores[chosen].argsort(descending=True, stable=True)]
            if len(chosen) == 0:
                continue
            taken: set[int] = set()
            overlap = overlaps(one.boxes[chosen], wanted)
            for row, score in zip(overlap, one.scores[chosen].tolist(), strict=True):
                place = int(row.argmax()) if len(row) else -1
                if place < 0 or float(row[place]) < 0.5:
                    claims.append((score, False))
                elif not hard[place]:
                    claims.append((score, place not in taken))
                    taken.add(place)
        if objects:
            areas.append(_area(claims, objects))
    if not areas:
        raise ValueError("the images to evaluate on hold no object that counts")
    return sum(areas) / len(areas)


def _area(claims: list[tuple[float, bool]], objects: int) -> float:
    """Return the area under the precision that is reached at each recall or at a higher one."""
    if not claims:
        return 0.0
    claims = sorted(claims, key=lambda claim: -claim[0])
    right = torch.tensor([hit for _, hit in claims], dtype=torch.float64).cumsum(0)
    precision = right / torch.arange(1, len(claims) + 1)
    best = precision.flip(0).cummax(0).values.flip(0)
    steps = torch.diff(right / objects, prepend=torch.zeros(1, dtype=torch.float64))
    return float((best * steps).sum())
