"""The torch.export frontend: the original to the last bit in both modes, or a refusal that says what to do."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, fx, nn
from torch.export import Dim

import cpt_fx
from cpt_fx import CaptureError
from cpt_fx.aten import arguments_of, hides_product, to_torch
from cpt_fx.capture.base import Captured
from cpt_fx.capture.export import capture_export, capture_program
from cpt_fx.graph_module import QuantizedGraphModule
from cpt_fx.meta import SITE
from cpt_fx.pipeline import Pipeline
from cpt_fx.recipes import paper
from cpt_fx.schedules import Static
from tests.test_identity import NOT_BATCHED, evaluate
from tests.test_symbolic import model_of
from tests.training import Equal, check_same, check_same_output, records, same, snapshot, train_step
from tests.zoo import ZOO

UNREGISTERED = {"dataclass_output"}
"""Outputs that torch.export does not know unless their class is registered."""

MODELS = [name for name in ZOO if name not in UNREGISTERED]


def exported(model: nn.Module, *args: Any, **kwargs: Any) -> QuantizedGraphModule:
    """Capture and quantize, all widths at 32."""
    return quantized(capture_export(model, args, kwargs))


def quantized(captured: Captured, bits: int = 32) -> QuantizedGraphModule:
    Pipeline.standard(schedule=Static(bits)).run(captured.module)
    return captured.module


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


def parity(model: nn.Module, *args: Any, **kwargs: Any) -> QuantizedGraphModule:
    reference = copy.deepcopy(model)
    result = exported(model, *args, **kwargs)
    check_parity(result, reference, args, kwargs)
    return result


def parity_where_opened(model: nn.Module, *args: Any, **kwargs: Any) -> None:
    """The graph is the model to the last bit; where its attention or recurrent layers are opened, to float rounding."""
    plain, again = copy.deepcopy(model), copy.deepcopy(model)
    check_parity(capture_export(plain, args, kwargs).module, copy.deepcopy(model), args, kwargs)
    check_parity(exported(again, *args, **kwargs), copy.deepcopy(model), args, kwargs, close)


def refused(message: str, model: nn.Module, *args: Any, **kwargs: Any) -> None:
    """The refusal says why, and leaves nothing behind."""
    before, random, seed = snapshot(model), torch.get_rng_state(), torch.manual_seed
    with pytest.raises(CaptureError, match=message):
        capture_export(model, args, kwargs)
    assert snapshot(model) == before
    assert torch.equal(torch.get_rng_state(), random)
    assert torch.manual_seed is seed


def targets(module: fx.GraphModule) -> list[Any]:
    return [node.target for node in module.graph.nodes]


# The zoo.


@pytest.mark.parametrize("name", MODELS)
def test_the_zoo(name: str) -> None:
    model, args, kwargs = ZOO[name]()
    reference, before = copy.deepcopy(model), snapshot(model)
    captured = capture_export(model, args, kwargs)
    assert snapshot(model) == before
    assert captured.frontend == "export"
    result = quantized(captured)
    check_same_output(evaluate(result, args, kwargs), evaluate(reference, args, kwargs))
    check_parity(result, reference, args, kwargs)
    assert [key for key in result.state_dict() if not key.startswith("_cpt_fx.")] == list(reference.state_dict())
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


@pytest.mark.parametrize("name", MODELS)
def test_layers_have_the_names_of_the_symbolic_frontend(name: str) -> None:
    model, args, kwargs = ZOO[name]()
    symbolic = cpt_fx.transform(model, Static(32), capture="symbolic")
    result = quantized(capture_export(*ZOO[name]()[:1], args, kwargs))
    found = [[node.meta[SITE].layer for node in graph.graph.nodes if SITE in node.meta]
             for graph in (*cpt_fx.graphs(symbolic), result)]  # fmt: skip
    assert found[0] and found[0] == found[1]


@pytest.mark.parametrize("name", ["residual_net", "bert_layer", "embeddings", "gcn", "unet"])
def test_four_bits_are_four_bits(name: str) -> None:
    model, args, kwargs = ZOO[name]()
    result = quantized(capture_export(model, args, kwargs), bits=4)
    train_step(result, args, kwargs)
    noted = records(result)
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


def test_an_average_over_all_batches() -> None:
    parity(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, momentum=None)), torch.randn(5, 4))


@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers(layer: Any) -> None:
    parity_where_opened(layer(4, 5, 2, dropout=0.3, bidirectional=True), torch.randn(3, 2, 4))


def test_attention() -> None:
    def forward(self: Any, x: Tensor) -> Any:
        return F.scaled_dot_product_attention(self.q(x), x, x, dropout_p=0.3 if self.training else 0.0)

    parity_where_opened(model_of(forward, q=nn.Linear(4, 4)), torch.randn(2, 2, 5, 4))


def test_a_transformer_layer_never_takes_the_fast_path() -> None:
    model = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.2, batch_first=True).requires_grad_(False)
    result = exported(model, torch.randn(2, 3, 4))
    assert not any("_transformer_encoder_layer_fwd" in str(target) for target in targets(result))
    assert targets(result).count(F.linear) == 4


def test_the_mode_of_the_model_is_that_of_the_result() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    model[1].eval()
    result = exported(model, torch.randn(2, 4))
    assert {name: module.training for name, module in result.named_modules() if not name.startswith("_cpt_fx")} == {
        "": True, "0": True, "1": False,
    }  # fmt: skip


def test_modes_that_differ_otherwise_are_refused() -> None:
    def branch(self: Any, x: Tensor) -> Any:
        return self.fc(x) * 2 if self.training else self.fc(x)

    def drop_path(self: Any, x: Tensor) -> Any:
        return x * torch.empty(len(x), 1).bernoulli_(0.5) if self.training else x

    inner = model_of(branch, fc=nn.Linear(4, 4))
    refused(r"module '1' does something else in training than in evaluation \(mul", nn.Sequential(nn.ReLU(), inner),
            torch.randn(3, 4))  # fmt: skip
    refused("does something else in training", model_of(drop_path), torch.randn(3, 4))


# Inputs and outputs.


def test_arguments_keep_their_names_and_defaults() -> None:
    def forward(self: Any, x: Tensor, mask: Any = None, flag: bool = False, *, scale: Tensor) -> Any:
        return self.fc(x) * scale * (2 if flag else 1)

    model = model_of(forward, fc=nn.Linear(4, 4))
    x, scale = torch.randn(3, 4), torch.randn(3, 4)
    result = exported(model, x, scale=scale)
    assert torch.equal(result(scale=scale, x=x), model(x, scale=scale))
    with pytest.raises(ValueError, match="captured for mask=None"):
        result(x, x, scale=scale)
    with pytest.raises(TypeError, match="exported for a tensor scale, got NoneType"):
        result(x)
    doubling = exported(model, x, flag=True, scale=scale)
    assert torch.equal(doubling(x, scale=scale), model(x, flag=True, scale=scale))
    with pytest.raises(ValueError, match="captured for flag=True"):
        doubling(x, flag=False, scale=scale)


def test_stars() -> None:
    def forward(self: Any, *xs: Tensor) -> Any:
        return self.fc(xs[0]) + xs[1]

    parity(model_of(forward, fc=nn.Linear(4, 4)), torch.randn(3, 4), torch.randn(3, 4))


def test_one_tensor_given_twice_is_two_inputs() -> None:
    def forward(self: Any, x: Tensor, y: Tensor) -> Any:
        return self.fc(x) - y

    model, x, y = model_of(forward, fc=nn.Linear(4, 4)), torch.randn(3, 4), torch.randn(3, 4)
    assert torch.equal(exported(model, x, x)(x, y), model(x, y))


def test_hooks_of_the_whole_model_run_once() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    model.register_forward_pre_hook(lambda _, args: (args[0] + 1.0,))
    model.register_forward_hook(lambda _, args, output: output * 3.0)
    parity(model, torch.randn(3, 4))


def test_sizes_that_take_another_path_are_refused_when_they_come() -> None:
    def forward(self: Any, x: Tensor, y: Tensor) -> Any:
        return self.fc(x) + 1 if x.shape[0] > 3 else self.fc(x) + y.sum()

    model = model_of(forward, fc=nn.Linear(4, 4))
    captured = capture_export(model, (torch.randn(5, 4), torch.randn(1, 2)), None)
    assert captured.notes == ("exported for x of size 4 in dim 1", "exported for y of size 1 in dim 0")
    result, y = quantized(captured), torch.randn(1, 2)
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


# Regions and what a graph cannot hold.


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
    assert [node.meta[SITE].layer for node in result.graph.nodes if SITE in node.meta] == ["a", "b", "b"]


def test_checkpoints_are_said_to_be_dropped() -> None:
    def forward(self: Any, x: Tensor, reentrant: bool = False) -> Any:
        return torch.utils.checkpoint.checkpoint(self.block, x, use_reentrant=reentrant)

    model = model_of(forward, block=nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)))
    captured = capture_export(model, (torch.randn(3, 4),), None)
    assert "torch.utils.checkpoint inside forward is not kept" in captured.notes[-1]
    parity(model, torch.randn(3, 4))
    refused("autograd.Function CheckpointFunction", model, torch.randn(3, 4), True)


class Doubled(torch.autograd.Function):
    """A backward that is not the derivative."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * 7


