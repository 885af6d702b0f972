"""Levels to test, by name, made when a test needs them:
nothing here touches a GPU unless a marked test asks for one.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator

import pytest
import torch

from tests.delay import set_transfer_delay
from vblackwell.machine.limits import default_disk_path
from vblackwell.memory.cache.stack import VGPUStack
from vblackwell.memory.disk import DiskLevel
from vblackwell.memory.host import HostLevel
from vblackwell.memory.level import DeviceLevel, Extent, Level
from vblackwell.memory.transfer import DoneTransfer, Transfer, flat_bytes
from vblackwell.units import KiB, MiB

KINDS = [
    "arena",
    "host",
    "disk",
    "null",
    pytest.param("cuda:0", marks=pytest.mark.gpu),
    pytest.param("cuda:1", marks=pytest.mark.multi_gpu),
]
CAPACITY = 4 * MiB
PAGE = 4 * KiB


class NullLevel(Level):
    """Accounts, and holds nothing: writes are discarded, reads leave the destination as it is."""

    def __init__(
        self, capacity_bytes: int, name: str = "null", device: torch.device | None = None, alignment: int = 512
    ) -> None:
        super().__init__(name, device, capacity_bytes, alignment)

    def read(self, extent: Extent, out: torch.Tensor) -> Transfer:
        assert flat_bytes(out).nbytes <= extent.num_bytes
        return DoneTransfer()

    def write(self, extent: Extent, src: torch.Tensor) -> Transfer:
        assert flat_bytes(src).nbytes <= extent.num_bytes
        return DoneTransfer()


@pytest.fixture(autouse=True)
def need_gpus(request: pytest.FixtureRequest) -> None:
    """Marked tests are skipped, with the reason, where the GPUs are missing that they were asked to run on."""
    for marker, count in (("gpu", 1), ("multi_gpu", 2)):
        if request.node.get_closest_marker(marker) and torch.cuda.device_count() < count:
            pytest.skip(f"needs {count} CUDA GPU(s), torch sees {torch.cuda.device_count()}")


@pytest.fixture
def disk_path() -> Iterator[str]:
    """A directory on a real disk: pytest's own may be on a tmpfs."""
    path = tempfile.mkdtemp(dir=default_disk_path(), prefix="vblackwell-test-")
    yield path
    shutil.rmtree(path)


@pytest.fixture
def make_level(disk_path: str) -> Iterator[Callable[..., Level]]:
    """``make_level(kind, capacity_bytes)``; closed after the test."""
    made: list[Level] = []

    def make(kind: str, capacity_bytes: int = CAPACITY) -> Level:
        if kind == "disk":
            level: Level = DiskLevel(disk_path, capacity_bytes, piece_bytes=MiB // 4, threads=3)
        elif kind == "host":
            level = HostLevel(capacity_bytes)
        elif kind == "null":
            level = NullLevel(capacity_bytes)
        else:
            level = DeviceLevel("cpu" if kind == "arena" else kind, capacity_bytes)
        made.append(level)
        return level

    yield make
    for level in made:
        level.close()


@pytest.fixture(params=KINDS)
def level(request: pytest.FixtureRequest, make_level: Callable[..., Level]) -> Level:
    """One level of each kind, 4 MiB."""
    return make_level(request.param)


@pytest.fixture
def no_delay_left() -> Iterator[None]:
    """For tests that hold transfers back."""
    yield
    set_transfer_delay(None)


def random_bytes(num_bytes: int, seed: int = 0, device: str = "cpu") -> torch.Tensor:
    """``num_bytes`` random bytes, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=generator).to(device)


@pytest.fixture
def make_stack(make_level: Callable[..., Level]):
    """``make_stack(2, 4, 8)``: arena, host and disk of that many pages of 4 KiB."""
    made: list[VGPUStack] = []

    def make(*pages: int, kinds: tuple[str, ...] = ("arena", "host", "disk"), **settings) -> VGPUStack:
        stack = VGPUStack([make_level(kind, n * PAGE) for kind, n in zip(kinds, pages, strict=False)], **settings)
        made.append(stack)
        return stack

    yield make
    for stack in made:
        stack.close()


def page(value: float, pages: int = 1) -> torch.Tensor:
    return torch.full((pages * KiB,), float(value))


def levels(stack: VGPUStack) -> dict[str, int]:
    return {key: stack.level_of(key) for key in stack}


def counts(stack: VGPUStack, what: str) -> list[int]:
    return [level[what] for level in stack.get_stats()["levels"]]
