"""What is planned, what a run is given and what it places are one placement, to the byte: drawn models and sizes.

``VB_SEED=7 VB_CASES=100 pytest tests/planner/test_same_placement.py`` draws others, and more.
"""

from __future__ import annotations

import os
import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from vblackwell import enable_vgpu_stack_optimization, offload_of
from vblackwell.errors import InsufficientMemory, Unsupported, VBError
from vblackwell.machine.rates import Rates
from vblackwell.nn.convert.linears import store_linears
from vblackwell.nn.convert.lora import Lora, add_adapters
from vblackwell.nn.convert.training import training_loss
from vblackwell.nn.decoder.config import DecoderConfig
from vblackwell.nn.decoder.decoder import Decoder
from vblackwell.offload.layout.forecast import fastest_updates
from vblackwell.offload.layout.groups import KINDS, PARAMETER_KINDS, Formats, bytes_when_resident, moment_ranges
from vblackwell.offload.layout.placement import StreamingOptions, old_kinds, place_streamed, spaces
from vblackwell.planner.forecast import Forecast, Machine, Placed
from vblackwell.planner.memory_estimate import P99_BYTES, Run
from vblackwell.planner.placement import Bounds, Plan, Space
from vblackwell.train import auto
from vblackwell.train.config import TrainConfig
from vblackwell.train.prepare import build_stack, make_optimizer
from vblackwell.units import KiB

SEED, CASES = int(os.environ.get("VB_SEED", "0")), int(os.environ.get("VB_CASES", "12"))
SEQ, BATCH, STEPS = 16, 2, 2
CPU = torch.device("cpu")
RATES = Rates(779e9, 1e11, 1e10, 5e9, 5e9, 5e9, 5e9, 1e9)
LEAST_8BIT = 400 * KiB  # of level 0: a quarter of it is the ring, which 8-bit moments need 92 KiB of


@dataclass(frozen=True)
class Case:
    """A model and its run; ``level0``, ``host`` and ``disk``: of the bytes that it takes when it is resident."""

    family: str
    sizes: tuple[int, int, int, int]  # hidden, intermediate, layers, vocabulary
    tied: bool
    dtype: torch.dtype | None
    lora: int
    use_fp4: bool
    formats: Formats
    micro_batches: int
    update: str
    placement: str
    clips: bool
    level0: float
    host: float
    disk: float

    def model(self) -> nn.Module:
        """On meta, in training mode."""
        hidden, wide, layers, words = self.sizes
        if self.family == "decoder":
            return Decoder(DecoderConfig(words, hidden, wide, layers, 2, max_position=SEQ), device="meta").train()
        import transformers

        transformers.logging.set_verbosity_error()
        ends: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": 2, "use_cache": False}
        if self.family == "gpt2":
            sizes = {"n_embd": hidden, "n_layer": layers, "n_head": 2, "n_positions": SEQ}
        else:
            sizes = {"hidden_size": hidden, "intermediate_size": wide, "num_hidden_layers": layers}
            sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": self.tied}
            sizes |= {"num_local_experts": 3} if self.family == "mixtral" else {}
        config = transformers.AutoConfig.for_model(self.family, vocab_size=words, **sizes, **ends)
        with torch.device("meta"):
            model: Any = transformers.AutoModelForCausalLM.from_config(config)
        if self.lora:
            add_adapters(model, Lora(self.lora))
        if self.use_fp4:
            store_linears(model, tiled=False)
        return model.train()

    def config(self, resident_bytes: int, folder: Path) -> TrainConfig:
        level0, host, disk = (int(share * resident_bytes) for share in (self.level0, self.host, self.disk))
        return TrainConfig(
            seq_length=SEQ,
            batch_size=BATCH,
            accumulation_steps=self.micro_batches,
            fast_memory=max(level0, LEAST_8BIT) if self.formats.packed else level0,
            host_memory=host,
            disk_memory=disk or None,
            disk_path=str(folder) if disk else None,
            update=self.update,
            placement=self.placement,
            optimizer_states=self.formats.states,
            masters=self.formats.masters,
            max_grad_norm=1e9 if self.clips else 0.0,
        )


