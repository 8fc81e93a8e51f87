"""Normalize: modules, methods, aliases and keywords to one form; one value per parameter; layers stay in the tree."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.nn.utils import parametrizations

from cpt_fx.ir.pass_base import stage_of
from cpt_fx.operators import FORMS, form_of
from cpt_fx.passes.normalize import Normalize
from cpt_fx.passes.verify import Verify
from tests.graph_text import graph_text
from tests.passes import Apply, assert_same, numbers, targets

LAYERS = [
    (nn.Linear(3, 2), (4, 3)),
    (nn.Linear(3, 2, bias=False), (4, 3)),
    (nn.Conv1d(3, 2, 2), (2, 3, 5)),
    (nn.Conv2d(2, 4, 3, stride=2, padding=1, groups=2, dilation=1), (1, 2, 5, 5)),
    (nn.Conv2d(2, 2, 3, padding=1, padding_mode="circular"), (1, 2, 4, 4)),
    (nn.Conv2d(2, 2, 3, padding="same", padding_mode="reflect"), (1, 2, 4, 4)),
    (nn.Conv3d(1, 2, 2), (1, 1, 3, 3, 3)),
    (nn.ConvTranspose1d(3, 2, 2, stride=2), (1, 3, 4)),
    (nn.ConvTranspose2d(2, 2, 3, stride=2, output_padding=1), (1, 2, 3, 3)),
    (nn.ConvTranspose3d(1, 2, 2), (1, 1, 2, 2, 2)),
    (parametrizations.weight_norm(nn.Linear(3, 2)), (4, 3)),
]


def normalized(model: nn.Module) -> fx.GraphModule:
    """Trace with plain torch.fx and normalize, alone."""
    module = fx.symbolic_trace(model)
    Normalize()(module)
    Verify("normalize")(module)
    return module


@pytest.mark.parametrize(("layer", "shape"), LAYERS, ids=lambda value: type(value).__name__)
def test_a_layer_becomes_the_function_it_calls(layer: nn.Module, shape: tuple[int, ...]) -> None:
    model = nn.Sequential(layer, nn.Tanh())
    x = torch.randn(shape)
    expected = numbers(model, x)
    module = normalized(model)
    assert not any(node.op == "call_module" and node.target == "0" for node in module.graph.nodes)
    assert_same(numbers(module, x), expected)
    assert isinstance(model[0], type(layer))  # the model itself is as it was


class _Own(nn.Linear):
    """A layer of the user's, whose code is another one from instance to instance."""

    def forward(self, x: Tensor) -> Tensor:
        """Do what the instance says."""
        result: Tensor = super().forward(x)
        return result * (2.0 if self.twice else 1.0)


def test_layers_that_look_alike_are_one_only_where_they_do_the_same() -> None:
    alike: list[Any] = [nn.Linear(3, 3) for _ in range(8)]
    alike[1].register_forward_hook(lambda layer, args, result: result * 2)
    alike[2].register_forward_hook(lambda layer, args, result: result * 3)
    alike[3].forward = lambda x: x + 1
    alike[4].forward = lambda x: x + 2
    alike[5].bias = None
    alike += [nn.Conv1d(4, 4, 1, padding_mode=mode, padding=1) for mode in ("zeros", "circular")]
    for twice in (False, True):
        alike.append(_Own(5, 5))
        alike[-1].twice = twice
    model, x = nn.Sequential(*alike), torch.randn(4, 3)
    alike[9].register_forward_pre_hook(lambda layer, args: (args[0][:, 1:-1],))
    expected = numbers(model, x)
    assert_same(numbers(normalized(model), x), expected)


def test_embeddings_are_opened() -> None:
    model = nn.Sequential(nn.Embedding(5, 3, padding_idx=0, max_norm=1.0), nn.Tanh())
    tokens = torch.tensor([[0, 2], [4, 2]])
    expected = numbers(model, tokens)
    module = normalized(model)
    assert targets(module)[0] is F.embedding
    assert_same(numbers(module, tokens), expected)


def test_a_bilinear_layer_is_opened() -> None:
    model = Apply(lambda self, x: self.product(x, x.flip(0)), product=nn.Bilinear(3, 3, 2))
    x = torch.randn(4, 3)
    expected = numbers(model, x)
    module = normalized(model)
    assert F.bilinear in targets(module)
    assert_same(numbers(module, x), expected)


W = torch.randn(3, 3)


def _in_place_product(self: Any, x: Tensor) -> Tensor:
    x @= self.w
    return x


