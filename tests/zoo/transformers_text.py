"""Language models of the transformers library: random weights, a narrow layer or two, labels for a loss."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.zoo.any_model import Inputs, add, integers, package

TEXT, DECODER, BOTH = "transformers encoder", "transformers decoder", "transformers encoder-decoder"
MIXTURE, STATE_SPACE = "transformers mixture of experts", "transformers state space"
VOCABULARY, LENGTH = 32, 5
# By every name that configurations use for the same thing; one that does not know a name ignores it.
SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "intermediate_size": 24, "max_position_embeddings": 16, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
TWO_LAYERS: dict[str, Any] = {**SMALL, "num_hidden_layers": 2}
SMALL_DECODER: dict[str, Any] = {**SMALL, "num_key_value_heads": 1, "use_cache": False}
SMALL_BOTH: dict[str, Any] = {
    "vocab_size": VOCABULARY, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "max_position_embeddings": 16,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2, "use_cache": False,
}  # fmt: skip


def register(
    family: str, config: str, head: str, inputs: Inputs, name: str = "", *, freeze: bool = False,
    rounding: bool = False, **options: Any,
) -> None:  # fmt: skip
    """Register the class `config + head` (a head with a dot in front is a whole class name) with a configuration."""

    def model() -> nn.Module:
        library = package("transformers")
        kind = getattr(library, head[1:] if head.startswith(".") else config + head)
        made = kind(getattr(library, f"{config}Config")(**options))
        if freeze:
            made.freeze_feature_encoder()
        assert isinstance(made, nn.Module)
        return made.train()

    add(family, name or config.lower(), model, inputs, needs="transformers", rounding=rounding)


def tokens(size: int) -> Tensor:
    """Word indices without the special ones."""
    return integers(VOCABULARY - 3, size, LENGTH) + 3


def mask(size: int) -> Tensor:
    """One at words, zero where a sentence has ended."""
    return (torch.arange(LENGTH)[None] < LENGTH - torch.arange(size)[:, None] % 2).long()


def every_word(size: int) -> dict[str, Any]:
    """Words, each with a label."""
    words = tokens(size)
    return {"input_ids": words, "attention_mask": mask(size), "labels": words.roll(1, 0)}


def every_sentence(size: int) -> dict[str, Any]:
    """Words, and one label for each sentence."""
    return {"input_ids": tokens(size), "attention_mask": mask(size), "labels": torch.arange(size) % 2}


def translation(size: int) -> dict[str, Any]:
    """Words of two languages."""
    return {"input_ids": tokens(size), "attention_mask": mask(size), "labels": tokens(size)[:, :4]}


def _layout(size: int) -> dict[str, Any]:
    corner = integers(8, size, LENGTH, 2)
    return {**every_word(size), "bbox": torch.cat([corner, corner + 2], dim=-1)}


def _passages(size: int) -> dict[str, Any]:
    return {"input_ids": tokens(size), "start_positions": torch.arange(size) % LENGTH,
            "end_positions": torch.arange(size) % LENGTH}  # fmt: skip


# fmt: off

# Encoders

register(TEXT, "Bert", "ForMaskedLM", every_word, **TWO_LAYERS)
register(TEXT, "Bert", "ForSequenceClassification", every_sentence, "bert_eager_attention",
         attn_implementation="eager", **SMALL)
register(TEXT, "Roberta", "ForTokenClassification", every_word, num_labels=VOCABULARY, **SMALL)
register(TEXT, "DistilBert", "ForSequenceClassification", every_sentence, vocab_size=VOCABULARY, dim=16, n_layers=1,
         n_heads=2, hidden_dim=24, max_position_embeddings=16)
register(TEXT, "Albert", "ForMaskedLM", every_word, embedding_size=8, **SMALL)
register(TEXT, "DebertaV2", "ForTokenClassification", every_word, num_labels=VOCABULARY, relative_attention=True,
         pos_att_type=["p2c", "c2p"], position_buckets=4, norm_rel_ebd="layer_norm", share_att_key=True,
         **SMALL)
register(TEXT, "Electra", "ForQuestionAnswering", _passages, embedding_size=8, **SMALL)
register(TEXT, "XLNet", "ForSequenceClassification", every_sentence, vocab_size=VOCABULARY, d_model=16, n_layer=1,
         n_head=2, d_inner=24)
register(TEXT, "LayoutLM", "ForTokenClassification", _layout, num_labels=VOCABULARY, max_2d_position_embeddings=16,
         **SMALL)
register(TEXT, "ModernBert", "ForMaskedLM", every_word, global_attn_every_n_layers=2, local_attention=2,
         cls_token_id=1, sep_token_id=2, **TWO_LAYERS)

# Decoders

register(DECODER, "GPT2", "LMHeadModel", every_word, vocab_size=VOCABULARY, n_embd=16, n_layer=1, n_head=2,
         n_positions=16, bos_token_id=1, eos_token_id=2)
register(DECODER, "GPTNeoX", "ForCausalLM", every_word, **SMALL_DECODER)
register(DECODER, "Llama", "ForCausalLM", every_word, **{**SMALL_DECODER, "num_hidden_layers": 2})
register(DECODER, "Mistral", "ForCausalLM", every_word, sliding_window=3, **SMALL_DECODER)
register(DECODER, "Qwen2", "ForCausalLM", every_word, **SMALL_DECODER)
register(DECODER, "Qwen3", "ForCausalLM", every_word, head_dim=8, **SMALL_DECODER)
register(DECODER, "Gemma2", "ForCausalLM", every_word, head_dim=8, **{**SMALL_DECODER, "num_hidden_layers": 2})
register(DECODER, "Phi", "ForCausalLM", every_word, **SMALL_DECODER)
register(DECODER, "Falcon", "ForCausalLM", every_word, **SMALL_DECODER)
register(DECODER, "Bloom", "ForCausalLM", every_word, vocab_size=VOCABULARY, hidden_size=16, n_layer=1, n_head=2,
         use_cache=False)
register(DECODER, "OPT", "ForCausalLM", every_word, "opt_layer_drop", vocab_size=VOCABULARY, hidden_size=16,
         num_hidden_layers=1, num_attention_heads=2, ffn_dim=24, max_position_embeddings=16, word_embed_proj_dim=16,
         layerdrop=0.3, use_cache=False)

# Encoder-decoders

register(BOTH, "T5", "ForConditionalGeneration", translation, vocab_size=VOCABULARY, d_model=16, d_kv=8, d_ff=24,
         num_layers=1, num_heads=2, decoder_start_token_id=0, use_cache=False)
register(BOTH, "Bart", "ForConditionalGeneration", translation, "bart_layer_drop",
         encoder_layerdrop=0.3, **SMALL_BOTH)
register(BOTH, "Marian", ".MarianMTModel", translation, decoder_vocab_size=VOCABULARY, **SMALL_BOTH)
register(BOTH, "Pegasus", "ForConditionalGeneration", translation, **SMALL_BOTH)

# Mixtures of experts

register(MIXTURE, "Mixtral", "ForCausalLM", every_word, num_local_experts=4, output_router_logits=True,
         **SMALL_DECODER)
register(MIXTURE, "Qwen2Moe", "ForCausalLM", every_word, num_experts=4, num_experts_per_tok=2,
         moe_intermediate_size=12, shared_expert_intermediate_size=12, **SMALL_DECODER)
register(MIXTURE, "Olmoe", "ForCausalLM", every_word, num_experts=4, num_experts_per_tok=2, **SMALL_DECODER)
# Its experts are a loop over those that were chosen: the graph breaks at each, which takes Dynamo seconds.
register(MIXTURE, "SwitchTransformers", "EncoderModel", lambda size: {"input_ids": tokens(size)},
         vocab_size=VOCABULARY, d_model=16, d_kv=8, d_ff=24, num_layers=1, num_sparse_encoder_layers=1, num_heads=2,
         num_experts=2, expert_capacity=8)

# State spaces

register(STATE_SPACE, "Mamba", "ForCausalLM", every_word, vocab_size=VOCABULARY, hidden_size=8, num_hidden_layers=1,
         state_size=4, time_step_rank=2, use_cache=False, use_associative_scan=False)
register(STATE_SPACE, "FalconMamba", "ForCausalLM", every_word, rounding=True, vocab_size=VOCABULARY, hidden_size=8,
         num_hidden_layers=1, state_size=4, time_step_rank=2, use_cache=False)
register(STATE_SPACE, "Mamba2", "ForCausalLM", every_word, vocab_size=VOCABULARY, hidden_size=8, num_hidden_layers=1,
         num_heads=4, head_dim=4, state_size=4, n_groups=1, chunk_size=4, use_cache=False)
register(STATE_SPACE, "Rwkv", "ForCausalLM", every_word, vocab_size=VOCABULARY, hidden_size=8, num_hidden_layers=2,
         attention_hidden_size=8, intermediate_size=12, use_cache=False)
register(STATE_SPACE, "RecurrentGemma", "ForCausalLM", every_word, lru_width=16, attention_window_size=4,
         block_types=["recurrent", "attention"], head_dim=8, **{**SMALL_DECODER, "num_hidden_layers": 2})
