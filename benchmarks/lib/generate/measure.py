"""The process of one system: opens the folder, writes texts, measures. bench_generate.py starts it with a case.

Every system writes greedily from the same prompts, through the package's own loop (`columns`), which reads a token
while the next is computed; the resident decoder through its own (`stepper`), with the step in a graph. Times are those
at which tokens are on the host.
"""

from __future__ import annotations

import gc
import statistics
import sys
import time
import traceback
from collections import deque
from collections.abc import Generator
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import torch

from benchmarks.lib.child_process import MemoryWatch, answer, say
from benchmarks.lib.generate.case import CAPPED, Case, Loading, Point
from vblackwell.errors import VBError
from vblackwell.generate.generate import columns, stepper
from vblackwell.generate.sampling import Arrival, Sampling, sample
from vblackwell.generate.steps import level0_for
from vblackwell.machine.device import cap_process, use_expandable_segments
from vblackwell.offload.layout.generation import MIN_WORKSPACE, cache_shape, token_bytes, workspace_bytes

GREEDY = Sampling(temperature=0)
SKIPPED = 2  # intervals after the first token: a graph is captured, kernels are chosen
ACCELERATE_NEW = 6
ACCELERATE_SPARE = 1 << 28  # next to the workspace that ours keeps free


class System:
    """An opened folder."""

    def __init__(self, case: Case) -> None:
        self.case, self.device = case, torch.device(case.device)
        self.cuda = self.device.type == "cuda"
        self.model: Any = None

    def open(self, rows: int) -> None:
        raise NotImplementedError

    def texts(self, numbers: list[list[int]], new: int) -> Generator[list[int]]:
        """Tokens of all rows, one position at a time."""
        raise NotImplementedError

    def prepare(self, rows: int, positions: int) -> None:
        """Before texts of a new size."""

    def must_bytes(self, rows: int, new: int) -> float | None:
        """What is needed for a token and is not on the GPU: the mean over ``new`` of them."""
        return None

    def moved_bytes(self) -> int | None:
        """What has crossed the link so far, to the GPU."""
        return None

    def weight_bytes(self) -> int:
        """What the GPU reads of the weights for a token: all but the embedding."""
        held = sum(each.nbytes for each in [*self.model.parameters(), *self.model.buffers()])
        return held - self.model.model.embed_tokens.weight.nbytes

    def mean_length(self, new: int) -> float:
        return self.case.prompt + new / 2


class Ours(System):
    """Streamed under the cap."""

    def open(self, rows: int) -> None:
        from vblackwell.generate.load import open_streamed
        from vblackwell.memory.cache.stack import create_vgpu_stack

        case = self.case
        self.stack = create_vgpu_stack(case.cap_bytes, case.host_bytes, 0, device=self.device, cap_process=False)
        fp4 = "nvfp4" if case.system.endswith("fp4") else None
        self.model = open_streamed(Path(case.folder), self.stack, fp4=fp4)
        self.through = False

    def texts(self, numbers: list[list[int]], new: int) -> Generator[list[int]]:
        if self.through:
            from vblackwell.offload.api import offload_of

            case, engine = self.case, offload_of(self.model)
            dtype = getattr(torch, case.dtype)
            engine.weights.rebudget(3 * case.sizes.block_parameters * dtype.itemsize)
            self.passing, cache = None, None
            shape = cache_shape(self.model.config, len(numbers), len(numbers[0]) + new, dtype)
            if self.cuda and shape is not None:
                from vblackwell.generate.stacked_cache import StackedCache

                cache = StackedCache(self.stack, shape, shape.layers)
            try:
                yield from columns(self.model, numbers, new, GREEDY, 0, None, cache)
            finally:
                if cache is not None:
                    cache.close()
            return
        with level0_for(self.model, len(numbers), len(numbers[0]) + new) as (cache, chunk):
            self.passing = None if cache is None else sum(layer.order is not None for layer in cache.layers)
            yield from columns(self.model, numbers, new, GREEDY, 0, chunk, cache)

    def must_bytes(self, rows: int, new: int) -> float:
        from vblackwell.offload.api import offload_of

        engine = offload_of(self.model)
        weights = sum(group.num_bytes for group in engine.groups if group.index not in engine.weights.staying)
        shape = cache_shape(self.model.config, rows, 1, getattr(torch, self.case.dtype))
        return weights + (self.passing or 0) * self.mean_length(new) * shape.position_bytes

    def moved_bytes(self) -> int:
        links = self.stack.get_stats()["links"]
        return sum(link["bytes"] for link in links if link["destination"] == self.stack.levels[0].name)


