"""Every kernel of the package on small shapes, for a sanitizer to watch: ``python -m tests.kernels.sanitized NAME...``
(sanitize.py).

Inputs are made on the CPU, so that few kernels but ours run. Sizes are odd where a kernel allows it: bounds are what is
watched.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.kernels.attention.oracle import inputs, use_plans
from tests.kernels.attention.test_paged import Cache
from tests.kernels.attention.test_paged import Case as PagedCase
from tests.kernels.emulation import A100, random_weight
from tests.kernels.fp4 import paths as fp4_paths
from tests.kernels.fp4.test_two_part import random_parts, wide_weight
from tests.kernels.optimizer.test_adamw import PLAIN, random_states
from tests.kernels.optimizer.test_adamw8 import States8
from tests.kernels.pointwise.oracle import DEVICE, normal
from vblackwell.kernels.attention import launch as attention_launch
from vblackwell.kernels.attention import plan as attention_plan
from vblackwell.kernels.attention.decode import decode_attention
from vblackwell.kernels.fp4 import encode, layout, mma_plan, two_part, two_part_round, w4a8
from vblackwell.kernels.fp4 import launch as fp4_launch
from vblackwell.kernels.fp4.encode_triton import encode_rows
from vblackwell.kernels.fp4.tile_triton import untile
from vblackwell.kernels.optimizer.adamw import BLOCK, AdamWStep, norm_of, norms_at, square_sums
from vblackwell.kernels.pointwise.cross_entropy import linear_cross_entropy
from vblackwell.kernels.pointwise.rows import rms_norm, rotary, store_rotated, swiglu, swiglu_linear
from vblackwell.kernels.pointwise.sampling import sample_tokens
from vblackwell.kernels.runtime import launch
from vblackwell.kernels.runtime.registry import use_backend
from vblackwell.numerics.formats import FORMATS
from vblackwell.numerics.separation import training_scales

NUMBERS = AdamWStep(1e-2, 0.9, 0.95, 1e-8, 0.1, 7)
REDUCED = Path(__file__).with_name("false_reports.cu")
# Its kernels, and how many threads they have.
REDUCED_KERNELS = {
    "handed_over_beside_part": 384, "handed_over_by_whole": 384, "handed_over_in_a_race": 384,
    "counted_by_one_lane": 64, "counted_by_all_lanes": 64, "counted_in_a_race": 64, "peer_that_waits_for_mail": 32,
    "peer_that_meets": 32,
}  # fmt: skip
N, K = 100, 1600  # of FP4 weights: no multiple of a block's rows, 25 windows


@dataclass(frozen=True)
class Case:
    """``kernels``: those that ``run`` must launch: a CUDA kernel's name, or a Triton kernel's module and name."""

    kernels: tuple[str, ...]
    run: Callable[[], Any]
    hopper: bool


CASES: dict[str, Case] = {}


def case(*kernels: str, hopper: bool = False) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    """``hopper``: needs one."""

    def add(run: Callable[[], Any]) -> Callable[[], Any]:
        CASES[run.__name__] = Case(kernels, run, hopper)
        return run

    return add


def here(x: Any) -> Any:
    return x.to(DEVICE) if isinstance(x, torch.Tensor) else x


def gpu() -> mma_plan.Gpu:
    return fp4_launch.gpu_of(torch.device("cuda", 0)) if DEVICE == "cuda" else mma_plan.H200


# -- CUDA C++ ----------------------------------------------------------------------------------------------------------


@case("adamw", "square_sums", "block_norms")
def adamw() -> None:
    for kind, first in itertools.product(((0, 0, 0), (1, 1, 2), (0, 0, 1), (1, 2, 0)), (0, 3)):
        states = random_states(2 * BLOCK + 77, PLAIN, *kind, seed=1, factor=0.5).map(here).piece(first, 2 * BLOCK + 77)
        sums = torch.empty(3, device=DEVICE)
        states.update(NUMBERS, sums)
        square_sums(states.gradient, sums, previous=states.previous)
        norm_of([sums])
        if DEVICE == "cuda":
            gradient = states.gradient
            ends = itertools.pairwise((0, BLOCK, BLOCK + 5, BLOCK + 5, len(gradient)))
            pieces = [(gradient[a:].data_ptr(), b - a, gradient.dtype) for a, b in ends]
            norms_at(pieces, gradient.device)


@case("adamw8")
def adamw8() -> None:
    for kind in ((0, 0, 0), (1, 1, 2), (2, 0, 1)):
        states = States8(BLOCK + 301, PLAIN, *kind, factor=0.5).to(DEVICE)
        states.update(NUMBERS, torch.empty(2, device=DEVICE))


@case("fp4_mma")
def fp4_mma() -> None:
    for plan, shapes in fp4_paths.MMA if gpu().clusters else ():
        m, n, k = shapes[-1]
        _, tiled = random_weight("nvfp4", n, k)
        fp4_launch.run_mma(plan, here(normal(m, k).bfloat16()), [*map(here, tiled)], None, "none", n)
    tiled, bias = [*map(here, random_weight("nvfp4", N, K)[1])], here(normal(N).bfloat16())
    meeting = mma_plan.MmaPlan(16, 2, 2, 1, 2, k_blocks=3)  # in global memory
    fp4_launch.run_mma(meeting, here(normal(40, K).bfloat16()), tiled, bias, "silu", N)
    for m in (1, 3, 16):
        plan = mma_plan.plan_mma(m, N, K, gpu())
        fp4_launch.run_mma(plan, here(normal(m, K).bfloat16()), tiled, bias, "silu", N)
        plan = mma_plan.plan_mma(m, N, K, gpu(), False, True)
        x, gain = here(normal(m, K).bfloat16()), here(normal(K).bfloat16())
        fp4_launch.run_mma(plan, x, tiled, bias, "none", N, gain_K=gain, eps=1e-5)


@case("fp4_wgmma", "swizzle_x", hopper=True)
def fp4_wgmma() -> None:
    chosen = [plan for plan, _ in fp4_paths.WGMMA if plan.windows_per_step > 1 or plan.splits != 2]
    for plan in {(p.tokens, p.splits, p.windows_per_step): p for p in chosen}.values():
        _, tiled = random_weight("nvfp4", 130, 520)
        fp4_launch.run_wgmma(plan, here(normal(70, 520).bfloat16()), [*map(here, tiled)], None, "none", 130)


@case("fp4_dequantize")
def fp4_dequantize() -> None:
    for dtype in (torch.bfloat16, torch.float32):
        fp4_launch.run_dequantize([*map(here, random_weight("nvfp4", 70, 200)[1])], 70, 200, dtype)


@case("prepare_e4m3", "w4a8", "w4a8_head", hopper=True)
def many_rows() -> None:
    n, k = 272, 544
    form = FORMATS["mxfp4"]
    codes = torch.randint(0, 256, form.codes_shape(n, k), dtype=torch.uint8)
    scales = torch.randint(112, 127, form.scales_shape(n, k)).to(torch.uint8)
    tiled = [*map(here, fp4_paths.layout.to_tiled(codes, scales, torch.tensor(1.0), "mxfp4", n, k))]
    top, x = w4a8.row_tops(tiled[1], n, k), here(normal(300, k).bfloat16())
    w4a8.run_prepare_e4m3(x, (*tiled, top), n, k)
    for width in w4a8.STEP_CYCLES:
        w4a8.run_w4a8(w4a8.of_width(width), x, (*tiled, top), None, "none", n, k)


@case("two_part_round", "two_part_measure", "two_part_renew")
def two_parts() -> None:
    tiled = [*map(here, layout.parts_to_tiled(*random_parts(N, K)[1], N, K))]
    for m, split in itertools.product((1, 5, 16), {gpu(), A100}):
        plan = two_part.plan_two_part(m, N, K, split)
        fp4_launch.run_mma(plan, here(normal(m, K).bfloat16()), tiled, None, "none", N)
    fp4_launch.run_dequantize(tiled, N, K, torch.bfloat16)
    for k in (96, 77):
        w_NK = wide_weight(70, k, torch.bfloat16)
        scales = training_scales(w_NK)
        scales = type(scales)(here(scales.block), here(scales.tensor))
        two_part_round.rounded(here(w_NK), scales.block, scales.tensor, torch.bfloat16)
        for kept in (None, scales):
            two_part_round.renewed_scales(here(w_NK), kept, 0.05)


# -- Triton ------------------------------------------------------------------------------------------------------------


@case("rows_triton._rms_norm", "rows_triton._rms_norm_backward", "rows_triton._sum")
def norms() -> None:
    with use_backend("rms_norm", "triton"):
        x, w = normal(37, 200).requires_grad_(), normal(200).requires_grad_()
        rms_norm(x, w, 1e-5).sum().backward()


@case("rows_triton._swiglu", "rows_triton._swiglu_backward")
def gates() -> None:
    with use_backend("swiglu", "triton"):
        gate, up = (normal(5, 77, seed=i).requires_grad_() for i in range(2))
        swiglu(gate, up).sum().backward()
        swiglu_linear(gate, up, normal(24, 77), True).sum().backward()


@case("rows_triton._rotate")
def turns() -> None:
    with use_backend("rotary", "triton"):
        rotary(normal(2, 4, 9, 24), normal(2, 2, 9, 24), normal(9, 24), normal(9, 24))


@case("rows_triton._loss_and_gradient", "rows_triton._scale")
def losses() -> None:
    with use_backend("cross_entropy", "triton"):
        hidden, weight = normal(11, 16).requires_grad_(), normal(4099, 16).requires_grad_()
        linear_cross_entropy(hidden, weight, here(torch.arange(11)), chunk_tokens=5).backward()


@case("sampling_triton._best", "sampling_triton._first", "sampling_triton._least_key")
def samples() -> None:
    with use_backend("sampling", "triton"):
        seeds = here(torch.arange(3))
        sample_tokens(normal(3, 1500), seeds, seeds)
        sample_tokens(normal(3, 1500), seeds, seeds, top_k=20, top_p=0.9, min_p=0.01)


@case("rows_triton._store", "decode_triton._attend", "decode_triton._join")
def decoding() -> None:
    q, k, v = normal(2, 4, 24), normal(2, 2, 24), normal(2, 2, 24)
    keys, values, at = normal(2, 2, 200, 24), normal(2, 2, 200, 24), here(torch.tensor([150]))
    with use_backend("store_rotated", "triton"), use_backend("decode_attention", "triton"):
        q = store_rotated(q, k, v, keys, values, normal(200, 24), normal(200, 24), at)
        decode_attention(q, keys, values, at)


@case("paged_triton._attend", "paged_triton._merge_chunks", "paged_triton._store_rows")
def paged() -> None:
    queries, keys = ((1, 37, 0, 1), (200, 137, 3, 65)) if DEVICE == "cuda" else ((1, 5, 0), (130, 70, 3))
    with use_backend("paged_attention", "triton"), use_backend("store_pages", "triton"):
        for page, options in ((32, {}), (5, {"window": 40, "softcap": 2.0})):
            Cache(PagedCase(queries, keys, heads=6, width=24, page=page)).attend(**options)


@case("encode_triton._encode", "encode_triton._maxima", "tile_triton._words", "tile_triton._scales")
def encoding() -> None:
    w_NK, formats = normal(7, 85), FORMATS if DEVICE == "cuda" else {"nvfp4": FORMATS["nvfp4"]}
    with use_backend("fp4_encode", "triton"), use_backend("fp4_tile", "triton"):
        for name, search in itertools.product(formats, ("mse", "max")):
            encode.tiles(encode.quantize(w_NK, name, search))
        encode.tiles(encode.separate(w_NK))
    with use_backend("fp4_round_trip", "triton"):
        for form in formats.values():
            encode.round_trip(w_NK, form, torch.bfloat16)


@case("encode_triton._encode_rows", "tile_triton._untile")
def fp4_operands() -> None:
    packed = encode.quantize(normal(48, 96), "nvfp4")
    tiled = layout.to_tiled(packed.codes, packed.block_scales, packed.tensor_scale, "nvfp4", 48, 96)
    untile(tiled[0], tiled[1], 48, 96)
    encode_rows(normal(7, 96).bfloat16())


def attend(plan: Any, head: int, mask: torch.Tensor | None, queries: int, keys: int, right: int | None) -> Any:
    """Forward and backward in this thread, which a chosen plan needs."""
    q, k, v = inputs(1, 2, 1, queries, keys, head, torch.float16)
    options = attention_launch.Options(
        None if mask is None else here(mask)[None, None],
        None,
        None,
        None,
        None,
        queries,
        keys,
        head**-0.5,
        None,
        right,
        False,
        0.0,
        0.0,
    )
    plans = {} if plan is None else {"forward": plan}
    with use_plans(**plans):
        out, lse = attention_launch.forward(q, k, v, options)
    return lambda: attention_launch.backward(out, q, k, v, out, lse, options)


def masks(queries: int, keys: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A boolean one, some of whose tiles are whole and some empty, and an additive one."""
    mask = torch.rand(queries, keys, generator=torch.Generator().manual_seed(0)) > 0.5
    mask[: queries // 2, : keys // 2], mask[queries // 2 :, : keys // 2] = False, True
    return mask, torch.zeros(queries, keys, dtype=torch.float16).masked_fill(~mask, float("-inf"))


@case(
    "forward.attend",
    "backward.query_gradient",
    "backward.key_gradient",
    "blocks.pack_bits",
    "blocks.judge_bits",
    "blocks.judge_values",
    "blocks.collect_tiles",
    "blocks.order_lines",
)
def attention() -> None:
    length = 261 if DEVICE == "cuda" else 21
    for mask in (None, *masks(length, length)):
        attend(
            attention_plan.plan_for("forward", 64, 2, 227 << 10) if DEVICE == "cuda" else None,
            64 if DEVICE == "cuda" else 16,
            mask,
            length,
            length,
            0 if mask is None else None,
        )()


@case("hopper.attend_hopper", hopper=True)
def attention_hopper() -> None:
    for head in (64, 128):
        plan = attention_plan.SPECIALIZED[head]
        attend(plan, head, None, 261, 261, 0)
        attend(plan, head, None, 100, 300, None)
        for mask in masks(264, 520):
            attend(plan, head, mask, 264, 520, None)


@case(*REDUCED_KERNELS, hopper=True)
def reduced() -> None:
    """No kernels of the package: what racecheck makes of their barriers (docs/reliability.md)."""
    blocks = 8  # the more, the surer a report that depends on the order in which warps run
    out = here(torch.zeros(blocks * 384, dtype=torch.int32))
    for name, threads in REDUCED_KERNELS.items():
        launch.kernel((str(REDUCED),), name, {}, out.device).launch((blocks, 1, 1), threads, 0, (out,))


# -- running -----------------------------------------------------------------------------------------------------------


@contextmanager
def launches() -> Iterator[set[str]]:
    """Inside, the names of kernels that are launched are added to the set."""
    import triton
    from triton.runtime import interpreter

    found: set[str] = set()
    patched: list[tuple[Any, str, Any]] = []

    def note(owner: Any, method: str, names_of: Callable[[Any], list[str]]) -> None:
        real = getattr(owner, method)

        def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
            found.update(names_of(self))
            return real(self, *args, **kwargs)

        patched.append((owner, method, real))
        setattr(owner, method, noted)

    def triton_name(kernel: Any) -> list[str]:
        return [f"{kernel.fn.__module__.rpartition('.')[2]}.{kernel.fn.__name__}"]

    note(triton.runtime.JITFunction, "run", triton_name)
    note(interpreter.GridExecutor, "__call__", triton_name)
    note(launch.Launcher, "__call__", lambda launcher: [launcher.kernel.entry])
    note(launch.Chain, "queue", lambda chain: [each.kernel.entry for each in chain.launches])
    try:
        yield found
    finally:
        for owner, method, real in patched:
            setattr(owner, method, real)


def run(name: str) -> list[str]:
    """Runs a case; its kernels that were not launched."""
    with launches() as found:
        CASES[name].run()
        if DEVICE == "cuda":
            torch.cuda.synchronize()
    return sorted(set(CASES[name].kernels) - found)


def main(names: list[str]) -> int:
    torch.manual_seed(0)
    missing = []
    for name in names:
        began = time.monotonic()
        missing += [f"{name} did not launch {kernel}" for kernel in run(name)]
        print(f"case {name} took {time.monotonic() - began:.1f} s", flush=True)
    print("\n".join(missing or ["all cases ran"]), flush=True)
    return int(bool(missing))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or list(CASES)))
