"""The census: products that go around the quantizers are named, and nothing else is."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

import cpt_fx
from cpt_fx import native
from cpt_fx.capture.dry_run import dry_run
from cpt_fx.inspection.census import Seen, census
from cpt_fx.inspection.levels import holds, levels_in, ranges_of
from cpt_fx.inspection.sameness import Inputs, Mode, run_in
from cpt_fx.inspection.verification import VerificationError
from cpt_fx.inspection.views import OF_A_SECOND
from cpt_fx.ir.meta import DECISION, LEFT, QUANTIZER
from cpt_fx.ir.subgraphs import state_of
from cpt_fx.quantizers.numerics import Grid
from cpt_fx.quantizers.ops import FAKE_QUANTIZE, QUANTIZERS
from cpt_fx.recipes import default, fp8, integer, mx, paper
from cpt_fx.schedules import Static
from tests.capture.captures import captures
from tests.inspection.escapes import ESCAPES, WIDTH, BeforeALeftLayer, Escaping, OperatorOfItsOwn, unseen
from tests.selecting import mostly_slow
from tests.zoo import ZOO


def looked_at(model: nn.Module, *args: Any, gradients: bool = True, **kwargs: Any) -> Seen:
    """Return what a census sees in a run at 2 bits."""
    with dry_run(model), ExitStack() as stack:
        for state in {id(found): found for found in map(state_of, cpt_fx.graphs(model))}.values():
            stack.enter_context(state.at(2))
        with census(model) as seen:
            run_in(model, Inputs(args, kwargs), [Mode(model.training, gradients)])
    return seen


def named(seen: Seen) -> list[str]:
    return [*map(str, seen.unknown), *seen.problems]


def batch() -> Tensor:
    return torch.randn(6, WIDTH, requires_grad=True)


@pytest.mark.filterwarnings("ignore:Using a non-full backward hook")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of a callback that torch.fx stops in
@pytest.mark.parametrize("name", mostly_slow(ESCAPES, every=5))
def test_what_goes_around_the_quantizers_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Dynamo reads what `weakref.finalize` has registered: half a minute, where thousands of tests ran before.
    monkeypatch.setattr(weakref.finalize, "_registry", {})
    x = batch()
    model = cpt_fx.transform(ESCAPES[name](), Static(4))
    model(x)
    with pytest.raises(VerificationError, match="comes from no quantizer") as raised:
        cpt_fx.inspect(model).verify(x)
    assert "escapes.py:" in str(raised.value) or "(root), " in str(raised.value) or "thread.py" in str(raised.value)


def test_a_layer_that_is_left_hides_no_backward_pass_of_somebody_else() -> None:
    x = batch()
    model = cpt_fx.transform(BeforeALeftLayer(), Static(4), exclude=["left"])
    with pytest.raises(VerificationError, match=r"escapes.py:.* in the backward pass"):
        cpt_fx.inspect(model).verify(x)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize("kind", ["integers", "quantized"])
def test_integers_and_operators_of_others_are_listed(kind: str) -> None:
    class Aside(Escaping):
        def between(self, h: Tensor) -> Tensor:
            def product() -> Any:
                left, right = h.detach(), self.w.detach()
                if kind == "integers":
                    return ((left * 1e6).long() @ (right * 1e6).long()).double().mean()
                codes = [torch.quantize_per_tensor(one, 0.1, 0, torch.qint8) for one in (left, right)]
                return torch.ops.quantized.matmul(*codes, 0.1, 0).dequantize().mean()

            result: Tensor = h * unseen(product).float()
            return result

    x = batch()
    model = cpt_fx.transform(Aside(), Static(4))
    assert cpt_fx.inspect(model).verify(x).proven
    said = "a product of integers" if kind == "integers" else "a custom operator; what it multiplies is not seen"
    assert any(said in item.reason for item in cpt_fx.inspect(model).uncovered)


def _take_away(module: torch.fx.GraphModule, what: str) -> None:
    """Take one decision about the last layer away, and the quantizer with it."""
    decisions = [node for node in module.graph.nodes if DECISION in node.meta]
    decision = decisions[-1].meta[DECISION]
    for node in [node for node in module.graph.nodes if QUANTIZER in node.meta]:
        quantizer = node.meta[QUANTIZER]
        if quantizer.layers == (decision.layer,) and what in (quantizer.role, "layer"):
            _without(node)
    if what == "layer":
        decisions[-1].meta[LEFT] = "a pass of mine"
        del decisions[-1].meta[DECISION]
    elif what == "gradient":
        decisions[-1].meta[DECISION] = replace(decision, gradient=None)
    else:
        decisions[-1].meta[DECISION] = replace(
            decision, operands=tuple(one for one in decision.operands if one.role != what)
        )
    module.recompile()


@pytest.mark.parametrize("what", ["weight", "activation"])
def test_a_factor_without_a_decision_is_named(what: str) -> None:
    model = cpt_fx.transform(_small(), Static(4), capture="symbolic")
    _take_away(cpt_fx.graphs(model)[0], what)
    with pytest.raises(VerificationError, match=r"2: addmm .* no entry of `uncovered` says why"):
        cpt_fx.inspect(model).verify(batch())


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("layer", "2: linear: a pass of mine"),
        ("gradient", "2: linear operand gradient: nothing quantizes the gradient"),
    ],
)
def test_what_a_pass_leaves_is_listed(what: str, said: str) -> None:
    model = cpt_fx.transform(_small(), Static(4), capture="symbolic")
    _take_away(cpt_fx.graphs(model)[0], what)
    assert cpt_fx.inspect(model).verify(batch()).proven
    assert any(str(item).startswith(said) for item in cpt_fx.inspect(model).uncovered)


def test_there_are_many_ways_around() -> None:
    assert len(ESCAPES) >= 40


@captures
def test_the_same_without_an_escape_is_proven(capture: str) -> None:
    class Honest(Escaping):
        def between(self, h: Tensor) -> Tensor:
            return h @ self.w

    x = batch()
    model = cpt_fx.transform(Honest(), Static(4), capture=capture)
    model(x)
    proof = cpt_fx.inspect(model).verify(x)
    # Three forward, six on the way back, and with graphs that are those of a mode three in the other mode.
    assert proof.products == (9 if capture == "symbolic" else 12) and proof.proven and not proof.outside
    assert proof.to_dict()["products"] == proof.products


def test_an_operator_with_code_of_its_own_is_listed_and_looked_into() -> None:
    x = batch()
    model = cpt_fx.transform(OperatorOfItsOwn(), Static(4))
    seen = looked_at(model, x)
    assert not named(seen)
    assert seen.products == 8
    assert any("hidden_product" in item.op for item in cpt_fx.inspect(model).uncovered)


class Copies(nn.Module):
    """Copies of quantized tensors in other memory: padded, transposed, folded, broadcast, summed by an operator."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc = nn.Conv1d(6, 6, 4, padding="same", padding_mode="circular"), nn.Linear(WIDTH, 8)
        self.two, self.w = nn.Conv2d(6, 6, (4, 1), padding="same", groups=2), nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        y = self.two(self.conv(x)[..., None].expand(-1, -1, -1, 3))
        y = self.fc(y.permute(0, 3, 1, 2).reshape(-1, WIDTH))
        y = torch.einsum("bij,jk->ik", y[None].expand(2, -1, -1), self.w)
        result: Tensor = torch.linalg.multi_dot((y, self.w, self.w.T))
        return result


