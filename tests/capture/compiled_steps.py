"""Training steps of real models with dropout, transformed and compiled: by a name, in a process that may crash.

python -m tests.capture.compiled_steps bert-classifier
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import cpt_fx
from cpt_fx.schedules import Static

Made = tuple[nn.Module, Callable[[Any], Tensor]]
"""A model, and what calls it (or what it was compiled to) and returns a loss."""
SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "vocab_size": 100,
}
ROBERTA = {**SMALL, "max_position_embeddings": 64}


def _of_words(name: str, head: str, **options: Any) -> Made:
    transformers = __import__("transformers")
    model = getattr(transformers, head)(getattr(transformers, f"{name}Config")(**options))
    words = torch.randint(5, 90, (4, 8))
    labels = torch.tensor([0, 1, 1, 0]) if "Classification" in head else words
    return model, lambda call: call(input_ids=words, labels=labels).loss


def _of_numbers(model: nn.Module, *shape: int) -> Made:
    x, labels = torch.randn(4, *shape), torch.tensor([0, 1, 2, 1])
    return model, lambda call: nn.functional.cross_entropy(call(x), labels)


class _Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.LSTM(6, 16, 2, dropout=0.2, batch_first=True), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[0][:, -1])  # type: ignore[no-any-return]


def _images() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout2d(0.2), nn.Conv2d(8, 8, 3, stride=2),
        nn.ReLU(), nn.Flatten(), nn.Dropout(0.5), nn.Linear(72, 3),
    )  # fmt: skip


def _encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(32, 4, 48, dropout=0.1, batch_first=True)
    return nn.Sequential(nn.Linear(6, 32), layer, nn.Flatten(), nn.Linear(160, 3))


GPT2 = {"n_embd": 32, "n_layer": 1, "n_head": 4, "n_positions": 16, "vocab_size": 100}
T5 = {
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 1,
    "num_heads": 4,
    "vocab_size": 100,
    "decoder_start_token_id": 0,
}
DISTIL = {"dim": 32, "n_layers": 1, "n_heads": 4, "hidden_dim": 48, "vocab_size": 100}
MODELS: dict[str, Callable[[], Made]] = {
    "bert-classifier": lambda: _of_words("Bert", "BertForSequenceClassification", **SMALL),
    "convolutions": lambda: _of_numbers(_images(), 3, 8, 8),
    "encoder": lambda: _of_numbers(_encoder(), 5, 6),
    "lstm": lambda: _of_numbers(_Recurrent(), 5, 6),
    "bert": lambda: _of_words("Bert", "BertForMaskedLM", **SMALL),
    "roberta-classifier": lambda: _of_words("Roberta", "RobertaForSequenceClassification", **ROBERTA),
    "albert-classifier": lambda: _of_words("Albert", "AlbertForSequenceClassification", embedding_size=16, **SMALL),
    "electra-classifier": lambda: _of_words("Electra", "ElectraForSequenceClassification", **SMALL),
    "distilbert-classifier": lambda: _of_words("DistilBert", "DistilBertForSequenceClassification", **DISTIL),
    "gpt2": lambda: _of_words("GPT2", "GPT2LMHeadModel", **GPT2),
    "t5": lambda: _of_words("T5", "T5ForConditionalGeneration", **T5),
}


def main(name: str) -> None:
    """Take three steps."""
    torch.manual_seed(0)
    model, loss_of = MODELS[name]()
    result = cpt_fx.transform(model.train(), Static(8))
    compiled = torch.compile(result)
    optimizer = torch.optim.SGD(result.parameters(), lr=0.01)
    for _ in range(3):
        loss = loss_of(compiled)
        loss.backward()
        gradients = [p.grad for p in result.parameters() if p.grad is not None]
        assert gradients and all(bool(gradient.isfinite().all()) for gradient in gradients)
        optimizer.step()
        optimizer.zero_grad()
        assert math.isfinite(loss.item())
        print(loss.item(), flush=True)
    print("three steps")


if __name__ == "__main__":
    main(sys.argv[1])