def drawn(number: int) -> Case:
    """Of eight one fits level 0, two are adapters, one of them over FP4, and two have 8-bit moments."""
    draw = random.Random(f"{SEED} {number}")
    adapts, packed, resident = number % 4 == 1, number % 4 == 2, number % 8 == 3
    dtype = draw.choice([None, torch.bfloat16, torch.bfloat16, *([] if packed else [torch.float16])])
    stochastic = packed and dtype is not None and draw.random() < 0.5
    family = draw.choice(["llama", "qwen2"] if adapts else ["decoder", "llama", "qwen2", "gpt2", "mixtral"])
    hidden = draw.choice([128, 160] if packed else [32, 48, 64])
    return Case(
        family=family,
        sizes=(hidden, draw.choice([64, 96, 160]), draw.randint(3, 4), draw.randint(60, 300)),
        tied=draw.random() < 0.5,
        dtype=dtype,
        lora=4 * adapts,
        use_fp4=number % 8 == 5,
        formats=Formats("8bit" if packed else "fp32", "stochastic" if stochastic else "exact"),
        micro_batches=draw.randint(1, 3),
        update="auto" if packed else draw.choice(["auto", "device", "host", "0.3", "0.5"]),
        placement="auto" if resident else "streamed",
        clips=draw.random() < 0.5,
        level0=1.1 if resident else draw.uniform(0.2, 0.6),
        host=draw.uniform(0.6, 3.0),
        disk=draw.choice([0.0, 3.0]),
    )


def fill(name: str, tensor: Tensor) -> None:
    """What no gradient of becomes infinite."""
    tensor.normal_(0, 0.02) if tensor.is_floating_point() else tensor.zero_()


def forecasts(monkeypatch: pytest.MonkeyPatch) -> list[Forecast]:
    """Those that the planner makes from now on, by stated rates."""
    made: list[Forecast] = []

    def keep(*args: Any, **more: Any) -> Forecast:
        made.append(Forecast(*args, **more))
        return made[-1]

    monkeypatch.setattr(auto, "Forecast", keep)
    monkeypatch.setattr(auto, "cpu_rates", lambda: RATES)
    monkeypatch.setattr(auto, "_disk_rates", lambda *args: (1e9, 1e9))
    return made


def trained(
    case: Case, model: nn.Module, stack: Any, config: TrainConfig, sizes: dict[str, Any]
) -> tuple[Any, list[int]]:
    """The engine after some steps, as `vb train` makes it, and what its levels held when it was placed."""
    enable_vgpu_stack_optimization(
        model,
        stack,
        placement=config.placement,
        compute_dtype=case.dtype,
        update=config.update_place,
        states=case.formats.states,
        masters=case.formats.masters,
        initialize=fill,
        **sizes,
    )
    first = [level.used_bytes for level in stack.levels]
    optimizer, engine = make_optimizer(model, config), offload_of(model)
    optimizer.loss_scale = scale = 16.0 if case.dtype is torch.float16 else 1.0
    tokens = torch.randint(case.sizes[-1], (BATCH, SEQ), generator=torch.Generator().manual_seed(0))
    for _ in range(STEPS):
        for _ in range(case.micro_batches):
            (training_loss(model)(tokens, tokens) * scale / case.micro_batches).backward()
        optimizer.step()
        assert not optimizer.skipped
        optimizer.zero_grad()
    assert engine is not None
    engine.finish()
    return engine, first


def plan_of(case: Case, config: TrainConfig, model: nn.Module) -> Plan | VBError:
    try:
        return auto.make_training_plan(config, model, case.dtype, CPU, lambda said: None)
    except (InsufficientMemory, Unsupported) as error:
        return error


# Of each eight cases `drawn` makes some of every kind; 2 has 8-bit moments as 6 has, which has experts as well.
every_number = pytest.mark.parametrize(
    "number", [pytest.param(number, marks=[pytest.mark.slow] * (number >= 8 or number == 2)) for number in range(CASES)]
)


