"""A model captured by Dynamo: one state for all its graphs, however many there are and whenever they are found."""

from __future__ import annotations

import copy
import logging
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import cpt_fx
from cpt_fx.capture.dynamo.engine import DynamoEngine
from cpt_fx.errors import TransformError
from cpt_fx.ir.result import part_of
from cpt_fx.schedules import Static, named
from tests.capture.dynamo.models import EXACT, Block, Blocks, Checkpointed, Modes, seeded
from tests.training import check_same, check_same_output, train_step


@pytest.fixture(autouse=True)
def _forget_compiled_code() -> Iterator[None]:
    yield
    torch._dynamo.reset()


def captured(model: nn.Module, bits: int = 4, **options: Any) -> nn.Module:
    return cpt_fx.transform(model, Static(bits), capture="dynamo", **options)


def engine_of(result: nn.Module) -> DynamoEngine:
    engine = part_of(result).session.engine
    assert isinstance(engine, DynamoEngine)
    return engine


def ranges(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items() if "_range_" in name}


def layers(result: nn.Module) -> list[str]:
    return sorted({quantizer.layer for quantizer in cpt_fx.inspect(result).quantizers})


X = torch.randn(3, 4, generator=torch.Generator().manual_seed(7))


def test_graphs_are_found_at_the_first_call_or_from_examples() -> None:
    result = captured(seeded(Modes))
    assert cpt_fx.graphs(result) == []
    result(X)
    assert len(cpt_fx.graphs(result)) == 1
    model = seeded(Modes)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    at_once = captured(model, example_inputs=(X,), example_kwargs={"scale": 1.0})
    assert len(cpt_fx.graphs(at_once)) == 2  # for training, and the proof evaluates too
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any(bool(value.any()) for value in ranges(at_once).values()), "the example taught the ranges"
    assert all(quantizer.times_run == 0 for quantizer in cpt_fx.inspect(at_once).quantizers)


def test_the_result_looks_like_the_model() -> None:
    model = seeded(Modes)
    result: Any = captured(model)
    assert [name for name in result.state_dict() if "cpt_fx" not in name] == list(model.state_dict())
    assert result.fc.weight is model.fc.weight and result.norm.momentum == 0.3  # type: ignore[union-attr]
    assert result.drop.p == 0.4
    with pytest.raises(AttributeError, match="nowhere"):
        _ = result.nowhere
    model.greeting = "hello"  # type: ignore[assignment]
    assert captured(model).greeting == "hello"


def test_methods_of_the_model_call_the_quantized_one() -> None:
    class Predicting(Modes):
        def predict(self, x: Tensor) -> Any:
            return self(x)["y"].argmax(-1)

    result: Any = captured(seeded(Predicting))
    result.predict(X)
    assert all(quantizer.times_run for quantizer in cpt_fx.inspect(result).quantizers if quantizer.role == "weight")


def test_modes_and_shapes_share_names_and_ranges() -> None:
    result = captured(seeded(Modes), recipe=EXACT)
    train_step(result, (X,), {})
    names, learned = layers(result), ranges(result)
    result.eval()
    with torch.no_grad():
        result(X)
        result(torch.randn(5, 4))
    assert layers(result) == names
    assert ranges(result).keys() == learned.keys()
    assert all(torch.equal(value, learned[name]) for name, value in ranges(result).items()), "evaluation taught"


def test_sizes_are_captured_twice_at_most() -> None:
    result = captured(seeded(Modes))
    counts = []
    for size in (3, 5, 6, 7, 9):
        result(torch.randn(size, 4))
        counts.append(len(cpt_fx.graphs(result)))
    assert counts == [1, 2, 2, 2, 2]


def test_a_change_of_bits_captures_nothing() -> None:
    schedule = named("CR", q_min=3, q_max=8, total_steps=12, cycles=2)
    result = cpt_fx.transform(seeded(Modes), schedule, capture="dynamo")
    seen = set()
    for _ in range(12):
        train_step(result, (X,), {})
        schedule.step()
        seen.add(cpt_fx.inspect(result).quantizers[0].bits)
    assert len(seen) > 3 and len(cpt_fx.graphs(result)) == 1


