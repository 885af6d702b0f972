"""``--vgpu-auto`` and ``--batch-size auto``: a plan for a run on this machine, traced on the meta device, and the
settings that follow from it. What the user said explicitly bounds the plan and is not chosen again.
"""

import copy
import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from vblackwell.errors import InsufficientMemory
from vblackwell.machine import limits
from vblackwell.machine.facts import memory_facts
from vblackwell.machine.gpus import NUM_SMS
from vblackwell.machine.rates import Rates, keep_disk, keep_rates, kept_disk, kept_rates
from vblackwell.nn.convert.causal_lm import is_accelerated
from vblackwell.nn.convert.training import training_loss
from vblackwell.nn.decoder.decoder import Decoder
from vblackwell.offload.measure import (
    COPY_BYTES,
    as_rates,
    cpu_rates,
    disk_gbps,
    gpu_rates,
    measured_bytes,
    rates_together,
)
from vblackwell.planner.forecast import Forecast, Machine, Placed
from vblackwell.planner.memory_estimate import Batches, Run
from vblackwell.planner.model_spec import ModelSpec
from vblackwell.planner.placement import Bounds, Choice, Lacking, Plan, Space
from vblackwell.trace.trace import Trace, on_meta
from vblackwell.train.config import TrainConfig

MAX_SEQUENCES = 1024  # in one forward


def make_training_plan(
    config: TrainConfig,
    model: nn.Module,
    compute_dtype: torch.dtype | None,
    device: torch.device,
    say: Callable[[str], None],
    max_sequences: int = MAX_SEQUENCES,
) -> Plan:
    """The fastest way to run ``config`` here, of a ``model`` as it will be put into a stack, on the CPU or on meta;
    ``max_sequences``: the most in a forward that ``--batch-size auto`` may mean.
    Raises InsufficientMemory: none fits; Untraceable: the model cannot be traced without its bytes.
    """
    rates = _rates_of(device, say)
    bounds, disk = bounds_of(config, device), None
    if bounds.disk:
        disk = functools.cache(lambda: _disk_rates(config.disk_path or limits.default_disk_path(), rates, say))
    if device.type != "cuda":
        machine = Machine(bounds, rates, has_gpu=False, disk=disk)
        return plan_on(machine, config, model, compute_dtype, max_sequences=max_sequences)
    machine = Machine(bounds, rates, disk=disk, capability=torch.cuda.get_device_capability(device))
    num_sms = torch.cuda.get_device_properties(device).multi_processor_count
    return plan_on(machine, config, model, compute_dtype, num_sms, max_sequences)


def plan_on(
    machine: Machine,
    config: TrainConfig,
    model: nn.Module,
    compute_dtype: torch.dtype | None,
    num_sms: int = NUM_SMS,
    max_sequences: int = MAX_SEQUENCES,
) -> Plan:
    """`make_training_plan` for any ``machine``, whose bounds are the run's."""
    undo = compute_dtype is not torch.float16  # a scaled loss means a factor at the step: nothing is updated before it
    machine = replace(machine, undo=undo, may_clip=config.max_grad_norm > 0)
    spec, precision = spec_of(model, config.name), precision_of(compute_dtype)
    seen = {"capability": machine.capability, "expandable": True, "num_sms": num_sms}
    run = Run(spec, config.seq_length, precision=precision, fuses=is_accelerated(model), **seen)
    forecast = Forecast(run, machine, config.masters)
    with torch.random.fork_rng(devices=[]):
        return forecast.plan(_space(config, model, forecast, machine.has_gpu, max_sequences))


def planned_sizes(plan: Plan) -> dict[str, Any]:
    """What `enable_vgpu_stack_optimization` takes of the plan in addition to the settings."""
    choice, waiting = plan.choice, plan.prediction.waiting
    if choice.placement == "resident":
        return {}
    sizes = {"weight_bytes": choice.weight_bytes, "resident_bytes": choice.resident_bytes}
    return sizes | {"activation_bytes": waiting if choice.activations == "host" else 0}


def precision_of(compute_dtype: torch.dtype | None) -> str:
    """What `Run` calls it."""
    return {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(compute_dtype or torch.float32, "fp32")


def spec_of(model: nn.Module, name: str) -> ModelSpec:
    """This very ``model`` as what is traced: copies of it, and the loss that it is trained with."""

    def build(dtype: torch.dtype) -> nn.Module:
        made = on_meta(model)
        return (copy.deepcopy(made) if made is model else made).to(dtype).train()

    def loss(copied: nn.Module, batch: Any) -> torch.Tensor:
        return training_loss(copied)(batch["input_ids"], batch["labels"])

    vocab_size = next((m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)), 2)
    return ModelSpec(name, build, vocab_size, loss)


def apply_plan(config: TrainConfig, plan: Plan) -> TrainConfig:
    """``config`` with what the plan chose."""
    choice = plan.choice
    return replace(
        config,
        batch_size=choice.batch_size,
        accumulation_steps=choice.accumulation_steps,
        gradient_checkpointing=choice.checkpointing,
        placement=choice.placement,
        update=choice.update if isinstance(choice.update, str) else f"{choice.update:g}",
        activations=choice.activations,
        optimizer_states=choice.states,
    )


