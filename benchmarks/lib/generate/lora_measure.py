"""The process of one system: adapters over a 4-bit base, trained on real text. Started by bench_lora.py with a case as
its only argument.

Both systems train peft's modules from the same first values (`fill_adapter`) on the same rows: bytes of the standard
library's Python sources, as tokens. Ours keeps the base in nvfp4, adapters' masters in fp32 and computes in bf16;
bitsandbytes keeps it in nf4, adapters in fp32 under autocast to bf16, with torch's fused AdamW. Both checkpoint every
layer.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import torch

from benchmarks.lib.child_process import answer, say
from benchmarks.lib.generate.lora_case import Case, Result
from benchmarks.lib.offload.loop import Clock
from vblackwell.machine.device import cap_process, use_expandable_segments
from vblackwell.nn.convert.lora import fill_adapter, is_adapter

SKIPPED = 5
TOLD = 5  # steps between two reads of the loss, which the host waits for
FIRST_TOKEN = 3  # of bytes
Step = Callable[[torch.Tensor, float], torch.Tensor]


def rows_of_text(case: Case) -> torch.Tensor:
    """Tokens (steps, batch, seq) of the default corpus."""
    from vblackwell.data.documents import find_text

    wanted, held = case.steps * case.batch * case.seq, bytearray()
    for path in find_text(None).files:
        if len(held) >= wanted:
            break
        held += path.read_bytes()
    ids = (
        torch.frombuffer(held, dtype=torch.uint8)[:wanted].long() % (case.sizes.vocab_size - FIRST_TOKEN) + FIRST_TOKEN
    )
    rows = ids.view(-1, case.seq)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(case.seed))
    return rows[order].view(case.steps, case.batch, case.seq)


def ours(case: Case, device: torch.device, result: Result) -> Step:
    from vblackwell.generate.causal_lm import load_causal_lm
    from vblackwell.memory.cache.stack import create_vgpu_stack
    from vblackwell.nn.convert.causal_lm import accelerate_causal_lm
    from vblackwell.nn.convert.lora import Lora
    from vblackwell.offload.api import offload_of
    from vblackwell.offload.optimizer import VGPUAdamW

    stack = create_vgpu_stack(case.cap_bytes, case.host_bytes, 0, device=device, cap_process=False)
    dtype = getattr(torch, case.dtype)
    how: dict[str, Any] = {"lora": Lora(case.rank, case.alpha), "fp4": "nvfp4", "placement": case.placement}
    model: Any = load_causal_lm(case.folder, stack, dtype=dtype, compute_dtype=dtype, seed=case.seed, **how)
    engine = offload_of(model)
    result.placement = engine.placement if engine is not None else ""
    accelerate_causal_lm(model)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    trained = [param for param in model.parameters() if param.requires_grad]
    result.trained = sum(param.numel() for param in trained)
    optimizer = VGPUAdamW(trained, lr=case.learning_rate, weight_decay=0.0, update_in_backward=True)

    return step_of(model, optimizer, nullcontext())


def bitsandbytes(case: Case, device: torch.device, result: Result) -> Step:
    import peft
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    dtype, cuda = getattr(torch, case.dtype), device.type == "cuda"
    packing = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype)
    base: Any = AutoModelForCausalLM.from_pretrained(
        case.folder, dtype=dtype, quantization_config=packing, device_map={"": 0 if cuda else "cpu"}
    )
    result.placement = "resident"
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    config = peft.LoraConfig(
        r=case.rank, lora_alpha=case.alpha, lora_dropout=0.0, target_modules=targets, bias="none", task_type="CAUSAL_LM"
    )
    base.requires_grad_(False)
    base.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model: Any = peft.get_peft_model(base, config).train()
    trained = []
    with torch.no_grad():
        for name, param in model.named_parameters():
            if is_adapter(name):
                value = torch.empty(param.shape)
                fill_adapter(name.removeprefix("base_model.model."), value, case.seed)
                param.copy_(value.to(dtype))  # ours begin in the compute type
                trained.append(param)
    result.trained = sum(param.numel() for param in trained)
    optimizer = torch.optim.AdamW(trained, lr=case.learning_rate, weight_decay=0.0, fused=cuda)

    return step_of(model, optimizer, torch.autocast("cuda", dtype) if cuda else nullcontext())


def step_of(model: Any, optimizer: Any, forward: AbstractContextManager[Any]) -> Step:
    """A step of either system; its forward runs in ``forward``."""

    def step(ids_BS: torch.Tensor, rate: float) -> torch.Tensor:
        for group in optimizer.param_groups:
            group["lr"] = rate
        with forward:
            loss = model(input_ids=ids_BS, labels=ids_BS, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def train(case: Case, device: torch.device) -> Result:
    cuda, began, result = device.type == "cuda", time.perf_counter(), Result(case.system)
    rows = rows_of_text(case)
    step = {"ours": ours, "bitsandbytes": bitsandbytes}[case.system](case, device, result)
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    result.opened_seconds = time.perf_counter() - began
    say(
        "phase",
        text=f"opened in {result.opened_seconds:.1f} s, {result.placement}, {result.trained / 1e6:.2f} M trained",
    )
    losses, clock, trained_from = [], Clock(device), time.perf_counter()
    for number, ids_BS in enumerate(rows):
        clock.mark()
        losses.append(step(ids_BS.to(device, non_blocking=True), case.rate_at(number)))
        if number % TOLD == 0:
            loss, mean = float(losses[-1]), (time.perf_counter() - trained_from) / (number + 1)
            rate = case.batch * case.seq / mean
            say(
                "phase",
                text=f"step {number + 1}: loss {loss:.4f}; {rate:,.0f} tokens/s so far, the first steps counted",
            )
            if time.perf_counter() - began > case.limit_seconds:
                result.status = f"ok, {number + 1} of {case.steps} steps in the time"
                break
    clock.mark()
    result.losses = [float(loss) for loss in losses]
    result.step_seconds = clock.intervals()
    if cuda:
        result.peak_reserved = torch.cuda.max_memory_reserved()
        result.peak_allocated = torch.cuda.max_memory_allocated()
    counted = result.step_seconds[SKIPPED:] or result.step_seconds
    result.tokens_per_second = case.batch * case.seq / statistics.median(counted)
    return result


def main(argument: str) -> None:
    case = Case.from_json(argument)
    device = torch.device("cuda", 0) if case.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        use_expandable_segments()
        cap_process(device, case.cap_bytes)
    say("result", result=asdict(train(case, device)))


if __name__ == "__main__":
    answer(main)
