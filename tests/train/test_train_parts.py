"""The trainer's small parts: schedule, loss scaler, settings, metrics, refusals of machines, advice."""

from __future__ import annotations

import json
import math
import os
import signal
from contextlib import ExitStack
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.nn.linear.peak_bytes import PeakBytes
from vblackwell import cli
from vblackwell.data.dataset import Corpus, PackedDataset
from vblackwell.errors import ConfigurationError, CorruptData, InsufficientMemory, Unsupported
from vblackwell.machine import device as machine
from vblackwell.machine.device import choose_precision
from vblackwell.machine.facts import DiskFacts, GPUFacts, MemoryFacts
from vblackwell.nn.attention import backends as dispatcher
from vblackwell.nn.convert.training import attention_backends, chosen_backend, fused_backend
from vblackwell.nn.decoder.config import DecoderConfig
from vblackwell.nn.decoder.decoder import Decoder
from vblackwell.nn.decoder.presets import PRESETS
from vblackwell.offload.state import export_state
from vblackwell.tools.doctor import advice
from vblackwell.train.checkpoint import refuse_other_run
from vblackwell.train.config import FIXED, TrainConfig, field_help, refuse_changes
from vblackwell.train.metrics import MetricsLog, StepRecord, cut_after, read_metrics
from vblackwell.train.model import trainable
from vblackwell.train.prepare import build_stack, decide_steps, prepare
from vblackwell.train.progress import PlainProgress
from vblackwell.train.report import make_report, report_lines
from vblackwell.train.schedule import MIN_SCALE, LossScaler, Schedule
from vblackwell.train.signals import StopRequest
from vblackwell.train.sources import RECIPES, resolve
from vblackwell.train.trainer import TrainerState, capture_rng, restore_rng
from vblackwell.units import GiB, MiB

CPU = torch.device("cpu")


# -- schedule and scaler ---------------------------------------------------------------------------------------------------


# A ratio is 0 or one that a rate survives: below 1e-12 of a small peak, products leave the range of floats.
@given(st.integers(1, 500), st.integers(0, 100), st.floats(1e-6, 1.0), st.just(0.0) | st.floats(1e-12, 1.0))
def test_schedule_rises_to_the_peak_and_falls_to_the_floor(total, warmup, peak, ratio):
    schedule = Schedule(peak, peak * ratio, min(warmup, total - 1), total)
    rates = [schedule.learning_rate(step) for step in range(total)]
    top = schedule.warmup_steps
    assert all(0 < rate <= peak * (1 + 1e-12) for rate in rates if ratio > 0)
    slack = peak * 1e-12  # floor + (peak - floor) rounds
    assert all(later >= sooner - slack for sooner, later in zip(rates[:top], rates[1 : top + 1], strict=True))
    assert all(later <= sooner + slack for sooner, later in zip(rates[top:], rates[top + 1 :], strict=False))
    assert math.isclose(rates[top], peak, rel_tol=1e-12)
    if total - 1 > top:
        assert math.isclose(rates[-1], peak * ratio, rel_tol=1e-9, abs_tol=1e-15)


@given(st.lists(st.booleans(), max_size=200))
def test_scaler_halves_on_overflow_and_stays_a_power_of_two(history):
    scaler = LossScaler(initial=2.0**8, growth_interval=3)
    for overflowed in history:
        before = scaler.scale
        scaler.update(overflowed=overflowed)
        assert math.frexp(scaler.scale)[0] == 0.5 and scaler.scale >= MIN_SCALE
        assert scaler.scale == max(MIN_SCALE, before / 2) if overflowed else scaler.scale in (before, before * 2)
    other = LossScaler()
    other.load_state_dict(json.loads(json.dumps(scaler.state_dict())))
    for overflowed in (False, False, True, False):
        scaler.update(overflowed=overflowed)
        other.update(overflowed=overflowed)
        assert other.scale == scaler.scale


def test_scaler_grows_after_its_interval():
    scaler = LossScaler(initial=4.0, growth_interval=2)
    scales = []
    for _ in range(4):
        scaler.update(overflowed=False)
        scales.append(scaler.scale)
    assert scales == [4.0, 8.0, 8.0, 16.0]
    assert not scaler.exhausted and LossScaler(initial=MIN_SCALE).exhausted