class InTurn(nn.Module):
    """An einsum of more than two operands."""

    def __init__(self, equation: str, shapes: tuple[tuple[int, ...], ...]) -> None:
        super().__init__()
        self.fc, self.equation = nn.Linear(WIDTH, 6), equation
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(shape)) for shape in shapes])

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum(self.equation, self.fc(x), *self.weights).sin()


IN_TURN = [
    ("ab,bc,c->ac", ((6, 8), (8,))),
    ("ab,ab,b->b", ((6, 6), (6,))),
    ("ab,bc,cd->ad", ((6, 8), (8, 6))),
    ("ab,bc,ac->ac", ((6, 8), (6, 8))),
    ("ab,b,bc,c->ac", ((6,), (6, 8), (8,))),
]


@pytest.mark.parametrize("left", ["", "input", "weight", "gradient"])
@pytest.mark.parametrize(("equation", "shapes"), IN_TURN)
def test_what_an_einsum_makes_in_between_is_listed_for_both_ways(
    equation: str, shapes: tuple[tuple[int, ...], ...], left: str
) -> None:
    recipe = default().with_rule("linear", **({left: None} if left else {}))
    model = cpt_fx.transform(InTurn(equation, shapes), Static(4), recipe=recipe, capture="symbolic")
    seen = looked_at(model, batch())
    assert not named(seen)
    assert any(item.op == "einsum" and "in between" in item.reason for item in cpt_fx.inspect(model).uncovered)


