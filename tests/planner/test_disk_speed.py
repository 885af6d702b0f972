"""What a plan is told of its disk level: measured on this model's bytes, once, and what then runs is what was decided."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from vblackwell.errors import Unsupported
from vblackwell.machine.cache import cache_root
from vblackwell.machine.gpus import find_gpu
from vblackwell.machine.measured import keep
from vblackwell.machine.rates import DISK_BYTES_PER_SECOND, Rates, assumed_rates
from vblackwell.memory import lossless
from vblackwell.memory.cache.config import default_disk_path
from vblackwell.memory.codec_speed import codec_speed
from vblackwell.memory.compressed_disk import CompressedDiskLevel
from vblackwell.memory.disk import DiskLevel
from vblackwell.nn.decoder.config import DecoderConfig
from vblackwell.nn.decoder.decoder import Decoder
from vblackwell.offload.api import enable_vgpu_stack_optimization, release
from vblackwell.offload.optimizer import VGPUAdamW
from vblackwell.planner.compression import CodecSpeed
from vblackwell.planner.estimate.speed import Speed, speed_of
from vblackwell.planner.estimator import Run, estimate_offload
from vblackwell.planner.model_spec import of_decoder
from vblackwell.train import auto, disk_speed
from vblackwell.train.config import TrainConfig
from vblackwell.train.disk_speed import DiskSpeeds, bytes_like, keep_disk, sample_of
from vblackwell.train.levels import build_stack, disk_savings
from vblackwell.train.precision import Precision
from vblackwell.train.prepare import place_or_share
from vblackwell.units import GiB, KiB, MiB

KINDS = ("bfloat16 weights", "remainders", "first moments", "second moments")


@pytest.fixture(autouse=True)
def few_bytes(monkeypatch, tmp_path):
    """A sample of 64 Ki elements, and a cache of the test's own."""
    pytest.importorskip("zstandard", reason="the extra 'compressed' is not installed")
    monkeypatch.setattr(disk_speed, "ELEMENTS", 1 << 16)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def disk_path() -> Iterator[str]:
    """A directory on a real disk: pytest's own may be on a tmpfs."""
    with tempfile.TemporaryDirectory(dir=default_disk_path(), prefix="vblackwell-test-") as path:
        yield path


def drawn(count: int) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(0)) * 0.02


def test_the_codec_is_measured_as_the_level_runs_it():
    """Ratio to the page as `lossless` gives it; bytes that do not shrink have a ratio of exactly 1."""
    weights = drawn(1 << 18).bfloat16()
    ratio, packs, unpacks = codec_speed([weights], threads=2, limit_seconds=0)
    held = lossless.compress(weights).numel()
    assert ratio == pytest.approx(weights.nbytes / held, rel=2 * 4096 / held)
    assert 1e6 < packs < 1e12 and 1e6 < unpacks < 1e12
    noise = torch.randint(0, 256, (1 << 18,), dtype=torch.uint8)
    assert codec_speed([noise], threads=2, limit_seconds=0)[0] == 1.0
    with pytest.raises(ValueError, match="no bytes"):
        codec_speed([torch.empty(0)])


def test_states_are_those_of_adamw():
    weights = drawn(1 << 14)
    found = bytes_like([*KINDS, "float32 weights", "8-bit first moments", "uint8 weights"], weights)
    master = found["float32 weights"]
    param = nn.Parameter(weights.clone())
    optimizer = torch.optim.AdamW([param], lr=3e-4, betas=(0.9, 0.95), weight_decay=0.0)
    for gradient in disk_speed.gradients(len(weights)):
        param.grad = gradient
        optimizer.step()
    state = optimizer.state[param]  # the order of the products may differ, by some last places of fp32
    torch.testing.assert_close(found["first moments"], state["exp_avg"], rtol=1e-5, atol=1e-12)
    torch.testing.assert_close(found["second moments"], state["exp_avg_sq"], rtol=1e-5, atol=1e-15)
    torch.testing.assert_close(master, param.detach(), rtol=1e-5, atol=1e-8)
    assert not torch.equal(master, weights)
    rounded = found["bfloat16 weights"].view(torch.int16).int() << 16
    assert torch.equal((rounded + found["remainders"]).view(torch.float32), master)
    assert found["second moments"].min() >= 0 and found["first moments"].abs().max() > 0
    # Rows differ in size, as layers' do; within a row all are alike.
    rows = found["second moments"].view(-1, disk_speed.ROW).mean(1)
    assert rows.max() > 20 * rows.min()
    assert found["8-bit first moments"].dtype == torch.uint8 and len(found["8-bit first moments"]) == len(weights)
    assert found["uint8 weights"].element_size() == 1 and found["uint8 weights"].numel() * 2 == len(weights)


