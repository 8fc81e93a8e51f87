"""Classifiers of text pairs from transformers, each with its tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from support.pairs import Numbers, Pair, Pairs, Tokenizer, Vocabulary

Made = tuple[Callable[[], nn.Module], Tokenizer]


def tiny(pairs: Pairs, length: int, layers: int) -> Made:
    """Return a small BERT with random weights, and a vocabulary of the words, or word parts, of the training pairs."""
    transformers = _transformers()
    vocabulary = Vocabulary(pairs.train, pairs.units)
    config = transformers.BertConfig(
        vocab_size=len(vocabulary.entries),
        hidden_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        intermediate_size=256,
        max_position_embeddings=length,
        num_labels=len(pairs.labels),
    )
    return lambda: transformers.BertForSequenceClassification(config), vocabulary


def checkpoint(name: str, pairs: Pairs, length: int) -> Made:
    """Return a pretrained model by name or path, with a new classifier, and its own tokenizer."""
    transformers = _transformers()
    try:
        own = transformers.AutoTokenizer.from_pretrained(name)
        config = transformers.AutoConfig.from_pretrained(name, num_labels=len(pairs.labels))
    except (OSError, ValueError) as error:
        raise ValueError(
            f"--model {name}: transformers finds no checkpoint there, give `tiny`, a name on the Hugging Face hub, or "
            f"a folder with config.json, the weights and the tokenizer ({str(error).splitlines()[0]})"
        ) from error
    longest = getattr(config, "max_position_embeddings", length)
    if length > longest:
        raise ValueError(f"--length {length}: {name} reads at most {longest} tokens")

    def tokenize(chosen: Sequence[Pair], length: int) -> Numbers:
        found = own(
            [one for one, _, _ in chosen],
            [other for _, other, _ in chosen],
            padding="max_length",
            truncation=True,
            max_length=length,
            return_tensors="pt",
            return_token_type_ids=True,
        )
        labels = torch.tensor([label for _, _, label in chosen])
        return Numbers(found["input_ids"], found["attention_mask"], found["token_type_ids"], labels)

    def build() -> nn.Module:
        made: nn.Module = transformers.AutoModelForSequenceClassification.from_pretrained(name, config=config)
        return made

    return build, tokenize


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise ImportError('this example needs transformers: pip install "cpt_fx[transformers]"') from error
    return transformers