@pytest.mark.parametrize(("equation", "shapes"), [("ab,bc->ac", ((6, 8),)), IN_TURN[0]])
def test_an_einsum_whose_gradient_has_no_quantizer(equation: str, shapes: tuple[tuple[int, ...], ...]) -> None:
    model = cpt_fx.transform(InTurn(equation, shapes), Static(4), capture="symbolic")
    (module,) = cpt_fx.graphs(model)
    _without(next(node for node in module.graph.nodes if node.name.startswith("einsum") and "gradient_q" in node.name))
    module.recompile()
    x = batch()
    assert any("bmm" in line and "2 times" in line for line in named(looked_at(model, x))) == (len(shapes) == 1)
    model(x).sum().backward()
    with pytest.raises(VerificationError, match=r"einsum.*gradient"):
        cpt_fx.inspect(model).verify(x)


RECIPES = [default(), paper(), paper(family="graph"), fp8(), mx()]


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda each: each.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_copies_of_quantized_tensors_are_known(recipe: Any, dtype: torch.dtype) -> None:
    x = torch.randn(2, 6, WIDTH, dtype=dtype)
    model = cpt_fx.transform(Copies().to(dtype), Static(4), recipe=recipe, capture="symbolic")
    seen = looked_at(model, x)
    assert not named(seen)
    assert seen.products >= 12


@pytest.mark.parametrize("name", sorted(ZOO))
def test_no_false_alarm(name: str) -> None:
    model, args, kwargs = ZOO[name]()
    result = cpt_fx.transform(model, Static(4), capture="symbolic")
    assert not named(looked_at(result, *args, **kwargs))
    assert not named(looked_at(result.eval(), *args, gradients=False, **kwargs))


@pytest.mark.parametrize("training", [True, False])
def test_integers(training: bool) -> None:
    net = nn.Sequential(nn.Linear(WIDTH, 64), nn.ReLU(), nn.Linear(64, 8))
    model = cpt_fx.transform(net, Static(4), execution="integer").train(training)
    assert not named(looked_at(model, batch(), gradients=training))
    with native.disabled():
        assert not named(looked_at(model, batch(), gradients=training))


def _without(node: torch.fx.Node) -> None:
    node.replace_all_uses_with(node.args[0])  # type: ignore[arg-type]
    node.graph.erase_node(node)


def _scaled(node: torch.fx.Node) -> None:
    with node.graph.inserting_after(node):
        scaled = node.graph.call_function(torch.mul, (node, 1.5))
    node.replace_all_uses_with(scaled, lambda user: user is not scaled)


def _written(node: torch.fx.Node) -> None:
    with node.graph.inserting_after(node):
        written = node.graph.call_function(_write, (node,))
    node.replace_all_uses_with(written, lambda user: user is not written)


def _write(quantized: Tensor) -> Tensor:
    quantized.data.mul_(1.5)
    return quantized


