"""What ONNX Runtime cannot differentiate, and what it is not known to differentiate rightly: found before it tries.

Gradients are followed from the parameters to the loss. Each operator on the way must be one whose gradient, towards
that input, was compared with PyTorch's (`docs/export-operators.md`). All others are refused: ONNX Runtime would leave
out some gradients, or compute others wrongly, and say nothing.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import onnx_ir as ir
import torch
from torch import fx, nn
from torch.export import ExportedProgram

from cpt_fx.errors import ExportError
from cpt_fx.export.functions import DOMAIN, STOP
from cpt_fx.meta import Dial

_ALIKE = {"Concat", "Sum", "Max", "Min"}
"""Operators of any number of inputs, all of one kind."""
PROVEN: frozenset[str] = frozenset(
    {
        "Add.0", "Add.1", "BatchNormalization.0", "BatchNormalization.1", "BatchNormalization.2",
        "Cast.0", "Clip.0", "Concat.0", "Conv.0", "Conv.1", "Conv.2", "Cos.0", "Div.0", "Div.1", "Erf.0",
        "Exp.0", "Expand.0", "Gather.0", "GatherElements.0", "GatherND.0", "Gemm.0",
        "Gemm.1", "Gemm.2", "LayerNormalization.0", "LayerNormalization.1",
        "LayerNormalization.2", "LeakyRelu.0", "Log.0", "LogSoftmax.0", "MatMul.0", "MatMul.1",
        "MaxPool.0", "Mul.0", "Mul.1", "Neg.0", "Pad.0", "Pow.0", "Reciprocal.0", "ReduceL2.0",
        "ReduceLogSumExp.0", "ReduceMean.0", "ReduceSum.0", "Relu.0", "Reshape.0",
        "ScatterElements.0", "ScatterElements.2", "ScatterND.0", "ScatterND.2", "Sigmoid.0", "Sin.0", "Slice.0",
        "Softmax.0", "Sqrt.0", "Squeeze.0", "Sub.0", "Sub.1", "Tanh.0", "Tile.0",
        "Transpose.0", "Trilu.0", "Unsqueeze.0", "Where.1", "Where.2",
    }
)  # fmt: skip
"""Operators whose gradient, towards an input, is proven."""
_FLAT = {
    "And", "ArgMax", "ArgMin", "Equal", "Greater", "GreaterOrEqual", "IsInf", "IsNaN", "Less", "LessOrEqual", "NonZero",
    "Not", "Or", "Shape", "Size", "Xor",
}  # fmt: skip
"""Operators that make whole numbers or truth values: nothing passes."""
_HALVES = {ir.DataType.FLOAT16, ir.DataType.BFLOAT16}
_FLOATS = {ir.DataType.FLOAT, ir.DataType.DOUBLE, *_HALVES}


def trainable(model: ir.Model, parameters: Iterable[str]) -> list[str]:
    """Return those parameters that the loss sends a gradient to: PyTorch leaves the others without one."""
    towards = _towards_loss(model)
    held = model.graph.initializers
    return [name for name in parameters if name in held and held[name] in towards]


def check(model: ir.Model, parameters: Collection[str]) -> None:
    """Refuse a model with an operator between a parameter and the loss whose gradient is not proven."""
    for node, index in on_the_way(model, parameters):
        if any(output.dtype in _HALVES for output in node.outputs):
            raise ExportError(
                f"{place(node)}: gradients in 16 bits. Exported models train in float32: take the cast away; cpt_fx's "
                "widths say how precise each layer is"
            )
        _check_form(node, index)
        if not ours(node, index) and key(node, index) not in PROVEN:
            raise ExportError(
                f"{place(node)}: ONNX Runtime has no gradient of {node.op_type} that is known to be PyTorch's, and "
                "the gradient of a parameter would pass through it. Write this operator in terms of others (docs/"
                "export-operators.md says which are right), or put it under torch.no_grad() if none is meant to pass"
            )


def ours(node: ir.Node, index: int) -> bool:
    """Whether a gradient is one that we registered: of what a function takes first, and of ranges that are learned.

    The running range of a quantizer depends on what it has seen, and no gradient passes there, as in PyTorch.
    """
    return node.domain == DOMAIN and node.op_type != STOP and (index == 0 or ("Learned" in node.op_type and index < 3))


def _check_form(node: ir.Node, index: int) -> None:
    """Refuse forms of an operator whose gradient fails or is wrong, although that of other forms is right."""
    value, result = _read(node)[index], node.outputs[0]
    assert value is not None
    if node.op_type == "MaxPool" and (
        value.shape is None or not all(isinstance(size, int) for size in value.shape[2:])
    ):
        raise ExportError(
            f"{place(node)}: ONNX Runtime's gradient of max pooling takes the sizes of the example inputs, all but "
            "the batch: their sizes must not vary"
        )
    if node.op_type == "Slice" and len(node.inputs) > 4 and node.inputs[4] is not None:
        steps = ir.convenience.get_const_tensor(node.inputs[4])
        if steps is None or (steps.numpy() < 1).any():
            raise ExportError(
                f"{place(node)}: ONNX Runtime cannot differentiate a slice with a negative step: use flip"
            )
    if node.op_type.startswith("Scatter") and node.attributes.get_string("reduction", "none") != "none":
        raise ExportError(f"{place(node)}: ONNX Runtime's gradient of a scatter that reduces is wrong: use scatter_add")
    if node.op_type == "Where" and value.shape != result.shape:
        raise ExportError(
            f"{place(node)}: ONNX Runtime does not sum the gradient of a tensor that torch.where repeats: expand its "
            "operands to one shape"
        )
    in_3d = node.op_type == "Conv" and result.shape is not None and len(result.shape) == 5
    if in_3d and node.attributes.get_int("group", 1) > 1:
        raise ExportError(f"{place(node)}: ONNX Runtime's gradient of grouped convolutions in 3-d is wrong")


def on_the_way(model: ir.Model, parameters: Collection[str]) -> Iterator[tuple[ir.Node, int]]:
    """Give the operators between parameters and the loss, each with the inputs that gradients pass to."""
    reached = _reached(model, parameters)
    towards = _towards_loss(model)
    for node in model.graph:
        if any(output in reached and output in towards for output in node.outputs):
            yield from (
                (node, index) for index, value in enumerate(_read(node)) if value in reached and _passes(node, index)
            )


def key(node: ir.Node, index: int) -> str:
    """Return what `PROVEN` calls an operator's gradient towards an input."""
    if node.op_type in _ALIKE:
        index = 0
    return f"{node.op_type}.{index}" if node.domain in ("", "ai.onnx") else f"{node.domain}.{node.op_type}.{index}"


