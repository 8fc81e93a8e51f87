"""All cases of the operator table."""

from __future__ import annotations

from tests.export.operator_case import Case
from tests.export.operators_elementwise import ELEMENTWISE, REDUCTIONS
from tests.export.operators_layers import (
    ACTIVATIONS,
    ATTENTION,
    CONVOLUTIONS,
    DROPOUT,
    NORMALIZATION,
    POOLING,
    RECURRENT,
)
from tests.export.operators_tensors import EMBEDDINGS, INDEXING, LOSSES, PADDING, PRODUCTS, SHAPES

SECTIONS = (
    ELEMENTWISE, REDUCTIONS, ACTIVATIONS, NORMALIZATION, POOLING, CONVOLUTIONS, PRODUCTS, RECURRENT, ATTENTION,
    EMBEDDINGS, DROPOUT, SHAPES, INDEXING, PADDING, LOSSES,
)  # fmt: skip
CASES: list[Case] = [case for section in SECTIONS for case in section]
