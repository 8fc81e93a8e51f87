"""`single_graph`: one module that is the transformed model, or a refusal that names every break."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import cpt_fx
from cpt_fx import CaptureError, recipes
from cpt_fx.bodies import bodies
from cpt_fx.graph_module import QuantizedGraphModule
from cpt_fx.schedules import Schedule, Sequence, Static
from cpt_fx.spec import check
from tests.faithful import evaluate, step
from tests.training import check_same, check_same_output, fresh, snapshot, widths
from tests.zoo import ANY_MODEL
from tests.zoo_any import missing

RECIPE = recipes.paper(gradient_rounding="nearest")
MODELS = (
    "lstm_two_layers", "gru_with_state", "convolutions", "sdpa_masks", "encoder_layer_pre_norm", "bert", "vit", "t5",
    "clip", "perceiver", "gcn", "hetero_conv", "checkpoint_with_dropout", "dataclass_output", "ordered_dict_output",
    "nested_input", "free_keywords", "tensor_outside", "straight_through", "autocast_region", "called_twice",
)  # fmt: skip


@pytest.fixture(autouse=True)
def _leave_nothing_behind() -> Iterator[None]:
    yield
    torch._dynamo.reset()


def by_dynamo(model: nn.Module, schedule: Schedule | None = None) -> nn.Module:
    return cpt_fx.transform(model, schedule or Static(4), recipe=RECIPE, capture="dynamo")


def single(model: nn.Module, *args: Any, **kwargs: Any) -> fx.GraphModule:
    return cpt_fx.single_graph(by_dynamo(model), args, kwargs)


def ranges_of(result: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in result.named_buffers() if "_range_" in name}


def refusal(model: nn.Module, *args: Any, **kwargs: Any) -> str:
    with pytest.raises(CaptureError) as caught:
        single(model, *args, **kwargs)
    return str(caught.value)


def as_it_is(self: Any, x: Tensor) -> Tensor:
    return x


class Small(nn.Module):
    """Two layers, with what a test wants in between and after."""

    def __init__(self, end: Callable[..., Any] = as_it_is) -> None:
        super().__init__()
        self.one = nn.Linear(4, 6)
        self.drop = nn.Dropout(0.5)
        self.two = nn.Linear(6, 4)
        self.end = end

    def forward(self, x: Tensor) -> Any:
        return self.end(self, self.two(self.drop(F.relu(self.one(x)))))


class Plain(nn.Module):
    """Nothing that asks for the mode."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor, scale: float = 1.0, *more: Tensor, shift: Tensor | None = None, **rest: Any) -> Tensor:
        y: Tensor = self.layer(x) * scale
        for item in more:
            y = y + item
        return y if shift is None else y + shift


X = torch.randn(2, 4, generator=torch.Generator().manual_seed(0))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
@pytest.mark.parametrize("name", MODELS)
def test_it_is_the_result(name: str) -> None:
    """The same numbers at 32 and at 4 bits, of another batch size too, in both modes, without a trace in the result."""
    entry = ANY_MODEL[name]
    if missing(entry.needs) is not None:
        pytest.skip(str(missing(entry.needs)))
    (model, args, kwargs), (twin, more, others) = entry.build(), entry.build()
    schedules = [Sequence([Static(32, total_steps=1), Static(4, total_steps=3)]) for _ in range(2)]
    result, reference = by_dynamo(model, schedules[0]), by_dynamo(twin, schedules[1])
    before = snapshot(model)
    # Copies, since the examples of some models are views of each other.
    graph = cpt_fx.single_graph(result, fresh(args), fresh(kwargs))
    assert snapshot(model) == before
    assert check(graph, "bound") > 0
    check_same(step(graph, args, kwargs), step(reference, more, others))
    for schedule in schedules:
        schedule.step()
    (_, args, kwargs), (_, more, others) = entry.build(3), entry.build(3)
    check_same(step(graph, args, kwargs, 2), step(reference, more, others, 2))
    cpt_fx.inspect(graph).verify()
    assert [key for key in graph.state_dict() if "cpt_fx" not in key] == list(model.state_dict())
    result.eval()
    (_, args, kwargs) = entry.build()
    with torch.no_grad():
        graph = cpt_fx.single_graph(result, fresh(args), fresh(kwargs))
    (_, args, kwargs) = entry.build(3)
    check_same_output(evaluate(graph, args, kwargs), evaluate(reference, more, others))


