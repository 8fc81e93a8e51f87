"""Refusals of what no exported graph can express, with the layer where it happens."""

from __future__ import annotations

import inspect
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import onnx_ir as ir
import torch
from torch import Tensor, fx, nn

from cpt_fx.capture.dry_run import dry_run
from cpt_fx.common.torch_private import BatchNorm, TorchDispatchMode, current_autograd_node, get_sequence_number, pytree
from cpt_fx.errors import ExportError
from cpt_fx.export.torch_private import InstanceNorm
from cpt_fx.ir.meta import WidthSource, module_path

if TYPE_CHECKING:
    from cpt_fx.export.program import Call


class UnsupportedError(ExportError):
    """An operator that cannot be exported, and why."""

    def __init__(self, operator: str, reason: str) -> None:
        super().__init__(f"{operator}: {reason}")
        self.operator, self.reason = operator, reason


def check_modules(model: nn.Module) -> None:
    """Refuse layers whose arithmetic depends on the number of calls so far: a graph is the same for every step."""
    for path, layer in model.named_modules():
        if isinstance(layer, _NORMS) and layer.momentum is None and layer.training and layer.track_running_stats:
            raise ExportError(
                f"{path}: {type(layer).__name__} with momentum=None averages over all batches so far, which no graph "
                "can say: give it a momentum (0.1 is PyTorch's default) before transform"
            )


def check_schedules(sources: Iterable[WidthSource]) -> None:
    """Refuse parts with a schedule of their own: an exported directory is trained under one."""
    own = {repr(source.schedule) for source in sources if source.schedule is not None}
    if own:
        raise ExportError(
            f"a part of the model follows a schedule of its own ({', '.join(sorted(own))}), and ONNX Runtime trains "
            "all parts under one: leave it out of overrides"
        )


def check_numbers(graph: fx.GraphModule) -> None:
    """Refuse dtypes in which ONNX Runtime does not compute as PyTorch does."""
    for node in graph.graph.nodes:
        # Inputs may have any dtype: only what the model computes counts.
        values = pytree.tree_leaves(node.meta.get("val")) if node.op == "call_function" else ()
        for value in values:
            if _is_odd(value):
                kind = "complex numbers" if value.is_complex() else "numbers of 16 bits, which it rounds elsewhere"
                raise UnsupportedError(str(node.target).removesuffix(".default"), f"ONNX Runtime does not train {kind}")


def _is_odd(value: Any) -> bool:
    return isinstance(value, Tensor) and (value.is_complex() or value.dtype in (torch.float16, torch.bfloat16))


def check_nodes(model: ir.Model) -> None:
    """Refuse operators whose result in ONNX Runtime would differ from run to run."""
    for node in model.graph.all_nodes():
        if node.domain:
            continue
        named = operator_of(node.metadata_props.get("pkg.torch.onnx.fx_node", "")) or node.op_type
        if node.op_type in _DRAWS:
            raise UnsupportedError(named, "draws at random in a way that an exported graph cannot repeat")
        if node.op_type == "ScatterND" and getattr(node.attributes.get("reduction"), "value", "none") != "none":
            raise UnsupportedError(named, "adds in several threads, of which ONNX Runtime loses some sums (ScatterND)")


def operator_of(text: str) -> str:
    """Return the operator that a node of a torch.fx graph calls, from the node's description."""
    return text.partition("[target=torch.ops.")[2].partition("]")[0].removesuffix(".default")


def layer_of(model: fx.GraphModule, call: Call, operator: str) -> str:
    """Return the layer that calls an operator, in its forward or its backward pass; "" if none does."""
    seen = _Seen(operator)
    bound = inspect.signature(model.forward).bind(*call.args, **call.kwargs)
    bound.apply_defaults()
    with dry_run(model), torch.enable_grad(), seen:
        outputs = _Walk(model, seen, bound.arguments).run()
        seen.layer = "the loss"
        if call.loss is not None:
            call.loss(outputs, *call.targets).backward()
    return seen.found


class _Seen(TorchDispatchMode):
    """Mode that finds the layer that calls an operator."""

    def __init__(self, operator: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.name = operator.split(".")[1]
        self.layer = self.found = ""
        self.odd = False
        """Whether the call that was found has a refused dtype: the same operator may be harmless elsewhere."""
        self.layers: list[tuple[int, str]] = []
        """The layers that ran, each with autograd's sequence number after it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        odd = any(map(_is_odd, pytree.tree_leaves(result)))
        if func._schema.name.partition("::")[2] == self.name and (odd > self.odd or not self.found):
            step = current_autograd_node()
            place = bisect_left(self.layers, (step._sequence_nr() + 1, "")) if step else len(self.layers)
            self.found = self.layers[place][1] if place < len(self.layers) else self.layer
            self.odd = odd
        return result


class _Walk(fx.Interpreter):
    """Interpreter that notes which layer is running."""

    def __init__(self, model: fx.GraphModule, seen: _Seen, given: Mapping[str, Any]) -> None:
        super().__init__(model)
        self.seen, self.given = seen, given

    def placeholder(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Return an argument, for any kind of parameter."""
        return self.given[str(target).lstrip("*")]

    def run_node(self, n: fx.Node) -> Any:
        self.seen.layer = module_path(n)[0] or "the model"
        result = super().run_node(n)
        self.seen.layers.append((get_sequence_number(), self.seen.layer))
        return result


_DRAWS = {"Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"}
_NORMS = (BatchNorm, InstanceNorm)
