"""A disk level that compresses its pieces: what every level promises, with bytes that shrink, and what was measured of it."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from tests.memory import test_levels as levels
from tests.memory.conftest import CAPACITY, random_bytes
from vblackwell.errors import ConfigurationError, CorruptData
from vblackwell.memory import compressed_disk
from vblackwell.memory.cache.create import create_vgpu_stack
from vblackwell.memory.cache.stack import VGPUStack
from vblackwell.memory.compressed_disk import CompressedDiskLevel, Savings, Way
from vblackwell.memory.scratch_file import memory_at
from vblackwell.memory.slab import map_slab
from vblackwell.offload.api import enable_vgpu_stack_optimization, release
from vblackwell.offload.optimizer import VGPUAdamW
from vblackwell.train.config import TrainConfig
from vblackwell.train.levels import build_stack
from vblackwell.units import KiB, MiB

pytest.importorskip("zstandard", reason="the extra 'compressed' is not installed")


@pytest.fixture
def level(disk_path):
    made = CompressedDiskLevel(disk_path, CAPACITY, piece_bytes=MiB // 4, threads=3)
    yield made
    made.close()


def weights(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed)).mul(0.02).bfloat16()


@pytest.mark.parametrize("half", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", [name for name in vars(levels) if name.startswith("test_")][:13])
def test_what_every_level_promises(name, half, level, monkeypatch, no_delay_left):
    """With bytes that do not shrink, and with bytes of which half do."""
    if half:
        monkeypatch.setattr(levels, "random_bytes", lambda count, **seed: random_bytes(count, **seed) & 0xF)
        monkeypatch.setattr(compressed_disk, "LEAST_BYTES", 0)
        monkeypatch.setattr(level, "_wanted", lambda: True)
    check = getattr(levels, name)
    wanted = check.__code__.co_varnames[: check.__code__.co_argcount]
    assert wanted[0] == "level", wanted
    options = {"no_delay_left": None} if "no_delay_left" in wanted else {}
    for size in (1, 4097, 256 * KiB + 1, MiB + 12345) if "size" in wanted else (None,):
        check(level, **options, **({} if size is None else {"size": size}))


def test_pieces_of_every_kind_meet(level, monkeypatch):
    """Compressed over plain, plain over compressed, the front of either, other lengths."""
    monkeypatch.setattr(level, "_wanted", lambda: True)
    values = {
        "weights": weights(MiB // 2),
        "noise": random_bytes(MiB),
        "short": weights(100_001, 1),
        "odd": random_bytes(70_001) & 7,
    }
    extent, held = level.allocate(MiB), torch.zeros(MiB, dtype=torch.uint8)
    level.write(extent, held).wait()
    for name in ("weights", "short", "noise", "odd", "weights", "odd", "noise", "short", "weights"):
        value = values[name].view(torch.uint8)
        level.write(extent, value).wait()
        held[: value.numel()] = value
        for count in (MiB, 300_001, 1):
            assert torch.equal(levels.read_back(level, extent, count), held[:count]), name
    assert 1.3 < level.savings.ratio < 4 and level.bytes_written < 9 * MiB


def test_what_it_saves_decides(level, monkeypatch):
    plain, packed = Way(1e9, 2.0), Way(1e9, 1.9)
    assert Savings().pays and Savings(plain).pays and Savings(plain, packed).pays
    assert Savings(plain, Way(1e9, 1.9, 1e9, 9.0)).pays  # reads of one way alone say nothing
    plain.read_bytes, plain.read_seconds, packed.read_bytes, packed.read_seconds = 1e9, 1.0, 1e9, 1.2
    assert not Savings(plain, packed).pays  # 3.0 s beside 3.1
    extent = level.allocate(MiB)
    for pays, tried in ((True, "plain"), (False, "packed")):
        monkeypatch.setattr(Savings, "pays", property(lambda self, pays=pays: pays))
        before = level.savings
        for _ in range(compressed_disk.CYCLE // 4):
            level.write(extent, weights(MiB // 2)).wait()
        after = level.savings
        gone = {
            way: getattr(after, way).written_bytes - getattr(before, way).written_bytes for way in ("plain", "packed")
        }
        assert (
            gone[tried] == compressed_disk.TRIED * MiB // 4 and sum(gone.values()) == compressed_disk.CYCLE * MiB // 4
        )
        assert torch.equal(levels.read_back(level, extent), weights(MiB // 2).view(torch.uint8))


def test_what_does_not_shrink_is_soon_left_alone(level, monkeypatch):
    """Compressing it takes time and saves none: that is what compressing takes, though the pieces are written as they are."""
    clock, pieces, real = threading.local(), [], compressed_disk.lossless.compress_piece

    def passes(seconds: float) -> float:
        clock.now = getattr(clock, "now", 0.0) + seconds
        return clock.now

    def compress_piece(piece, itemsize, zstd_level):
        pieces.append(piece.nbytes)
        passes(1.0)
        return real(piece, itemsize, zstd_level)

    monkeypatch.setattr(compressed_disk.lossless, "compress_piece", compress_piece)
    monkeypatch.setattr(compressed_disk, "time", SimpleNamespace(perf_counter=lambda: passes(0.1)))
    extent = level.allocate(MiB)
    for _ in range(compressed_disk.CYCLE // 4):
        level.write(extent, random_bytes(MiB)).wait()
    assert level.savings.ratio == 1
    # Of 128: each thread may have begun one before the first was over.
    assert 0 < sum(size == MiB // 4 for size in pieces) <= 3


def test_in_a_stack(disk_path):
    sizes = [
        {"capacity_mb": 1, "device": "arena"},
        {"capacity_mb": 16, "device": "ssd", "path": disk_path, "codec": "lossless"},
    ]
    with VGPUStack({"levels": sizes}) as stack:
        for number in range(6):
            stack.register(str(number), weights(MiB // 4, number), 2)
        for number in (*range(6), 0, 3):
            assert torch.equal(stack.access(str(number)), weights(MiB // 4, number))
        disk = stack.levels[1]
        assert isinstance(disk, CompressedDiskLevel) and disk.name == "ssd+zstd" and disk.savings.ratio > 1.3
    for wrong in ({"device": "cpu", "codec": "lossless"}, {"device": "ssd", "path": disk_path, "codec": "fp4"}):
        with pytest.raises(ConfigurationError, match="'lossless', and for ssd"):
            VGPUStack({"levels": [sizes[0], {"capacity_mb": 1, **wrong}]})


def test_training_over_it_is_the_same_training(disk_path):
    """Weights, masters and moments on a disk level; what passes through it comes back bit for bit."""
    results = []
    for codec in (None, "lossless"):
        sizes = [{"capacity_mb": 2, "device": "arena"}, {"capacity_mb": 1.5, "device": "cpu"}]
        sizes.append({"capacity_mb": 64, "device": "ssd", "path": disk_path, "codec": codec})
        torch.manual_seed(0)
        layers = nn.ModuleList(nn.Linear(256, 256) for _ in range(4))
        model = nn.Sequential(*layers)
        with VGPUStack({"levels": sizes}) as stack:
            enable_vgpu_stack_optimization(model, stack, placement="streamed", compute_dtype=torch.bfloat16)
            optimizer = VGPUAdamW(model.parameters(), lr=1e-2)
            for step in range(2):
                model(torch.full((4, 256), 0.1 * step, dtype=torch.bfloat16)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            release(model)
            disk = stack.levels[2]
            assert disk.bytes_read > MiB
            assert codec is None or disk.savings.ratio > 1.2
        results.append([param.detach().clone() for param in model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_a_run_asks_for_it(disk_path):
    options = {"fast_memory": "1MiB", "host_memory": "1MiB", "disk_codec": "lossless"}
    with build_stack(TrainConfig(**options, disk_memory="8MiB", disk_path=disk_path), torch.device("cpu")) as stack:
        assert isinstance(stack.levels[2], CompressedDiskLevel)
    with pytest.raises(ConfigurationError, match="--disk-codec is for a disk level"):
        build_stack(TrainConfig(**options), torch.device("cpu"))


def test_a_codec_without_its_disk_is_refused(disk_path):
    with pytest.raises(
        ConfigurationError, match="--disk-memory 0 leaves that out: give --disk-memory a size, e.g. 64GiB"
    ):
        TrainConfig(disk_codec="lossless", disk_memory="0", disk_path=disk_path)
    with pytest.raises(ConfigurationError, match="disk_memory 0 leaves it out"):
        create_vgpu_stack("1MiB", "1MiB", 0, disk_path, disk_codec="lossless", device="cpu")


def test_a_flipped_bit_is_an_error(level, monkeypatch):
    monkeypatch.setattr(level, "_wanted", lambda: True)
    extent = level.allocate(MiB)
    level.write(extent, weights(MiB // 2)).wait()
    noise = map_slab(4096)  # whose address a direct write takes
    noise.copy_(random_bytes(4096))
    level._file.write(extent.offset + 4096, memory_at(noise.data_ptr(), 4096))
    with pytest.raises(CorruptData, match="came back changed"):
        levels.read_back(level, extent)
