"""Other packages for low-precision training, each set up as its documentation says. Each function converts a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

INSTALL = 'not installed: pip install "cpt_fx[bench]"'


def torch_ao_fx(model: nn.Module, inputs: tuple[Any, ...]) -> nn.Module:
    """Prepare quantization-aware training by torch.ao: weights and activations, 8 bits."""
    from torch.ao.quantization import get_default_qat_qconfig_mapping
    from torch.ao.quantization.quantize_fx import prepare_qat_fx

    prepared: nn.Module = prepare_qat_fx(model, get_default_qat_qconfig_mapping("x86"), inputs)
    layers = sum(hasattr(module, "weight_fake_quant") for module in prepared.modules())
    return _checked(prepared, layers, "torch.ao")


def torchao(model: nn.Module, inputs: tuple[Any, ...]) -> nn.Module:
    """Let torchao multiply linear layers in int8. Without `module_swap` the CPU silently runs FP32."""
    try:
        from torchao.prototype.quantized_training import int8_mixed_precision_training
        from torchao.quantization import quantize_
    except ImportError as error:
        raise ImportError(_why(error, "torchao")) from error
    quantize_(model, int8_mixed_precision_training(module_swap=True))
    layers = sum(type(module).__name__.startswith("Int8MixedPrecision") for module in model.modules())
    return _checked(model, layers, "torchao")


def brevitas(model: nn.Module, inputs: tuple[Any, ...]) -> nn.Module:
    """Replace layers by Brevitas layers: weights and activations, 8 bits."""
    try:
        from brevitas.graph.quantize import layerwise_quantize
        from brevitas.nn.mixin import QuantWeightMixin
    except ImportError as error:
        raise ImportError(_why(error, "brevitas")) from error
    prepared: nn.Module = layerwise_quantize(model)
    return _checked(prepared, sum(isinstance(module, QuantWeightMixin) for module in prepared.modules()), "Brevitas")


def _why(error: ImportError, package: str) -> str:
    missing = isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] == package
    return INSTALL if missing else f"cannot be imported: {error}"


def _checked(model: nn.Module, layers: int, package: str) -> nn.Module:
    """Refuse a model that a peer left unchanged: it would be timed as FP32."""
    if not layers:
        raise ValueError(f"{package} found no layer that it quantizes")
    return model


BUILDERS: dict[str, Callable[[nn.Module, tuple[Any, ...]], nn.Module]] = {
    "torch-ao-fx": torch_ao_fx,
    "torchao": torchao,
    "brevitas": brevitas,
}