class Accelerate(System):
    """`device_map="auto"` with the rest in RAM; keys and values there too where they do not fit, by transformers'
    cache.
    """

    def open(self, rows: int) -> None:
        from transformers import AutoModelForCausalLM

        case, self.model = self.case, None
        gc.collect()
        if self.cuda:
            torch.cuda.empty_cache()
        self.offloaded, room = self._room(rows)
        self.model = AutoModelForCausalLM.from_pretrained(
            case.folder,
            dtype=getattr(torch, case.dtype),
            device_map="auto" if self.cuda else None,
            max_memory={0: room, "cpu": case.host_bytes} if self.cuda else None,
        ).eval()
        self.rows = rows

    def _room(self, rows: int) -> tuple[bool, int]:
        """Whether keys and values go to RAM, and what weights may take of the GPU."""
        from transformers import AutoConfig

        case = self.case
        config = AutoConfig.from_pretrained(case.folder)
        shape = cache_shape(config, rows, case.prompt + ACCELERATE_NEW, getattr(torch, case.dtype))
        free = case.cap_bytes - workspace_bytes(case.cap_bytes) - ACCELERATE_SPARE
        offloaded = shape.num_bytes > free - 3 * case.sizes.block_parameters * 2
        return offloaded, max(1, free - (3 * shape.layer_bytes if offloaded else shape.num_bytes))

    def prepare(self, rows: int, positions: int) -> None:
        if self._room(rows) != self._room(self.rows):
            self.open(rows)

    def texts(self, numbers: list[list[int]], new: int) -> Generator[list[int]]:
        from transformers import DynamicCache

        config, case = self.model.config, self.case
        cache = DynamicCache(config=config, offloading=True) if self.offloaded and self.cuda else None
        each = token_bytes(config, getattr(torch, case.dtype).itemsize) * len(numbers)
        chunk = max(1, max(MIN_WORKSPACE, workspace_bytes(case.cap_bytes)) * 3 // 4 // each)
        yield from columns(self.model, numbers, new, GREEDY, 0, chunk, cache)


class Resident(System):
    """The decoder on the GPU, its step in a graph."""

    def open(self, rows: int) -> None:
        from vblackwell.generate.load import open_resident
        from vblackwell.generate.quantized import Packing

        packing = Packing() if self.case.system.endswith("fp4") else None
        self.model = open_resident(Path(self.case.folder), self.device, packing=packing)

    def texts(self, numbers: list[list[int]], new: int) -> Generator[list[int]]:
        step = stepper(self.model, len(numbers[0]) + new)
        tokens_BS, arriving = torch.tensor(numbers, device=self.device), deque[Arrival]()
        for position in range(new):
            token_B = sample(step(tokens_BS), GREEDY, 0, position)
            tokens_BS = token_B.clamp(min=0)[:, None]
            arriving.append(Arrival(token_B))
            if position == 0 or len(arriving) > int(self.cuda):
                yield arriving.popleft().numbers()
        for arrival in arriving:
            yield arrival.numbers()


MADE = {
    "streamed": Ours,
    "streamed-fp4": Ours,
    "accelerate": Accelerate,
    "resident": Resident,
    "resident-fp4": Resident,
}


def prompts(case: Case, rows: int) -> list[list[int]]:
    """The same for every system."""
    generator = torch.Generator().manual_seed(case.seed + rows)
    return torch.randint(3, case.sizes.vocab_size, (rows, case.prompt), generator=generator).tolist()


def measure(system: System, rows: int, new: int, *, through: bool = False) -> Point:
    case, numbers = system.case, prompts(system.case, rows)
    point = Point(case.system, rows, new, through)
    system.prepare(rows, case.prompt + new)
    if system.cuda:
        torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    text = system.texts(numbers, new)
    point.tokens = next(text)
    point.first_cold = time.perf_counter() - began
    text.close()
    began = time.perf_counter()
    times, moved = [], []
    text = system.texts(numbers, new)
    for _ in text:
        times.append(time.perf_counter() - began)
        moved.append(system.moved_bytes())
        if len(times) == SKIPPED:
            point.must_bytes = system.must_bytes(rows, new)
    text.close()
    intervals = [late - early for early, late in zip(times, times[1:], strict=False)][SKIPPED:] or [0.0]
    point.first_seconds, point.step_seconds = times[0], statistics.median(intervals)
    point.rate = rows / point.step_seconds if point.step_seconds else None
    if len(times) > 1:
        point.drained_rate = rows * (len(times) - 1) / (times[-1] - times[0])
    counted = [b - a for a, b in zip(moved, moved[1:], strict=False) if a is not None and b is not None][SKIPPED:]
    point.moved_bytes = statistics.fmean(counted) if counted else None
    if isinstance(system, Resident):
        sizes = case.sizes
        heads = sizes.num_kv_heads or sizes.num_heads
        position = 2 * sizes.num_layers * heads * (sizes.hidden_size // sizes.num_heads) * 2 * rows
        point.read_bytes = system.weight_bytes() + position * system.mean_length(point.new)
    if system.cuda:
        point.peak_reserved = torch.cuda.max_memory_reserved()
    return point


def main(argument: str) -> None:
    case = Case.from_json(argument)
    cuda = case.device.startswith("cuda")
    if cuda:
        torch.cuda.init()
        use_expandable_segments()
        if case.system in CAPPED:
            cap_process(torch.device("cuda", 0), case.cap_bytes)
        torch.zeros(1, device="cuda")
    import transformers.models.llama.modeling_llama  # noqa: F401 (not counted as memory that a folder takes)

    import vblackwell.generate.load  # noqa: F401

    if case.system == "accelerate":
        import accelerate  # noqa: F401
    system: System = MADE[case.system](case)
    file_bytes = sum(path.stat().st_size for path in Path(case.folder).glob("*.safetensors"))
    watch, began = MemoryWatch(0.02), time.perf_counter()
    system.open(case.batches[0])
    if cuda:
        torch.cuda.synchronize()
    own, machine = watch.end()
    loading = Loading(case.system, time.perf_counter() - began, file_bytes, own, machine)
    say("loading", loading=asdict(loading))
    whole = True
    with torch.no_grad():
        for rows in case.batches:
            new = min(case.new, ACCELERATE_NEW) if case.system == "accelerate" else case.new
            whole &= one(system, rows, new, through=False)
            if rows == case.batches[0] and case.through_new and isinstance(system, Ours):
                system.through = True
                whole &= one(system, 1, case.through_new, through=True)
                system.through = False
    if not whole:
        sys.exit(1)


def one(system: System, rows: int, new: int, *, through: bool) -> bool:
    """A point, also of what does not fit. False where something else failed: other sizes may do nevertheless."""
    try:
        point, whole = measure(system, rows, new, through=through), True
    except Exception as error:
        whole = isinstance(error, (torch.OutOfMemoryError, MemoryError, VBError))
        if not whole:
            traceback.print_exc()
        status = " ".join(f"{type(error).__name__} {error}".split())[:420]
        point = Point(system.case.system, rows, new, through, status=status)
    say("point", point=asdict(point))
    return whole


if __name__ == "__main__":
    answer(main)
