"""What an inspection says of integer execution."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import cpt_fx
from cpt_fx import native
from cpt_fx.inspection import ProductView
from cpt_fx.integer import choice
from cpt_fx.schedules import Bits, Static
from tests.integer.models import CONVOLUTIONS_PRODUCTS, Convolutions, always, both, difference, set_widths
from tests.passes import numbers

__all__ = ["always"]


def images() -> torch.Tensor:
    return torch.randn(2, 1, 8, 8)


def test_products_of_a_simulated_model_say_so() -> None:
    _, simulated = both(Convolutions())
    views = cpt_fx.inspect(simulated).products
    assert len(views) == CONVOLUTIONS_PRODUCTS
    assert not any(view.lowered or view.on_integers for view in views)
    assert str(views[0]) == "stem: conv2d: simulated: the model was transformed with execution='simulated'"
    assert "on integers" not in str(cpt_fx.inspect(simulated)).replace("execution", "")


def test_products_are_counted_by_layer_and_direction() -> None:
    model, _ = both(Convolutions())
    views = cpt_fx.inspect(model).products
    assert [view.integer for view in views] == [(0, 0, 0)] * CONVOLUTIONS_PRODUCTS
    assert not any(view.on_integers for view in views)  # nothing ran yet
    for _ in range(2):
        model(images()).sum().backward()
    views = cpt_fx.inspect(model).products
    assert [(view.layer, view.op, view.integer) for view in views] == [
        ("stem", "conv2d", (2, 0, 2)), ("conv", "conv2d", (2, 2, 2)), ("shortcut", "conv2d", (2, 2, 2)),
        ("head", "linear", (2, 2, 2)),
    ]  # fmt: skip
    assert all(view.on_integers and not view.reasons for view in views)
    set_widths(model, 16, 8)
    model(images()).sum().backward()
    head = cpt_fx.inspect(model).products[-1]
    assert not head.on_integers
    assert (head.integer, head.floating) == ((2, 2, 2), (1, 1, 1))
    assert head.reasons == tuple(
        f"{name}: an operand is not at 1 to 8 bits (1 of 3)" for name in ("forward", "left", "right")
    )
    assert str(head).startswith("head: linear: on integers: forward 2 of 3, left 2 of 3, right 2 of 3: forward: an")


def test_small_products_say_what_was_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Which is faster is measured for each product by itself; here the gradients of weights are not."""
    monkeypatch.setenv("CPT_FX_CACHE", str(tmp_path))
    monkeypatch.setattr(choice, "_measure", lambda kind, sizes: 0.75 if kind.endswith("weight") else 1.5)
    choice._decided.cache_clear()
    ours, theirs = both(Convolutions())
    x = images()
    with choice.chosen("measured"):
        found = [numbers(model, x) for model in (ours, theirs)]
    choice._decided.cache_clear()
    assert difference(*found) < 0.02
    head = cpt_fx.inspect(ours).products[-1]
    assert (head.integer, head.floating) == ((1, 1, 0), (0, 0, 1))
    assert head.ratios == (1.5, 1.5, 0.75)
    assert head.reasons == ("right: too small to be faster on integers here, 0.75 times as fast (1 of 1)",)


def test_never_is_simulated_execution() -> None:
    ours, theirs = both(torch.nn.Sequential(torch.nn.Linear(16, 8)))
    with choice.chosen("never"):
        found = [numbers(model, torch.ones(3, 16)) for model in (ours, theirs)]
    assert difference(*found) < 5e-6
    (view,) = cpt_fx.inspect(ours).products
    assert view.integer == (0, 0, 0) and view.floating == (1, 1, 1)
    assert view.reasons[0] == "forward: too small to be faster on integers here (1 of 1)"


def test_they_are_shown(tmp_path: Path) -> None:
    plain = torch.nn.Sequential(torch.nn.Conv2d(4, 4, 1), torch.nn.Conv2d(4, 4, 1, groups=4))
    model = cpt_fx.transform(plain, Static(Bits(4, 4, 8)), execution="integer")
    model(torch.randn(1, 4, 3, 3)).sum().backward()
    inspection = cpt_fx.inspect(model)
    text = str(inspection)
    assert "on integers whenever they ran: 1 of 2 products" in text
    assert f"kernels: {native.kernels()}" in text
    assert "a grouped convolution has no integer" in text
    page = inspection.html(tmp_path / "page.html")
    assert "<h2>On integers</h2>" in page and "a grouped convolution has no integer form" in page
    # The product is an operator in the drawing, that quantizes its gradient: not a quantizer.
    assert "integer_conv" in inspection.svg() and "gradient 8 bits" in inspection.svg()
    kinds = {name: data["kind"] for name, data in inspection.networkx().nodes(data=True)}
    assert kinds["conv2d"] == "operator" and kinds["_0_input_q"] == "quantizer"
    _, simulated = both(plain)
    assert "<h2>On integers</h2>" not in cpt_fx.inspect(simulated).html()


def test_costs_are_those_of_the_simulated_graph() -> None:
    ours, theirs = both(Convolutions())
    schedule = Static(Bits(4, 4, 8))
    first, second = (cpt_fx.cost(model, schedule, (images(),)) for model in (ours, theirs))
    assert first == second and first.flops > 0


def test_a_view_is_public() -> None:
    view = ProductView("a", "linear", "linear", integer=(3, 2, 2), floating=(0, 1, 0), lowered=True)
    assert view.ran() == ("3", "2 of 3", "2") and not view.on_integers
