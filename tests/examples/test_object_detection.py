"""The detector: what of it is quantized, that it learns, and that runs resume."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from object_detection import SCRIPT, ObjectDetection, train
from support.resnet import ResNet
from support.retinanet import FrozenNorm, RetinaNet, load_backbone
from support.training import fit
from torch import nn

import cpt_fx
from cpt_fx.schedules import Static, named
from tests.examples.resuming import assert_resumes
from tests.examples.test_detection_parts import write_coco, write_voc


def task(**options: Any) -> ObjectDetection:
    return ObjectDetection(SCRIPT.options(fast=True, **options))


def detector(depth: int = 18, norm: Any = nn.BatchNorm2d) -> RetinaNet:
    return RetinaNet(ResNet(depth, 0, width=4, norm=norm), 3, 9, width=8)


def with_new_statistics(*names: str) -> set[str]:
    """The names of metrics where there is batch norm: what was published, and the same with new statistics."""
    return {*names, *(f"recalibrated {name}" for name in names)}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["small", "resnet18", "resnet101"])
def test_everything_convolutional_is_quantized(kind: str) -> None:
    """Stem, blocks, shortcuts, pyramid, both heads and their output convolutions, with their biases."""
    model = task().model() if kind == "small" else detector(int(kind.removeprefix("resnet")))
    convolutions = {name: module for name, module in model.named_modules() if isinstance(module, nn.Conv2d)}
    quantized = cpt_fx.transform(model, Static(8), recipe=cpt_fx.recipes.paper(), strict=True)
    scores, codes = quantized(torch.randn(2, 1 if kind == "small" else 3, 64, 96))
    assert scores.shape[:2] == codes.shape[:2]
    found = cpt_fx.inspect(quantized)
    by_role = {
        role: {layer for item in found.quantizers if item.role == role for layer in item.layers}
        for role in ("weight", "bias", "activation", "gradient")
    }
    assert by_role["weight"] == by_role["activation"] == by_role["gradient"] == set(convolutions)
    assert by_role["bias"] == {name for name, module in convolutions.items() if module.bias is not None}
    assert {"classify.output", "locate.output"} < by_role["bias"]
    assert not found.uncovered


def test_heads_give_a_row_for_each_anchor() -> None:
    one = task()
    images = one._stacked([one.train_scenes[0], one.train_scenes[1]])
    scores, codes = one.model()(images)
    anchors = one.anchors.of(images.shape[2], images.shape[3])
    assert scores.shape == (2, len(anchors), 10)
    assert codes.shape == (2, len(anchors), 4)
    assert float(scores.detach().sigmoid().mean()) == pytest.approx(0.01, rel=0.2)  # at first everything is background
    wide = detector()(torch.randn(1, 3, 128, 256))[0]
    assert wide.shape[1] == sum(9 * (128 // stride) * (256 // stride) for stride in (8, 16, 32, 64, 128))


def test_a_place_of_the_pyramid_is_the_place_of_its_anchors() -> None:
    """What one place of one level says stands in the rows of the anchors around it: seen by its gradient."""
    one = task()
    model = one.model().eval()
    images = torch.rand(1, 1, 64, 64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    anchors = one.anchors.of(64, 64)
    row = (10 * 16 + 3) * one.anchors.per_place  # of the finest level: row 10, column 3, at stride 4
    (gradient,) = torch.autograd.grad(model(images)[0][0, row].sum(), images)
    weights = gradient[0, 0].abs()
    centre = (
        (weights * torch.arange(64).view(-1, 1)).sum() / weights.sum(),
        (weights * torch.arange(64)).sum() / weights.sum(),
    )
    left, top, right, bottom = anchors[row].tolist()
    assert float(centre[0]) == pytest.approx((top + bottom) / 2, abs=6)
    assert float(centre[1]) == pytest.approx((left + right) / 2, abs=6)


@pytest.mark.slow
def test_frozen_norm_is_never_changed_or_trained() -> None:
    model = detector(norm=FrozenNorm)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    quantized = cpt_fx.transform(model, Static(8), recipe=cpt_fx.recipes.paper())
    quantized.train()
    scores, codes = quantized(torch.randn(2, 3, 64, 64))
    (scores.sum() + codes.sum()).backward()
    assert before
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())
    assert not any("bn" in name for name, _ in model.named_parameters())
    norm = FrozenNorm(2)
    norm.load_state_dict(dict(zip(norm.state_dict(), torch.tensor([[2.0, 1], [1, 0], [3, 0], [4, 1]]), strict=True)))
    x = torch.randn(1, 2, 2, 2)
    assert torch.allclose(norm(x)[:, 0], (x[:, 0] - 3) / (4 + 1e-5) ** 0.5 * 2 + 1)


def test_pretrained_weights_are_loaded_or_refused(tmp_path: Path) -> None:
    source = ResNet(18, 1000, width=4)
    for buffer in source.buffers():
        if buffer.is_floating_point():
            buffer.uniform_(0.5, 1.5)
    file = tmp_path / "resnet18.pth"
    torch.save(source.state_dict(), file)
    backbone = ResNet(18, 0, width=4, norm=FrozenNorm)
    load_backbone(backbone, file)
    source.eval()
    images = torch.randn(1, 3, 64, 64)
    for expected, got in zip(source.features(images), backbone.features(images), strict=True):
        assert torch.allclose(expected, got, atol=1e-4)
    with pytest.raises(ValueError, match=r"belongs to another net: .*layer1\.1"):
        load_backbone(ResNet(10, 0, width=4), file)
    with pytest.raises(ValueError, match=r"belongs to another net: .* differ"):
        load_backbone(ResNet(18, 0, width=8), file)
    with pytest.raises(FileNotFoundError, match=r"missing\.pth does not exist.*resnet101-63fe2227\.pth"):
        load_backbone(backbone, tmp_path / "missing.pth")
    torch.save({"weights": Path}, file)
    with pytest.raises(ValueError, match="no file of plain tensors"):
        load_backbone(backbone, file)


def test_options_are_checked() -> None:
    with pytest.raises(ValueError, match=r"--batch must be between 1 and 1000"):
        task(batch=2000)
    with pytest.raises(ValueError, match=r"--frozen-norm .* needs --backbone-weights FILE"):
        task(frozen_norm=True)
    with pytest.raises(ValueError, match=r"--train-images must be between 1 and 1000"):
        task(train_images=0)
    with pytest.raises(ValueError, match=r"unknown --model 'yolo'; there are: small; resnet10, "):
        task(model="yolo").model()
    with pytest.raises(FileNotFoundError, match=r"VOCdevkit is not a folder .*VOCtrainval"):
        ObjectDetection(SCRIPT.options(preset="voc-resnet101"))


def test_torchvisions_detectors_train_or_say_what_to_install() -> None:
    one = task(model="torchvision/retinanet_resnet50_fpn_v2", batch=2, test_images=2)
    try:
        model = one.model()
    except ImportError as error:
        assert "pip install torchvision" in str(error)
        pytest.skip("torchvision is not installed; that this is said was tested")
    quantized = cpt_fx.transform(model, Static(8), recipe=one.recipe)
    loss = one.loss(quantized.train(), one.batch(0, 0))
    loss.backward()
    assert bool(loss.isfinite())
    with torch.no_grad():
        assert set(one.evaluate(quantized.eval())) == {"composed AP50", "composed COCO mAP", "composed COCO AP50"}


def test_batches_depend_on_step_and_seed_alone() -> None:
    one = task(steps=3)
    forward = [one._stacked(one.batch(step, 1)) for step in (0, 1, 200)]
    backward = [one._stacked(one.batch(step, 1)) for step in (200, 1, 0)]
    assert all(torch.equal(first, second) for first, second in zip(forward, reversed(backward), strict=True))
    assert not torch.equal(forward[0], one._stacked(one.batch(0, 2)))


def test_half_of_the_scenes_are_mirrored_where_that_makes_sense() -> None:
    one = task(train_images=1, batch=1)  # the same scene in every step
    (scene,) = one.batch(0, 0)
    assert all(torch.equal(one.batch(step, 0)[0].image, scene.image) for step in range(40))  # digits are not
    one.data = replace(one.data, mirrors=True)
    seen = [one.batch(step, 0)[0] for step in range(40)]
    mirrored = [torch.equal(other.image, scene.image.flip(2)) for other in seen]
    assert 10 < sum(mirrored) < 30
    for other, turned in zip(seen, mirrored, strict=True):
        assert torch.equal(other.boxes, scene.mirrored().boxes if turned else scene.boxes)


@pytest.mark.slow
def test_it_learns_and_says_that_scenes_are_composed() -> None:
    torch.set_num_threads(1)
    one = task()
    outcome = fit(one, named("CR", q_min=4, q_max=8, total_steps=30, cycles=2), seed=0)
    assert sum(outcome.losses[-5:]) < 0.7 * sum(outcome.losses[:5])
    assert set(outcome.metrics) == with_new_statistics("composed AP50", "composed COCO mAP", "composed COCO AP50")
    assert one.metric == "composed AP50"


def test_gradients_are_clipped() -> None:
    one = task(clip=0.1)
    model = one.model()
    one.loss(model, one.batch(0, 0)).backward()
    one.after_backward(model)
    norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
    assert float(norm) == pytest.approx(0.1, rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["voc", "coco"])
def test_files_train(tmp_path: Path, form: str) -> None:
    (write_voc if form == "voc" else write_coco)(tmp_path)
    metrics = train(
        Static(6, total_steps=2), data=f"{tmp_path}", model="resnet10", width=4, pyramid_width=8, batch=1, image_size=64
    )
    assert set(metrics) == with_new_statistics("AP50", "COCO mAP", "COCO AP50")


@pytest.mark.slow
def test_a_run_that_broke_down_resumes_exactly(tmp_path: Path) -> None:
    options = SCRIPT.options(fast=True, batch=4)
    assert_resumes(lambda: ObjectDetection(options), tmp_path / "run.pt", steps=10, stop=7, save_every=4)


@pytest.mark.skipif(not os.environ.get("CPT_FX_FETCH"), reason="downloads; set CPT_FX_FETCH=1 to run it")
@pytest.mark.parametrize("data", ["composed-fashion-mnist", "composed-mnist"])
def test_fetched_scenes_train(data: str) -> None:
    torch.set_num_threads(1)
    metrics = train(Static(8, total_steps=5), fast=True, data=data)
    assert set(metrics) == with_new_statistics("composed AP50", "composed COCO mAP", "composed COCO AP50")