def _read(node: ir.Node) -> list[ir.Value | None]:
    """Return what a node reads: its inputs, and what the bodies of loops and branches take from around them."""
    captured = [
        value
        for attribute in node.attributes.values()
        if attribute.type == ir.AttributeType.GRAPH
        for inner in attribute.as_graph()
        for value in _read(inner)
    ]
    return [*node.inputs, *captured]


def _reached(model: ir.Model, parameters: Collection[str]) -> set[ir.Value]:
    """Return the values that depend on a parameter in a way that gradients can take."""
    found = {value for name, value in model.graph.initializers.items() if name in parameters}
    for node in model.graph:
        if any(value in found and _passes(node, index) for index, value in enumerate(_read(node))):
            found.update(output for output in node.outputs if _carries(output))
    return found


def _towards_loss(model: ir.Model) -> set[ir.Value]:
    """Return the values that the loss, a graph's first output, sends gradients to."""
    found = {model.graph.outputs[0]}
    for node in reversed(model.graph):
        if any(output in found for output in node.outputs):
            found.update(
                value for index, value in enumerate(_read(node)) if value and _passes(node, index) and _carries(value)
            )
    return found


def _passes(node: ir.Node, index: int) -> bool:
    """Whether there is a gradient, in PyTorch, from an operator to its input."""
    if node.domain == DOMAIN:
        return ours(node, index)
    whole = node.op_type == "Cast" and ir.DataType(node.attributes.get_int("to", 1)) not in _FLOATS
    return not whole and node.op_type not in _FLAT


def _carries(value: ir.Value) -> bool:
    return value.dtype is None or value.dtype in _FLOATS


def place(node: ir.Node) -> str:
    """Name the operator in PyTorch that a node was, and the layer it belongs to, or comes after."""
    scopes = _scopes(node)
    operator = scopes[-1].rstrip("_0123456789") if scopes else node.op_type
    operator = node.op_type if operator == "symbolic" else operator
    return f"{_layer(node) or _layer_before(node) or 'the model'}: {operator}"


