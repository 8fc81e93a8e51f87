"""Recurrent layers and cells: fused operators, which are decomposed into their products where possible."""

from __future__ import annotations

import torch
from torch import nn

from cpt_fx.operators.row import left

_INSIDE = "its products are not separate operators in this graph"
_CELL = f"fused recurrent cell: {_INSIDE}"
_KERNEL = f"fused recurrent kernel: {_INSIDE}"

ROWS = (
    left(_KERNEL, "lstm", function=torch.lstm, modules=(nn.RNNBase,)),
    *(left(_KERNEL, name, function=getattr(torch, name)) for name in ("gru", "rnn_tanh", "rnn_relu")),
    left(_CELL, "lstm_cell", function=torch.lstm_cell, modules=(nn.RNNCellBase,)),
    *(left(_CELL, name, function=getattr(torch, name)) for name in ("gru_cell", "rnn_tanh_cell", "rnn_relu_cell")),
    left(
        _KERNEL, "mkldnn_rnn_layer", "mkldnn_rnn_layer_backward", "_cudnn_rnn", "_cudnn_rnn_backward", "miopen_rnn",
        "miopen_rnn_backward", "_lstm_mps", "lstm_mps_backward", "quantized_lstm", "quantized_gru",
        "quantized_lstm_cell", "quantized_gru_cell", "quantized_rnn_relu_cell", "quantized_rnn_tanh_cell",
        name="fused_recurrent",
    ),
)  # fmt: skip