def test_what_an_export_loses_is_refused() -> None:
    def function(self: Any, x: Tensor) -> Any:
        return Doubled.apply(self.fc(x))  # type: ignore[no-untyped-call]

    def stores(self: Any, x: Tensor) -> Any:
        self.last = self.fc(x)
        return self.last

    def counts(self: Any, x: Tensor) -> Any:
        self.n += 1
        return self.fc(x)

    def appends(self: Any, x: Tensor) -> Any:
        self.seen.append(1)
        return self.fc(x)

    def seeds(self: Any, x: Tensor) -> Any:
        torch.manual_seed(3)
        return self.fc(x)

    def branches(self: Any, x: Tensor) -> Any:
        return self.fc(x) if x.sum() > 0 else x

    x = torch.randn(3, 4)
    for forward, message in {
        function: "autograd.Function Doubled",
        stores: "forward of stores stores a tensor in self.last",
        counts: "forward of counts stores 1 in self.n",
        appends: "forward changes self.seen",
        seeds: r"torch.manual_seed\(3\)",
        branches: r"cannot trace branches at .*test_export_frontend.py:\d+ \(return .*choose with torch.where",
    }.items():
        refused(message, model_of(forward, fc=nn.Linear(4, 4), n=0, seen=[]), x)
    hooked = nn.Sequential(nn.Linear(4, 4))
    hooked[0].register_full_backward_hook(lambda *_: None)
    refused("module '0' .Linear. has a backward hook", hooked, x)


