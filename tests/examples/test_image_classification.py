"""Image classifiers: the nets, what of them is quantized, batches, and runs that resume."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from image_classification import PRESETS, SCRIPT, ImageClassification, train
from support.resnet import ResNet
from support.training import fit
from support.vision_models import build, full_precision
from torch import nn

import cpt_fx
from cpt_fx.schedules import Static, named
from tests.examples.resuming import assert_resumes


def task(**options: Any) -> ImageClassification:
    return ImageClassification(SCRIPT.options(fast=True, **options))


def convolutions(model: nn.Module) -> set[str]:
    return {name for name, module in model.named_modules() if isinstance(module, nn.Conv2d)}


@pytest.mark.parametrize(
    ("name", "million"),
    [
        # Parameters as the papers count them; CIFAR ResNets here have 1x1 convolutions as shortcuts.
        ("resnet20", 0.272),
        ("resnet110", 1.731),
        ("resnet152", 2.41),
        ("mobilenetv2", 2.30),
        ("imagenet-resnet18", 11.69),
        ("imagenet-resnet34", 21.80),
        ("imagenet-resnet50", 25.56),
    ],
)
def test_nets_have_the_size_they_are_known_for(name: str, million: float) -> None:
    model = build(name, 1000 if name.startswith("imagenet") else 10)
    assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(million, rel=0.01)


@pytest.mark.parametrize("name", ["resnet8", "resnet14", "mobilenetv2"])
def test_cifar_nets_are_quantized_but_for_the_classifier(name: str) -> None:
    """Every convolution, first and 1x1 shortcuts too, with weight, input and gradient; nothing else."""
    model = build(name, 10, width=None if name == "mobilenetv2" else 4)
    exclude = full_precision(name, model)
    assert exclude == ("head",)
    quantized = cpt_fx.transform(model, Static(8), recipe=cpt_fx.recipes.paper(), exclude=exclude)
    found = cpt_fx.inspect(quantized)
    for role in ("weight", "activation", "gradient"):  # one activation may serve a block and its shortcut
        layers = [layer for item in found.quantizers if item.role == role for layer in item.layers]
        assert sorted(layers) == sorted(convolutions(model))
    assert {(item.layer, item.by_choice) for item in found.uncovered} == {("head", True)}
    assert quantized(torch.randn(2, 3, 32, 32)).shape == (2, 10)


def test_imagenet_nets_keep_stem_shortcuts_and_classifier() -> None:
    model = build("imagenet-resnet34", 10, width=4)
    exclude = full_precision("imagenet-resnet34", model)
    shortcuts = {f"layer{stage}.0.downsample.0" for stage in (2, 3, 4)}
    assert set(exclude) == {"conv1", "fc"} | shortcuts
    quantized = cpt_fx.transform(model, Static(8), recipe=cpt_fx.recipes.paper(), exclude=exclude)
    found = cpt_fx.inspect(quantized)
    assert {item.layer for item in found.quantizers} == convolutions(model) - shortcuts - {"conv1"}
    assert all(item.by_choice for item in found.uncovered)
    # The detector's backbone is the same net; it has no classifier, and says so.
    with pytest.raises(RuntimeError, match="features"):
        ResNet(10, 0, width=4)(torch.zeros(1, 3, 32, 32))


def test_models_by_name_are_checked() -> None:
    with pytest.raises(ValueError, match=r"unknown --model 'vgg'; there are: resnet8, .*timm/NAME"):
        build("vgg", 10)
    with pytest.raises(ValueError, match=r"6 n \+ 2 layers .* got 18"):
        build("resnet18", 10)
    with pytest.raises(ValueError, match="unknown --model 'imagenet-resnet19'"):
        build("imagenet-resnet19", 10)
    with pytest.raises(ValueError, match=r"whole number from 1 up, got 1\.5"):
        build("resnet8", 10, width=1.5)
    with pytest.raises(ValueError, match="no effect on --model timm/resnet18"):
        build("timm/resnet18", 10, width=4)
    with pytest.raises(ValueError, match="wants colour images"):
        build("torchvision/resnet18", 10, channels=1)


@pytest.mark.parametrize("library", ["timm", "torchvision"])
def test_models_of_other_libraries(library: str) -> None:
    """Where the library is there its model trains as it is; where not, the message says what to install."""
    try:
        model = build(f"{library}/resnet18", 10)
    except ImportError as error:
        assert f"pip install {library}" in str(error)
        pytest.skip(f"{library} is not installed; that this is said was tested")
    exclude = full_precision(f"{library}/resnet18", model)
    assert {"conv1", "fc"} < set(exclude)
    quantized = cpt_fx.transform(model, Static(8), recipe=cpt_fx.recipes.paper(), exclude=exclude, strict=True)
    assert quantized(torch.randn(2, 3, 64, 64)).shape == (2, 10)


def test_batches_depend_on_step_and_seed_alone() -> None:
    one = task()
    forward = [one.batch(step, seed=1) for step in range(3)]
    backward = [one.batch(step, seed=1) for step in (2, 1, 0)]
    for (images, labels), (same_images, same_labels) in zip(forward, reversed(backward), strict=True):
        assert torch.equal(images, same_images)
        assert torch.equal(labels, same_labels)
    other, _ = one.batch(0, seed=2)
    assert not torch.equal(forward[0][0], other)
    single = task(train_images=1, batch=1)  # the same image in every step, cut out elsewhere
    assert len(torch.cat([single.batch(step, seed=1)[0] for step in range(30)]).unique(dim=0)) == 9


def test_an_epoch_sees_every_image_at_most_once() -> None:
    one = task(no_augment=True, batch=100)
    assert one.steps_per_epoch == 11
    epochs = [[one.batch(epoch * 11 + place, 0)[0] for place in range(11)] for epoch in range(2)]
    first, second = (torch.cat(parts).flatten(1) for parts in epochs)
    assert len(first.unique(dim=0)) == len(first)  # no two digits are alike
    assert not torch.equal(first, second)
    with pytest.raises(ValueError, match=r"--batch must be between 1 and 1198, the training images, got 2000"):
        task(batch=2000)


def test_the_rate_falls_where_it_should() -> None:
    def rates(**options: Any) -> list[float]:
        one = task(lr=0.1, **options)
        return [round(one.learning_rate(step, 90), 6) for step in (0, 29, 30, 44, 45, 59, 60, 67, 68, 89)]

    assert rates() == [0.1, 0.1, 0.1, 0.1, 0.01, 0.01, 0.01, 0.001, 0.001, 0.001]
    assert rates(lr_drops=PRESETS["imagenet-resnet34"]["lr_drops"]) == [0.1, 0.1, *[0.01] * 4, *[0.001] * 4]


@pytest.mark.slow
def test_it_learns_and_the_metrics_are_right() -> None:
    torch.set_num_threads(1)
    one = task(steps=60)
    schedule = named("CR", q_min=4, q_max=8, total_steps=60, cycles=2)
    outcome = fit(one, schedule, seed=0)
    assert sum(outcome.losses[-10:]) < 0.8 * sum(outcome.losses[:10])
    assert outcome.metrics["accuracy"] > 0.3
    outcome.model.eval()
    with torch.no_grad():
        scores = outcome.model(one.data.test.plain(torch.arange(599)))
    labels = one.data.test.labels
    assert outcome.metrics["accuracy"] == pytest.approx((scores.argmax(1) == labels).float().mean().item())
    assert outcome.metrics["loss"] == pytest.approx(nn.functional.cross_entropy(scores, labels).item(), rel=1e-4)


@pytest.mark.slow
def test_a_run_that_broke_down_resumes_exactly(tmp_path: Path) -> None:
    """Cropped and flipped images, momentum, running statistics: all of it goes on where it stopped."""
    options = SCRIPT.options(fast=True)
    assert_resumes(lambda: ImageClassification(options), tmp_path / "run.pt", steps=20, stop=13, save_every=5)


@pytest.mark.slow
def test_train_is_what_a_study_calls() -> None:
    torch.set_num_threads(1)
    metrics = train(Static(4, 8, total_steps=5), 0, fast=True)
    assert set(metrics) == {"accuracy", "loss", "recalibrated accuracy", "recalibrated loss"}
    other = train(Static(4, 8, total_steps=5), 0, fast=True, recipe="default")
    assert list(other) == ["accuracy", "loss", "unrecalibrated accuracy", "unrecalibrated loss"]
    assert metrics == train(Static(4, 8, total_steps=5), 0, fast=True)


@pytest.mark.skipif(not os.environ.get("CPT_FX_FETCH"), reason="downloads; set CPT_FX_FETCH=1 to run it")
@pytest.mark.parametrize("data", ["cifar10", "fashion-mnist", "mnist"])
def test_real_data_train(data: str) -> None:
    torch.set_num_threads(1)
    metrics = train(
        Static(8, total_steps=60), 0, data=data, model="resnet8", width=4, batch=64, test_images=1000, image_size=14
    )
    assert metrics["accuracy"] > (0.15 if data == "cifar10" else 0.3)
