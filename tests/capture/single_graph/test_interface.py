"""`single_graph`: its arguments, its outputs, and what is refused."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import pickle
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import cpt_fx
from tests.capture.single_graph.models import Plain, Small, X, by_dynamo, refusal, single
from tests.training import check_same_output

# Arguments


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


# Outputs


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
    assert f"the model returns a {__name__}.test_what_cannot_be_returned_is_named.<locals>.Box" in text
    assert "register_pytree_node" in text


# Refusals


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


class _Unbound(nn.Module):
    forward = torch.sin


def test_a_forward_that_does_not_say_what_it_takes_is_refused() -> None:
    """Neither a function in C++ nor a part of one has a signature; any object that is called has."""
    message = "does not say what it takes: call it in a method"
    model: Any
    for forward in (torch.sin, functools.partial(torch.add, torch.ones(3))):
        model = nn.Linear(3, 3)
        model.forward = forward
        with pytest.raises(cpt_fx.TransformError, match=message):
            cpt_fx.single_graph(cpt_fx.transform(model, cpt_fx.schedules.Static(8)), (torch.ones(2, 3),))
    with pytest.raises(cpt_fx.TransformError, match=message):
        cpt_fx.transform(_Unbound(), cpt_fx.schedules.Static(8))


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
