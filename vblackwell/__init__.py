"""Virtual Blackwell: train and run transformer models several times larger than the GPU's memory.

The public names. They are resolved on first use, so that importing the package costs nothing beyond torch and never
touches a GPU.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_WHERE = {
    "enable_vgpu_stack_optimization": "vblackwell.offload.api",
    "release": "vblackwell.offload.api",
    "offload_of": "vblackwell.offload.api",
    "VGPUAdamW": "vblackwell.offload.optimizer",
    "VGPUStackLinear": "vblackwell.offload.api",
    "clip_grad_norm_": "vblackwell.offload.gradient_norms",
    "select_top_k_gradients": "vblackwell.offload.gradient_norms",
    "export_state": "vblackwell.offload.state",
    "load_causal_lm": "vblackwell.generate.causal_lm",
    "save_causal_lm": "vblackwell.generate.causal_lm",
    "Lora": "vblackwell.nn.convert.lora",
    "save_adapter": "vblackwell.generate.adapters",
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
    "FusedFP4Linear": "vblackwell.nn.linear.fused_fp4",
    "SeparatedTensor": "vblackwell.numerics.separation",
    "separate": "vblackwell.numerics.separation",
    "VBOptimizedLinear": "vblackwell.nn.linear.two_part",
    "VBModelWrapper": "vblackwell.nn.convert.optimize",
    "enable_vb_optimization": "vblackwell.nn.convert.optimize",
    "VirtualBlackwellAdapter": "vblackwell.nn.linear.two_part",
    "create_virtual_blackwell": "vblackwell.nn.linear.two_part",
    "FlashAttention": "vblackwell.nn.attention.layer",
    "from_multihead_attention": "vblackwell.nn.attention.layer",
    "OptimizedTransformerBlock": "vblackwell.nn.decoder.block",
    "compare": "vblackwell.tools.compare",
    "convert": "vblackwell.nn.convert.model",
    "Conversion": "vblackwell.nn.convert.causal_lm",
    "accelerate_causal_lm": "vblackwell.nn.convert.causal_lm",
    "restore_causal_lm": "vblackwell.nn.convert.causal_lm",
    "VGPUStack": "vblackwell.memory.cache.stack",
    "VGPULevel": "vblackwell.memory.cache.single",
    "CompressedVGPULevel": "vblackwell.memory.cache.single",
    "create_vgpu_stack": "vblackwell.memory.cache.stack",
    "HardwareDetector": "vblackwell.machine.facts",
    "communication_cost": "vblackwell.planner.parallel.collectives",
    "UnknownKey": "vblackwell.errors",
    "VGPUResourceEstimator": "vblackwell.planner.estimator",
    "ModelConfig": "vblackwell.planner.estimator",
    "quick_estimate": "vblackwell.planner.estimator",
    "MemoryEstimate": "vblackwell.planner.memory_estimate",
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
    from vblackwell.generate.adapters import save_adapter
    from vblackwell.generate.causal_lm import load_causal_lm, save_causal_lm
    from vblackwell.machine.facts import HardwareDetector
    from vblackwell.memory.cache.single import CompressedVGPULevel, VGPULevel
    from vblackwell.memory.cache.stack import VGPUStack, create_vgpu_stack
    from vblackwell.nn.attention.layer import FlashAttention, from_multihead_attention
    from vblackwell.nn.convert.causal_lm import Conversion, accelerate_causal_lm, restore_causal_lm
    from vblackwell.nn.convert.lora import Lora
    from vblackwell.nn.convert.model import convert
    from vblackwell.nn.convert.optimize import VBModelWrapper, enable_vb_optimization
    from vblackwell.nn.decoder.block import OptimizedTransformerBlock
    from vblackwell.nn.linear.fused_fp4 import FusedFP4Linear
    from vblackwell.nn.linear.two_part import VBOptimizedLinear, VirtualBlackwellAdapter, create_virtual_blackwell
    from vblackwell.numerics.fp4 import FP4Codec, quantize
    from vblackwell.numerics.packed import PackedTensor
    from vblackwell.numerics.separation import SeparatedTensor, separate
    from vblackwell.offload.api import VGPUStackLinear, enable_vgpu_stack_optimization, offload_of, release
    from vblackwell.offload.gradient_norms import clip_grad_norm_, select_top_k_gradients
    from vblackwell.offload.optimizer import VGPUAdamW
    from vblackwell.offload.state import export_state, import_state
    from vblackwell.planner.estimator import ModelConfig, VGPUResourceEstimator, quick_estimate
    from vblackwell.planner.memory_estimate import MemoryEstimate
    from vblackwell.planner.parallel.collectives import communication_cost
    from vblackwell.tools.compare import compare


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'vblackwell' has no attribute {name!r}")
    value = getattr(importlib.import_module(_WHERE[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(_WHERE))