CALLS: dict[str, tuple[Callable[[Any, Tensor], Tensor], Any]] = {
    "method": (lambda self, x: x.matmul(self.w), torch.matmul),
    "method mm": (lambda self, x: x.mm(self.w), torch.mm),
    "method keyword": (lambda self, x: x.mm(mat2=self.w), torch.mm),
    "method bmm": (lambda self, x: x[None].bmm(self.w[None]), torch.bmm),
    "operator": (lambda self, x: x @ self.w, torch.matmul),
    "in-place operator": (_in_place_product, torch.matmul),
    "reflected": (lambda self, x: x.__matmul__(self.w), torch.matmul),
    "linalg": (lambda self, x: torch.linalg.matmul(x, self.w), torch.matmul),
    "ger": (lambda self, x: torch.ger(x[0], self.w[0]), torch.outer),
    "vec keyword": (lambda self, x: torch.mv(x, vec=self.w[0]), torch.mv),
    "matmul keywords": (lambda self, x: torch.matmul(other=self.w, input=x), torch.matmul),
    "addmm method": (lambda self, x: x.addmm(x, self.w, beta=2), torch.addmm),
    "baddbmm keywords": (
        lambda self, x: torch.baddbmm(x[None], batch1=x[None], batch2=self.w[None]), torch.baddbmm),
    "linear keywords": (lambda self, x: F.linear(weight=self.w, input=x), F.linear),
    "linear bias=None": (lambda self, x: F.linear(x, self.w, bias=None), F.linear),
    "einsum list": (lambda self, x: torch.einsum("ij,jk->ik", [x, self.w]), torch.einsum),
    "einsum": (lambda self, x: torch.einsum("ij,jk->ik", x, self.w), torch.einsum),
    "index_add method": (
        lambda self, x: x.index_add(0, torch.tensor([2, 0, 1]), self.w), torch.index_add),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_other_spellings_become_one_call(name: str) -> None:
    function, target = CALLS[name]
    model = Apply(function, w=W)
    x = torch.randn(3, 3)
    expected = numbers(model, x)
    module = normalized(model)
    (call,) = [node for node in module.graph.nodes if node.target is target]
    assert not set(call.kwargs) - {"beta"}
    assert_same(numbers(module, x), expected)


ALIASES = [
    key for key, form in FORMS.items()
    if form.target not in (None, key) and form.convert is None and not (isinstance(key, str) and "::" in key)
]  # fmt: skip


@pytest.mark.parametrize("alias", ALIASES, ids=lambda alias: getattr(alias, "__name__", alias))
def test_every_alias_has_an_operator_behind_it(alias: Any) -> None:
    graph = fx.Graph()
    values = [graph.placeholder(name) for name in "abcd"]
    graph.create_node("call_method" if isinstance(alias, str) else "call_function", alias, tuple(values))
    graph.output(values[0])
    module = fx.GraphModule(nn.Module(), graph)
    assert Normalize()(module).changed == 1
    Verify()(module)
    (call,) = [node for node in module.graph.nodes if node.op.startswith("call")]
    form = form_of(alias)
    assert form is not None and call.target is form.target


def test_a_keyword_behind_a_gap_stays_a_keyword() -> None:
    def function(self: Any, x: Tensor) -> Tensor:
        return F.conv1d(x, self.w, stride=2) + F.conv1d(x, weight=self.w, bias=None, stride=2)

    model = Apply(function, w=torch.randn(2, 3, 2))
    x = torch.randn(1, 3, 6)
    expected = numbers(model, x)
    module = normalized(model)
    first, second = (node for node in module.graph.nodes if node.target is torch.conv1d)
    assert (len(first.args), first.kwargs) == (2, {"stride": 2})
    assert (len(second.args), second.args[2:], second.kwargs) == (4, (None, 2), {})
    assert_same(numbers(module, x), expected)


def test_an_operand_behind_a_gap_gets_its_position() -> None:
    def function(self: Any, x: Tensor) -> Tensor:
        return F.bilinear(x, x, weight=self.w) + torch.scatter_add(x, dim=0, index=self.index, src=x)

    model = Apply(function, w=torch.randn(3, 3, 3))
    model.register_buffer("index", torch.zeros(4, 3, dtype=torch.int64))
    x = torch.randn(4, 3)
    expected = numbers(model, x)
    module = normalized(model)
    assert all(not node.kwargs for node in module.graph.nodes)
    assert_same(numbers(module, x), expected)


def test_other_calls_are_left_alone() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3), nn.ReLU(), nn.Dropout(0.0), nn.LayerNorm(3))
    module = fx.symbolic_trace(model)
    before = graph_text(module)
    report = Normalize()(module)
    assert (report.changed, graph_text(module)) == (0, before)
    assert stage_of(module) == "normalized"


