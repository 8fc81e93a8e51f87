"""The elementwise steps of recurrent layers, and the loop over time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Step = Callable[..., tuple[Tensor, ...]]


def scan(
    body: Step,
    inputs: Tensor,
    state: Sequence[Tensor],
    constants: Sequence[Tensor | None],
    *,
    reverse: bool = False,
    batch_sizes: Tensor | None = None,
    autocasts_on_cpu: bool = False,
) -> tuple[Tensor, ...]:
    """Run the steps of a loop over time: `state = body(input, *state, *constants)`.

    Returns the first part of every state, joined along time, then the last state. The number of steps is known only
    at run time. With `batch_sizes`, sequences are packed: their lengths decrease, and a step sees the rows of those
    that are still running. Under autocast the state has the dtype in which the fused kernel would return it.
    """
    device = inputs.device.type
    autocasts = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    if autocasts and (autocasts_on_cpu or device != "cpu"):
        state = [part.to(inputs.dtype) for part in state]
    pieces = inputs.unbind(0) if batch_sizes is None else inputs.split(batch_sizes.tolist())
    if not pieces:
        raise ValueError("a recurrent layer needs at least one time step, got a sequence of length 0")
    current, rest, outputs = tuple(state), tuple[Tensor, ...](), []
    for piece in reversed(pieces) if reverse else pieces:
        if batch_sizes is not None and piece.shape[0] != current[0].shape[0]:
            # Sequences that end leave at the end of the batch; in reverse they join it there.
            whole, rows = _joined(current, rest), piece.shape[0]
            current, rest = tuple(part[:rows] for part in whole), tuple(part[rows:] for part in whole)
        current = tuple(body(piece, *current, *constants))
        outputs.append(current[0])
    join: Any = torch.stack if batch_sizes is None else torch.cat
    return (join(outputs[::-1] if reverse else outputs), *_joined(current, rest))


def _joined(first: tuple[Tensor, ...], second: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(map(torch.cat, zip(first, second, strict=True))) if second else first


def lstm_step(inputs: Tensor, hidden: Tensor, cell: Tensor) -> tuple[Tensor, Tensor]:
    """Return the next output and cell of an LSTM, given the products of its input and of its last output."""
    i, f, g, o = (inputs + hidden).chunk(4, dim=-1)
    cell = torch.sigmoid(f) * cell + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(cell), cell


def gru_step(inputs: Tensor, hidden: Tensor, last: Tensor) -> Tensor:
    """Return the next output of a GRU, given the products of its input and of its last output."""
    input_r, input_z, input_n = inputs.chunk(3, dim=-1)
    hidden_r, hidden_z, hidden_n = hidden.chunk(3, dim=-1)
    reset, update = torch.sigmoid(input_r + hidden_r), torch.sigmoid(input_z + hidden_z)
    new = torch.tanh(input_n + reset * hidden_n)
    return new + update * (last - new)


def tanh_step(inputs: Tensor, hidden: Tensor) -> Tensor:
    """Return the next output of a plain recurrent layer with tanh."""
    return torch.tanh(inputs + hidden)


def relu_step(inputs: Tensor, hidden: Tensor) -> Tensor:
    """Return the next output of a plain recurrent layer with ReLU."""
    return torch.relu(inputs + hidden)