@every_number
def test_a_run_places_what_was_planned(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    case, made = drawn(number), forecasts(monkeypatch)
    model = case.model()
    config = case.config(bytes_when_resident(model, case.dtype, case.formats), tmp_path)
    plan = plan_of(case, config, model)
    if isinstance(plan, VBError):
        with build_stack(config, CPU) as stack, pytest.raises(VBError):
            trained(case, model, stack, config, {})
        return
    planned = auto.apply_plan(config, plan)
    with build_stack(planned, CPU, plan) as stack:
        engine, first = trained(case, model, stack, planned, auto.planned_sizes(plan))
        real, said, levels = engine.summary(), plan.prediction, stack.get_stats()["levels"]
        peaks = [level["peak_bytes"] for level in levels]
        assert real["placement"] == plan.choice.placement
        if plan.choice.placement == "resident":
            assert [said.gpu, 0, 0][: len(levels)] == peaks
            return
        placed = made[0].place(plan.choice)
        assert isinstance(placed, Placed) and placed.step is not None
        told = placed.step.bytes_by_level
        assert {kind: row for kind, row in told.items() if kind in KINDS} == real["bytes_by_level"]
        undo = told.get("undo", [0] * len(levels))
        assert sum(undo) == real["undo_bytes"]
        # Where the optimizer's states spill, RAM that they pass through may be taken before they are placed, and more.
        assert [max(said.host, first[1]), *(said.disk + size for size in undo[2:])] == peaks[1:]
        assert plan.choice.weight_bytes == placed.step.lanes.weight_budget == real["weights_budget_bytes"]
        assert told["ring"][0] == real["ring_bytes"]
        works = zip(engine.groups, placed.step.lanes.groups, strict=True)
        above = [group.name for group, work in works if work.parameters and not work.on_host]
        assert above == real["updated_on_level0"]
        assert said.gpu == min(placed.step.bytes_of(0), plan.choice.level0_bytes) >= peaks[0]


@every_number
def test_a_gpu_is_planned_as_the_run_would_divide_it(number: int):
    """By arithmetic: the planner's own copy of the model, in the type that computes, and the run's with its options."""
    case = drawn(number)
    model = case.model()
    run = Run(auto.spec_of(model, "drawn"), SEQ, precision=auto.precision_of(case.dtype))
    undo, size = case.dtype is not torch.float16, bytes_when_resident(model, case.dtype, case.formats)
    bounds = Bounds(2 * P99_BYTES + int(case.level0 * size), int(case.host * size), int(case.disk * size))
    forecast = Forecast(run, Machine(bounds, RATES, undo=undo), case.formats.masters)
    space = Space(((BATCH, case.micro_batches),), (False,), ("streamed",), states=(case.formats.states,))
    try:
        plan = forecast.plan(space)
    except (InsufficientMemory, Unsupported):
        return
    choice = plan.choice
    placed = forecast.place(choice)
    assert isinstance(placed, Placed) and placed.step is not None and placed.choice == choice
    below = [bounds.host] + ([bounds.disk] if bounds.disk else [])
    untold, levels = StreamingOptions(case.dtype, formats=case.formats), spaces([bounds.gpu, *below], on_gpu=True)
    updates = fastest_updates(model, levels, untold, lambda: (RATES.up_both, RATES.cpu_adamw))
    if not placed.step.lanes.uses_disk:  # where a plan tries one place for all as well
        assert updates(case.micro_batches, undo) == choice.update  # of a run that is told nothing
    if plan.updates is not None:  # and by what the run looks at its share again
        assert plan.updates(case.micro_batches, undo) == choice.update
    assert (plan.updates is not None) == isinstance(choice.update, float)
    sizes = {"weight_bytes": choice.weight_bytes, "resident_bytes": choice.resident_bytes}
    options = StreamingOptions(case.dtype, update=choice.update, formats=case.formats, **sizes)
    capacities = [choice.level0_bytes, *below]
    found = place_streamed(model, spaces(capacities, on_gpu=True), options)
    gradients = found.gradient_ranges(found.trainable, case.micro_batches, undo=undo)
    incoming_bytes = found.incoming_bytes(case.micro_batches, undo=undo)
    storage = replace(found.storage, incoming_bytes=incoming_bytes)
    storage = storage.with_ranges(gradients + moment_ranges(found.trainable))
    assert (incoming_bytes > 0) == (case.micro_batches > 1 and bool(found.incoming_bytes(3, undo=undo)))
    told = placed.step.bytes_by_level
    assert {kind: row for kind, row in told.items() if kind in KINDS} == storage.bytes_by_level()
    assert (told["ring"][0], placed.step.lanes.weight_budget) == (found.ring_bytes, found.budget_bytes)
    host, (behind, shadowed) = storage.levels[1], found.early(storage, case.micro_batches) if undo else ([], [])
    pairs = [(g, k) for g in shadowed for k in PARAMETER_KINDS]
    held = [host.held_bytes(storage.range(*pair).num_bytes) for pair in pairs if pair in storage]
    olds = [(g, k) for g in behind for k in old_kinds(g, on_host=g not in found.on_level0)]
    held += [host.held_bytes(g.size_of(k)) for g, k in olds]
    assert sum(told.get("undo", [])) == sum(held)