@pytest.mark.slow
def test_blocks_of_one_class_have_ranges_of_their_own() -> None:
    """Where the code breaks, Dynamo would run the first block's graph for all three."""
    broken, whole = (
        captured(seeded(Blocks, breaks=True), recipe=EXACT),
        captured(seeded(Blocks, breaks=False), recipe=EXACT),
    )
    for step in range(3):
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(step))
        check_same(train_step(broken, (x,), {}), train_step(whole, (x,), {}))
    ours, theirs = ranges(broken), ranges(whole)
    assert len(cpt_fx.graphs(whole)) == 1 and len(cpt_fx.graphs(broken)) > 3
    assert theirs and all(torch.equal(ours[name], value) for name, value in theirs.items())
    runs = {quantizer.layer: quantizer.times_run for quantizer in cpt_fx.inspect(broken).quantizers}
    assert set(runs.values()) == {3}, "a quantizer ran for another block"
    assert layers(broken) == layers(whole)


def test_breaks_are_listed_with_their_place(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="cpt_fx"):
        result = captured(seeded(Blocks, breaks=True))
        result(X)
    (line,) = [record.message for record in caplog.records if "operators found" in record.message]
    assert (
        "Blocks: 16 operators found, 16 quantized by" in line
        and "0 excluded, 0 uncovered, 7 graphs, 1 break (dynamo)" in line
    )
    notes = "\n".join(cpt_fx.inspect(result).capture.notes)
    assert "the code cannot be one graph" in notes and "models.py:" in notes and "graph_break()" in notes


@pytest.mark.slow
def test_two_models_of_one_class_share_nothing() -> None:
    one, two = captured(seeded(Blocks, breaks=True)), captured(seeded(Blocks, breaks=True), bits=8)
    one(X)
    assert not any(ranges(two).values())
    two(X)
    widths = [{quantizer.bits for quantizer in cpt_fx.inspect(each).quantizers} for each in (one, two)]
    assert widths == [{4}, {8}]


def test_copies_go_on_from_the_same_state() -> None:
    result = captured(seeded(Blocks, breaks=False), recipe=EXACT)
    train_step(result, (X,), {})
    twin, pickled = copy.deepcopy(result), pickle.loads(pickle.dumps(result))
    assert len(cpt_fx.graphs(twin)) == len(cpt_fx.graphs(pickled)) == 1, "a copy knows what the original knew"
    expected = train_step(copy.deepcopy(result), (X,), {})
    check_same(train_step(twin, (X,), {}), expected)
    check_same(train_step(pickled, (X,), {}), expected)
    assert len(cpt_fx.graphs(twin)) == 1, "the graphs of the original are replaced by its own"
    before = ranges(result)
    assert any(not torch.equal(value, before[name]) for name, value in ranges(twin).items())


def test_a_checkpoint_loads_before_the_first_call() -> None:
    trained = captured(seeded(Blocks, breaks=False), recipe=EXACT)
    for _ in range(2):
        train_step(trained, (X,), {})
    fresh = captured(Blocks(breaks=False), recipe=EXACT)
    assert fresh.load_state_dict(trained.state_dict()) == torch.nn.modules.module._IncompatibleKeys([], [])
    check_same_output(fresh.eval()(X), trained.eval()(X))
    plain = captured(Blocks(breaks=False), recipe=EXACT)
    plain.load_state_dict(seeded(Blocks, breaks=False).state_dict())