# -- settings --------------------------------------------------------------------------------------------------------------


def test_every_setting_has_a_help_text():
    assert set(field_help()) == set(TrainConfig.__dataclass_fields__)
    assert all(text.endswith(".") or text.endswith("'.") for text in field_help().values())


def test_recipes_are_valid_and_name_the_presets():
    assert list(RECIPES) == list(PRESETS)
    for name in RECIPES:
        config = resolve({"config": name})
        assert config.preset == name and config.name == name
        assert config.seq_length <= PRESETS[name].max_position
    assert resolve({"model": "some/model"}).learning_rate == 2e-5
    assert resolve({"model": "some/model", "lora": "16"}).learning_rate == 2e-4
    assert resolve({"model": "some/model", "lora": "16", "learning_rate": "1e-3"}).learning_rate == 1e-3


def test_flags_beat_the_file_beat_the_resumed_run_beat_the_recipe(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("preset: small\nmax-steps: 7\nbatch_size: 3\nbeta1: 1e-1\n")
    config = resolve({"config": str(file), "batch_size": "5"})
    assert (config.preset, config.max_steps, config.epochs) == ("small", 7, None)  # the recipe's epochs gave way
    assert (config.batch_size, config.learning_rate, config.beta1) == (5, 1e-3, 0.1)
    (tmp_path / "settings.json").write_text(json.dumps(config.to_dict()))
    resumed = resolve({"out": str(tmp_path), "resume": True, "epochs": "2", "fast_memory": "1MiB"})
    assert (resumed.preset, resumed.batch_size, resumed.max_steps, resumed.epochs) == ("small", 5, None, 2.0)
    assert resumed.fast_memory == MiB


# Each list is ten of the one before: printed, it has 10^10 words.
BOMB = "[&a [x], " + ", ".join(f"&{b} [{', '.join(['*' + a] * 10)}]" for a, b in pairwise("abcdefghijk")) + "]"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("- a\n", "list"), ("a: [\n", "not YAML"), ("node: 2\n", "'node'"), ("resume: 3\n", "true or false"),
        ("out: 3\n", "not text"), ("batch_size: 1.5\n", "whole number"), ("learning_rate: .nan\n", "finite"),
        ("precision: fp8\n", "fp8"), ("architecture: 3\n", "mapping"), ("seed: " + "[" * 1000, "not YAML"),
        ("seed: 2024-13-45\n", "not YAML"), ("out: !!python/object/apply:os.system [ls]\n", "not YAML"),
        ("seed: !!timestamp x\n", "not YAML"), ("max_steps: [3]\n", "'max_steps' holds a list"), ("? [seed]\n: 3\n", "not YAML"),
        ("architecture: {num_layers: [3]}\n", "'architecture' holds"), ("seed: [1]\n", "holds a list"),
        (f"seed: {BOMB}\n", "'seed' holds a list"),
        (f"architecture: {{a: {BOMB}}}\n", "'architecture' holds"),
    ],
)  # fmt: skip
def test_yaml_is_checked_like_flags(tmp_path, text, said):
    file = tmp_path / "run.yaml"
    file.write_text(text)
    with pytest.raises(ConfigurationError, match=said):
        resolve({"config": str(file)})


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"mixed_precision": True, "precision": "fp32"}, "contradicts"), ({"beta2": 1.0}, "--beta2"),
        ({"min_learning_rate_ratio": 2.0}, "--min-learning-rate-ratio"), ({"max_grad_norm": float("inf")}, "finite"),
        ({"model": "x", "architecture": {"num_layers": 1}}, "--model"), ({"seed": True}, "--seed"),
        ({"epochs": 0.0}, "--epochs"), ({"host_memory": "-3"}, "--host-memory"), ({"device": "tpu"}, "tpu"),
    ],
)  # fmt: skip
def test_values_out_of_range(values, said):
    with pytest.raises(ConfigurationError, match=said):
        TrainConfig(**values)


def test_epochs_become_steps():
    config = decide_steps(TrainConfig(epochs=1.5, batch_size=4, accumulation_steps=2), windows_per_epoch=100)
    assert (config.max_steps, config.warmup_steps, config.epochs) == (19, 0, None)  # 150 windows of 8 a step
    assert decide_steps(TrainConfig(max_steps=400), 100).warmup_steps == 20
    assert decide_steps(TrainConfig(), 100).max_steps == 13  # one epoch


