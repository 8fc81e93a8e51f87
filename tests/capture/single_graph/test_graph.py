"""`single_graph`: one module that is the transformed model, or a refusal that names every break."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import cpt_fx
from cpt_fx.ir.module import QuantizedGraphModule
from cpt_fx.ir.subgraphs import subgraphs
from cpt_fx.ir.verifier import check
from cpt_fx.schedules import Sequence, Static
from tests.capture.faithful import evaluate, step
from tests.capture.single_graph.models import RECIPE, Attributes, Plain, Small, X, by_dynamo, ranges_of, single
from tests.training import check_same, check_same_output, fresh, snapshot, widths
from tests.zoo import ANY_MODEL
from tests.zoo.any_model import missing

MODELS = (
    "lstm_two_layers", "gru_with_state", "convolutions", "sdpa_masks", "encoder_layer_pre_norm", "bert",
    "gcn", "checkpoint_with_dropout", "dataclass_output", "ordered_dict_output",
    "nested_input", "free_keywords", "tensor_outside", "straight_through", "autocast_region", "called_twice",
)  # fmt: skip
LONG = ("hetero_conv", "vit", "t5", "clip", "perceiver")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
@pytest.mark.parametrize("name", [*MODELS, *(pytest.param(name, marks=pytest.mark.long) for name in LONG)])
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


@pytest.mark.slow
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


@pytest.mark.parametrize("capture", ["auto", "symbolic"])
def test_what_hooks_surround_is_part_of_the_graph(capture: str) -> None:
    """A layer with hooks is called as a module by the traced graph, and has a graph of its own."""
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    net[0].register_forward_hook(lambda module, args, output: output * 3.0)
    result = cpt_fx.transform(net, Static(4), capture=capture)
    result(X)
    graph = cpt_fx.single_graph(result, (X,))
    assert check(graph, "bound") > 0
    result.eval()
    graph.eval()
    with cpt_fx.at_bits(graph, 2):
        at_two = graph(X)
    with cpt_fx.at_bits(result, 2):
        check_same_output(at_two, result(X))
    assert not torch.equal(at_two, result(X))


@pytest.mark.parametrize("capture", ["auto", "symbolic"])
@pytest.mark.parametrize("change", ["hook", "forward", "added"])
def test_a_model_that_was_changed_since_its_last_call(change: str, capture: str) -> None:
    net: Any = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    result: Any = cpt_fx.transform(net, Static(4), capture=capture)
    result(X)
    if change == "hook":
        result[0].register_forward_hook(lambda module, args, output: output * 3.0)
    elif change == "forward":
        result[0].forward = lambda x: x.sin()
    else:
        result.append(nn.Softmax(1))
    graph = cpt_fx.single_graph(result, (X,))
    assert check(graph, "bound") > 0
    check_same_output(graph.eval()(X), result.eval()(X))


def test_a_tensor_that_is_a_plain_attribute_comes_along() -> None:
    net = cpt_fx.transform(Attributes(), Static(4))
    net(X)
    graph = cpt_fx.single_graph(net)
    check_same_output(graph.eval()(X), net.eval()(X))


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
    assert len(subgraphs(graph)) == 1


def test_a_traced_loop_comes_along() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        state = [torch.zeros(1, 3, 4)] * 2
        return self.fc(torch.lstm(x, state, [self.w, self.u], False, 1, 0.0, False, False, False)[0])  # type: ignore[no-any-return]

    model: Any = type("Looping", (nn.Module,), {"forward": forward})()
    model.fc, model.w, model.u = nn.Linear(4, 4), nn.Parameter(torch.randn(16, 4)), nn.Parameter(torch.randn(16, 4))
    result, x = cpt_fx.transform(model, Static(4), recipe=RECIPE, capture="symbolic"), torch.randn(5, 3, 4)
    alone = cpt_fx.single_graph(result)
    assert isinstance(alone, QuantizedGraphModule) and subgraphs(alone)
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