@pytest.mark.parametrize("breaks", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_computes_again_what_it_computed(reentrant: bool, breaks: bool) -> None:
    plain = captured(seeded(Checkpointed, reentrant=None, breaks=False), bits=3, recipe=EXACT)
    result = captured(seeded(Checkpointed, reentrant=reentrant, breaks=breaks), bits=3, recipe=EXACT)
    x = torch.randn(5, 6, generator=torch.Generator().manual_seed(3))
    for seed in range(2):
        check_same(train_step(result, (x,), {}, seed=seed), train_step(plain, (x,), {}, seed=seed))
    assert all(torch.equal(value, ranges(plain)[name]) for name, value in ranges(result).items()), "taught twice"


def test_force_eager_does_not_skip_quantizers() -> None:
    with torch.compiler.set_stance("force_eager"):
        result = captured(seeded(Modes), example_inputs=(X,))
        result(X)
        assert cpt_fx.inspect(result).verify(X).proven


def test_without_dynamo_every_product_still_goes_through_the_net() -> None:
    expected = captured(seeded(Blocks, breaks=False), recipe=EXACT)
    result = captured(seeded(Blocks, breaks=False), recipe=EXACT)
    with torch._dynamo.config.patch(disable=True):
        for _ in range(2):
            check_same(train_step(result, (X,), {}), train_step(expected, (X,), {}))
    assert "Dynamo is switched off" in str(cpt_fx.inspect(result).capture)
    assert layers(result) == layers(expected)


def test_a_model_that_sets_itself_up_in_its_first_call_is_one_graph_after_it() -> None:
    class SetsUp(Modes):
        ready = False

        def forward(self, x: Tensor, *, scale: float = 1.0) -> dict[str, Any]:
            if not self.ready:
                torch._dynamo.graph_break()
                self.ready = True
            return super().forward(x, scale=scale)

    result = captured(seeded(SetsUp))
    result(X)
    assert "cannot be one graph" in str(cpt_fx.inspect(result).capture)
    result(X)
    assert "cannot be one graph" not in str(cpt_fx.inspect(result).capture)


def test_errors_of_the_model_are_its_own() -> None:
    result = captured(seeded(Modes))
    result(X)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        result(torch.randn(3, 5))
    result(X)
    with pytest.raises(TypeError, match="unexpected keyword argument 'scal'"):
        result(X, scal=2.0)


class Twisted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        return torch.cdist(self.fc(x), x)


def test_strict_looks_at_layers_that_are_put_in_later() -> None:
    """Graphs of layers that are gone are dropped: a new one counts, however many there were before."""
    result: Any = captured(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), strict=True)
    for mode in (True, False):
        result.train(mode)(X)
    result[0], result[1] = nn.Linear(4, 4), Twisted()
    with pytest.raises(TransformError, match=r"strict=True, but 1 operators.*\n.*cdist"):
        result(X)


def test_strict_raises_once_it_is_known_what_is_left() -> None:
    with pytest.raises(TransformError, match=r"strict=True, but 1 operators.*\n.*cdist: distances are not quantized"):
        captured(Twisted(), strict=True, example_inputs=(X,))
    result = captured(Twisted(), strict=True)
    for _ in range(2):
        with pytest.raises(TransformError, match="strict=True"):
            result(X)
    captured(Twisted(), example_inputs=(X,))


def test_nothing_to_quantize_is_said_at_the_first_call(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(TransformError, match="there is nothing to quantize in Sequential"):
        captured(nn.Sequential(nn.Dropout()), example_inputs=(X,))
    captured(nn.Sequential(nn.Dropout()))(X)
    assert "in this call there is nothing to quantize in Sequential" in caplog.text


def test_nothing_to_quantize_in_a_layer_of_torch_is_said_at_once() -> None:
    for examples in (None, (X,)):
        with pytest.raises(TransformError, match="there is nothing to quantize in Dropout"):
            captured(nn.Dropout(), example_inputs=examples)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"exclude": "blocks.0.thre"}, r"exclude: 'blocks.0.thre' matches no module"),
        ({"exclude": "nothing.here"}, r"exclude: 'nothing.here' matches no module"),
        ({"exclude": nn.Conv2d}, r"exclude: no module is a Conv2d"),
        ({"overrides": {"blocks.7.one": 8}}, r"overrides: 'blocks.7.one' matches no module"),
    ],
)
def test_patterns_that_match_nothing_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        captured(seeded(Blocks, breaks=True), **options)(X)