def test_a_resumed_run_computes_as_it_began():
    stored = TrainConfig(learning_rate=0.1).to_dict()
    refuse_changes(TrainConfig(learning_rate=0.1, fast_memory="1GiB", max_steps=9, profile=True), stored)
    with pytest.raises(ConfigurationError, match="--learning-rate is 0.2, the run was started with 0.1"):
        refuse_changes(TrainConfig(learning_rate=0.2), stored)
    assert set(FIXED) <= set(TrainConfig.__dataclass_fields__)


@pytest.mark.parametrize(
    ("now", "part"),
    [
        ({"learning_rate": 0.2}, "--learning-rate is 0.2"), ({"seed": 1}, "--seed is 1"), ({"beta2": 0.9}, "--beta2 is 0.9"),
        ({"weight_decay": 0.2}, "--weight-decay is 0.2"), ({"warmup_steps": 9}, "--warmup-steps is 9"),
        ({"max_steps": 800, "warmup_steps": 20}, None), ({"max_steps": 800, "warmup_steps": 40}, None),
        ({"max_steps": 800, "warmup_steps": 41}, "--warmup-steps is 41"), ({"fast_memory": "1GiB"}, None),
    ],
)  # fmt: skip
def test_a_checkpoint_of_other_settings_is_not_gone_on_from(now, part, tmp_path):
    """Whatever became of settings.json: trainer.json is hashed, and holds what the run was computed with."""
    began = {"learning_rate": 0.1, "max_steps": 400, "warmup_steps": 20}
    written = json.loads(json.dumps(TrainConfig(**began).to_dict()))
    config = TrainConfig(**(began | now))
    if part is None:
        refuse_other_run(config, tmp_path, written)
        return
    with pytest.raises(ConfigurationError, match=f"{part}, the run was started with .*trainer.json"):
        refuse_other_run(config, tmp_path, written)


# -- state, metrics, report ------------------------------------------------------------------------------------------------


def test_generators_continue_where_they_were():
    import random

    state = TrainerState(step=3, data_position=9, rng=json.loads(json.dumps(capture_rng(CPU))))
    expected = torch.rand(3), random.random()
    again = TrainerState.from_json(json.loads(json.dumps(vars(state))))
    restore_rng(again.rng, CPU)
    assert torch.equal(torch.rand(3), expected[0]) and random.random() == expected[1]
    with pytest.raises(CorruptData, match="data_position"):
        TrainerState.from_json({"step": 3})


def record(step, **extra):
    values = {"loss": 1.0, "lr": 0.1, "grad_norm": 2.0, "tokens_per_second": 10.0, "stall_seconds": 0.0}
    return StepRecord(step=step, level_bytes={"arena": 5}, link_bytes={"arena>cpu": 7}, **(values | extra))


def test_metrics_are_cut_at_the_checkpoint(tmp_path):
    log = MetricsLog(tmp_path, 0, tensorboard=False)
    for step in range(1, 6):
        log.write(record(step, **({"val_loss": 3.0} if step == 2 else {}), **({"loss": None} if step == 4 else {})))
    log.close()
    path = tmp_path / "metrics.jsonl"
    path.write_text(path.read_text() + '{"step": 6, "lo')  # killed in the middle of a line
    lines = read_metrics(path)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5] and lines[3]["loss"] is None
    assert [("val_loss" in line) for line in lines] == [False, True, False, False, False]
    log = MetricsLog(tmp_path, 3, tensorboard=False)
    log.write(record(4))
    log.close()
    assert [line["step"] for line in read_metrics(path)] == [1, 2, 3, 4]
    cut_after(tmp_path / "gone.jsonl", 3)


