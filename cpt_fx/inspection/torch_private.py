"""Private names of torch that inspection uses, each with the reason: what public torch lacks."""

import torch
from torch.autograd.graph import _engine_run_backward as run_backward  # the frame in which every backward pass starts
from torch.utils._python_dispatch import _pop_mode as pop_mode  # `with mode` also sets flags of the whole process
from torch.utils._python_dispatch import _push_mode as push_mode  # the same

disabled_torch_dispatch = torch._C._disabled_torch_dispatch_impl  # what a subclass has that dispatches nothing
has_computed_kernel = torch._C._dispatch_has_computed_kernel_for_dispatch_key  # torch.library does not tell
get_mkldnn_enabled = torch._C._get_mkldnn_enabled  # torch.backends.mkldnn.flags also sets an option of Intel GPUs,
set_mkldnn_enabled = torch._C._set_mkldnn_enabled  # which warns where there are none, and `enabled` may be frozen
