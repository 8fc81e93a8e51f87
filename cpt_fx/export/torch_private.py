"""Private names of torch that exports use, each with the reason: what public torch lacks."""

from torch._decomp import decomposition_table  # all that torch has: torch.export.default_decompositions has some
from torch._dispatch.python import enable_python_dispatcher  # composite operators on symbolic shapes
from torch._subclasses import fake_tensor  # sizes as symbols, and the errors where code asks for a value
from torch.nn.modules.instancenorm import _InstanceNorm as InstanceNorm  # the base of all instance norms
from torch.onnx._internal.exporter._registration import ONNXRegistry  # which operators the exporter translates