def test_report_says_what_was_counted():
    level = {"evictions": 0, "promotions": 0, "demotions": 0, "used_bytes": 0}
    stats = {
        "levels": [
            {"device": "arena", "capacity_bytes": 4 * MiB, "peak_bytes": 3 * MiB, "hits": 3, "misses": 1, **level},
            {"device": "cpu", "capacity_bytes": GiB, "peak_bytes": 9 * MiB, "hits": 0, "misses": 0, **level},
        ],
        "links": [
            {"source": "arena", "destination": "ssd", "bytes": 5 * MiB, "seconds": 2.0},
            {"source": "cpu", "destination": "arena", "bytes": MiB, "seconds": 0.5},
        ],
        "stall_seconds": 1.0,
    }
    formats = {"states": "8bit", "masters": "exact"}
    summary = {"placement": "streamed", "groups": 5, "bytes_by_level": {}, "formats": formats}
    report = make_report(stats, summary, run={"seconds": 4.0}, gpu_peak_bytes=None, process_peak_bytes=GiB)
    assert report["ssd_written_bytes"] == 5 * MiB and report["stalled_share"] == 0.25
    assert [entry["hit_rate"] for entry in report["levels"]] == [0.75, None]
    text = "\n".join(report_lines(report))
    for part in (
        "75.0%",
        "3.00 MiB",
        "arena > ssd",
        "25.0% of the run",
        "5 layer groups",
        "AdamW: 8bit states, exact masters",
        "written to the SSD: 5.00 MiB",
    ):
        assert part in text
    report["gpu_peak_bytes"] = {"allocated": GiB, "reserved": 2 * GiB}
    assert "1.00 GiB allocated, 2.00 GiB reserved" in "\n".join(report_lines(report))


# -- machines --------------------------------------------------------------------------------------------------------------


def gpu(index=0):
    return GPUFacts(index, f"GPU number {index}", 8 * GiB, 7 * GiB, (8, 6), "0000:01:00.0", "470.0", (11, 4), None)


def test_a_gpu_that_torch_cannot_use_stops_the_run(monkeypatch):
    monkeypatch.setattr(machine, "list_gpus", lambda: [gpu()])
    monkeypatch.setattr(
        machine, "why_no_cuda", lambda gpus: f"found {gpus[0].name} with driver 470.0: update the driver"
    )
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with pytest.raises(Unsupported, match="update the driver; or compute on the CPU with --device cpu"):
        machine.choose_device("auto", print)
    assert machine.choose_device("cpu", print) == CPU
    said = []
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert machine.choose_device("auto", said.append) == CPU and "hidden" in said[0]
    monkeypatch.setattr(machine, "list_gpus", lambda: [])
    assert machine.choose_device("auto", print) == CPU
    monkeypatch.setattr(machine, "why_no_cuda", lambda gpus: "no NVIDIA GPU was found")
    with pytest.raises(Unsupported, match="no NVIDIA GPU"):
        machine.choose_device("cuda", print)


def test_a_gpu_that_nvml_does_not_describe_is_used(monkeypatch):
    monkeypatch.setattr(machine, "list_gpus", lambda: [])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(machine, "why_no_cuda", lambda gpus: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert machine.choose_device("auto", print) == torch.device("cuda", 0)


def test_unused_gpus_are_named(monkeypatch):
    monkeypatch.setattr(machine, "list_gpus", lambda: [gpu(0), gpu(1)])
    monkeypatch.setattr(machine, "why_no_cuda", lambda gpus: None)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"GPU number {index}")
    said = []
    assert machine.choose_device("auto", said.append) == torch.device("cuda", 0)
    assert said == ["GPU 1 (GPU number 1) is not used: this version computes on one GPU"]


