"""Private names of torch that the table of operators uses, each with the reason: what public torch lacks."""

from typing import Any

import torch

_C: Any = torch._C  # typed in part
VF = _C._VariableFunctions  # what torch.einsum and others call; its variants take other arguments
nn_functions = _C._nn  # functions of ATen that F does not have, or wraps
linalg = _C._linalg  # those of torch.linalg, under ATen's names
sparse = _C._sparse  # those of torch.sparse
convolution = torch._convolution  # what traces by TorchScript call
embedding_bag = torch._embedding_bag  # what torch.embedding_bag is in graphs
grouped_mm = torch._grouped_mm  # transformers calls it for experts
LOW_RANK = (  # what torch.svd_lowrank, torch.pca_lowrank and torch.lobpcg call inside, each by itself
    torch._lowrank.get_approximate_basis, torch._lowrank._svd_lowrank, torch._linalg_utils.matmul,
    torch._linalg_utils.bform, torch._linalg_utils.qform, torch._linalg_utils.basis, torch._linalg_utils.symeig,
)  # fmt: skip