def _scopes(node: ir.Node) -> list[str]:
    found: list[str] = ast.literal_eval(node.metadata_props.get("pkg.torch.onnx.name_scopes", "[]"))
    return found


def _layer(node: ir.Node) -> str:
    layers = [scope for scope in _scopes(node)[:-1] if scope]
    return layers[-1].removeprefix("model.") if layers else ""


def _layer_before(node: ir.Node) -> str:
    """Say after which layer a node comes: a graph does not know the layers of all of its operators."""
    seen, waiting = {node}, [node]
    while waiting:
        current = waiting.pop(0)
        if layer := _layer(current):
            return f"after {layer}"
        for value in current.inputs:
            if value is None:
                continue
            if value.is_initializer() and "." in str(value.name):
                return f"after {str(value.name).rpartition('.')[0]}"
            producer = value.producer()
            if producer is not None and producer not in seen:
                seen.add(producer)
                waiting.append(producer)
    return ""


def layer_of(node: fx.Node) -> str:
    """Name the layer that a node of an exported program belongs to, and its operator."""
    stack = node.meta.get("nn_module_stack") or {}
    layers = [path for path, _ in stack.values() if path]
    name = str(getattr(node.target, "__name__", node.target)).partition(".")[0]
    return f"{layers[-1].removeprefix('model.')}: {name}" if layers else name


def check_modules(model: nn.Module) -> None:
    """Refuse layers whose arithmetic depends on how often they were called: a graph is the same for every step."""
    for path, layer in model.named_modules():
        if isinstance(layer, _NORMS) and layer.momentum is None and layer.training and layer.track_running_stats:
            raise ExportError(
                f"{path}: {type(layer).__name__} with momentum=None averages over all batches so far, which no graph "
                "can say: give it a momentum (0.1 is PyTorch's default) before transform"
            )


def check_schedules(dials: Iterable[Dial]) -> None:
    """Refuse parts with a schedule of their own: what is exported is trained under one."""
    own = {repr(dial.schedule) for dial in dials if dial.schedule is not None}
    if own:
        raise ExportError(
            f"a part of the model follows a schedule of its own ({', '.join(sorted(own))}), and ONNX Runtime trains "
            "all parts under one: leave it out of overrides"
        )


_NORMS = (nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm)


@contextmanager
def converting(program: ExportedProgram) -> Iterator[None]:
    """Say which operator of which layer has no translation to ONNX."""
    try:
        yield
    except torch.onnx.OnnxExporterError as error:
        name = re.search(r"translating node %(\w+)", str(error))
        found = re.search(r"No ONNX function found for <OpOverload\(op='\w+\.(\w+)'", str(error))
        place = next((layer_of(node) for node in program.graph.nodes if name and node.name == name[1]), "")
        operator = found[1] if found else name[1] if name else "an operator"
        text = "" if found else f" ({str(error.__cause__ or error).strip().splitlines()[0]})"
        raise ExportError(
            f"{place or operator}: torch's ONNX exporter has no translation of {operator}{text}. Write it in terms of "
            "others: the table in docs/export-operators.md says which are right"
        ) from error


def refuse_operator(target: Any) -> None:
    """Refuse an operator that no rewrite took, and that no graph can say."""
    if target in _REFUSED:
        raise ExportError(_REFUSED[target])
    if torch.Tag.nondeterministic_seeded in getattr(target, "tags", ()):
        raise ExportError(
            "it draws at random. An exported graph draws from seeds that are an input, so that a training can be "
            "resumed exactly; of the operators that draw, dropout in all its kinds, rand_like and bernoulli do so"
        )


_aten = torch.ops.aten
_REFUSED: dict[Any, str] = {
    _aten.embedding_renorm_.default: (
        "an embedding with max_norm scales its weight in place while it is read, which no graph can say: normalize the "
        "weight between steps"
    ),
    **dict.fromkeys(
        (_aten.embedding_bag.default, _aten.embedding_bag.padding_idx),
        "ONNX has no bags of embeddings: use nn.Embedding, and sum, average or maximize over the bag",
    ),
    _aten.repeat_interleave.self_Tensor: "how often each element is repeated must be a number: use index_select",
    _aten.as_strided.default: "as_strided reads memory, which graphs do not know: use slices, unfold or reshape",
    torch.ops.higher_order.wrap_with_autocast: (
        "torch.autocast in forward: exported models train in float32. Take the autocast region away; cpt_fx's widths "
        "say how precise each layer is"
    ),
}
