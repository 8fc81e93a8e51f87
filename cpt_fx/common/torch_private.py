"""Private names of torch that several rooms use, each with the reason: what public torch lacks."""

from importlib import import_module
from typing import Any

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack  # torch.func cannot be left from inside
from torch._guards import TracingContext  # what Dynamo captures now, with its guards
from torch._ops import OpOverload, OpOverloadPacket  # the classes of torch.ops.*, to tell them from functions
from torch._subclasses import FakeTensor  # no predicate tells a tensor without memory
from torch.amp.autocast_mode import _enter_autocast as enter_autocast  # graphs call it where code has `with autocast`
from torch.amp.autocast_mode import _exit_autocast as exit_autocast  # its end
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm  # the base of all batch norms, lazy and users' own
from torch.nn.modules.module import _has_any_global_hook as has_any_global_hook  # global hooks are set, but not listed
from torch.utils import _pytree as pytree  # nested arguments as a list; torch.export registers classes in it
from torch.utils._python_dispatch import (
    TorchDispatchMode,  # sees operators below autograd; no public module has it
    is_traceable_wrapper_subclass,  # a tensor that is made of other tensors
)
from torch.utils._python_dispatch import _disable_current_modes as disable_current_modes  # our own work is not seen

frames: Any = torch._C._dynamo.eval_frame  # what Dynamo does with a frame; torch.compiler imports the whole compiler
FrameAction = frames._FrameAction  # what `frames.set_code_exec_strategy` takes
FrameExecStrategy = frames._FrameExecStrategy  # two of them: for the function, and for what it calls

functorch: Any = torch._C._functorch  # torch.func does not tell which of its wrappers a tensor has, nor unwraps one
are_transforms_active = torch._C._are_functorch_transforms_active  # nor whether code runs under it
vmapmode_increment_nesting = torch._C._vmapmode_increment_nesting  # the old vmap of `is_grads_batched`: its level,
vmapmode_decrement_nesting = torch._C._vmapmode_decrement_nesting  # which is left for what it does not support,
add_batch_dim, remove_batch_dim = torch._add_batch_dim, torch._remove_batch_dim  # and its tensors

current_autograd_node = torch._C._current_autograd_node  # the step of a backward pass that runs now
get_sequence_number = torch._C._autograd._get_sequence_nr  # links a step with the operator of the forward pass
top_saved_tensors_hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks  # public: only to set them
set_grad_enabled: Any = torch._C._set_grad_enabled  # what graphs call: torch.set_grad_enabled is a class

dispatch_depth = torch._C._len_torch_dispatch_stack  # how many dispatch modes are active
has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key  # torch.library registers kernels, but does not tell
native_multi_head_attention = torch._native_multi_head_attention  # nn.MultiheadAttention calls it in evaluation,
transformer_encoder_layer = torch._transformer_encoder_layer_fwd  # nn.TransformerEncoderLayer this one


def forward_ad_level() -> int:
    """Return the level of forward-mode gradients, -1 outside: torch.autograd.forward_ad only opens and closes it."""
    return torch.autograd.forward_ad._current_level


def translator() -> Any:
    """Return what Dynamo traces with, imported late: torch.compiler tells neither its place nor its options."""
    return import_module("torch._dynamo.symbolic_convert").InstructionTranslator.current_tx()
