"""Batch normalization of a single value: torch refuses it, ONNX Runtime makes the running variance NaN for good."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import onnx
from numpy.typing import NDArray

from cpt_fx.export.manifest import Manifest

_NORMS = ("BatchNormalization", "BatchNormInternal")


def needs_two(path: Path) -> bool:
    """Look whether a training graph normalizes, per channel, over nothing but the batch."""
    graph = onnx.load(str(path), load_external_data=False).graph
    shapes = {value.name: value.type.tensor_type.shape for value in (*graph.value_info, *graph.input, *graph.output)}
    for node in graph.node:
        if node.op_type in _NORMS and node.input[0] in shapes:
            first, _, *rest = [dim.dim_value for dim in shapes[node.input[0]].dim]
            # 0 stands for a dim that varies.
            if not first and math.prod(rest) == 1:
                return True
    return False


def check_two(manifest: Manifest, arrays: Mapping[str, NDArray[Any]]) -> None:
    """Refuse a batch of one example."""
    for tensor in manifest.inputs:
        if tensor.shape[:1] == (None,) and len(arrays[tensor.name]) == 1:
            raise ValueError(
                f"{tensor.name} holds 1 example; the model trains with batch normalization over the examples alone, "
                "which takes at least 2: leave out a last batch of one (DataLoader(drop_last=True))"
            )