def test_examples_are_needed() -> None:
    with pytest.raises(CaptureError, match="pass example_inputs, a tuple"):
        capture_export(nn.Linear(2, 2), None, None)


def test_outputs_of_unknown_classes_say_what_to_do() -> None:
    model, args, kwargs = ZOO["dataclass_output"]()
    refused("tests.zoo.Output.* call torch.export.register_dataclass", model, *args, **kwargs)


def test_caches_say_what_to_do() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(vocab_size=9, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
                                      num_attention_heads=2)  # fmt: skip
    model, ids = transformers.LlamaForCausalLM(config), torch.randint(0, 9, (2, 5))
    refused("DynamicCache.* pass use_cache=False in example_kwargs", model, ids)
    parity_where_opened(model, ids, labels=ids, use_cache=False)


# Programs.

AUTO = ((Dim.AUTO, Dim.AUTO),)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6, eps=1e-2, momentum=0.3), nn.Dropout(0.4), nn.Linear(6, 2))


@pytest.mark.parametrize("training", [True, False])
def test_a_program_learns_to_switch(training: bool) -> None:
    model, x = network().train(training), torch.randn(5, 4)
    reference = copy.deepcopy(model)
    program = torch.export.export(model, (x,), dynamic_shapes=AUTO)
    captured = capture_program(program)
    assert any("exported in evaluation mode" in note for note in captured.notes) is not training
    result = quantized(captured)
    modes = {name: module.training for name, module in result.named_modules() if not name.startswith("_cpt_fx")}
    assert set(modes.values()) == {training}
    check_parity(result, reference, (x,), {})
    check_parity(result, reference, (torch.randn(8, 4),), {})
    assert [key for key in result.state_dict() if not key.startswith("_cpt_fx.")] == list(reference.state_dict())
    assert all(value is program.state_dict[key] for key, value in result.named_parameters())
    again = pickle.loads(pickle.dumps(result))
    check_same_output(evaluate(again, (x,), {}), evaluate(result, (x,), {}))


def test_a_program_has_its_own_sizes() -> None:
    result = quantized(capture_program(torch.export.export(network(), (torch.randn(5, 4),))))
    with pytest.raises(ValueError, match="exported for input of size 5 in dim 0, got 3"):
        result(torch.randn(3, 4))


@pytest.mark.parametrize("name", ["dict_input", "keyword_arguments", "buffers_mutated", "dict_output", "tied_weights",
                                  "namedtuple_output", "plain_attributes", "constants_made_in_forward", "embeddings",
                                  "unused", "called_twice"])  # fmt: skip
def test_programs_of_the_zoo(name: str) -> None:
    model, args, kwargs = ZOO[name]()
    reference = copy.deepcopy(model)
    result = quantized(capture_program(torch.export.export(model, args, kwargs)))
    check_same(train_step(result, args, kwargs), train_step(reference, args, kwargs))


def test_a_decomposed_program() -> None:
    x = torch.randn(5, 4)
    plain = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
    program = torch.export.export(plain, (x,)).run_decompositions()
    result = quantized(capture_program(program))
    assert [node.target for node in result.graph.nodes if SITE in node.meta] == [torch.addmm, torch.addmm]
    assert torch.equal(result(x), plain(x))
    with pytest.raises(CaptureError, match=r"this program was decomposed: .*before run_decompositions"):
        capture_program(torch.export.export(network().train(), (x,)).run_decompositions())
    evaluated = quantized(capture_program(torch.export.export(network().eval(), (x,)).run_decompositions()))
    before = evaluated.get_buffer("1.running_mean").clone()
    evaluated.train()(x)
    assert not torch.equal(evaluated.get_buffer("1.running_mean"), before)
    assert int(evaluated.get_buffer("1.num_batches_tracked")) == 1