@pytest.mark.parametrize("edit", [_without, _scaled, _written])
@pytest.mark.parametrize("place", range(6))
def test_an_edited_graph(edit: Callable[[torch.fx.Node], None], place: int) -> None:
    model = cpt_fx.transform(_small(), Static(4), capture="symbolic")
    (module,) = cpt_fx.graphs(model)
    node = [node for node in module.graph.nodes if node.target in QUANTIZERS][place]
    if node.meta["cpt_fx_quantizer"].role in ("bias", "gradient"):
        pytest.skip("no factor of a product in the forward pass")
    edit(node)
    module.recompile()
    layer = node.meta["cpt_fx_quantizer"].layers[0]
    assert any(line.startswith(f"{layer}: addmm") for line in named(looked_at(model, batch())))


def _small() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 8))


def test_a_gradient_without_its_quantizer() -> None:
    model = cpt_fx.transform(_small(), Static(4), capture="symbolic")
    (module,) = cpt_fx.graphs(model)
    _without(next(node for node in module.graph.nodes if "gradient_q" in node.name and node.op == "call_function"))
    module.recompile()
    (line,) = named(looked_at(model, batch()))
    assert line.startswith("0: mm of ") and "backward pass, 2 times" in line


class Recomputed(nn.Module):
    """Computes a layer again on the way back."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = checkpoint(self.second, self.first(x), use_reentrant=False)
        return result


@captures
@pytest.mark.parametrize("left", ["input", "weight", "gradient"])
def test_what_a_recipe_leaves_may_be_computed_again(capture: str, left: str) -> None:
    recipe = default().with_rule("linear", **{left: None})
    result = cpt_fx.transform(Recomputed(), Static(4), recipe=recipe, capture=capture)
    assert cpt_fx.inspect(result).verify(batch()).proven


def test_parts_outside_are_named() -> None:
    inner = cpt_fx.transform(nn.Linear(WIDTH, WIDTH), Static(4))
    proof = cpt_fx.inspect(nn.Sequential(inner, nn.Linear(WIDTH, 8))).verify(batch())
    assert proof.outside == ("1 (addmm, mm)",)
    assert "outside of what was transformed: 1: Linear" in str(proof)


class Energy(nn.Module):
    """Returns a force: the gradient of its own output, which is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.net = _small()

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            (force,) = torch.autograd.grad(self.net(x).sum(), x, create_graph=True)
        return force


@pytest.mark.slow
def test_products_of_a_second_backward_pass_are_listed() -> None:
    x = batch()
    model = cpt_fx.transform(Energy(), Static(4))
    model(x)
    assert cpt_fx.inspect(model).verify(x).products == 12
    second = [item for item in cpt_fx.inspect(model).uncovered if item.reason == OF_A_SECOND]
    wanted = [("net.0", "linear"), ("net.2", "linear")]
    assert sorted((item.layer, item.op) for item in second) == wanted
    model(x)
    assert cpt_fx.inspect(model).uncovered == tuple(second)