@pytest.mark.parametrize(
    ("command", "module"), [("generate", "generate.command"), ("quantize", "tools.quantize"), ("bench", "tools.bench")]
)
def test_every_command_says_that_a_gpu_is_hidden(command, module, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(machine, "list_gpus", lambda: [gpu()])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    monkeypatch.setattr(f"vblackwell.{module}.{command}_command", lambda **options: 0)
    monkeypatch.setattr("vblackwell.folders.checked.check_request", lambda *given, **options: None)
    monkeypatch.setattr("vblackwell.generate.load.resolve_model", lambda path: SimpleNamespace(folder=path))
    model = [str(tmp_path)] if command == "bench" else ["--model", str(tmp_path)]
    out = ["--out", str(tmp_path / "out")] if command == "quantize" else []
    assert cli._dispatch([command, *model, *out]) == 0
    found = capsys.readouterr()
    assert found.out == "" and "GPU number 0 is hidden by CUDA_VISIBLE_DEVICES: computing on the CPU" in found.err


def test_launchers_are_refused():
    machine.refuse_distributed({})
    machine.refuse_distributed({"WORLD_SIZE": "1"})
    with pytest.raises(Unsupported, match="WORLD_SIZE is 4"):
        machine.refuse_distributed({"WORLD_SIZE": "4"})


def test_precision_by_device(monkeypatch):
    assert choose_precision("auto", False, CPU).compute_dtype is None
    assert choose_precision("auto", True, CPU).compute_dtype is torch.bfloat16
    cuda = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    turing = choose_precision("auto", True, cuda)
    assert turing.compute_dtype is torch.float16 and turing.needs_scaler and turing.name == "float16"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    assert choose_precision("auto", True, cuda).compute_dtype is torch.bfloat16
    assert choose_precision("fp16", False, cuda).needs_scaler


def test_the_attention_that_runs_is_known():
    shape = DecoderConfig(vocab_size=8, hidden_size=32, intermediate_size=32, num_layers=1, num_heads=2)
    with attention_backends(use_flash_attn=True, deterministic=False):
        assert chosen_backend(shape.num_heads, shape.kv_heads, shape.head_size, 16, torch.float32, CPU) == "flash"
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION), pytest.raises(Unsupported, match="--use-flash-attn: no fused"):
        chosen_backend(shape.num_heads, shape.kv_heads, shape.head_size, 16, torch.float32, CPU)


def test_the_fused_attention_of_a_run_and_why_there_is_none(monkeypatch):
    monkeypatch.setattr(dispatcher, "_measured", lambda request: {})
    assert fused_backend(4, 2, 32, 16, torch.float32, CPU) == "flash"
    cuda = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert fused_backend(4, 2, 64, 512, torch.bfloat16, cuda) == "cudnn"
    assert fused_backend(4, 2, 64, 512, torch.bfloat16, cuda, deterministic=True) == "triton"
    assert fused_backend(4, 4, 64, 512, torch.float32, cuda) == "efficient"
    with pytest.raises(Unsupported, match="--use-flash-attn: no fused.*--mixed-precision") as caught:
        fused_backend(4, 2, 512, 512, torch.float32, cuda)
    for words in (
        "flash: torch.float32: it takes",
        "efficient: 4 query heads over 2 key heads",
        "triton: a head of 512",
    ):
        assert words in str(caught.value)
    assert "math" not in str(caught.value)


def test_a_decoder_attends_where_it_is_told():
    shape = DecoderConfig(
        vocab_size=31, hidden_size=32, intermediate_size=32, num_layers=2, num_heads=4, num_kv_heads=2
    )
    tokens = torch.randint(0, 31, (2, 9), generator=torch.Generator().manual_seed(0))
    runs = []
    for backend in (None, "flash"):
        model = Decoder(shape, seed=1)
        model.use_attention(backend)
        loss = model(tokens, tokens)
        runs.append([loss, *torch.autograd.grad(loss, list(model.parameters()))])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
    model.use_attention("cudnn")
    with pytest.raises(Unsupported, match="'cudnn' refuses"):
        model(tokens)
    model.use_attention(None)
    model(tokens)


def test_advice_names_what_is_missing(tmp_path):
    memory = MemoryFacts(2 * GiB, GiB, "/sys/fs/cgroup/box")
    said = advice(memory, DiskFacts(tmp_path, MiB, "tmpfs"), [], "no NVIDIA GPU was found", wsl=True)
    text = "\n".join(said)
    for part in (
        "no NVIDIA GPU",
        "/sys/fs/cgroup/box",
        "is tmpfs",
        "checkpoints need 12 bytes",
        ".wslconfig",
        "pinned memory",
    ):
        assert part in text
    plenty = MemoryFacts(64 * GiB, 60 * GiB, "machine")
    assert advice(plenty, DiskFacts(tmp_path, 100 * GiB, "ext4"), [], "x", wsl=False) == [
        "GPU: x. Training runs on the CPU."
    ]
    assert "slow" in "\n".join(advice(plenty, DiskFacts(tmp_path, 100 * GiB, "9p"), [gpu()], "x", wsl=False))


