"""Language models in plain PyTorch."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

State = tuple[Tensor, ...]


class LSTMModel(nn.Module):
    """Embedding, LSTM, decoder. Reads (positions, batch); its state is passed on to the next piece of text."""

    def __init__(self, vocabulary: int, width: int, layers: int = 1, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, width, layers, dropout=dropout if layers > 1 else 0.0)
        self.dropout = nn.Dropout(dropout)
        self.decoder = nn.Linear(width, vocabulary)
        nn.init.uniform_(self.embedding.weight, -0.1, 0.1)
        nn.init.uniform_(self.decoder.weight, -0.1, 0.1)
        nn.init.zeros_(self.decoder.bias)

    def forward(self, tokens: Tensor, hidden: Tensor, cell: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # noqa: D102
        output, (hidden, cell) = self.lstm(self.dropout(self.embedding(tokens)), (hidden, cell))
        return self.decoder(self.dropout(output)), hidden, cell

    def first_state(self, batch: int) -> State:
        """Return the state before the first piece of a text."""
        shape = (self.lstm.num_layers, batch, self.lstm.hidden_size)
        return torch.zeros(shape), torch.zeros(shape)


class TransformerModel(nn.Module):
    """A decoder-only transformer. Reads (positions, batch), at most `positions` at a time, and has no state."""

    mask: Tensor

    def __init__(
        self, vocabulary: int, width: int, layers: int = 2, dropout: float = 0.0, heads: int = 4, positions: int = 512
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(0.02 * torch.randn(positions, 1, width))
        self.dropout = nn.Dropout(dropout)
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, nn.LayerNorm(width), enable_nested_tensor=False)
        self.decoder = nn.Linear(width, vocabulary)
        nn.init.normal_(self.embedding.weight, std=1 / math.sqrt(width))
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(positions), persistent=False)

    def forward(self, tokens: Tensor) -> tuple[Tensor]:  # noqa: D102
        length = tokens.size(0)
        x = self.dropout(self.embedding(tokens) + self.position[:length])
        return (self.decoder(self.encoder(x, mask=self.mask[:length, :length], is_causal=True)),)

    def first_state(self, batch: int) -> State:
        """Return nothing: a transformer sees only the piece it is given."""
        return ()


MODELS = {"lstm": LSTMModel, "transformer": TransformerModel}