@pytest.mark.slow
def test_patterns_select_over_all_graphs() -> None:
    options = {"exclude": ("blocks.2.matmul_1", "blocks.0.*"), "overrides": {"*.two": 8, Block: "+1"}}
    broken = captured(seeded(Blocks, breaks=True), **options)  # type: ignore[arg-type]
    whole = captured(seeded(Blocks, breaks=False), **options)  # type: ignore[arg-type]
    broken(X)
    whole(X)
    for result in (broken, whole):
        widths = {quantizer.layer: quantizer.bits for quantizer in cpt_fx.inspect(result).quantizers}
        assert widths["blocks.1.one"] == 5 and widths["head"] == 4 and "blocks.0.one" not in widths
        assert sorted(item.layer for item in cpt_fx.inspect(result).uncovered if item.by_choice) == [
            "blocks.0.matmul", "blocks.0.matmul_1", "blocks.0.matmul_2", "blocks.0.one", "blocks.0.two",
            "blocks.2.matmul_1",
        ]  # fmt: skip


def test_hooks_run_where_they_were() -> None:
    calls: list[str] = []
    model: Any = seeded(Modes)
    model.register_forward_pre_hook(lambda module, args: calls.append("before"))
    model.fc.register_forward_hook(lambda module, args, output: output * 2)
    reference = copy.deepcopy(model)
    result = captured(model, bits=32)
    result.register_forward_hook(lambda module, args, output: calls.append("after"))
    check_same_output(result.eval()(X), reference.eval()(X))
    assert calls == ["before", "after", "before"]


def test_revert_gives_the_trained_model() -> None:
    model = seeded(Modes)
    result = captured(model)
    step = train_step(result, (X,), {})
    plain = cpt_fx.revert(result)
    assert type(plain) is Modes and plain is not model
    assert list(plain.state_dict()) == list(model.state_dict())
    for name, parameter in model.named_parameters():
        assert plain.get_parameter(name) is parameter and torch.equal(parameter, step.parameters[name])
    with pytest.raises(TransformError, match="transformed already"):
        cpt_fx.transform(result, Static(4))


def test_tensors_that_are_replaced_are_seen() -> None:
    result = captured(seeded(Modes), bits=32)
    reference = seeded(Modes)
    result(X)
    other = {
        name: value + 0.5 if value.is_floating_point() else value for name, value in reference.state_dict().items()
    }
    result.load_state_dict(other, strict=False, assign=True)
    reference.load_state_dict(other)
    check_same_output(result.eval()(X), reference.eval()(X))
    check_same_output(result.double()(X.double()), reference.double()(X.double()))


def test_a_model_in_evaluation_starts_with_the_widths_for_evaluation() -> None:
    result = cpt_fx.transform(seeded(Modes).eval(), Static(4, eval_bits=7), capture="dynamo")
    assert not any(module.training for module in result.modules())
    result(X)
    assert {quantizer.bits for quantizer in cpt_fx.inspect(result).quantizers if quantizer.role != "gradient"} == {7}
    train_step(result.train(), (X,), {})
    assert {quantizer.bits for quantizer in cpt_fx.inspect(result).quantizers} == {4}


def test_a_checkpointed_batch_norm_counts_as_in_plain_torch() -> None:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

        def forward(self, x: Tensor) -> Any:
            return checkpoint(lambda y: self.norm(self.fc(y)), x * 1, use_reentrant=False)

    reference = seeded(Normed)
    result = cpt_fx.transform(seeded(Normed), Static(32))
    assert cpt_fx.inspect(result).capture.frontend == "dynamo"
    check_same(train_step(result, (X,), {}), train_step(reference, (X,), {}))
    assert int(reference.norm.num_batches_tracked) == 2  # type: ignore[arg-type, union-attr]


class Sliced(nn.Module):
    """Runs some of its layers, as language models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.ends = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        """Slice containers of both kinds."""
        for layer in self.layers[:2]:
            x = layer(x)
        y: Tensor = self.ends[1:](self.ends[:1](x))
        return y


def test_a_slice_of_layers_does_not_end_a_graph() -> None:
    x = torch.randn(2, 4)
    result: Any = cpt_fx.transform(Sliced(), Static(4), capture="dynamo", example_inputs=(x,), prove=False)
    assert len(cpt_fx.graphs(result)) == 1
    assert type(result.layers[:2]) is nn.ModuleList and type(result.ends[:2]) is nn.Sequential
    cpt_fx.inspect(result).verify(x)
