"""Training through a stack, in every placement: losses, norms, parameters, moments."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import vblackwell as vb
from tests.bits.case import Results, case
from tests.bits.hashes import tensors_of
from tests.bits.models import (
    FORMATS,
    causal_loss,
    causal_model,
    llama_folder,
    make_stack,
    mixture,
    mixture_loss,
    mlp,
    mlp_loss,
    wide,
    wide_loss,
)

STEPS = 4

Loss = Callable[[Any, int], torch.Tensor]


def in_two_groups(model: Any) -> list[dict[str, Any]]:
    params = [param for param in model.parameters() if param.requires_grad]
    return [
        {"params": [param for param in params if param.ndim >= 2], "weight_decay": 0.1, "lr": 3e-3},
        {"params": [param for param in params if param.ndim < 2], "weight_decay": 0.0, "lr": 1e-3},
    ]


def trained(
    model: Any,
    loss_of: Loss,
    stack: vb.VGPUStack | None,
    *,
    optimizer: dict[str, Any] | None = None,
    sparse: float | None = None,
    clip: float | None = None,
    **placement: Any,
) -> dict[str, Any]:
    """Losses, norms and final parameters, moments and buffers of a few steps.

    Args:
        stack: what ``model`` is put into with ``placement``; None for a model that is in a stack already.
        optimizer: arguments of `VGPUAdamW`.
        sparse: step this share of the groups only.
        clip: norm for `clip_grad_norm_`.
    """
    if stack is not None:
        vb.enable_vgpu_stack_optimization(model, stack, **placement)
    arguments = {"max_grad_norm": float("inf")} | (optimizer or {})
    ours = vb.VGPUAdamW(in_two_groups(model), betas=(0.9, 0.95), **arguments)
    micros = arguments.get("accumulation_steps", 1)
    losses, norms = [], []
    torch.manual_seed(1)
    for step in range(STEPS):
        for micro in range(micros):
            loss = loss_of(model, 100 * step + micro) / micros
            (loss * arguments.get("loss_scale", 1.0)).backward()
            losses.append(loss.item())
        if clip is not None:
            norms.append(vb.clip_grad_norm_(model, clip).item())
        chosen = None if sparse is None else vb.select_top_k_gradients(model, sparse)
        ours.step(only=chosen)
        if arguments["max_grad_norm"] is not None:
            norms.append(float(ours.grad_norm))
        ours.zero_grad()
    states = {name: dict(state) for name, state in vb.export_state(model, ours)}
    buffers = dict(model.named_buffers())
    if vb.offload_of(model) is not None:
        vb.release(model)
    return {
        "losses": losses,
        "norms": norms,
        "states": states,
        "buffers": buffers,
        "parameters": {name: param.detach() for name, param in model.named_parameters()},
    }


BITES, SOMETIMES, NEVER = 0.05, 1.5, 1e9  # of the gradients' norms here: always above, some above, all below
IN_BACKWARD = {"update_in_backward": True, "accumulation_steps": 2, "max_grad_norm": SOMETIMES}


def llama_cases(folder: Path) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    def run(
        fast: float = 128, host: float | None = None, checkpointing: bool = False, **more: Any
    ) -> Callable[[], Any]:
        def start() -> dict[str, Any]:
            with make_stack(folder, fast, host) as stack:
                model = causal_model("llama", checkpointing)
                return trained(model, causal_loss, stack, **({"placement": "streamed"} | more))

        return start

    yield "resident", run(4096, placement="resident", optimizer={"max_grad_norm": SOMETIMES})
    yield "ram-unclipped", run(optimizer={"max_grad_norm": None})
    yield "ram-clip-never", run(optimizer={"max_grad_norm": NEVER})
    yield "ram-clip-sometimes", run(optimizer={"max_grad_norm": SOMETIMES})
    yield "ram-clip-always", run(optimizer={"max_grad_norm": BITES})
    yield "disk-unclipped", run(host=500, optimizer={"max_grad_norm": None})
    yield "disk-clip-sometimes", run(host=500, optimizer={"max_grad_norm": SOMETIMES})
    yield "disk-in-backward-accumulated", run(host=800, optimizer=IN_BACKWARD)
    yield "ram-in-backward-accumulated", run(optimizer=IN_BACKWARD)
    yield "in-backward-clip-always", run(optimizer={"update_in_backward": True, "max_grad_norm": BITES})
    yield "in-backward-without-undo", run(optimizer={"update_in_backward": True, "undo": False, "max_grad_norm": None})
    for share in (0.0, 0.5, 1.0):
        yield f"update-share-{share}", run(update=share, optimizer={"max_grad_norm": SOMETIMES})
        yield f"update-share-{share}-in-backward", run(update=share, optimizer=IN_BACKWARD)
    yield "recomputed", run(checkpointing=True, optimizer=IN_BACKWARD)
    yield "activations-host", run(checkpointing=True, activations="host", optimizer=IN_BACKWARD)
    yield "bf16", run(compute_dtype=torch.bfloat16, optimizer=IN_BACKWARD)
    yield (
        "bf16-disk-activations-host",
        run(
            host=500,
            checkpointing=True,
            activations="host",
            activation_bytes="64KiB",
            compute_dtype=torch.bfloat16,
            optimizer={"max_grad_norm": SOMETIMES},
        ),
    )
    yield "8bit", run(512, states="8bit", optimizer={"max_grad_norm": SOMETIMES})
    yield "8bit-bf16", run(512, states="8bit", compute_dtype=torch.bfloat16, optimizer=IN_BACKWARD)
    stochastic = {"states": "8bit", "masters": "stochastic", "compute_dtype": torch.bfloat16, "rounding_seed": 3}
    yield "8bit-stochastic", run(512, **stochastic, optimizer={"max_grad_norm": SOMETIMES})
    yield "8bit-stochastic-in-backward", run(512, **stochastic, optimizer=IN_BACKWARD)
    yield "sparse", run(sparse=0.4, optimizer={"max_grad_norm": SOMETIMES})
    yield "clipped-by-hand", run(clip=SOMETIMES, optimizer={"max_grad_norm": None})
    yield "loss-scale", run(optimizer={"max_grad_norm": SOMETIMES, "loss_scale": 1024.0})
    yield "kept-groups", run(512, update=0.0, resident_bytes="160KiB", weight_bytes="96KiB", optimizer=IN_BACKWARD)
    yield "groups-by-name", run(512, groups=["model.layers", "lm_head"], optimizer={"max_grad_norm": SOMETIMES})


@case
def offload_llama(folder: Path) -> Results:
    for name, start in llama_cases(folder):
        yield name, start()


@case
def offload_others(folder: Path) -> Results:
    def run(model: Any, loss_of: Loss, fast: float, host: float | None = None, **more: Any) -> dict[str, Any]:
        with make_stack(folder, fast, host) as stack:
            return trained(model, loss_of, stack, **({"placement": "streamed", "optimizer": IN_BACKWARD} | more))

    sometimes = {"max_grad_norm": SOMETIMES}
    yield "mlp-buffers", run(mlp(), mlp_loss, 160)
    yield "mlp-disk", run(mlp(), mlp_loss, 160, 200, optimizer=sometimes)
    yield "gpt2-tied-dropout", run(causal_model("gpt2"), causal_loss, 192)
    yield "gpt2-tied-bf16", run(causal_model("gpt2"), causal_loss, 192, compute_dtype=torch.bfloat16)
    yield (
        "gpt2-tied-recomputed",
        run(causal_model("gpt2", True), causal_loss, 192, activations="host", optimizer=sometimes),
    )
    yield "qwen2-tied-disk", run(causal_model("qwen2-tied"), causal_loss, 128, 500)
    yield "mixtral", run(causal_model("mixtral"), causal_loss, 384)
    yield "experts-without-tokens", run(mixture(), mixture_loss, 128)
    yield "experts-at-step", run(mixture(), mixture_loss, 128, optimizer={"max_grad_norm": None})
    for tied in (False, True):
        kind = "tied" if tied else "untied"
        yield f"sliced-{kind}", run(wide(tied), wide_loss, 64)
        yield f"sliced-{kind}-bf16", run(wide(tied), wide_loss, 64, compute_dtype=torch.bfloat16, optimizer=sometimes)
    frozen = causal_model("llama")
    for name, param in frozen.named_parameters():
        param.requires_grad_("layers.1" in name or "layers.3.mlp" in name or "norm" in name)
    yield "partly-frozen", run(frozen, causal_loss, 128)
    half = causal_model("llama", dtype=torch.bfloat16)
    yield "bf16-parameters", run(half, causal_loss, 128)


@case
def offload_folders(folder: Path) -> Results:
    source = llama_folder(folder)
    names = iter(range(100))

    def loaded(saved: Callable[[Any, Path], object], optimizer: dict[str, Any], **options: Any) -> list[Any]:
        out = folder / f"out-{next(names)}"
        with make_stack(folder, 128) as stack:
            model = vb.load_causal_lm(source, stack, **({"placement": "streamed"} | options))
            ours = vb.VGPUAdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, **optimizer)
            losses = []
            torch.manual_seed(1)
            for step in range(STEPS):
                loss = causal_loss(model, step)
                loss.backward()
                losses.append(loss.item())
                ours.step()
                ours.zero_grad()
            saved(model, out)
            return [losses, tensors_of(out)]

    in_backward = {"max_grad_norm": SOMETIMES, "update_in_backward": True}
    lora = vb.Lora(rank=2, alpha=8)
    yield "whole", loaded(vb.save_causal_lm, in_backward)
    yield "whole-bf16", loaded(vb.save_causal_lm, in_backward, compute_dtype=torch.bfloat16)
    yield "lora", loaded(vb.save_adapter, in_backward, lora=lora, seed=5)
    yield "lora-dropout", loaded(vb.save_adapter, {}, lora=vb.Lora(2, dropout=0.25, targets=("q_proj", "v_proj")))
    for name in FORMATS[:1]:
        yield f"lora-over-{name}", loaded(vb.save_adapter, in_backward, lora=lora, fp4=name)
        yield f"lora-over-{name}-merged", loaded(vb.save_causal_lm, in_backward, lora=lora, fp4=name)

    with make_stack(folder, 128) as stack, make_stack(folder, 160, 500) as other:
        model, again = causal_model("llama"), causal_model("llama")
        vb.enable_vgpu_stack_optimization(model, stack, placement="streamed")
        vb.enable_vgpu_stack_optimization(again, other, placement="streamed")
        before, after = (vb.VGPUAdamW(each.parameters(), lr=1e-2, max_grad_norm=SOMETIMES) for each in (model, again))
        for step in range(2):
            causal_loss(model, step).backward()
            before.step()
            before.zero_grad()
        states = dict(vb.export_state(model, before))
        yield "exported", states
        vb.import_state(again, after, states.__getitem__)
        causal_loss(again, 2).backward()
        after.step()
        yield "imported-and-stepped", dict(vb.export_state(again, after))
        yield "state-dict", dict(again.state_dict())