@pytest.mark.filterwarnings("ignore:.* learned anything:UserWarning")
def test_a_language_model_returns_its_own_class() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=20, n_positions=12, use_cache=False)
    model = transformers.GPT2LMHeadModel(config)
    tokens = torch.randint(0, 20, (2, 5))
    result = by_dynamo(model)
    result.eval()
    graph = cpt_fx.single_graph(result, example_kwargs={"input_ids": tokens})
    longer = torch.randint(0, 20, (3, 7))
    ours, theirs = evaluate(graph, (), {"input_ids": longer}), evaluate(result, (), {"input_ids": longer})
    assert type(ours) is type(theirs)
    check_same_output(ours, theirs)


def test_what_is_one_graph_already_needs_no_examples() -> None:
    result: Any = cpt_fx.transform(nn.Linear(4, 4), Static(4), capture="symbolic")
    result(X)
    for graph in (cpt_fx.single_graph(result), cpt_fx.single_graph(nn.Sequential(result))):
        assert isinstance(graph, fx.GraphModule) and not isinstance(graph, nn.Linear)
        assert str(graph.graph) == str(result.graph) and graph.graph is not result.graph
        assert graph.weight is result.weight
        check_same_output(graph.eval()(X), result.eval()(X))
        assert cpt_fx.single_graph(graph) is graph
        assert cpt_fx.single_graph(nn.Sequential(graph)) is graph
        result.train()
    exported = cpt_fx.transform(nn.Linear(4, 4), Static(4), capture="export", example_inputs=(X,))
    graph = cpt_fx.single_graph(exported, (X,))
    check_same_output(graph.eval()(X), exported.eval()(X))


def test_it_shares_what_the_result_learns_and_follows_its_schedule() -> None:
    schedule = Sequence([Static(8, total_steps=1), Static(4, total_steps=3)])
    result = by_dynamo(Small(), schedule)
    result(X)
    learned = ranges_of(result)
    graph = cpt_fx.single_graph(result, (X,))
    assert isinstance(graph, QuantizedGraphModule)
    assert learned and all(torch.equal(value, learned[name]) for name, value in ranges_of(result).items())
    ours, theirs = dict(graph.named_parameters()), dict(result.named_parameters())
    assert list(ours) == list(theirs) and all(ours[name] is theirs[name] for name in theirs)
    assert all(graph.get_buffer(name) is result.get_buffer(name) for name in learned)
    schedule.step()
    assert widths(graph)["weight"] == widths(result)["weight"] == 4
    graph(3 * X)
    assert any(not torch.equal(value, learned[name]) for name, value in ranges_of(result).items())


def test_its_mode_is_its_own() -> None:
    """Widths for evaluation in one do not reach the other."""
    result = by_dynamo(Plain(), Static(4, eval_bits=8))
    result(X)
    graph = cpt_fx.single_graph(result, (X,))
    graph.eval()
    assert widths(graph)["weight"] == 8
    assert widths(result)["weight"] == 4
    graph(X)  # nothing in the code asks for the mode


def test_a_graph_that_depends_on_the_mode_refuses_the_other_one() -> None:
    result = by_dynamo(Small())
    graph = cpt_fx.single_graph(result, (X,))
    graph.eval()
    with pytest.raises(
        RuntimeError, match=r"captured with drop in training mode.*is in evaluation mode now. Call train"
    ):
        graph(X)
    graph.train()(X)
    result.eval()
    evaluating = cpt_fx.single_graph(result, (X,))
    check_same_output(evaluating(X), result(X))
    evaluating.train()
    with pytest.raises(RuntimeError, match="captured with drop in evaluation mode"):
        evaluating(X)
    assert "one graph, for evaluation" in str(cpt_fx.inspect(evaluating).capture)


