"""Virtual Blackwell: train and run transformer models several times larger than the GPU's memory.

The public names. They are resolved on first use, so that importing the package costs nothing beyond torch and never
touches a GPU.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_WHERE = {
    "enable_vgpu_stack_optimization": "vblackwell.offload.enable",
    "release": "vblackwell.offload.enable",
    "offload_of": "vblackwell.offload.enable",
    "VGPUAdamW": "vblackwell.offload.optimizer",
    "VGPUStackLinear": "vblackwell.offload.linear",
    "clip_grad_norm_": "vblackwell.offload.clip",
    "select_top_k_gradients": "vblackwell.offload.sparse",
    "export_state": "vblackwell.offload.state",
    "load_causal_lm": "vblackwell.infer.causal_lm",
    "save_causal_lm": "vblackwell.infer.causal_lm",
    "Lora": "vblackwell.nn.lora_config",
    "save_adapter": "vblackwell.infer.adapters",
    "import_state": "vblackwell.offload.state",
    "VBError": "vblackwell.errors",
    "ConfigurationError": "vblackwell.errors",
    "FolderMismatch": "vblackwell.errors",
    "InsufficientMemory": "vblackwell.errors",
    "DiskError": "vblackwell.errors",
    "CorruptData": "vblackwell.errors",
    "KeyClash": "vblackwell.errors",
    "StaleTensor": "vblackwell.errors",
    "StepAbandoned": "vblackwell.errors",
    "Unsupported": "vblackwell.errors",
    "FP4Codec": "vblackwell.numerics.fp4",
    "quantize": "vblackwell.numerics.fp4",
    "PackedTensor": "vblackwell.numerics.packed",
    "FusedFP4Linear": "vblackwell.nn.linear",
    "SeparatedTensor": "vblackwell.numerics.separation",
    "separate": "vblackwell.numerics.separation",
    "FineStream": "vblackwell.nn.fine_stream",
    "VBOptimizedLinear": "vblackwell.nn.optimized_linear",
    "VBModelWrapper": "vblackwell.nn.optimize",
    "enable_vb_optimization": "vblackwell.nn.optimize",
    "VirtualBlackwellAdapter": "vblackwell.nn.two_part",
    "create_virtual_blackwell": "vblackwell.nn.two_part",
    "FlashAttention": "vblackwell.nn.attention_layer",
    "from_multihead_attention": "vblackwell.nn.attention_layer",
    "OptimizedTransformerBlock": "vblackwell.nn.transformer_block",
    "compare": "vblackwell.nn.compare",
    "convert": "vblackwell.nn.convert",
    "Conversion": "vblackwell.nn.convert",
    "accelerate_causal_lm": "vblackwell.nn.causal_lm",
    "restore_causal_lm": "vblackwell.nn.causal_lm",
    "VGPUStack": "vblackwell.memory.stack",
    "VGPULevel": "vblackwell.memory.single",
    "CompressedVGPULevel": "vblackwell.memory.compressed",
    "AccessPredictor": "vblackwell.memory.predictor",
    "create_vgpu_stack": "vblackwell.memory.create",
    "HardwareDetector": "vblackwell.hardware",
    "communication_cost": "vblackwell.plan.collectives",
    "UnknownKey": "vblackwell.errors",
    "VGPUResourceEstimator": "vblackwell.estimator",
    "ModelConfig": "vblackwell.estimator",
    "quick_estimate": "vblackwell.estimator",
    "MemoryEstimate": "vblackwell.plan.estimate",
}

__all__ = sorted(_WHERE)  # pyright: ignore[reportUnsupportedDunderAll]

if TYPE_CHECKING:
    from vblackwell.errors import (
        ConfigurationError,
        CorruptData,
        DiskError,
        FolderMismatch,
        InsufficientMemory,
        KeyClash,
        StaleTensor,
        StepAbandoned,
        UnknownKey,
        Unsupported,
        VBError,
    )
    from vblackwell.estimator import ModelConfig, VGPUResourceEstimator, quick_estimate
    from vblackwell.hardware import HardwareDetector
    from vblackwell.infer.adapters import save_adapter
    from vblackwell.infer.causal_lm import load_causal_lm, save_causal_lm
    from vblackwell.memory.compressed import CompressedVGPULevel
    from vblackwell.memory.create import create_vgpu_stack
    from vblackwell.memory.predictor import AccessPredictor
    from vblackwell.memory.single import VGPULevel
    from vblackwell.memory.stack import VGPUStack
    from vblackwell.nn.attention_layer import FlashAttention, from_multihead_attention
    from vblackwell.nn.causal_lm import accelerate_causal_lm, restore_causal_lm
    from vblackwell.nn.compare import compare
    from vblackwell.nn.convert import Conversion, convert
    from vblackwell.nn.fine_stream import FineStream
    from vblackwell.nn.linear import FusedFP4Linear
    from vblackwell.nn.lora_config import Lora
    from vblackwell.nn.optimize import VBModelWrapper, enable_vb_optimization
    from vblackwell.nn.optimized_linear import VBOptimizedLinear
    from vblackwell.nn.transformer_block import OptimizedTransformerBlock
    from vblackwell.nn.two_part import VirtualBlackwellAdapter, create_virtual_blackwell
    from vblackwell.numerics.fp4 import FP4Codec, quantize
    from vblackwell.numerics.packed import PackedTensor
    from vblackwell.numerics.separation import SeparatedTensor, separate
    from vblackwell.offload.clip import clip_grad_norm_
    from vblackwell.offload.enable import enable_vgpu_stack_optimization, offload_of, release
    from vblackwell.offload.linear import VGPUStackLinear
    from vblackwell.offload.optimizer import VGPUAdamW
    from vblackwell.offload.sparse import select_top_k_gradients
    from vblackwell.offload.state import export_state, import_state
    from vblackwell.plan.collectives import communication_cost
    from vblackwell.plan.estimate import MemoryEstimate


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'vblackwell' has no attribute {name!r}")
    value = getattr(importlib.import_module(_WHERE[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(_WHERE))
