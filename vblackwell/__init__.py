"""Virtual Blackwell: train and run transformer models several times larger than the GPU's memory.

The public names, resolved on first use: importing the package costs nothing beyond torch and never touches a GPU.
"""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_NAMES = {
    "vblackwell.errors": (
        "ConfigurationError", "CorruptData", "DiskError", "FolderMismatch", "InsufficientMemory", "KeyClash",
        "StaleTensor", "StepAbandoned", "UnknownKey", "Unsupported", "VBError",
    ),
    "vblackwell.generate.adapters": ("save_adapter",),
    "vblackwell.generate.causal_lm": ("load_causal_lm", "save_causal_lm"),
    "vblackwell.kernels.fp4.encode": ("FP4Codec", "quantize", "separate"),
    "vblackwell.machine.facts": ("HardwareDetector",),
    "vblackwell.memory.cache.single": ("CompressedVGPULevel", "VGPULevel"),
    "vblackwell.memory.cache.stack": ("VGPUStack", "create_vgpu_stack"),
    "vblackwell.nn.attention.layer": ("FlashAttention", "from_multihead_attention"),
    "vblackwell.nn.convert.causal_lm": ("Conversion", "accelerate_causal_lm", "restore_causal_lm"),
    "vblackwell.nn.convert.lora": ("Lora",),
    "vblackwell.nn.convert.model": ("convert",),
    "vblackwell.nn.convert.linears": ("VBModelWrapper", "enable_vb_optimization"),
    "vblackwell.nn.decoder.block": ("OptimizedTransformerBlock",),
    "vblackwell.nn.linear.fused_fp4": ("FusedFP4Linear",),
    "vblackwell.nn.linear.two_part": ("VBOptimizedLinear", "VirtualBlackwellAdapter", "create_virtual_blackwell"),
    "vblackwell.numerics.packed": ("PackedTensor",),
    "vblackwell.offload.api": (
        "VGPUStackLinear", "enable_vgpu_stack_optimization", "model_plan", "offload_of", "release",
    ),
    "vblackwell.offload.optimizer": ("VGPUAdamW", "clip_grad_norm_", "select_top_k_gradients"),
    "vblackwell.offload.prepare": ("prepare",),
    "vblackwell.offload.state": ("export_state", "import_state"),
    "vblackwell.planner.memory_estimate": ("MemoryEstimate", "ModelConfig", "VGPUResourceEstimator", "quick_estimate"),
    "vblackwell.planner.several_gpus": ("communication_cost",),
    "vblackwell.tools.compare": ("compare",),
}  # fmt: skip
_WHERE = {name: module for module, names in _NAMES.items() for name in names}

__all__ = sorted(_WHERE)  # pyright: ignore[reportUnsupportedDunderAll]

if TYPE_CHECKING:
    from vblackwell.errors import *  # noqa: F403 (all of its classes)
    from vblackwell.generate.adapters import save_adapter
    from vblackwell.generate.causal_lm import load_causal_lm, save_causal_lm
    from vblackwell.kernels.fp4.encode import FP4Codec, quantize, separate
    from vblackwell.machine.facts import HardwareDetector
    from vblackwell.memory.cache.single import CompressedVGPULevel, VGPULevel
    from vblackwell.memory.cache.stack import VGPUStack, create_vgpu_stack
    from vblackwell.nn.attention.layer import FlashAttention, from_multihead_attention
    from vblackwell.nn.convert.causal_lm import Conversion, accelerate_causal_lm, restore_causal_lm
    from vblackwell.nn.convert.linears import VBModelWrapper, enable_vb_optimization
    from vblackwell.nn.convert.lora import Lora
    from vblackwell.nn.convert.model import convert
    from vblackwell.nn.decoder.block import OptimizedTransformerBlock
    from vblackwell.nn.linear.fused_fp4 import FusedFP4Linear
    from vblackwell.nn.linear.two_part import VBOptimizedLinear, VirtualBlackwellAdapter, create_virtual_blackwell
    from vblackwell.numerics.packed import PackedTensor
    from vblackwell.offload.api import VGPUStackLinear, enable_vgpu_stack_optimization, model_plan, offload_of, release
    from vblackwell.offload.optimizer import VGPUAdamW, clip_grad_norm_, select_top_k_gradients
    from vblackwell.offload.prepare import prepare
    from vblackwell.offload.state import export_state, import_state
    from vblackwell.planner.memory_estimate import MemoryEstimate, ModelConfig, VGPUResourceEstimator, quick_estimate
    from vblackwell.planner.several_gpus import communication_cost
    from vblackwell.tools.compare import compare


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'vblackwell' has no attribute {name!r}")
    value = getattr(importlib.import_module(_WHERE[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(_WHERE))