def test_the_weights_are_the_models(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    first, second = drawn(4096).view(64, 64) + 1, drawn(1 << 17).view(256, 512).bfloat16()
    save_file(
        {"a": first, "b": second, "norm": torch.ones(64), "ids": torch.ones(8, 8, dtype=torch.int64)},
        folder / "x.safetensors",
    )
    sample = sample_of(None, folder)
    found = sample.elements()
    assert sample.name == "weights of model (19% of the sample, the rest drawn)" and len(found) == disk_speed.ELEMENTS
    assert torch.equal(found[:4096], first.flatten())
    part = disk_speed.ELEMENTS // disk_speed.FROM_ONE  # of the larger matrix; the rest is drawn
    assert torch.equal(found[4096 : 4096 + part], second.flatten()[:part].float())
    save_file({"a": first}, folder / "x.safetensors")
    assert sample_of(None, folder).key != sample.key
    save_file({f"{number}": second.clone() for number in range(disk_speed.FROM_ONE)}, folder / "x.safetensors")
    whole = sample_of(None, folder)
    assert whole.name == "weights of model" and torch.equal(
        whole.elements(), second.flatten()[:part].float().repeat(disk_speed.FROM_ONE)
    )
    own = nn.Linear(300, 300)
    assert torch.equal(sample_of(own, None).elements()[:8192], own.weight.detach().flatten()[:8192])


def test_what_was_measured_is_kept_with_what_it_is_of(monkeypatch, disk_path, tmp_path):
    measured, said = [], []
    monkeypatch.setattr(disk_speed, "disk_gbps", lambda path: measured.append(path) or {"write": 0.5, "read": 0.25})
    monkeypatch.setattr(disk_speed, "codec_speed", lambda values: measured.append(len(values[0])) or (1.5, 2e9, 3e9))
    sample = sample_of(None, None)
    nothing = DiskSpeeds(disk_path, sample)(KINDS)
    assert (
        not measured
        and not nothing.codec
        and nothing.read == DISK_BYTES_PER_SECOND
        and "run vb doctor" in nothing.refused
    )
    found = DiskSpeeds(disk_path, sample, say=said.append)(KINDS)
    assert (found.read, found.write) == (0.25e9, 0.5e9) and found.codec["remainders"] == CodecSpeed(1.5, 2e9, 3e9)
    assert len(measured) == 1 + len(KINDS) and len(said) == 2
    assert "weights as they are drawn" in found.codec_source and found.source.startswith("measured at /")
    assert DiskSpeeds(disk_path, sample)(KINDS) == found  # without a say: from the cache
    more = DiskSpeeds(disk_path, sample, say=said.append)([*KINDS, "float32 weights"])
    assert len(measured) == 2 + len(KINDS) and set(more.codec) == {*KINDS, "float32 weights"}
    (file,) = Path(tmp_path / "cache/vblackwell/rates").glob("codec-*.json")
    file.write_text(json.dumps(json.loads(file.read_text()) | {"cores": 999}))
    assert DiskSpeeds(disk_path, sample)(KINDS).refused == "compression was not measured here: run vb doctor"
    assert DiskSpeeds(disk_path, sample, "none", said.append)(KINDS).codec == {}


def test_without_zstandard_or_a_disk(monkeypatch, disk_path):
    def missing():
        raise Unsupported("lossless compression needs the package zstandard")

    monkeypatch.setattr(disk_speed, "disk_gbps", lambda path: {"write": 0.5, "read": 0.25})
    with monkeypatch.context() as changed:
        changed.setattr(lossless, "require_zstandard", missing)
        found = DiskSpeeds(disk_path, sample_of(None, None), say=print)(KINDS)
        assert not found.codec and "needs the package zstandard" in found.refused and found.read == 0.25e9
        with pytest.raises(Unsupported):
            DiskSpeeds(disk_path, sample_of(None, None), "lossless", print)(KINDS)
    monkeypatch.setenv("XDG_CACHE_HOME", "/nowhere")
    monkeypatch.setattr(disk_speed, "disk_gbps", lambda path: {"refused": "it is a tmpfs"})
    assert DiskSpeeds(disk_path, sample_of(None, None), say=print)(KINDS).refused == "it is a tmpfs"


RATES = Rates(1e11, 1e11, 1e10, 5e9, 5e9, 2.5e9, 2.5e9, 1e9)


@pytest.mark.parametrize(("gbps", "codec"), [(0.01, "lossless"), (500.0, "none")])
def test_a_planned_run_compresses_where_the_plan_says_so(gbps, codec, monkeypatch, disk_path):
    """States on a disk: the codec measured here, a disk of given rates. The run has the level that was planned, and everybody's bits."""
    shape = DecoderConfig(64, 64, 192, 3, 2, max_position=16)
    model = Decoder(shape, seed=0, device="cpu")
    monkeypatch.setattr(auto, "cpu_rates", lambda: RATES)
    monkeypatch.setattr(disk_speed, "disk_gbps", lambda path: {"write": gbps, "read": gbps})
    config = TrainConfig(
        vgpu_auto=True, seq_length=16, batch_size=2, fast_memory=MiB, host_memory=900 * KiB, disk_memory=16 * MiB, disk_path=disk_path,
    )  # fmt: skip
    said: list[str] = []
    plan = auto.make_training_plan(config, model, Precision(None, False), torch.device("cpu"), said.append)
    verdict = plan.prediction.compression
    assert verdict is not None and verdict.used is (codec == "lossless") and plan.prediction.disk > 0
    assert verdict.packed_seconds is not None and (verdict.packed_seconds < verdict.plain_seconds) is verdict.used
    assert plan.prediction.step_seconds == min(verdict.packed_seconds, verdict.plain_seconds)
    assert f"  {verdict}" in plan.lines() and "measuring lossless compression" in said[1]
    applied = auto.apply_plan(config, plan)
    assert applied.disk_codec == codec and ("disk compressed" in str(plan.choice)) is verdict.used
    again = auto.make_training_plan(
        replace(config, disk_codec="none"), model, Precision(None, False), torch.device("cpu"), said.append
    )
    assert (
        "disk level plain, as asked" in "\n".join(again.lines()) and auto.apply_plan(config, again).disk_codec == "none"
    )
    with build_stack(applied, torch.device("cpu"), plan) as stack:
        assert type(stack.levels[2]) is (CompressedDiskLevel if verdict.used else DiskLevel)
        enable_vgpu_stack_optimization(
            model, stack, placement="streamed", update=place_or_share(applied.update), **auto.planned_sizes(plan)
        )
        optimizer = VGPUAdamW(model.parameters(), lr=1e-3)
        ids = torch.arange(32).view(2, 16)
        for _ in range(2):
            model(ids, ids).backward()
            optimizer.step()
            optimizer.zero_grad()
        release(model)
        savings = disk_savings(stack)
        assert (savings is None) is not verdict.used
        assert savings is None or (savings["ratio"] > 1.05 and savings["written_bytes"] > 0)
    found = [param.detach().clone() for param in model.parameters()]
    twin = Decoder(shape, seed=0, device="cpu")
    plain = torch.optim.AdamW(twin.parameters(), lr=1e-3, fused=True)
    for _ in range(2):
        twin(ids, ids).backward()
        plain.step()
        plain.zero_grad()
    assert all(torch.equal(one, other) for one, other in zip(found, twin.parameters(), strict=True))


def test_an_estimate_decides_by_what_is_kept(monkeypatch, disk_path):
    """For this machine's card alone; nothing is measured for an estimate."""
    monkeypatch.setattr("vblackwell.planner.estimate.speed.default_disk_path", lambda: disk_path)
    monkeypatch.setattr(disk_speed, "codec_speed", lambda values: (1.5, 2e9, 3e9))
    card = find_gpu("H200")
    run = Run(
        of_decoder("decoder", DecoderConfig(512, 256, 704, 4, 4, max_position=64)),
        64,
        precision="bf16",
        capability=(9, 0),
    )
    trace = run.trace(1)
    stack = estimate_offload(run, trace, 2 * GiB, 32 * MiB, GiB)
    assert stack.refused is None and stack.disk > 0

    def speed() -> Speed:
        return speed_of(run, trace, 1, card, 2 * GiB, stack, 32 * MiB, GiB)

    keep_disk(disk_path, {"write": 0.05, "read": 0.05})
    DiskSpeeds(disk_path, sample_of(None, None), say=lambda text: None)([*KINDS, "float32 weights"])
    assert speed().disk is None  # rates of a data sheet are another machine's
    keep("NVIDIA H200", replace(assumed_rates(card), disk_read=0.05e9, disk_write=0.05e9, source="measured here"))
    found = speed()
    assert (
        found.disk is not None
        and found.disk.used
        and found.disk.ratio == pytest.approx(1.5)
        and found.bottleneck == "disk"
    )
    assert found.as_dict()["disk"]["packed_seconds"] == pytest.approx(64 / found.streamed)
    for file in cache_root().glob("rates/codec-*.json"):
        file.unlink()
    plain = speed()
    assert plain.disk is None and plain.streamed == pytest.approx(64 / found.disk.plain_seconds)
    assert 1.45 < found.streamed / plain.streamed < 1.5  # the disk is all there is to it
