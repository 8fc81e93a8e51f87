"""Detect compilers and tracers around a call and hide code from them, without the slow import of torch's compiler."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from types import CodeType
from typing import Any

import torch
from torch import fx, nn

from cpt_fx.common import torch_private as private
from cpt_fx.errors import TransformError


def skip_frame(code: CodeType, *, inside: bool = False) -> None:
    """Make Dynamo run a function as plain Python; what it calls is still captured, unless `inside` skips that, too."""
    action = private.FrameAction
    strategy = private.FrameExecStrategy(action.SKIP, action.SKIP if inside else action.DEFAULT)
    private.frames.set_code_exec_strategy(code, strategy)


def is_compiler_around() -> bool:
    """Return whether a `torch.compile` around this call inspects every frame."""
    return private.frames.get_eval_frame_callback() is not None


def imported_aside(name: str) -> Any:
    """Import a module with Dynamo switched off, which would otherwise inspect the code of the module."""
    before = private.frames.set_eval_frame(None)
    try:
        return import_module(name)
    finally:
        private.frames.set_eval_frame(before)


def is_one_graph_demanded() -> bool:
    """Return whether the compiler that traces this code must produce one graph: `fullgraph=True`, export."""
    tracing = private.translator()
    return bool(tracing.one_graph or tracing.error_on_graph_break)


# Dynamo calls it while tracing, and treats the result as a constant.
is_one_graph_demanded._dynamo_marked_constant = True  # type: ignore[attr-defined]


def has_proxies(values: Iterable[Any]) -> bool:
    """Return whether torch.fx traces a call with these arguments."""
    for value in values:  # noqa: SIM110  (a generator is a frame that Dynamo would inspect)
        if isinstance(value, fx.Proxy):
            return True
    return False


def refuse_tools(root: nn.Module) -> None:
    """Raise under tools that cannot trace what Dynamo captures: they would get the model without quantizers."""
    tool = ""
    if torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
        tool = "torch.jit.trace"
    elif torch.compiler.is_exporting():
        tool = "torch.export"
    elif private.are_transforms_active():
        tool = "torch.func"
    elif any(
        value is not None and not isinstance(value, nn.Parameter)
        for module in root.modules()
        for value in module._parameters.values()
    ):
        tool = "torch.func.functional_call"
    if tool:
        raise TransformError(
            f"{tool} cannot follow a transformed model that Dynamo captures. Give it "
            "cpt_fx.single_graph(result, example_inputs), which is one graph, or transform with capture='symbolic'"
        )


for _function in (is_compiler_around, imported_aside, has_proxies, private.forward_ad_level):
    skip_frame(_function.__code__)