@pytest.mark.parametrize("execution", ["simulated", "integer"])
@pytest.mark.parametrize("capture", ["symbolic", "dynamo"])
def test_a_second_backward_pass_of_a_training_loop_is_listed_once_it_came(capture: str, execution: str) -> None:
    """A gradient penalty: the model's own code has no second backward pass, and no look at it shows one."""
    model = cpt_fx.transform(_small(), Static(4), recipe=integer(), capture=capture, execution=execution, prove=False)
    x = batch().requires_grad_()
    model(x).sum().backward()
    assert not cpt_fx.inspect(model).uncovered
    (force,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    force.square().sum().backward()
    second = [item for item in cpt_fx.inspect(model).uncovered if item.reason == OF_A_SECOND]
    assert [(item.layer, item.op, item.operand) for item in second] == [
        ("0", "linear", "gradient"), ("2", "linear", "gradient")
    ]  # fmt: skip
    cpt_fx.inspect(model).verify(x.detach())


def test_dynamo_goes_on_as_if_nobody_looked() -> None:
    """Nothing is captured anew because of a census, what is captured under one serves later, and numbers are equal."""
    torch._dynamo.reset()
    x = batch()
    model = cpt_fx.transform(_small(), Static(4), capture="dynamo")
    assert not named(looked_at(model, x))
    assert len(cpt_fx.graphs(model)) == 1
    counters.clear()
    first = model.eval()(x)
    with census(model):
        again = model(x)
    assert torch.equal(first, again)
    model.train()(x)
    assert not counters["stats"] and len(cpt_fx.graphs(model)) == 1


def test_every_range_is_looked_at() -> None:
    """A quantizer that leaves the last of its ranges alone shows few levels in the first, where a sample is taken."""
    rows = torch.randint(0, 4, (5, 40)).float()
    rows[4] = torch.randn(40)
    assert levels_in(rows, 4)[0] == 5
    most, levels = levels_in(rows[:4], 4)
    assert most == 4 and set(levels.tolist()) == {0.0, 1.0, 2.0, 3.0}
    assert levels_in(torch.tensor([[1.0, -0.0, 0.0, torch.nan]]), 4)[0] == 2


def test_ranges_are_rows() -> None:
    x = torch.randn(2, 3, 4, 5)
    assert ranges_of(x, Grid()).shape == (1, 120)
    assert torch.equal(ranges_of(x, Grid(keep=(1,))), x.transpose(0, 1).reshape(3, 40))
    assert torch.equal(ranges_of(x, Grid(over=(-2,))), x.transpose(-1, -2).reshape(30, 4))
    assert ranges_of(x, Grid(over=(-1,), block=4)).shape == (48, 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
@pytest.mark.parametrize("count", [1, 4, 11, 60])
def test_copies_hold_levels(dtype: torch.dtype, count: int) -> None:
    levels = torch.randn(count, dtype=dtype).unique()
    x = levels[torch.randint(0, len(levels), (700,))].view(7, 100).T
    assert holds(x, levels)
    for place in (0, 350, 699):
        other = x.clone()
        other[place % 100, place // 100] += 1e-2
        assert not holds(other, levels)


def test_a_range_of_one_element_is_noted() -> None:
    model = cpt_fx.transform(nn.Conv2d(3, 4, 1), Static(4), recipe=paper())
    assert not looked_at(model, torch.randn(2, 3, 4, 4)).notes
    one = cpt_fx.transform(nn.Conv2d(1, 4, 1), Static(4))
    assert any("a single element" in note for note in looked_at(one, torch.randn(2, 1, 4, 4)).notes)


def test_quantizers_of_the_users_own_count() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.w = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.randn(WIDTH, WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.fc(x)
            return result

    x = batch()
    model: Any = cpt_fx.transform(Own(), Static(4))
    bits = torch.tensor(2)
    with census(model) as seen:
        FAKE_QUANTIZE(x.detach(), bits) @ FAKE_QUANTIZE(model.w.detach(), bits)
        FAKE_QUANTIZE(x.detach(), bits) @ model.w.detach()
    assert [unknown.operands for unknown in seen.unknown] == [(1,)]


def test_tensors_without_values_are_stepped_over() -> None:
    model = cpt_fx.transform(_small(), Static(4))
    with census(model) as seen:
        torch.randn(3, 4, device="meta") @ torch.randn(4, 5, device="meta")
    assert not seen.unknown
    assert seen.notes == ("products of meta tensors were not looked at: they hold no values",)


def test_censuses_of_two_threads_leave_nothing_behind() -> None:
    before = Tensor.register_hook, threading.Thread._bootstrap_inner  # type: ignore[attr-defined]
    second_is_open, first_is_closed = threading.Event(), threading.Event()

    def first() -> None:
        with census(nn.Linear(2, 2)):
            threads.submit(second)
            second_is_open.wait(0.5)
        first_is_closed.set()

    def second() -> None:
        with census(nn.Linear(2, 2)):
            second_is_open.set()
            first_is_closed.wait()

    with ThreadPoolExecutor(2) as threads:
        threads.submit(first).result()
    assert (Tensor.register_hook, threading.Thread._bootstrap_inner) == before  # type: ignore[attr-defined]
