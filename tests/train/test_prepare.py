"""Setting up a run: steps, memory, and models that are refused."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.nn.linear.peak_bytes import PeakBytes
from vblackwell.data.corpus import Corpus, PackedDataset
from vblackwell.errors import ConfigurationError, InsufficientMemory
from vblackwell.machine.facts import MemoryFacts
from vblackwell.machine.gpus import find_gpu
from vblackwell.machine.rates import rates_of
from vblackwell.nn.decoder.config import DecoderConfig
from vblackwell.nn.decoder.decoder import Decoder
from vblackwell.offload.api import offload_of
from vblackwell.offload.layout.forecast import FastestUpdates
from vblackwell.offload.state import export_state
from vblackwell.train import auto
from vblackwell.train import prepare as prepare_module
from vblackwell.train.auto import make_training_plan
from vblackwell.train.config import TrainConfig
from vblackwell.train.defaults import Facts
from vblackwell.train.model import trainable
from vblackwell.train.prepare import build_stack, decide, decide_steps, prepare
from vblackwell.train.progress import Progress, StopRequest
from vblackwell.units import GiB, MiB

CPU = torch.device("cpu")


def test_epochs_become_steps():
    config = decide_steps(TrainConfig(epochs=1.5, batch_size=4, accumulation_steps=2), windows_per_epoch=100)
    assert (config.max_steps, config.warmup_steps, config.epochs) == (19, 0, None)  # 150 windows of 8 a step
    assert decide_steps(TrainConfig(max_steps=400), 100).warmup_steps == 20
    assert decide_steps(TrainConfig(), 100).max_steps == 13  # one epoch


def test_a_frozen_model_is_refused_before_memory_is_taken(monkeypatch):
    """torch's own words come later, and are of an empty parameter list, or of a tensor without grad_fn."""
    made = Decoder(DecoderConfig(64, 32, 64, 2, 2, max_position=16), seed=0, device="cpu").requires_grad_(False)
    monkeypatch.setattr("vblackwell.train.prepare.find_model", lambda config, cleanup: trainable(made))
    monkeypatch.setattr("vblackwell.train.prepare.open_data", lambda *_: (None, None, None))
    with pytest.raises(ConfigurationError, match="Decoder has nothing to train: all of its .* frozen"):
        prepare(TrainConfig(), CPU, Progress(), StopRequest(), ExitStack())


@pytest.fixture
def preset_corpus(monkeypatch):
    """A tokenized corpus without files: `prepare` gets as far as the stack."""
    corpus = Corpus(np.arange(4000, dtype=np.uint16) % 64, None, 64, None, "", "toy")
    windows = PackedDataset(corpus, 32, "train")
    monkeypatch.setattr("vblackwell.train.prepare.open_data", lambda *_: (corpus, windows, windows))


def test_a_preset_that_does_not_fit_is_refused_before_it_takes_memory(preset_corpus):
    config = TrainConfig(preset="small", seq_length=32, fast_memory="20MiB", host_memory="40MiB")
    with PeakBytes() as held, ExitStack() as cleanup, pytest.raises(InsufficientMemory, match="MiB") as refusal:
        prepare(config, CPU, Progress(), StopRequest(), cleanup)
    assert refusal.value.needed_bytes > refusal.value.available_bytes
    assert held.peak < 60 * MiB, "weights, which are 101 MiB, were drawn first"


@pytest.mark.parametrize(
    ("sizes", "part"),
    [
        ({"fast_memory": "10TiB"}, "--fast-memory 10.0 TiB are RAM"),
        ({"fast_memory": "9GiB", "host_memory": "8GiB"}, "--fast-memory 9.00 GiB and --host-memory 8.00 GiB"),
        ({"fast_memory": "2MiB", "host_memory": "8MiB"}, None),
        (
            {"fast_memory": "2MiB", "host_memory": "14GiB"},
            None,
        ),  # a cap: the run's state takes less of what is free just now
        ({"fast_memory": "2MiB", "host_memory": "15GiB"}, "up to 13.0 GiB are needed"),
    ],
)
def test_what_is_asked_of_ram_is_within_the_cgroup(sizes, part, monkeypatch):
    facts = MemoryFacts(16 * GiB, 12 * GiB, "/sys/fs/cgroup/job")
    state_bytes = 13 * GiB if sizes.get("host_memory") == "15GiB" else 64 * MiB
    monkeypatch.setattr("vblackwell.train.prepare.memory_facts", lambda: facts)
    if part is None:
        monkeypatch.setattr("vblackwell.memory.host.memory_facts", lambda: MemoryFacts(64 * GiB, 64 * GiB, "machine"))
        build_stack(TrainConfig(**sizes), CPU, state_bytes=state_bytes).close()
        return
    with pytest.raises(
        InsufficientMemory, match="12.0 GiB of 16.0 GiB are available .limited by /sys/fs/cgroup/job"
    ) as error:
        build_stack(TrainConfig(**sizes), CPU, state_bytes=state_bytes)
    assert part in str(error.value)


