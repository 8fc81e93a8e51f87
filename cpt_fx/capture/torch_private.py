"""Private names of torch that capture uses, each with the reason: what public torch lacks."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
import torch.fx._symbolic_trace
from torch._ops import HigherOrderOperator  # the class of torch.ops.higher_order.*
from torch.autograd.function import _SingleLevelFunction as SingleLevelFunction  # whose apply Function.apply calls
from torch.nn.modules.conv import _ConvTransposeNd as ConvTransposeNd  # the base of all transposed convolutions
from torch.utils._sympy.numbers import int_oo  # the upper bound of a size that has none

conv_output_padding: Callable[..., list[int]] = ConvTransposeNd._output_padding  # its arithmetic on sizes
set_version_counter: Any = torch._C._autograd._unsafe_set_version_counter  # a write that backward need not notice
STATES = {  # libraries ask these for the state of the process, or whether values are traced
    torch._C: ("is_grad_enabled", "_is_any_autocast_enabled"),
    torch.fx._symbolic_trace: ("is_fx_tracing", "is_fx_symbolic_tracing"),
}


def import_dynamo() -> None:
    """Import Dynamo. torch.compiler does so at its first use only, which may be in a trace, where it is refused."""
    import_module("torch._dynamo")