@pytest.mark.parametrize("through", [copy.deepcopy, lambda graph: pickle.loads(pickle.dumps(graph))])
def test_copies_and_pickles_are_the_same_graph(through: Callable[[Any], Any]) -> None:
    graph = single(nn.LSTM(4, 6, batch_first=True), torch.randn(2, 3, 4))
    other = through(graph)
    x = torch.randn(3, 5, 4)
    check_same_output(other(x), graph(x))
    assert other.weight_ih_l0 is not graph.weight_ih_l0
    assert cpt_fx.inspect(other).capture.frontend == "dynamo"


def test_loops_stay_loops() -> None:
    graph = single(nn.LSTM(4, 6, batch_first=True), torch.randn(2, 3, 4))
    assert len(bodies(graph)) == 1


def test_a_traced_loop_comes_along() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        state = [torch.zeros(1, 3, 4)] * 2
        return self.fc(torch.lstm(x, state, [self.w, self.u], False, 1, 0.0, False, False, False)[0])  # type: ignore[no-any-return]

    model: Any = type("Looping", (nn.Module,), {"forward": forward})()
    model.fc, model.w, model.u = nn.Linear(4, 4), nn.Parameter(torch.randn(16, 4)), nn.Parameter(torch.randn(16, 4))
    result, x = cpt_fx.transform(model, Static(4), recipe=RECIPE, capture="symbolic"), torch.randn(5, 3, 4)
    alone = cpt_fx.single_graph(result)
    assert isinstance(alone, QuantizedGraphModule) and bodies(alone)
    assert torch.equal(alone(x), result(x)) and torch.equal(copy.deepcopy(alone)(x), result(x))


def test_revert_is_of_the_result_and_not_of_its_graph() -> None:
    result = by_dynamo(Small())
    graph = cpt_fx.single_graph(result, (X,))
    for module in (graph, nn.Sequential(graph), copy.deepcopy(graph)):
        with pytest.raises(cpt_fx.TransformError, match=r"this graph of Small stands alone.*revert\(result\)"):
            cpt_fx.revert(module)
    plain = cpt_fx.revert(result)
    assert type(plain) is Small
    assert all(plain.get_parameter(name) is parameter for name, parameter in graph.named_parameters())


