"""TorchScript functions that a model calls: compiled code in which no quantizer can stand."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from cpt_fx.dynamo.callers import caller_of

if TYPE_CHECKING:
    from cpt_fx.dynamo.engine import Engine

_MULTIPLIES = re.compile(
    r"aten::(matmul|mm|bmm|mv|dot|inner|outer|addmm|addmv|addbmm|baddbmm|einsum|linear|bilinear|conv\w*|_convolution|"
    r"scaled_dot_product_attention|lstm\w*|gru\w*|rnn\w*|cdist|tensordot|chain_matmul)\("
)


@contextmanager
def noticed_scripts(engine: Engine) -> Iterator[None]:
    """Note every TorchScript function that multiplies while the model's own code runs: Dynamo breaks at each."""
    kind: Any = torch._C.ScriptFunction
    plain = kind.__call__

    def call(function: Any, *args: Any, **kwargs: Any) -> Any:
        if engine.runs_here() and _MULTIPLIES.search(str(function.inlined_graph)):
            reason = "a TorchScript function: its code is compiled and cannot be rewritten"
            engine.leave(caller_of(engine.places).path, function.name, reason)
        return plain(function, *args, **kwargs)

    kind.__call__ = call
    try:
        yield
    finally:
        kind.__call__ = plain
