"""Private names of torch that quantizers use, each with the reason: what public torch lacks."""

import torch

dispatch_mode_at = torch._C._get_dispatch_stack_at  # the active dispatch modes are not listed
storage_use_count = torch._C._storage_Use_Count  # whether a buffer can be used again; sys.getrefcount sees Python only
graph_task_id = torch._C._current_graph_task_id  # whether a backward pass runs: checkpointing computes again in it
pop_saved_tensors_hooks = torch._C._autograd._pop_saved_tensors_default_hooks  # public: a `with` block, and no way
push_saved_tensors_hooks = torch._C._autograd._push_saved_tensors_default_hooks  # to stand before hooks that are set
