"""Compilers and tracers around a call, and what they are not to look into; without torch's compiler: it is slow."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from types import CodeType
from typing import Any

import torch
from torch import fx, nn

from cpt_fx.errors import TransformError

_frames: Any = torch._C._dynamo.eval_frame


def skip_frame(code: CodeType, *, inside: bool = False) -> None:
    """Let a function run as Python where a compiler comes by; what it calls may still be captured, or is `inside`."""
    action = _frames._FrameAction
    strategy = _frames._FrameExecStrategy(action.SKIP, action.SKIP if inside else action.DEFAULT)
    _frames.set_code_exec_strategy(code, strategy)


def is_compiler_around() -> bool:
    """Whether a `torch.compile` around this call looks at every frame."""
    return _frames.get_eval_frame_callback() is not None


def imported_aside(name: str) -> Any:
    """Import a module while a compiler is around, which is not to look at the code of modules."""
    before = _frames.set_eval_frame(None)
    try:
        return import_module(name)
    finally:
        _frames.set_eval_frame(before)


def is_one_graph_demanded() -> bool:
    """Whether the compiler that looks at this code must make one graph of it: `fullgraph=True`, export."""
    translator: Any = import_module("torch._dynamo.symbolic_convert").InstructionTranslator.current_tx()
    return bool(translator.one_graph or translator.error_on_graph_break)


# A compiler asks it while it traces, and takes the answer for a constant.
is_one_graph_demanded._dynamo_marked_constant = True  # type: ignore[attr-defined]


def has_proxies(values: Iterable[Any]) -> bool:
    """Whether torch.fx traces a call with these arguments."""
    for value in values:  # noqa: SIM110  (a generator is a frame that a compiler around would look at)
        if isinstance(value, fx.Proxy):
            return True
    return False


def refuse_tools(root: nn.Module) -> None:
    """Refuse tools that cannot look into code that Dynamo captures: they would get it without quantizers."""
    tool = ""
    if torch._C._is_tracing():
        tool = "torch.jit.trace"
    elif torch.compiler.is_exporting():
        tool = "torch.export"
    elif torch._C._are_functorch_transforms_active():
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


for _function in (is_compiler_around, imported_aside, has_proxies):
    skip_frame(_function.__code__)