def test_gradients_stay_off_where_the_caller_switched_them_off() -> None:
    """Code that switches them off itself leaves, when captured, a node that switches them on again."""

    class Teacher(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.other = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                target = self.other(x)
            return torch.sub(self.layer(x), target)

    graph = single(Teacher(), X)
    with torch.no_grad():
        assert not graph(X).requires_grad
        assert not torch.is_grad_enabled()
    graph(X).sum().backward()
    gradients = {name: parameter.grad is not None for name, parameter in graph.named_parameters()}
    assert gradients["layer.weight"] and not gradients["other.weight"]
    result = by_dynamo(Teacher())
    with torch.no_grad():
        graph = cpt_fx.single_graph(result, (X,))
    graph(X)
    assert torch.is_grad_enabled()


# -- Arguments


def test_the_signature_is_the_models() -> None:
    more, shift = X + 1, X + 2
    result = by_dynamo(Plain())
    graph = cpt_fx.single_graph(result, (X, 2.0, more), {"shift": shift})
    assert str(inspect.signature(graph.forward)) == "(x, scale=2.0, *more, shift=None, **rest)"
    check_same_output(graph(X, 2.0, more, shift=shift), result(X, 2.0, more, shift=shift))
    with pytest.raises(ValueError, match=r"captured for scale=2.0, which its code branches on; got 3.0"):
        graph(X, 3.0, more, shift=shift)
    with pytest.raises(ValueError, match=r"captured for more in the form tuple\(_\), got tuple\(_, _\)"):
        graph(X, 2.0, more, more, shift=shift)
    with pytest.raises(ValueError, match=r"captured for rest in the form \{\}, got \{'typo': _\}"):
        graph(X, 2.0, more, shift=shift, typo=1)
    with pytest.raises(TypeError, match="captured for a tensor shift, got NoneType"):
        graph(X, 2.0, more)


def test_an_argument_that_was_left_out_is_its_default() -> None:
    graph = single(Plain(), X)
    assert torch.equal(graph(x=X), graph(X))
    with pytest.raises(ValueError, match="captured for shift=None, which its code branches on; got Tensor"):
        graph(X, shift=X)


def test_sizes_that_the_code_branches_on_are_checked() -> None:
    def branch(self: nn.Module, x: Tensor) -> Tensor:
        return x.reshape(-1, 2) if x.shape[0] % 2 == 0 else x

    graph = single(Small(branch), X)
    assert graph(torch.randn(6, 4)).shape == (12, 2)
    with pytest.raises(
        ValueError, match=r"captured for inputs where x.size\(\)\[0\] % 2 == 0, which does not hold here"
    ):
        graph(torch.randn(3, 4))
    with pytest.raises(ValueError, match="captured for x of size 4 in dim 1, got 5"):
        graph(torch.randn(2, 5))
    with pytest.raises(ValueError, match=r"captured for x of torch.float32 with 2 dims, got torch.float64 with 2"):
        graph(X.double())


def test_a_batch_of_one_is_a_batch() -> None:
    graph = single(Small(), X)
    assert graph(X[:1]).shape == (1, 4)
    graph = single(Small(), X[:1])
    assert graph(X).shape == (2, 4)


def test_a_batch_that_a_kernel_would_choose_by_is_open() -> None:
    graph = single(nn.Conv1d(4, 6, 1), torch.randn(2, 4, 8))
    assert graph(torch.randn(32, 4, 8)).shape == (32, 6, 8)


def test_sizes_that_happen_to_be_equal_are_two() -> None:
    class Both(Plain):
        def forward(self, x: Tensor, y: Tensor) -> Any:  # type: ignore[override]
            return self.layer(x), self.layer(y).sum()

    graph = single(Both(), X, X + 1)
    assert graph(torch.randn(5, 4), torch.randn(3, 4))[0].shape == (5, 4)


def test_static_sizes() -> None:
    graph = cpt_fx.single_graph(by_dynamo(Small()), (X,), dynamic=False)
    with pytest.raises(ValueError, match="captured for x of size 2 in dim 0, got 3"):
        graph(torch.randn(3, 4))


def test_sizes_that_are_returned_are_those_of_the_call() -> None:
    graph = single(Small(lambda self, x: (x, x.shape[0], 2, x.shape, x.shape[0] * 2)), X)
    _, size, two, shape, double = graph(torch.randn(5, 4))
    assert (size, two, shape, double) == (5, 2, torch.Size([5, 4]), 10)


def test_tensors_that_are_neither_arguments_nor_parameters_come_along() -> None:
    table = torch.randn(4)

    class Adds(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.shift = torch.randn(4)

        def forward(self, x: Tensor) -> Any:  # type: ignore[override]
            return self.layer(x) + table + self.shift, self.shift

    model = Adds()
    result = by_dynamo(model)
    graph = cpt_fx.single_graph(result, (X,))
    check_same_output(graph(torch.ones(3, 4)), result(torch.ones(3, 4)))
    assert graph(X)[1] is model.shift
    assert list(model.state_dict()) == [key for key in graph.state_dict() if "cpt_fx" not in key]
    buffers = [name for name, _ in graph.named_buffers() if not name.startswith("_cpt_fx.")]
    assert len(buffers) - len(dict(result.named_buffers())) == 2


def test_one_tensor_passed_twice() -> None:
    class Pair(Plain):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:  # type: ignore[override]
            z: Tensor = self.layer(x) * y
            return z

    graph = single(Pair(), X, X)
    with pytest.raises(ValueError, match="captured for one tensor as both y and x, got two"):
        graph(X, X.clone())


# -- Outputs


class Point(NamedTuple):
    x: Any
    rest: Any


@dataclasses.dataclass
class Answer:
    value: Tensor
    points: list[Point]
    name: str = "answer"


def several_outputs(self: Any, x: Tensor) -> Any:
    return {"answer": Answer(x, [Point(x + 1, None)]), "same": x, "weight": self.one.weight, "dtype": torch.float32}


@pytest.mark.filterwarnings("ignore:.* learned anything:UserWarning")
def test_outputs_have_the_models_own_form() -> None:
    result = by_dynamo(Small(several_outputs))
    result.eval()
    graph = cpt_fx.single_graph(result, (X,))
    ours, theirs = graph(X), result(X)
    check_same_output(ours, theirs)
    assert type(ours["answer"]) is Answer and type(ours["answer"].points[0]) is Point
    assert ours["same"] is ours["answer"].value
    assert ours["weight"] is graph.get_parameter("one.weight")
    again = pickle.loads(pickle.dumps(graph))
    check_same_output(again(X)["answer"], theirs["answer"])


def test_what_cannot_be_returned_is_named() -> None:
    class Box:
        def __init__(self, value: Tensor) -> None:
            self.value = value

    text = refusal(Small(lambda self, x: Box(x)), X)
    assert "the model returns a tests.test_single_graph.test_what_cannot_be_returned_is_named.<locals>.Box" in text
    assert "register_pytree_node" in text


# -- Refusals


def test_breaks_are_listed_with_file_line_and_code() -> None:
    def prints(self: Any, x: Tensor) -> Tensor:
        print("between")
        if x.sum() > 0:
            x = x + 1
        return x

    text = refusal(Small(prints), X)
    line = prints.__code__.co_firstlineno
    assert text.startswith("Small is not one graph. Its code breaks at:\n")
    assert f"{__file__}:{line + 1} (print(" in text
    assert f"{__file__}:{line + 2} (if x.sum() > 0:)" in text
    assert "it runs in several graphs" in text


def test_what_python_objects_keep_is_refused() -> None:
    def last(self: Any, x: Tensor) -> Tensor:
        self.last = x
        return x * 2

    assert "the forward of Small stores something in self.last, which one graph would not do" in refusal(Small(last), X)
    kept: list[Tensor] = []

    def keep(self: Any, x: Tensor) -> Tensor:
        kept.append(x)
        return x * 2

    assert "forward changes self.end.__closure__" in refusal(Small(keep), X)


def test_an_argument_that_cannot_be_taken_apart_is_named() -> None:
    class Batch:
        def __init__(self, x: Tensor) -> None:
            self.x = x

    class Takes(Plain):
        def forward(self, batch: Batch) -> Tensor:  # type: ignore[override]
            y: Tensor = self.layer(batch.x)
            return y

    assert "the argument batch is a Batch, which one graph cannot take apart" in refusal(Takes(), Batch(X))


def test_errors_of_the_model_are_said_to_be_such() -> None:
    assert "Small does not run on these examples: RuntimeError: mat1 and mat2" in refusal(Small(), torch.randn(2, 5))


def test_examples_are_asked_for() -> None:
    result = by_dynamo(Small())
    with pytest.raises(TypeError, match=r"pass single_graph\(result, example_inputs\) a tuple"):
        cpt_fx.single_graph(result)
    with pytest.raises(TypeError, match="example_inputs must be a tuple of the model's arguments, got Tensor"):
        cpt_fx.single_graph(result, X)  # type: ignore[arg-type]
    with pytest.raises(cpt_fx.TransformError, match="Small is not transformed"):
        cpt_fx.single_graph(Small(), (X,))
