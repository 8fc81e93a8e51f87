"""Private names of Dynamo, each with the reason: what torch.compiler lacks.

Apart from the module of its room, since to import Dynamo takes seconds.
"""

from importlib import import_module
from typing import Any

from torch._dynamo import config, eval_frame  # torch.compile has few options, and does not tell its backend
from torch._dynamo.callback import callback_handler  # when tracing starts and ends
from torch._dynamo.exc import RestartAnalysis, unimplemented  # traces again, or breaks the graph with a reason
from torch._dynamo.guards import GuardBuilder  # the code is captured again if an object is another one
from torch._dynamo.side_effects import SideEffects  # what code does besides its result, which a graph would not
from torch._dynamo.source import AttrSource, LocalSource  # where Dynamo has found a value
from torch._dynamo.variables.base import AttributeMutationNew, ValueMutationNew  # changes of objects made inside
from torch._dynamo.variables.higher_order_ops import CheckpointHigherOrderVariable  # how it captures a checkpoint
from torch._guards import ChainedSource, Source  # their bases
from torch._higher_order_ops.map import map_impl  # what its graphs call for `map`,
from torch._higher_order_ops.scan import scan_op  # `scan`
from torch._higher_order_ops.while_loop import while_loop_op  # and `while_loop`
from torch.utils._sympy.printers import PythonPrinter  # writes a condition on sizes as code

capture_checkpoint: Any = CheckpointHigherOrderVariable._call_function  # replaced, and called
shapes_config: Any = import_module("torch.fx.experimental._config")  # how sizes become symbols; torch does not type it


def stance() -> Any:
    """Return the stance of torch.compile: torch.compiler.set_stance sets it only."""
    return eval_frame._stance
