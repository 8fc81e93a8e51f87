"""Private names of torch that graphs use, each with the reason: what public torch lacks."""

from typing import Any

import torch
from torch.autograd.grad_mode import _enter_inference_mode as enter_inference_mode  # what graphs call for `with`
from torch.autograd.grad_mode import _exit_inference_mode as exit_inference_mode  # its end
from torch.fx.node import _get_qualified_name as get_qualified_name  # the path that fx writes into code

schemas_of: Any = torch._C._jit_get_schemas_for_operator  # which arguments the overloads of an ATen name overwrite
DISPATCHING = (torch._ops.__file__, torch._tensor.__file__)  # files of torch between a line of code and its operator