def bounds_of(config: TrainConfig, device: torch.device, stated: tuple[int, int] | None = None) -> Bounds:
    """What the machine has free, or ``stated`` bytes of RAM and disk, cut to what the settings allow."""
    available, wants_disk = memory_facts().available_bytes if stated is None else stated[0], config.has_disk
    if wants_disk:
        available = max(available // 2, available - limits.DISK_THREAD_BYTES)
    gpu = int(available * limits.ARENA_SHARE) if config.fast_memory is None else int(config.fast_memory)
    host = int(available * limits.HOST_SHARE) if config.host_memory is None else int(config.host_memory)
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - limits.LATER_BYTES
        gpu = free if config.fast_memory is None else min(gpu, free)
    disk = config.disk_memory
    if disk is None and stated is not None:
        disk = stated[1] if wants_disk else 0
    elif disk is None:
        disk = limits.free_disk_bytes(config.disk_path or limits.default_disk_path()) if wants_disk else 0
    return Bounds(gpu, host, int(disk))


def _rates_of(device: torch.device, say: Callable[[str], None]) -> Rates:
    if device.type != "cuda":
        return cpu_rates()
    name = torch.cuda.get_device_name(device)
    found = kept_rates(name)
    if found is None:
        in_full = measured_bytes(device, COPY_BYTES) == COPY_BYTES  # 2.5 GiB: the sizes that rates are meant for
        how = "once (vb doctor does it again)" if in_full else "within the cap, for this run"
        say(f"measuring this GPU and its link, {how}")
        found = as_rates(gpu_rates(device))
        if in_full:
            keep_rates(name, found)
        torch.cuda.empty_cache()
    link, cpu = rates_together(device)  # by which a run that was told nothing divides its updates: of today
    return replace(found, up_both=link, down_both=link, cpu_adamw=cpu)


def _disk_rates(path: str, rates: Rates, say: Callable[[str], None]) -> tuple[float, float]:
    """Bytes/s that the disk at ``path`` reads and writes: kept, or measured now; of ``rates`` where that fails."""
    found = kept_disk(path)
    if found is not None:
        return found
    say(f"measuring the disk at {path}, once (vb doctor does it again)")
    measured = disk_gbps(path)
    if "refused" in measured:
        return rates.disk_read, rates.disk_write
    keep_disk(path, measured)
    return float(measured["read"]) * 1e9, float(measured["write"]) * 1e9


def _space(
    config: TrainConfig, model: nn.Module, forecast: Forecast, has_gpu: bool, max_sequences: int = MAX_SEQUENCES
) -> Space:
    able = isinstance(model, Decoder) or getattr(model, "supports_gradient_checkpointing", False)
    free = able and has_gpu and not config.resume  # a resumed run computes as it began
    said, kept_bits = config.gradient_checkpointing, config.deterministic  # rates that decide it are of the moment
    checkpointing = (False, True) if free and said is None and not kept_bits else (bool(said),)
    activations = ("level0", "host") if has_gpu else ("level0",)
    space = Space(
        batches=((config.batch_size, config.accumulation_steps),),
        checkpointing=checkpointing,
        placements=("resident", "streamed") if config.placement == "auto" else (config.placement,),
        updates=(config.update_place,),
        activations=activations if config.activations == "auto" else (config.activations,),
        states=(config.optimizer_states,),
    )
    if not config.auto_batch_size:
        return space
    return replace(space, batches=batches_of(config, space, forecast, max_sequences))


def batches_of(
    config: TrainConfig, space: Space, forecast: Forecast, max_sequences: int = MAX_SEQUENCES
) -> tuple[tuple[int, int], ...]:
    """(sequences in a forward, forwards in a step) that ``--batch-size auto`` may mean; InsufficientMemory for none.
    With accumulation: every way to divide a step's sequences. Without: for each placement and checkpointing the largest
    forward that fits, its half and quarter, because what activations leave is what streaming has."""
    if config.accumulation_steps > 1:
        total = config.batch_size * config.accumulation_steps
        return tuple((size, total // size) for size in range(min(total, MAX_SEQUENCES), 0, -1) if total % size == 0)
    sizes, refusals = set[int](), list[Lacking]()
    for choice in forecast.choices(space):
        largest, refused = largest_forward(choice, forecast)
        largest = min(largest, max_sequences)
        sizes |= {largest, largest // 2, largest // 4} - {0}
        refusals += [refused] if refused is not None else []
    if not sizes:
        lacking = min(refusals, key=lambda each: (not each.num_bytes, each.num_bytes, str(each)), default=None)
        shorter = "shorten --seq-length, or " if forecast.machine.has_gpu else ""
        bounds = forecast.machine.bounds.words(forecast.machine.has_gpu)
        said = (
            f"--batch-size auto: not one sequence of {config.seq_length} tokens fits {bounds}: the "
            f"nearest {lacking}; {shorter}give more memory (--fast-memory, --host-memory, --disk-memory)"
        )
        raise InsufficientMemory(said, needed_bytes=lacking.num_bytes if lacking else 0, available_bytes=0)
    return tuple((size, 1) for size in sorted(sizes, reverse=True))


def largest_forward(choice: Choice, forecast: Forecast) -> tuple[int, Lacking | None]:
    """The most sequences in a forward with which ``choice`` fits; 0 and the reason where one does not."""
    first = forecast.predict(replace(choice, batch_size=1))
    if isinstance(first, Lacking):
        return 0, first
    if not forecast.machine.has_gpu:  # activations are outside the arena
        return choice.batch_size, None
    traces = Batches(lambda size: forecast.trace(choice.checkpointing, size))

    def fits(size: int, trace: Trace) -> bool:
        return isinstance(forecast.place(replace(choice, batch_size=size), trace), Placed)

    return traces.largest(fits, MAX_SEQUENCES), None