def test_graphs_in_a_program_are_refused() -> None:
    def forward(self: Any, x: Tensor) -> Any:
        return torch.cond(x.sum() > 0, lambda x: self.fc(x), lambda x: self.fc(x) * 2, (x,))

    program = torch.export.export(model_of(forward, fc=nn.Linear(4, 4)), (torch.randn(3, 4),))
    with pytest.raises(CaptureError, match="calls cond, which holds graphs inside the graph"):
        capture_program(program)


# The form of operators.


def one_call(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """Rewrite a graph of one ATen call, check that it computes the same, and return the node that it became."""
    graph = fx.Graph()
    tensors = [value for value in args if isinstance(value, Tensor)]
    given = iter([graph.placeholder(f"x{place}") for place in range(len(tensors))])
    node = graph.call_function(
        target, tuple(next(given) if isinstance(value, Tensor) else value for value in args), kwargs
    )
    graph.output(node)
    to_torch(graph)
    result = fx.GraphModule(nn.Module(), graph)(*copy.deepcopy(tensors))
    wanted = target(*copy.deepcopy(args), **kwargs)
    check_same_output(result, wanted)
    nodes: list[fx.Node] = [item for item in graph.nodes if item.op.startswith("call")]
    return nodes[0]


def test_arguments_in_another_order() -> None:
    aten, index, table = torch.ops.aten, torch.tensor([1, 2]), torch.randn(3, 4)
    embedding = one_call(aten.embedding.default, table, index)
    assert embedding.target is F.embedding and embedding.kwargs["padding_idx"] is None
    assert one_call(aten.embedding.default, table, index, 2).kwargs["padding_idx"] == 2
    x, weight = torch.randn(2, 3, 6, 6), torch.randn(4, 3, 2, 2)
    options = ([1, 1], [0, 0], [1, 1])
    assert one_call(aten.convolution.default, x, weight, None, *options, False, [0, 0], 1).target is torch.conv2d
    up = one_call(aten.convolution.default, x, torch.randn(3, 4, 2, 2), None, [2, 2], [0, 0], [1, 1], True, [1, 1], 1)
    assert up.target is torch.conv_transpose2d
    mean, variance = torch.zeros(3), torch.ones(3)
    norm = (x, torch.rand(3), torch.rand(3), mean, variance, False, 0.1, 1e-5, False)
    assert one_call(aten.batch_norm.default, *norm).target is F.batch_norm
    assert one_call(aten.add_.Tensor, torch.randn(3), torch.randn(3), alpha=2).target == "add_"
    assert one_call(aten.elu_.default, torch.randn(3)).target is torch._C._nn.elu_
    assert one_call(aten.cumsum.default, torch.randn(3), 0).target is aten.cumsum.default


def test_in_place_operators_say_so() -> None:
    """Everything that overwrites its argument gets a name that ends with an underscore."""
    for name in ("add_", "mul_", "relu_", "copy_", "index_put_", "masked_fill_", "dropout_", "celu_", "silu_", "zero_"):
        packet = getattr(torch.ops.aten, name)
        graph = fx.Graph()
        node = graph.call_function(getattr(packet, packet.overloads()[0]), (graph.placeholder("x"),))
        to_torch(graph)
        assert (node.target if isinstance(node.target, str) else node.target.__name__).endswith("_"), name


def test_defaults_of_a_schema() -> None:
    graph = fx.Graph()
    node = graph.call_function(torch.ops.aten.addmm.default, tuple(graph.placeholder(name) for name in "abc"))
    assert list(arguments_of(node)) == ["self", "mat1", "mat2", "beta", "alpha"]


def test_hidden_products_have_a_reason() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    assert "fused attention" in hides_product(graph.call_function(torch.ops.aten._efficient_attention_forward.default))
    assert "operator table" in hides_product(graph.call_function(torch.ops.aten._scaled_mm.default, (x, x)))
    assert hides_product(graph.call_function(torch.ops.aten.relu.default, (x,))) == ""
    assert hides_product(x) == ""


def test_the_paper_recipe_sees_the_same_places() -> None:
    """Additions, products and sums are found in an export as they are in a trace."""
    for name in ("gat", "bert_layer", "sage"):
        model, args, kwargs = ZOO[name]()
        family = "graph" if name in ("gat", "sage") else "dense"
        symbolic = cpt_fx.transform(model, Static(4), recipe=paper(family=family), capture="symbolic")
        captured = capture_export(ZOO[name]()[0], args, kwargs)
        Pipeline.standard(recipe=paper(family=family), schedule=Static(4)).run(captured.module)
        assert records(symbolic).keys() == records(captured.module).keys()