@pytest.mark.parametrize("lacks", ["disk", "RAM"])
def test_a_run_is_held_against_its_state_and_not_against_its_caps(lacks, preset_corpus, monkeypatch, tmp_path):
    """A resumed run finds its own spill file in the way, and other programs what they hold just now."""
    shape = {"num_layers": 3, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2}
    sizes = {"fast_memory": "128KiB", "host_memory": "8MiB", "disk_memory": "1GiB", "disk_path": str(tmp_path)}
    if lacks == "disk":
        monkeypatch.setattr(
            prepare_module, "disk_facts", lambda path: SimpleNamespace(path=tmp_path, free_bytes=8 * MiB)
        )
    else:
        sizes["host_memory"] = "1GiB"
        monkeypatch.setattr(prepare_module, "memory_facts", lambda: MemoryFacts(2 * GiB, 8 * MiB, "machine"))
    config = TrainConfig(architecture=shape, seq_length=32, max_steps=2, **sizes)
    with ExitStack() as cleanup:
        prepare(config, CPU, Progress(), StopRequest(), cleanup)


@pytest.mark.parametrize(
    ("level0", "options"),
    [
        ("8MiB", {}),
        ("128KiB", {}),
        ("128KiB", {"precision": "bf16"}),
        ("8MiB", {"precision": "bf16"}),
        ("128KiB", {"use_fp4": True}),
    ],
)
def test_a_preset_begins_with_the_same_bits_wherever_it_lives(level0, options, preset_corpus):
    shape = {"num_layers": 3, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2}
    config = TrainConfig(
        architecture=shape, seq_length=32, seed=5, max_steps=2, fast_memory=level0, host_memory="8MiB", **options
    )
    with ExitStack() as cleanup:
        prepared = prepare(config, CPU, Progress(), StopRequest(), cleanup)
        found = dict(export_state(prepared.model, None))
        drawn = Decoder(prepared.model.config, seed=5, device="cpu")
        expected = dict(drawn.named_parameters())
        assert list(found) == list(expected)
        assert all(torch.equal(found[name]["weight"], param.detach()) for name, param in expected.items())


@pytest.fixture
def rated(monkeypatch):
    """A plan for this machine without measuring it, which takes a second."""
    monkeypatch.setattr(auto, "cpu_rates", lambda: rates_of(find_gpu("RTX 3060")))


@pytest.mark.parametrize("chosen", [False, True])
def test_a_share_that_a_plan_chose_may_move_and_one_that_was_stated_stays(chosen, preset_corpus, rated, monkeypatch):
    """The plan is this machine's, with the share of a GPU's."""

    def plan_of(*args):
        plan = make_training_plan(*args)
        updates = FastestUpdates({}, 0.0, 2e9, 0.5) if chosen else None
        return replace(plan, choice=replace(plan.choice, update=0.5), updates=updates)

    monkeypatch.setattr(prepare_module, "make_training_plan", plan_of)
    shape = {"num_layers": 6, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2}
    sizes = {"fast_memory": "192KiB", "host_memory": "8MiB", "disk_memory": 0, "placement": "streamed"}
    config = TrainConfig(architecture=shape, seq_length=32, batch_size=2, max_steps=2, vgpu_auto=True, **sizes)
    with ExitStack() as cleanup:
        prepared = prepare(config, CPU, Progress(), StopRequest(), cleanup)
        engine = offload_of(prepared.model)
        assert engine.host_share.place == 0.5 and 0 < len(engine.level0.groups) < len(engine.groups)
        assert engine.host_share.rates == ([(2e9, 0.5)] if chosen else [])


@pytest.mark.parametrize("fits", [pytest.param(512, marks=pytest.mark.slow), 256])
def test_on_a_gpu_a_folder_is_planned_with_the_length_and_batch_that_fit(fits, rated, monkeypatch):
    """With the facts of one. Its plan is this machine's, and says no to what is longer than ``fits``."""
    made = trainable(Decoder(DecoderConfig(64, 32, 64, 2, 2, max_position=512), seed=0, device="cpu"))
    corpus = Corpus(np.arange(600_000, dtype=np.uint16) % 64, None, 64, None, "", "toy")
    asked: list[tuple[int, int]] = []

    def plan_of(config, model, dtype, device, say, most):
        asked.append((config.seq_length, most))
        if config.seq_length > fits:
            raise InsufficientMemory("too long")
        assert config.auto_batch_size and config.vgpu_auto and dtype is torch.bfloat16
        plan = make_training_plan(replace(config, auto_batch_size=False, batch_size=2), model, dtype, device, say)
        return replace(plan, choice=replace(plan.choice, checkpointing=True))

    facts = Facts(True, True, torch.bfloat16, 512)
    monkeypatch.setattr(prepare_module, "find_model", lambda config, cleanup: replace(made, folder=None))
    monkeypatch.setattr(prepare_module, "facts_of", lambda *_: facts)
    monkeypatch.setattr(prepare_module, "prepare_data", lambda *_: corpus)
    monkeypatch.setattr(prepare_module, "make_training_plan", plan_of)
    said: list[str] = []
    monkeypatch.setattr(Progress, "say", lambda self, text: said.append(text))
    with ExitStack() as cleanup:
        decided = decide(TrainConfig(model="folder", max_steps=3), CPU, Progress(), StopRequest(), cleanup)
    config, rows = decided.config, 588_000 // fits
    assert (config.seq_length, decided.train.seq_length, config.batch_size) == (fits, fits, 2)
    assert config.gradient_checkpointing and config.precision == "bf16" and len(decided.train) == rows
    assert [length for length, _ in asked] == [512, 256][: len(asked)] and asked[-1][1] == rows // 100
    (line,) = [text for text in said if text.startswith("chosen: ")]
    for reason in ("planned, on a GPU", "bf16, as the folder", "512 tokens a sequence: the model's positions"):
        assert reason in line
    assert ("cut to 256, which fit" in line) == (fits == 256) and "resident, 2 sequences, checkpointing" in line