def test_signals_are_noted_and_handlers_put_back():
    before = signal.getsignal(signal.SIGTERM)
    with StopRequest() as stop:
        assert not stop.wanted
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.wanted and stop.exit_code == 143
        os.kill(os.getpid(), signal.SIGINT)  # the first reason stays
        assert stop.exit_code == 143
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize("first", [[], [signal.SIGTERM]])
def test_two_sigints_leave_at_once_whatever_came_before(first, monkeypatch):
    left = []
    monkeypatch.setattr(os, "_exit", left.append)
    with StopRequest():
        for number in (*first, signal.SIGINT):
            os.kill(os.getpid(), number)
        assert not left
        os.kill(os.getpid(), signal.SIGINT)
        assert left == [130]


def test_both_kinds_of_progress_show_the_numbers(monkeypatch, capsys):
    from vblackwell.train.progress import PlainProgress, RichProgress

    monkeypatch.setenv("COLUMNS", "100")
    for progress in (PlainProgress(), RichProgress()):
        progress.phase("counting", None)
        progress.say("hello [not markup]")
        progress.start(0, 3)
        for step in (1, 2, 3):
            progress.step(record(step, seconds=2.0, skipped=step == 2, **({"val_loss": 4.5} if step == 1 else {})))
        progress.close()
        progress.close()
        said = capsys.readouterr().out
        for part in (
            "counting",
            "hello [not markup]",
            "loss 1.0000",
            "val 4.5",
            "10 tokens/s",
            "arena 5 B",
            "SKIPPED",
            "left",
        ):
            assert part in said, (type(progress), part)


def test_a_frozen_model_is_refused_before_memory_is_taken(monkeypatch):
    """torch's own words come later, and are of an empty parameter list, or of a tensor without grad_fn."""
    made = Decoder(DecoderConfig(64, 32, 64, 2, 2, max_position=16), seed=0, device="cpu").requires_grad_(False)
    source = SimpleNamespace(tokenizer_path=None, build=lambda config, corpus: trainable(made))
    monkeypatch.setattr("vblackwell.train.prepare.find_model", lambda config, cleanup: source)
    monkeypatch.setattr("vblackwell.train.prepare.open_data", lambda *_: SimpleNamespace(corpus=None))
    with pytest.raises(ConfigurationError, match="Decoder has nothing to train: all of its .* frozen"):
        prepare(TrainConfig(), CPU, PlainProgress(), StopRequest(), ExitStack())


@pytest.fixture
def preset_corpus(monkeypatch):
    """A tokenized corpus without files: `prepare` gets as far as the stack."""
    corpus = Corpus(np.arange(4000, dtype=np.uint16) % 64, None, 64, None, "", "toy")
    windows = PackedDataset(corpus, 32, "train")
    data = SimpleNamespace(corpus=corpus, train=windows, validation=windows, packs_documents=False, template=None)
    monkeypatch.setattr("vblackwell.train.prepare.open_data", lambda *_: data)


def test_a_preset_that_does_not_fit_is_refused_before_it_takes_memory(preset_corpus):
    config = TrainConfig(preset="small", seq_length=32, fast_memory="20MiB", host_memory="40MiB")
    with PeakBytes() as held, ExitStack() as cleanup, pytest.raises(InsufficientMemory, match="MiB") as refusal:
        prepare(config, CPU, PlainProgress(), StopRequest(), cleanup)
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


@pytest.mark.parametrize(
    ("level0", "options"),
    [("8MiB", {}), ("128KiB", {}), ("128KiB", {"precision": "bf16"}), ("8MiB", {"precision": "bf16"}), ("128KiB", {"use_fp4": True})],
)  # fmt: skip
def test_a_preset_begins_with_the_same_bits_wherever_it_lives(level0, options, preset_corpus):
    shape = {"num_layers": 3, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2}
    config = TrainConfig(
        architecture=shape, seq_length=32, seed=5, max_steps=2, fast_memory=level0, host_memory="8MiB", **options
    )
    with ExitStack() as cleanup:
        prepared = prepare(config, CPU, PlainProgress(), StopRequest(), cleanup)
        found = dict(export_state(prepared.parts.model, None))
        drawn = Decoder(prepared.parts.model.config, seed=5, device="cpu")
        expected = dict(drawn.named_parameters())
        assert list(found) == list(expected)
        assert all(torch.equal(found[name]["weight"], param.detach()) for name, param in expected.items())


def test_a_sample_cannot_steer_the_terminal():
    from vblackwell.train.run import printable

    assert printable("a\x1b[2Jb\r\n\tc\x07é") == "a\ufffd[2Jb\ufffd\n\tc\ufffdé"