def test_a_subclass_keeps_its_meaning() -> None:
    class Standardized(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return F.linear(input, self.weight - self.weight.mean(), self.bias) * 2

    model = nn.Sequential(Standardized(3, 2))
    x = torch.randn(4, 3)
    expected = numbers(model, x)
    assert_same(numbers(normalized(model), x), expected)


def test_hooks_keep_their_meaning() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[0].register_forward_hook(lambda module, args, output: output * 2)
    model[1].register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    x = torch.randn(4, 3)
    expected = numbers(model, x)
    module = normalized(model)
    assert operator.mul in targets(module)
    assert_same(numbers(module, x), expected)


def test_a_shared_module_is_opened_at_every_call_with_one_weight() -> None:
    model = Apply(lambda self, x: self.layer(self.layer(x)), layer=nn.Linear(3, 3))
    x = torch.randn(4, 3)
    expected = numbers(model, x)
    module = normalized(model)
    first, second = (node for node in module.graph.nodes if node.target is F.linear)
    assert first.args[1:] == second.args[1:]
    assert_same(numbers(module, x), expected)


def test_tied_weights_are_one_value_under_its_first_name() -> None:
    model = nn.Sequential(nn.Embedding(5, 3), nn.Tanh(), nn.Linear(3, 5, bias=False))
    model[2].weight = model[0].weight
    tokens = torch.tensor([[1, 2]])
    expected = numbers(model, tokens)
    module = normalized(model)
    (weight,) = [node for node in module.graph.nodes if node.op == "get_attr"]
    assert weight.target == "0.weight"
    assert {user.target for user in weight.users} == {F.embedding, F.linear}
    assert_same(numbers(module, tokens), expected)


def test_a_layer_called_with_keywords_is_opened() -> None:
    graph = fx.Graph()
    graph.output(graph.call_module("0", (), {"input": graph.placeholder("x"), "output_size": None}))
    module = fx.GraphModule(nn.Sequential(nn.ConvTranspose1d(2, 2, 2, stride=2)), graph)
    x = torch.randn(1, 2, 3)
    expected = numbers(module, x)
    assert Normalize()(module).changed
    assert_same(numbers(module, x), expected)


def test_layers_stay_where_they_were_and_the_graph_reads_what_they_hold() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    module = normalized(model)
    layer, bias = module.get_submodule("0"), module.get_parameter("0.bias")
    assert type(layer) is nn.Linear
    assert layer.weight is model[0].weight
    x = torch.randn(1, 3)
    assert torch.equal(layer(x), model[0](x))
    assert isinstance(module.get_submodule("1"), nn.Tanh)
    assert list(module.state_dict()) == list(model.state_dict())
    layer.weight = nn.Parameter(torch.zeros(3, 3))
    assert torch.equal(module(x), bias.tanh().expand(1, 3))


def test_nodes_remember_the_layer_they_came_from() -> None:
    module = normalized(nn.Sequential(nn.Linear(3, 3)))
    (node,) = [node for node in module.graph.nodes if node.target is F.linear]
    (path, kind) = next(reversed(node.meta["nn_module_stack"].values()))
    assert (path, kind) == ("0", nn.Linear)
    assert node.meta["cpt_fx_pass"] == "normalize"


def test_twice_changes_nothing_more() -> None:
    model = Apply(lambda self, x: self.layer(x) @ self.w, layer=nn.Linear(3, 3), w=W)
    module = normalized(model)
    before = graph_text(module)
    assert Normalize()(module).changed == 0
    assert graph_text(module) == before


def test_the_report_counts() -> None:
    model = Apply(lambda self, x: self.layer(self.layer(x)) @ self.w, layer=nn.Linear(3, 3), w=W)
    report = Normalize()(fx.symbolic_trace(model))
    # Two calls of one layer read two parameters twice: two of the four reads go.
    assert report.changed == 5
    assert report.notes == ("2 layers inlined, 1 calls renamed, 2 parameter values merged",)


def test_alone_it_leaves_a_module_that_runs_what_its_graph_says() -> None:
    """No recompile by hand: the code of a rewritten module is never the old one."""
    module = fx.symbolic_trace(nn.Sequential(nn.Linear(3, 3)))
    Normalize()(module)
    assert "linear" in module.code
    assert module(torch.randn(2, 3)).shape == (2, 3)
