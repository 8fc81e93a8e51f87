"""A program holds one mode. What tells it so becomes a switch, and what cannot be switched is refused or said."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from cpt_fx.aten import arguments_of, name_of, take_first
from cpt_fx.capture.base import CaptureError
from cpt_fx.capture.export_modes import ATTENTION, COUNTER, FLAGS, Switches, counts_batches, set_argument
from cpt_fx.capture.export_trace import Exported
from cpt_fx.meta import module_path

_ONE_MODE = ("native_batch_norm", "_native_batch_norm_legit", "_native_batch_norm_legit_functional",
             "_batch_norm_with_update", "_batch_norm_with_update_functional", "_batch_norm_no_update",
             "_fused_rms_norm_training")  # fmt: skip
"""What a decomposed program holds in place of a batch norm: the running statistics of one mode only."""

_EVALUATED = "aten._native_batch_norm_legit_no_training.default"


def restore_switches(exported: Exported) -> tuple[dict[str, bool], tuple[str, ...]]:
    """Turn the flags of a program into switches; return the mode each module was exported in, and what to know."""
    graph = exported.graph
    switches = Switches(graph)
    modes: dict[str, bool] = {}
    for node in list(graph.nodes):
        if name_of(node).startswith("aten.") and name_of(node).split(".")[1] in _ONE_MODE:
            if "no_stats" in name_of(node):
                continue
            raise CaptureError(
                f"this program was decomposed: {name_of(node)} holds the batch norm of one mode. Pass the program as "
                "torch.export.export returned it, before run_decompositions"
            )
        if name_of(node) == _EVALUATED and take_first(graph, node):
            _as_batch_norm(node)
        if name_of(node) in FLAGS:
            _switch(exported, switches, node, modes)
        elif name_of(node) == ATTENTION and arguments_of(node)["dropout_p"]:
            _note_mode(modes, node, True)
            set_argument(node, "dropout_p", switches.scale(node, arguments_of(node)["dropout_p"]))
        elif counts_batches(node):
            set_argument(node, "other", switches.read(node, True))
    if any(modes.values()):
        return modes, ()
    return modes, (
        "the program was exported in evaluation mode: dropout that its code left out then stays out in training",
    )


def _as_batch_norm(node: fx.Node) -> None:
    given = arguments_of(node)
    order = ("input", "weight", "bias", "running_mean", "running_var")
    node.target = torch.ops.aten.batch_norm.default
    node.args = (*(given[name] for name in order), False, given["momentum"], given["eps"], False)


def _switch(exported: Exported, switches: Switches, node: fx.Node, modes: dict[str, bool]) -> None:
    given = arguments_of(node)
    name = FLAGS[name_of(node)]
    value = given[name]
    normalises = "norm" in name_of(node)
    if not isinstance(value, bool) or (normalises and given["running_mean"] is None):
        # Without running statistics a norm does the same in both modes.
        return
    _note_mode(modes, node, value)
    set_argument(node, name, switches.read(node, True))
    if normalises and not value:
        _count_batches(exported, switches, node, given["running_mean"])


def _count_batches(exported: Exported, switches: Switches, node: fx.Node, mean: Any) -> None:
    """Count batches in training where the program, exported in evaluation, does not."""
    path = str(mean.target).rpartition(".")[0] if isinstance(mean, fx.Node) and mean.op == "get_attr" else None
    counter = f"{path}.{COUNTER}" if path else COUNTER
    if path is None or counter not in dict(exported.module.named_buffers()):
        return
    flag = switches.read(node, True)
    graph = exported.graph
    with graph.inserting_before(node):
        count = graph.call_function(torch.ops.aten.add_.Tensor, (graph.get_attr(counter), flag))
    if "nn_module_stack" in node.meta:
        count.meta["nn_module_stack"] = node.meta["nn_module_stack"]


def _note_mode(modes: dict[str, bool], node: fx.Node, value: bool) -> None:
    path, _ = module_path(node)
    if modes.setdefault(path, value) is not value:
        raise CaptureError(
            f"in this program {f'module {path!r}' if path else 'the model'} is in training for one operator and in "
            f"evaluation for another ({node.format_node()}): one switch cannot be both"
        )
