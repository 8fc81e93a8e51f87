"""A program holds one mode. What tells it so becomes a switch, and what cannot be switched is refused or said."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from cpt_fx.aten import arguments_of, name_of, take_first
from cpt_fx.capture.base import CaptureError
from cpt_fx.meta import module_path
from cpt_fx.operators.around import FLAGS, ONE_MODE

_EVALUATED = "aten._native_batch_norm_legit_no_training.default"
_ATTENTION = "aten.scaled_dot_product_attention.default"
_COUNT = "aten.add_.Tensor"
_COUNTER = "num_batches_tracked"


def restore_switches(module: fx.GraphModule) -> tuple[str, ...]:
    """Turn the flags of a program into switches, in the mode it was exported in; return what to know about them."""
    switches = _Switches(module)
    for node in list(module.graph.nodes):
        name = name_of(node)
        if name.startswith("aten.") and name.split(".")[1] in ONE_MODE and "no_stats" not in name:
            raise CaptureError(
                f"this program was decomposed: {name} holds the batch norm of one mode. Pass the program as "
                "torch.export.export returned it, before run_decompositions"
            )
        if name == _EVALUATED and take_first(module.graph, node):
            _as_batch_norm(node)
        if name_of(node) in FLAGS:
            switches.restore(node)
        elif name == _ATTENTION and arguments_of(node)["dropout_p"]:
            probability = arguments_of(node)["dropout_p"]
            switches.note(node, True)
            flag = switches.read(node)
            with module.graph.inserting_before(node):
                _set(node, "dropout_p", module.graph.call_function(operator.mul, (probability, flag)))
        elif _counts_batches(node):
            # A flag is a number to the operator: True is one.
            _set(node, "other", switches.read(node))
    training = any(switches.modes.values())
    for path, child in module.named_modules():
        child.training = switches.modes.get(path, training)
    if training:
        return ()
    return ("the program was exported in evaluation mode: dropout that its code left out then stays out in training",)


class _Switches:
    """Makes the nodes that read a module's mode, one for each module, and remembers which mode was exported."""

    def __init__(self, module: fx.GraphModule) -> None:
        self.module = module
        self.graph = module.graph
        self.modes: dict[str, bool] = {}
        self._made: dict[str, fx.Node] = {}

    def read(self, node: fx.Node) -> fx.Node:
        """Return what is True in training, for the module that `node` belongs to."""
        path, _ = module_path(node)
        if path not in self._made:
            holder: Any = self.module
            for part in filter(None, path.split(".")):
                # A module without tensors is not in a program, but it has a mode.
                if part not in holder._modules:
                    holder.add_module(part, torch.nn.Module())
                holder = holder._modules[part]
            first = next(item for item in self.graph.nodes if item.op not in ("placeholder", "get_attr"))
            with self.graph.inserting_before(first):
                # create_node, not get_attr: the latter warns about attributes that are no tensors.
                self._made[path] = self.graph.create_node("get_attr", f"{path}.training" if path else "training")
        return self._made[path]

    def note(self, node: fx.Node, value: bool) -> None:
        """Remember the mode of a module; refuse one that is in both."""
        path, _ = module_path(node)
        if self.modes.setdefault(path, value) is not value:
            raise CaptureError(
                f"in this program {f'module {path!r}' if path else 'the model'} is in training for one operator and in "
                f"evaluation for another ({node.format_node()}): one switch cannot be both"
            )

    def restore(self, node: fx.Node) -> None:
        """Let an operator with a flag follow the mode of its module."""
        given = arguments_of(node)
        name = FLAGS[name_of(node)]
        value = given[name]
        normalises = "norm" in name_of(node)
        if not isinstance(value, bool) or (normalises and given["running_mean"] is None):
            # Without running statistics a norm does the same in both modes.
            return
        self.note(node, value)
        _set(node, name, self.read(node))
        if normalises and not value:
            self._count_batches(node, given["running_mean"])

    def _count_batches(self, node: fx.Node, mean: Any) -> None:
        """Count batches in training where the program, exported in evaluation, does not."""
        path = str(mean.target).rpartition(".")[0] if isinstance(mean, fx.Node) and mean.op == "get_attr" else None
        counter = f"{path}.{_COUNTER}" if path else _COUNTER
        if path is None or counter not in dict(self.module.named_buffers()):
            return
        flag = self.read(node)
        with self.graph.inserting_before(node):
            count = self.graph.call_function(torch.ops.aten.add_.Tensor, (self.graph.get_attr(counter), flag))
        if "nn_module_stack" in node.meta:
            count.meta["nn_module_stack"] = node.meta["nn_module_stack"]


def _as_batch_norm(node: fx.Node) -> None:
    given = arguments_of(node)
    order = ("input", "weight", "bias", "running_mean", "running_var")
    node.target = torch.ops.aten.batch_norm.default
    node.args = (*(given[name] for name in order), False, given["momentum"], given["eps"], False)


def _set(node: fx.Node, name: str, value: Any) -> None:
    """Set an argument of an ATen call by its name in the schema."""
    assert isinstance(node.target, torch._ops.OpOverload)
    place = [argument.name for argument in node.target._schema.arguments].index(name)
    if place < len(node.args):
        node.update_arg(place, value)
    else:
        node.update_kwarg(name, value)


def _counts_batches(node: fx.Node) -> bool:
    """Whether a node adds one to the counter of a batch norm."""
    source: Any = node
    while isinstance(source, fx.Node) and name_of(source) == _COUNT:
        source = source.args[0]
    counts = isinstance(source, fx.Node) and str(source.target).rpartition(".")[2] == _COUNTER
    return source is not node and counts and bool(node.args[1] == 1)
