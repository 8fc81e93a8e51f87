"""Exported programs: the exported model to the last bit in both modes, or a refusal that says what to do."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.export import ExportedProgram

import cpt_fx
from cpt_fx import CaptureError
from cpt_fx.capture.program import program_module
from cpt_fx.ir.meta import DECISION
from cpt_fx.recipes import paper
from cpt_fx.schedules import Static
from tests.capture.programs import program_of
from tests.capture.test_identity import NOT_BATCHED, evaluate
from tests.capture.test_symbolic import model_of
from tests.selecting import mostly_slow
from tests.training import Equal, check_same, check_same_output, counters, same, train_step
from tests.zoo import ZOO

UNREGISTERED = {"dataclass_output"}
"""Outputs that torch.export does not know unless their class is registered."""

NAMED_OTHERWISE = {"two_names", "weight_normalised"}
"""A program keeps the name by which a module was called, and of its class no more than another name."""

MODELS = [name for name in ZOO if name not in UNREGISTERED]


def transformed(program: ExportedProgram, bits: int = 32, **options: Any) -> fx.GraphModule:
    result = cpt_fx.transform(program, Static(bits), **options)
    assert isinstance(result, fx.GraphModule)
    return result


def exported(model: nn.Module, *args: Any, **kwargs: Any) -> fx.GraphModule:
    """Export and quantize, all widths at 32."""
    return transformed(program_of(model, *args, **kwargs))


def close(ours: Tensor | None, theirs: Tensor | None) -> bool:
    """Equal up to float rounding."""
    if ours is None or theirs is None:
        return ours is theirs
    return ours.dtype == theirs.dtype and torch.allclose(ours, theirs, rtol=1e-4, atol=1e-6)


def check_parity(
    result: nn.Module, reference: nn.Module, args: Any, kwargs: dict[str, Any], equal: Equal = same
) -> None:
    """Train and evaluate by turns: the switch works in both directions."""
    for step in range(2):
        result.train()
        reference.train()
        ours, theirs = (train_step(model, args, kwargs, seed=step) for model in (result, reference))
        check_same(ours, theirs, equal)
        check_same_output(evaluate(result, args, kwargs), evaluate(reference, args, kwargs), equal)


def parity(model: nn.Module, *args: Any, **kwargs: Any) -> fx.GraphModule:
    reference = copy.deepcopy(model)
    result = exported(model, *args, **kwargs)
    check_parity(result, reference, args, kwargs)
    return result


def parity_where_opened(model: nn.Module, *args: Any, **kwargs: Any) -> None:
    """The converted program is the model to the last bit; its attention or recurrent layers are decomposed later."""
    plain, again = copy.deepcopy(model), copy.deepcopy(model)
    check_parity(program_module(program_of(plain, *args, **kwargs))[0], copy.deepcopy(model), args, kwargs)
    check_parity(exported(again, *args, **kwargs), copy.deepcopy(model), args, kwargs, close)


# The zoo.


@pytest.mark.parametrize("name", MODELS)
def test_the_zoo(name: str) -> None:
    model, args, kwargs = ZOO[name]()
    reference = copy.deepcopy(model)
    result = exported(model, *args, **kwargs)
    assert cpt_fx.inspect(result).capture.frontend == "export"
    check_parity(result, reference, args, kwargs)
    assert [key for key in result.state_dict() if "cpt_fx" not in key] == list(reference.state_dict())
    assert all(value is dict(model.named_parameters())[key] for key, value in result.named_parameters())
    check_same_output(evaluate(copy.deepcopy(result), args, kwargs), evaluate(copy.deepcopy(reference), args, kwargs))
    if name in NOT_BATCHED:
        return
    args, kwargs = doubled(args), doubled(kwargs)
    result.train()
    reference.train()
    check_same(train_step(result, args, kwargs), train_step(reference, args, kwargs))


def doubled(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value if value.ndim == 1 else torch.cat([value, value])
    if isinstance(value, dict):
        return {key: doubled(item) for key, item in value.items()}
    return tuple(map(doubled, value))


@pytest.mark.parametrize("name", mostly_slow([name for name in MODELS if name not in NAMED_OTHERWISE], every=4))
def test_layers_have_the_names_of_the_symbolic_frontend(name: str) -> None:
    model, args, kwargs = ZOO[name]()
    symbolic = cpt_fx.transform(model, Static(32), capture="symbolic")
    result = exported(ZOO[name]()[0], *args, **kwargs)
    nodes = [[node for graph in cpt_fx.graphs(one) for node in graph.graph.nodes] for one in (symbolic, result)]
    found = [[node.meta[DECISION].layer for node in one if DECISION in node.meta] for one in nodes]
    assert found[0] and found[0] == found[1]


@pytest.mark.parametrize("name", ["residual_net", "bert_layer", "embeddings", "gcn", "unet"])
def test_four_bits_are_four_bits(name: str) -> None:
    model, args, kwargs = ZOO[name]()
    result = transformed(program_of(model, *args, **kwargs), bits=4)
    train_step(result, args, kwargs)
    noted = counters(result)
    assert noted
    assert all(int(record[0]) > 0 and 0 < int(record[4]) <= 2**4 for record in noted.values())


# Training and evaluation.


def test_flags_keep_their_constants() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, eps=1e-2, momentum=0.3), nn.Dropout2d(0.4), nn.AlphaDropout(0.2),
        nn.RReLU(), nn.InstanceNorm2d(4, momentum=0.2, track_running_stats=True), nn.Dropout(0.7, inplace=True),
    )  # fmt: skip
    result = parity(model, torch.randn(2, 3, 8, 8))
    norm = next(node for node in result.graph.nodes if node.target is F.batch_norm)
    assert norm.args[6:] == (0.3, 1e-2)
    assert str(norm.args[5].target) == "1.training"


def test_parts_of_a_model_switch_alone() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)))
    reference, x = copy.deepcopy(model), torch.randn(3, 4)
    result = exported(model, x)
    for one in (result, reference):
        one.train()
        one.get_submodule("2").eval()
    check_same(train_step(result, (x,), {}), train_step(reference, (x,), {}))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The tensor attributes self._flat_weights")  # torch.export, of every such layer
@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers(layer: Any) -> None:
    parity_where_opened(layer(4, 5, 2, dropout=0.3, bidirectional=True), torch.randn(3, 2, 4))


@pytest.mark.slow
def test_attention() -> None:
    def forward(self: Any, x: Tensor) -> Any:
        return F.scaled_dot_product_attention(self.q(x), x, x, dropout_p=0.3 if self.training else 0.0)

    parity_where_opened(model_of(forward, q=nn.Linear(4, 4)), torch.randn(2, 2, 5, 4))


def test_one_module_in_two_modes_is_refused() -> None:
    def forward(self: Any, x: Tensor) -> Any:
        return F.dropout(self.fc(F.dropout(x, 0.5, True)), 0.5, False)

    with pytest.raises(CaptureError, match="the model is in training for one operator and in evaluation for another"):
        exported(model_of(forward, fc=nn.Linear(4, 4)), torch.randn(3, 4))


# Inputs and outputs.


def test_arguments_keep_their_names() -> None:
    def forward(self: Any, x: Tensor, mask: Any = None, flag: bool = False, *, scale: Tensor) -> Any:
        return self.fc(x) * scale * (2 if flag else 1)

    model = model_of(forward, fc=nn.Linear(4, 4))
    x, scale = torch.randn(3, 4), torch.randn(3, 4)
    result = exported(model, x, scale=scale)
    assert torch.equal(result(scale=scale, x=x), model(x, scale=scale))
    with pytest.raises(TypeError, match="exported for a tensor scale, got NoneType"):
        result(x, None)
    doubling = exported(model, x, None, True, scale=scale)
    assert torch.equal(doubling(x, scale=scale), model(x, flag=True, scale=scale))
    with pytest.raises(ValueError, match="captured for flag=True"):
        doubling(x, flag=False, scale=scale)
    with pytest.raises(ValueError, match="captured for mask=None"):
        doubling(x, x, scale=scale)


@pytest.mark.slow
def test_containers_of_another_form_are_refused() -> None:
    def forward(self: Any, x: Tensor, more: Any) -> Any:
        return sum(more, self.fc(x))

    model, x = model_of(forward, fc=nn.Linear(4, 4)), torch.randn(3, 4)
    for more, others in ((), (x,)), ((x,), ()), ([x, x], [x, x, x]):
        result = exported(model, x, more)
        assert torch.equal(result(x, more), model(x, more))
        with pytest.raises(ValueError, match=r"exported for more in the form (tuple|list)\("):
            result(x, others)


def test_a_dict_is_read_by_its_keys() -> None:
    def forward(self: Any, given: dict[str, Tensor]) -> Any:
        return self.fc(given["a"]) - given["b"]

    model, a, b = model_of(forward, fc=nn.Linear(4, 4)), torch.randn(3, 4), torch.randn(3, 4)
    result = exported(model, {"a": a, "b": b})
    assert torch.equal(result({"b": b, "a": a}), model({"a": a, "b": b}))
    with pytest.raises(ValueError, match=r"exported for given in the form {'a': _, 'b': _}, got {'a': _}"):
        result({"a": a})


def test_one_tensor_given_twice_is_two_inputs() -> None:
    def forward(self: Any, x: Tensor, y: Tensor) -> Any:
        return self.fc(x) - y

    model, x, y = model_of(forward, fc=nn.Linear(4, 4)), torch.randn(3, 4), torch.randn(3, 4)
    assert torch.equal(exported(model, x, x)(x, y), model(x, y))


def test_sizes_that_take_another_path_are_refused_when_they_come() -> None:
    def forward(self: Any, x: Tensor, y: Tensor) -> Any:
        return self.fc(x) + 1 if x.shape[0] > 3 else self.fc(x) + y.sum()

    model = model_of(forward, fc=nn.Linear(4, 4))
    result, y = exported(model, torch.randn(5, 4), torch.randn(1, 2)), torch.randn(1, 2)
    assert {"exported for x of size 4 in dim 1", "exported for y of size 1 in dim 0"} < {
        *cpt_fx.inspect(result).capture.notes
    }
    assert torch.equal(result(torch.ones(9, 4), y), model(torch.ones(9, 4), y))
    with pytest.raises(ValueError, match="exported for x of size 4 or more in dim 0, got 3"):
        result(torch.randn(3, 4), y)
    with pytest.raises(ValueError, match=r"exported for x of torch.float32 with 2 dims, got torch.float64"):
        result(torch.randn(5, 4).double(), y)
    with pytest.raises(ValueError, match="exported for y of size 1 in dim 0, got 2"):
        result(torch.randn(5, 4), torch.randn(2, 2))


def test_conditions_between_sizes_are_kept() -> None:
    def forward(self: Any, x: Tensor, y: Tensor) -> Any:
        return self.fc(x) if x.shape[0] == 2 * y.shape[0] or x.shape[0] % 7 == 5 else x

    model = model_of(forward, fc=nn.Linear(4, 4))
    result = exported(model, torch.randn(6, 4), torch.randn(3, 4))
    assert torch.equal(result(torch.ones(8, 4), torch.ones(4, 4)), model(torch.ones(8, 4), torch.ones(4, 4)))
    with pytest.raises(ValueError, match=r"exported for inputs where .*does not hold here"):
        result(torch.randn(6, 4), torch.randn(4, 4))


# Regions.


def test_regions_are_in_the_graph() -> None:
    def forward(self: Any, x: Tensor) -> Any:
        with torch.no_grad():
            y = self.a(x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            z = self.b(x)
        return y + self.b(x), z

    model = model_of(forward, a=nn.Linear(4, 4), b=nn.Linear(4, 4))
    result, x = parity(model, torch.randn(3, 4)), torch.randn(3, 4)
    assert result(x)[1].dtype is torch.bfloat16
    with torch.no_grad():
        assert not result(x)[0].requires_grad
        assert not torch.is_grad_enabled()
    assert [node.meta[DECISION].layer for node in result.graph.nodes if DECISION in node.meta] == ["a", "b", "b"]


# Programs as they come.


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6, eps=1e-2, momentum=0.3), nn.Dropout(0.4), nn.Linear(6, 2))


@pytest.mark.parametrize("training", [True, False])
def test_a_program_learns_to_switch(training: bool) -> None:
    model, x = network().train(training), torch.randn(5, 4)
    reference = copy.deepcopy(model)
    program = program_of(model, x)
    result = transformed(program)
    notes = cpt_fx.inspect(result).capture.notes
    assert any("exported in evaluation mode" in note for note in notes) is not training
    modes = {name: module.training for name, module in result.named_modules() if not name.startswith("_cpt_fx")}
    assert set(modes.values()) == {training}
    check_parity(result, reference, (x,), {})
    check_parity(result, reference, (torch.randn(8, 4),), {})
    assert [key for key in result.state_dict() if "cpt_fx" not in key] == list(reference.state_dict())
    assert all(value is program.state_dict[key] for key, value in result.named_parameters())
    again = pickle.loads(pickle.dumps(result))
    check_same_output(evaluate(again, (x,), {}), evaluate(result, (x,), {}))


@pytest.mark.slow
def test_a_program_is_taken_as_the_module_that_it_becomes() -> None:
    model, x = network().train(), torch.randn(5, 4)
    module, _ = program_module(program_of(model, x))
    result, given = transformed(program_of(model, x), 4), cpt_fx.transform(module, Static(4))
    assert [cpt_fx.inspect(one).capture.frontend for one in (result, given)] == ["export", "given"]
    assert cpt_fx.graphs(result)[0].code == cpt_fx.graphs(given)[0].code
    check_same_output(evaluate(result, (x,), {}), evaluate(given, (x,), {}))


def test_revert_gives_a_module_that_switches() -> None:
    model, x = network().train(), torch.randn(5, 4)
    reference = copy.deepcopy(model)
    result = transformed(program_of(model, x))
    train_step(result, (x,), {})
    train_step(reference, (x,), {})
    plain = cpt_fx.revert(pickle.loads(pickle.dumps(result)))
    check_parity(plain, reference, (x,), {})
    assert list(plain.state_dict()) == list(reference.state_dict())


def test_a_program_has_its_own_sizes() -> None:
    result = transformed(torch.export.export(network(), (torch.randn(5, 4),)))
    with pytest.raises(ValueError, match="exported for input of size 5 in dim 0, got 3"):
        result(torch.randn(3, 4))


@pytest.mark.parametrize("name", ["dict_input", "keyword_arguments", "buffers_mutated", "dict_output", "tied_weights",
                                  "namedtuple_output", "plain_attributes", "constants_made_in_forward", "embeddings",
                                  "unused", "called_twice"])  # fmt: skip
def test_programs_of_the_zoo(name: str) -> None:
    model, args, kwargs = ZOO[name]()
    reference = copy.deepcopy(model)
    result = transformed(torch.export.export(model, args, kwargs))
    check_same(train_step(result, args, kwargs), train_step(reference, args, kwargs))


@pytest.mark.slow
def test_a_decomposed_program() -> None:
    x = torch.randn(5, 4)
    plain = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
    program = torch.export.export(plain, (x,)).run_decompositions()
    result = transformed(program)
    assert [node.target for node in result.graph.nodes if DECISION in node.meta] == [torch.addmm, torch.addmm]
    assert torch.equal(result(x), plain(x))
    with pytest.raises(CaptureError, match=r"this program was decomposed: .*before run_decompositions"):
        transformed(torch.export.export(network().train(), (x,)).run_decompositions())
    evaluated = transformed(torch.export.export(network().eval(), (x,)).run_decompositions())
    before = evaluated.get_buffer("1.running_mean").clone()
    evaluated.train()(x)
    assert not torch.equal(evaluated.get_buffer("1.running_mean"), before)
    assert int(evaluated.get_buffer("1.num_batches_tracked")) == 1


@pytest.mark.slow
def test_graphs_in_a_program_are_refused() -> None:
    def forward(self: Any, x: Tensor) -> Any:
        return torch.cond(x.sum() > 0, lambda x: self.fc(x), lambda x: self.fc(x) * 2, (x,))

    program = torch.export.export(model_of(forward, fc=nn.Linear(4, 4)), (torch.randn(3, 4),))
    with pytest.raises(CaptureError, match="calls cond, which holds graphs inside the graph"):
        transformed(program)


@pytest.mark.slow
def test_the_paper_recipe_sees_the_same_places() -> None:
    """Additions, products and sums are found in an export as they are in a trace."""
    for name in ("gat", "bert_layer", "sage"):
        model, args, kwargs = ZOO[name]()
        family = "graph" if name in ("gat", "sage") else "dense"
        symbolic = cpt_fx.transform(model, Static(4), recipe=paper(family=family), capture="symbolic")
        result = transformed(program_of(ZOO[name]()[0], *args, **kwargs), 4, recipe=paper(family=family))
        assert counters(symbolic).keys() == counters(result).keys()
