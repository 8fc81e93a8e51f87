"""Vision models of timm: one of each kind of block. Importing timm imports torchvision, which not every torch has."""

from __future__ import annotations

from typing import Any

from torch import nn

from tests.zoo.any_model import add, normal, package


def _create(name: str, options: dict[str, Any]) -> nn.Module:
    """Make a model by the name it has in the register of timm, or by its class."""
    if name == "MlpMixer":
        made = package("timm.models.mlp_mixer").MlpMixer(num_classes=3, **options)
    else:
        made = package("timm").create_model(name, pretrained=False, num_classes=3, **options)
    assert isinstance(made, nn.Module)
    return made


def vision(name: str, kind: str, side: int = 32, **options: Any) -> None:
    """Register a model of timm with the options that make it small."""
    add("timm", name, lambda: _create(kind, options), normal(3, side, side), needs="timm")


NARROW: dict[str, Any] = {"embed_dim": 16, "depth": 2, "num_heads": 2}

vision("timm_resnet_drop_path", "resnet10t", channels=(8, 8, 8, 8), stem_width=4, drop_path_rate=0.3,
       block_args={"attn_layer": "se"})  # fmt: skip
vision("timm_vit", "vit_tiny_patch16_224", img_size=32, drop_rate=0.1, drop_path_rate=0.2, **NARROW)
vision("timm_vit_attention_pool", "test_vit3", img_size=32)
vision("timm_deit_distilled", "deit_tiny_distilled_patch16_224", img_size=32, **NARROW)
vision("timm_convnext", "convnext_atto", depths=(1, 1, 1, 1), dims=(4, 8, 8, 16), drop_path_rate=0.2)
vision("timm_efficientnet", "test_efficientnet", drop_rate=0.1, drop_path_rate=0.2)
vision("timm_nfnet", "test_nfnet")
vision("timm_byobnet", "test_byobnet")
vision("timm_mixer", "MlpMixer", img_size=32, patch_size=16, num_blocks=2, embed_dim=16)
vision("timm_swin", "swin_tiny_patch4_window7_224", img_size=32, window_size=4, embed_dim=8, depths=(1, 2),
       num_heads=(1, 2), drop_path_rate=0.2)  # fmt: skip
vision("timm_maxvit", "test_maxvit", 64, img_size=64)
vision("timm_coatnet", "test_coatnet", 64, img_size=64)
