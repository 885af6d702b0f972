"""Several models over the weights of one folder: itself, and adapters over it. The base's parameters are the same
objects in all of them, so that host memory and level 0 hold them once.
"""

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from vblackwell.folders.folder import stored_dtype
from vblackwell.folders.weights import build_on_meta
from vblackwell.generate.adapters import adapt, read_lora
from vblackwell.generate.quantized import Packing, open_folder, packing_over, refuse_unpacked
from vblackwell.memory.cache.stack import VGPUStack
from vblackwell.nn.convert.lora import base_name, is_adapter
from vblackwell.offload.api import enable_vgpu_stack_optimization
from vblackwell.offload.storage.initialize import Initialize
from vblackwell.serve.sources import naming


class ModelsOverOneBase(nn.Module):
    """Holds the models; each is called by itself."""

    def __init__(self, models: list[nn.Module]) -> None:
        super().__init__()
        for number, model in enumerate(models):  # not a ModuleList, whose children would be layer groups
            self.add_module(f"model{number}", model)


def open_over_one_base(
    folder: Path,
    adapters: Mapping[str, Path | None],
    stack: VGPUStack,
    *,
    fp4: str | None = None,
    fp4_layers: str = Packing.layers,
    keep: str | None = None,
    w4a8: bool = False,
    w4a4: bool = False,
    trust_remote_code: bool = False,
    **placement: Any,
) -> dict[str, nn.Module]:
    """The causal models over the weights in ``folder``, by the names that ``adapters`` has: with an adapter's folder,
    or None for the base as it is; frozen, in eval mode, streamed through ``stack``. Arguments and errors are those of
    `load_causal_lm`; an error names the model that it is about, if it is about one."""
    dtype, rounds = stored_dtype(folder), {"w4a8": w4a8, "w4a4": w4a4}
    if any(rounds.values()) and fp4 is None:
        refuse_unpacked(folder)
    models, fills = list[nn.Module](), dict[str, Initialize]()
    with ExitStack() as opened:
        for name, adapter in adapters.items():
            with naming(name):
                made = build_on_meta(folder, dtype, trust_remote_code=trust_remote_code, quantized=True)
                made.requires_grad_(False)
                weights = opened.enter_context(open_folder(made, folder))
                weights.load_buffers()
                packing = packing_over(folder, weights.packing, Packing(fp4, fp4_layers, keep) if fp4 else None)
                fill: Initialize = weights
                lora = None if adapter is None else read_lora(adapter)
                if lora is not None or packing is not None:
                    where: dict[str, Any] = {"name": str(folder), "values": adapter, **rounds}
                    fill = adapt(made, weights, lora, packing, stack.level0_device, **where)
                made.requires_grad_(False)
                fills[f"model{len(models)}"] = fill
                models.append(made)
        for other in models[1:]:
            _share(models[0], other)

        def initialize(name: str, out: Tensor) -> None:
            model, _, rest = name.partition(".")
            fills[model](rest, out)

        whole = ModelsOverOneBase(models)
        options: dict[str, Any] = {"placement": "streamed", "accelerate": False} | placement
        enable_vgpu_stack_optimization(whole, stack, next(iter(adapters)), initialize=initialize, **options)
    return {name: model.eval() for name, model in zip(adapters, models, strict=True)}


def _share(one: nn.Module, other: nn.Module) -> None:
    """Make the base's parameters of ``other`` those of ``one``."""
    params = {base_name(name): param for name, param in one.named_parameters(remove_duplicate=False)}
    for name, param in [*other.named_parameters(remove_duplicate=False)]:
        if not is_adapter(name):
            owner, _, leaf = name.rpartition(".")
            shared = params[base_name(name)]
            assert (shared.shape, shared.dtype) == (param.shape, param.dtype), name
            other.get_submodule(owner)._parameters[leaf] = shared
