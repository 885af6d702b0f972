"""What offloading is elsewhere: FSDP2 with `CPUOffloadPolicy`, and DeepSpeed's ZeRO-3 offload, on one GPU.

Both train transformers' Llama in bf16 with fp32 masters and AdamW on the CPU, as their documentation sets them up.
DeepSpeed casts the initial weights to bf16 before it makes masters of them, so its losses begin a rounding away from
the others'.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.lib.offload.case import Case
from benchmarks.lib.offload.data import fill
from benchmarks.lib.offload.systems import System, adamw_settings, clip_of, hf_loss, hf_model


def _fresh_rotary(model: Any, device: torch.device) -> None:
    """Rotary tables in fp32 on ``device``: those of a model made on 'meta' have no values, and DeepSpeed would round
    them.
    """
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config).to(device)


def build_fsdp2(case: Case, device: torch.device) -> System:
    """A shard group a block and one for the rest, in a world of one."""
    from torch._C._distributed_c10d import HashStore
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
    from torch.distributed.tensor import DTensor

    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"  # gloo: the norm of gradients in host memory
    dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    settings: dict[str, Any] = {
        "mesh": init_device_mesh(device.type, (1,)),
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        "offload_policy": CPUOffloadPolicy(pin_memory=device.type == "cuda"),
    }
    model = hf_model(case, "meta")
    for layer in model.model.layers:
        fully_shard(layer, **settings)
    fully_shard(model, **settings)
    model.to_empty(device="cpu")
    _fresh_rotary(model, device)
    shards = []
    for name, param in model.named_parameters():
        assert isinstance(param, DTensor), "every parameter is sharded"
        shards.append((name, param.shape, param.to_local()))
    fill(shards, case.decoder, case.seed, device)
    optimizer = torch.optim.AdamW(model.parameters(), **adamw_settings(case), fused=True)
    clip = clip_of(case, model)
    whole = None if clip is None else lambda: _whole(clip())
    return System(model, optimizer, hf_loss(model), whole, notes=["torch AdamW on the CPU, fused"])


def _whole(norm: Tensor) -> Tensor:
    from torch.distributed.tensor import DTensor

    return norm.full_tensor() if isinstance(norm, DTensor) else norm


@dataclass
class DeepSpeedSystem(System):
    """Backward, clipping and the update are the engine's."""

    engine: Any = None

    def backward(self, loss: Tensor) -> None:
        self.engine.backward(loss)
        self.engine.step()


def build_deepspeed(case: Case, device: torch.device) -> System:
    """ZeRO stage 3, parameters and optimizer in pinned host memory, DeepSpeed's own CPU Adam (compiled on first
    use).
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
    import deepspeed  # pyright: ignore[reportMissingImports]

    host = {"device": "cpu", "pin_memory": device.type == "cuda"}
    settings = {
        "train_micro_batch_size_per_gpu": case.batch,
        "gradient_accumulation_steps": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3, "offload_optimizer": host, "offload_param": host},
        "gradient_clipping": case.max_grad_norm or 0.0,
        "optimizer": {"type": "AdamW", "params": adamw_settings(case)},
        "steps_per_print": 1 << 30,
    }
    model = hf_model(case, "meta").to(torch.bfloat16).to_empty(device="cpu")
    named = ((name, param.shape, param.detach()) for name, param in model.named_parameters())
    fill(named, case.decoder, case.seed, device)
    engine, optimizer, _, _ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=settings)
    _fresh_rotary(engine.module, device)
    return DeepSpeedSystem(
        model,
        optimizer,
        hf_loss(engine),
        norm_of=(lambda: float(engine.get_global_grad_norm())) if case.max_grad_norm else (lambda: None),
        notes=[f"deepspeed {deepspeed.__version__}, optimizer {type(optimizer.optimizer).__name__}"],
        engine=engine,
    )
