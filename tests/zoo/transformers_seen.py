"""Vision, speech and multi-modal models of the transformers library, as small as their code allows."""

from __future__ import annotations

from typing import Any

import torch

from tests.zoo.any_model import Inputs
from tests.zoo.transformers_text import SMALL, SMALL_BOTH, VOCABULARY, mask, register, tokens

VISION, SPEECH, SEVERAL = "transformers vision", "transformers speech", "transformers multi-modal"
SMALL_VISION: dict[str, Any] = {**SMALL, "image_size": 16, "patch_size": 8, "num_labels": 3}


def pictures(side: int) -> Inputs:
    """Pictures with one label each."""
    return lambda size: {"pixel_values": torch.randn(size, 3, side, side), "labels": torch.arange(size) % 3}


def _regions(size: int) -> dict[str, Any]:
    return {"pixel_values": torch.randn(size, 3, 32, 32), "labels": torch.randint(0, 3, (size, 32, 32))}


def _sound(size: int) -> dict[str, Any]:
    return {"input_values": torch.randn(size, 400), "labels": torch.arange(size) % 3}


def _dictation(size: int) -> dict[str, Any]:
    return {"input_values": torch.randn(size, 400), "labels": torch.arange(2 * size).view(size, 2) % 5 + 3}


def _spectrum(size: int) -> dict[str, Any]:
    return {"input_features": torch.randn(size, 8, 16), "labels": tokens(size)[:, :3]}


def _captions(size: int) -> dict[str, Any]:
    words = tokens(size)
    words[:, -1] = 2
    return {"input_ids": words, "attention_mask": mask(size), "pixel_values": torch.randn(size, 3, 16, 16),
            "return_loss": True}  # fmt: skip


# fmt: off

register(VISION, "ViT", "ForImageClassification", pictures(16), **SMALL_VISION)
register(VISION, "DeiT", "ForImageClassification", pictures(16), **SMALL_VISION)
register(VISION, "Beit", "ForImageClassification", pictures(16), "beit_drop_path", drop_path_rate=0.4,
         use_relative_position_bias=True, **SMALL_VISION)
register(VISION, "Swin", "ForImageClassification", pictures(16), image_size=16, patch_size=2, embed_dim=8,
         depths=[2, 1], num_heads=[1, 2], window_size=2, drop_path_rate=0.3, num_labels=3)
register(VISION, "ConvNext", "ForImageClassification", pictures(32), hidden_sizes=[4, 4, 8, 8], depths=[1, 1, 1, 1],
         num_labels=3, drop_path_rate=0.3)
register(VISION, "Segformer", "ForSemanticSegmentation", _regions, num_encoder_blocks=2, depths=[1, 1],
         sr_ratios=[2, 1], hidden_sizes=[8, 16], patch_sizes=[7, 3], strides=[4, 2], num_attention_heads=[1, 2],
         mlp_ratios=[2, 2], decoder_hidden_size=8, num_labels=3)
register(VISION, "ResNet", "ForImageClassification", pictures(16), embedding_size=4, hidden_sizes=[4, 8],
         depths=[1, 1], layer_type="basic", num_labels=3)
register(VISION, "Yolos", "ForObjectDetection", lambda size: {"pixel_values": torch.randn(size, 3, 32, 32)},
         num_detection_tokens=4, **{**SMALL_VISION, "image_size": [32, 32], "patch_size": 16})

SMALL_SPEECH: dict[str, Any] = {
    **SMALL, "conv_dim": (8, 8), "conv_stride": (10, 4), "conv_kernel": (10, 8), "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "layerdrop": 0.0, "num_labels": 3,
    "classifier_proj_size": 8,
}
# Its masks come from numpy's generator.
MASKED: dict[str, Any] = {"mask_time_prob": 0.3, "mask_time_length": 2, "mask_time_min_masks": 1}
register(SPEECH, "Wav2Vec2", "ForSequenceClassification", _sound, freeze=True, mask_time_prob=0.0, **SMALL_SPEECH)
register(SPEECH, "Wav2Vec2", "ForCTC", _dictation, "wav2vec2_masked", freeze=True, ctc_loss_reduction="mean", **MASKED,
         **{**SMALL_SPEECH, "layerdrop": 0.3})
register(SPEECH, "Hubert", "ForSequenceClassification", _sound, freeze=True, mask_time_prob=0.0, **SMALL_SPEECH)
register(SPEECH, "Whisper", "ForConditionalGeneration", _spectrum, num_mel_bins=8, max_source_positions=8,
         max_target_positions=8, **SMALL_BOTH)
register(SPEECH, "Speech2Text", "ForConditionalGeneration",
         lambda size: {"input_features": torch.randn(size, 24, 8), "labels": tokens(size)[:, :3]},
         input_feat_per_channel=8, conv_channels=8, max_source_positions=16, max_target_positions=8, **SMALL_BOTH)

register(SEVERAL, "CLIP", "Model", _captions, projection_dim=8, text_config=SMALL, vision_config=SMALL_VISION)
register(SEVERAL, "Perceiver", "ForMaskedLM", lambda size: {"inputs": tokens(size), "labels": tokens(size)},
         num_latents=4, d_latents=8, d_model=8, num_blocks=1, num_self_attends_per_block=1,
         num_self_attention_heads=2, num_cross_attention_heads=2, vocab_size=VOCABULARY, max_position_embeddings=5)
