"""FP4 weights on FP8 tensor cores: a stated choice with its own accuracy, never a silent default.

mxfp4 weights become E4M3 exactly, each row relative to its largest block scale, because E2M1 times a power of two needs
two significant bits, where a row's block exponents span at most 14 (``check_packed``). Activations are rounded to E4M3
with one scale a row, amax / 448: about 31 dB on Gaussian rows. Fewer than ``MIN_ROWS`` rows are multiplied as they are,
by `fp4_linear`. On Hopper one kernel decodes weights and rounds rows while it multiplies others (``cuda/w4a8.cu``).
Elsewhere, and for many rows of large weights, it is PyTorch's row-scaled FP8 matmul, without fast accumulation, of
operands written out by one launch (``cuda/fp4_e4m3.cu``). Backward is straight through the rounding: dX = dY W. ``M``
rows, ``N`` out features, ``K`` in features. A step is 128 columns.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from vblackwell.errors import ConfigurationError, Unsupported
from vblackwell.kernels.fp4 import layout, reference
from vblackwell.kernels.fp4.launch import Weight, aligned, like, processors
from vblackwell.kernels.fp4.linear import (
    HALVES,
    LINEAR,
    each_time,
    fp4_linear_dx,
    hopper_reasons,
    linear_reasons,
    packed_linear,
    run_rows,
)
from vblackwell.kernels.fp4.mma_plan import ceil_div
from vblackwell.kernels.fp4.reference import ACTIVATIONS, activate
from vblackwell.kernels.runtime import counters
from vblackwell.kernels.runtime.launch import kernel
from vblackwell.kernels.runtime.registry import Backend, Request, capability
from vblackwell.numerics.packed import PackedTensor

FORMAT = "mxfp4-tiled"
E4M3_MAX = 448.0
MIN_TOP = 2.0**-100  # as in cuda/round_row.cuh
MAX_SPAN = 14
FP8_CAPABILITY = (8, 9)
MULTIPLE = 16  # of N and of K, for PyTorch's FP8 matmul
# By times on an H200 (docs/journal/fp4.md) w4a8 is faster from the rows on that have the tiles of 1024; above MAX_ROWS
# PyTorch's matmul of whole operands is at least as fast as one kernel, but for small weights.
MIN_ROWS, MAX_ROWS, LARGEST_WEIGHT = 897, 2048, 6144 * 4096
FLAG = "--fp8-activations"
_WITHOUT = f"go without {FLAG} (w4a8=True)"
SUMMARY = f"inputs of {MIN_ROWS} rows and more are rounded to FP8 (E4M3, a scale a row), fewer are not"
E4M3_FILES = ("ptx.cuh", "fp4/decode.cuh", "fp4/e4m3.cuh", "fp4/round_row.cuh", "fp4/fp4_e4m3.cu")
PREPARE_SHARED_BYTES = 64  # of a block that rounds rows: two fp32 from each of its 8 warps
FILES = (
    "ptx.cuh", "barrier.cuh", "ring.cuh", "fp4/wgmma.cuh", "fp4/wgmma_e4m3.cuh", "fp4/decode.cuh", "fp4/e4m3.cuh",
    "fp4/epilogue.cuh", "fp4/round_row.cuh", "fp4/w4a8.cu",
)  # fmt: skip
CLUSTER = 2  # blocks, each of 128 tokens
THREADS = 512
FIRST_COUNTER = 32  # the queue has a cache line to itself
# By features of a tile: cycles of a step on an H200, and stages. Of 256 and 192 one more fits; the rest is L1.
STEP_CYCLES = {256: 1180, 224: 1105, 192: 955}
STAGES = {256: 3, 224: 4, 192: 4}
HEAD_ROWS = 1024  # the tokens of four pairs of tiles, which go side by side
MAX_WAITING = 4  # clusters whose first rows the product's own warps round, after the weight
LARGE_WEIGHT = 4096 * 4096  # elements; above, those warps come too late to the rows of a second round of tiles as well


def quantize_rows(x_MK: Tensor) -> tuple[Tensor, Tensor]:
    """(E4M3 rows, (M, 1) fp32 scales amax / 448), amax at least 2^-100: x is about rows * scales. Each operation is
    rounded once to fp32, then ``x * (448 / amax)`` to the nearest E4M3, ties to even."""
    values = x_MK.to(torch.float32)
    amax = values.abs().amax(1, keepdim=True).clamp(min=MIN_TOP)
    # A tensor: to divide by a number, PyTorch multiplies by its rounded inverse on a GPU.
    top = torch.full_like(amax, E4M3_MAX)
    return (values * (top / amax)).to(torch.float8_e4m3fn), amax / top


def check_shape(format: str, n: int, k: int, name: str = "the weight") -> None:
    """Raises ConfigurationError where a weight of this format and shape (N, K) cannot compute by w4a8."""
    if format != "mxfp4":
        remedy = f"pack to mxfp4 (vb quantize --format mxfp4), or {_WITHOUT}"
        said = "FP8 activations go with mxfp4, whose scales are powers of two"
        raise ConfigurationError(f"{name} is {format}: {said}: {remedy}")
    if n % MULTIPLE or k % MULTIPLE:
        remedy = f"keep it from being packed (--keep), or {_WITHOUT}"
        raise ConfigurationError(f"{name} is {n} x {k}: FP8 activations take multiples of {MULTIPLE}: {remedy}")


def check_device(device: torch.device, name: str = "the weight", dtype: torch.dtype | None = None) -> None:
    """Raises Unsupported where ``device`` is a GPU without FP8 tensor cores (before compute capability 8.9), or one to
    which activations come in a ``dtype`` that its kernels do not take."""
    found = capability(device)
    if (0, 0) < found < FP8_CAPABILITY:
        raise Unsupported(
            f"{name}: {device} has compute capability {found[0]}.{found[1]}, and FP8 tensor cores begin with 8.9: "
            f"{_WITHOUT}"
        )
    if found > (0, 0) and dtype is not None and dtype not in HALVES:
        found_dtype = f"{name}: activations are {dtype}, and become FP8 from bf16 or fp16 on a GPU"
        remedy = "vb train --mixed-precision computes in bf16, vb quantize --format mxfp4 writes a folder that does"
        raise Unsupported(f"{found_dtype}: {remedy}; or {_WITHOUT}")


def check_packed(packed: PackedTensor, name: str = "the weight") -> None:
    """Raises as `check_shape` and `check_device`, and Unsupported where rows of a canonical mxfp4 matrix would not
    become E4M3 without loss, or would not fit tiles. Waits for the device."""
    check_shape(packed.format, packed.n, packed.k, name)
    check_device(packed.device, name)
    _, _, span = layout.live_exponents(packed.codes, packed.block_scales)
    if span > MAX_SPAN:
        raise Unsupported(
            f"{name}: block exponents of a row span {span}, E4M3 holds {MAX_SPAN}: keep this layer from being packed"
            f" (--keep), or {_WITHOUT}"
        )


def row_tops(block_scales: Tensor, n: int, k: int) -> Tensor:
    """(N,) E5M3 bytes: the largest scale of each row of a tiled weight that `check_packed` takes."""
    bands, windows = layout.tiles(n, k)
    return block_scales.view(bands, windows, 8, 4, 4).amax((1, 3)).transpose(1, 2).reshape(-1)[:n].contiguous()


@dataclass(frozen=True)
class W4A8Plan:
    """How ``w4a8`` cuts a product."""

    features: int  # of a tile, which has 128 tokens; a multiple of 32
    stages: int  # of 128 columns of both operands in shared memory
    head_steps: int = 8  # steps of the first tiles' weights that ``w4a8_head`` decodes
    head_rows: int = HEAD_ROWS  # of x, that it rounds; a multiple of 128

    def shared_bytes(self) -> int:
        outputs, units = 8 * 16 * 144, 2 * (self.features // 2 * 16 + 128 * 4)  # of eight warps; of two tiles
        return self.stages * (128 + self.features) * 128 + outputs + units + 16 * self.stages + 16

    def macros(self, fp16: bool, k: int) -> dict[str, int]:
        fields = {name.upper(): getattr(self, name) for name in ("stages", "head_steps", "head_rows")}
        fixed = {"FP16": 0, "OUT32": 0, "TOKENS": 0, "ROUND_WARPS": 4, "SPLITS": CLUSTER}
        return fields | fixed | {"COLUMNS": self.features // 2, "X_FP16": int(fp16), "KEPT": min(4, ceil_div(k, 1024))}


def of_width(features: int) -> W4A8Plan:
    return W4A8Plan(features, STAGES[features])


def plan_w4a8(m: int, n: int, k: int, multiprocessors: int) -> W4A8Plan:
    """The tile by which a GPU is done first, in whole rounds of tiles. The head rounds the rows that all clusters but
    ``MAX_WAITING`` begin with; of a ``LARGE_WEIGHT`` 2,048 at least, unless four pairs' tiles fill a round and a half.
    """
    pairs, clusters = ceil_div(m, 128 * CLUSTER), multiprocessors // CLUSTER
    width = min(STEP_CYCLES, key=lambda width: ceil_div(pairs * ceil_div(n, width), clusters) * STEP_CYCLES[width])
    four = 4 * ceil_div(n, width)  # tiles
    late = n * k > LARGE_WEIGHT and 2 * four < 3 * clusters
    fours = max(1 + late, ceil_div(clusters - MAX_WAITING, four))
    return replace(of_width(width), head_rows=HEAD_ROWS * min(fours, ceil_div(m, HEAD_ROWS)))


class Cut(NamedTuple):
    """Sizes of a product (M, N, K)."""

    pairs: int  # of token tiles
    columns: int  # of tiles
    steps: int  # of K
    chunk: int  # columns that the clusters are at work on at a time, whose weights are decoded first
    head_blocks: int  # of ``w4a8_head``
    counters: int  # of 32 bits: the queue, what is made of each tile of the weight, and of each tile of x


def cut(plan: W4A8Plan, m: int, n: int, k: int, clusters: int) -> Cut:
    pairs, columns, steps = ceil_div(m, 128 * CLUSTER), ceil_div(n, plan.features), ceil_div(k, 128)
    chunk = min(columns, ceil_div(clusters, min(4, pairs)))
    items = min(plan.head_steps, steps) * min(chunk * plan.features // 32, ceil_div(n, 32))
    head_blocks = ceil_div(min(m, plan.head_rows), 2) + ceil_div(items, 8)
    return Cut(pairs, columns, steps, chunk, head_blocks, FIRST_COUNTER + columns * steps + pairs * CLUSTER)


def run_w4a8(
    plan: W4A8Plan, x_MK: Tensor, weight: Weight, bias: Tensor | None, activation: str, n: int, k: int
) -> Tensor:
    """``activation(x W^T + bias)`` in bf16 or fp16; N, K are multiples of 16, ``weight`` ends with `row_tops`."""
    codes, block_scales, tensor_scale, row_top = weight
    m, device = x_MK.shape[0], x_MK.device
    clusters = processors(device) // CLUSTER
    sizes, macros = cut(plan, m, n, k, clusters), plan.macros(x_MK.dtype == torch.float16, k)
    x_tiles = torch.empty(sizes.pairs * CLUSTER * sizes.steps * 128 * 128, dtype=torch.uint8, device=device)
    w_tiles = torch.empty(sizes.columns * sizes.steps * plan.features * 128, dtype=torch.uint8, device=device)
    scale_M = torch.empty(m, dtype=torch.float32, device=device)
    y_MN = torch.empty(m, n, dtype=x_MK.dtype, device=device)
    head, product = (kernel(FILES, name, macros, device) for name in ("w4a8_head", "w4a8"))
    operands, shape = (x_MK, x_tiles, scale_M, codes, block_scales), (m, n, k)
    with counters.zeroed(sizes.counters, device) as (now, stale, stale_count):
        args = (*operands, row_top, w_tiles, now, stale, stale_count, *shape, sizes.chunk)
        head.launch((sizes.head_blocks, 1, 1), 256, 32, args, weight)
        args = (*operands, tensor_scale, row_top, bias, y_MN, w_tiles, now, *shape, ACTIVATIONS.index(activation))
        product.launch((clusters, CLUSTER, 1), THREADS, plan.shared_bytes(), (*args, clusters, sizes.chunk))
    return y_MN


def prepare_macros(fp16: bool, k: int) -> dict[str, int]:
    return {"FP16": 0, "X_FP16": int(fp16), "KEPT": min(8, ceil_div(k, 2048)), "ROUND_WARPS": 8}


def run_prepare_e4m3(x_MK: Tensor, weight: Weight, n: int, k: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Both operands of an FP8 matmul in one launch: `quantize_rows` of x; the weight (N, K) as E4M3, each row relative
    to its largest scale, which becomes 2^6, and its (1, N) fp32 scales. K is a multiple of 16."""
    x_MK = aligned(x_MK)
    m, device = x_MK.shape[0], x_MK.device
    q_MK = torch.empty(m, k, dtype=torch.float8_e4m3fn, device=device)
    w_NK = torch.empty(n, k, dtype=torch.float8_e4m3fn, device=device)
    scale_M1 = torch.empty(m, 1, dtype=torch.float32, device=device)
    scale_1N = torch.empty(1, n, dtype=torch.float32, device=device)
    columns = ceil_div(ceil_div(k, 64), 8)  # of blocks
    row_blocks = min(1024, ceil_div(m, columns))
    args = (*weight, w_NK, n, k, scale_1N, x_MK, q_MK, scale_M1, m, row_blocks)
    prepare = kernel(E4M3_FILES, "prepare_e4m3", prepare_macros(x_MK.dtype == torch.float16, k), device)
    prepare.launch((columns, ceil_div(n, 32) + row_blocks, 1), 256, PREPARE_SHARED_BYTES, args, weight)
    return q_MK, scale_M1, w_NK, scale_1N


def _multiple_reasons(request: Request, taker: str) -> list[str]:
    odd = request.n % MULTIPLE or request.k % MULTIPLE
    return [f"{request.n} x {request.k}: {taker} takes multiples of {MULTIPLE}"] if odd else []


def _fp8_reasons(request: Request) -> list[str]:
    reasons = linear_reasons(request)
    if request.device.type == "cuda" and request.capability < FP8_CAPABILITY:
        reasons.append(f"compute capability {request.capability[0]}.{request.capability[1]} has no FP8 tensor cores")
    return reasons + _multiple_reasons(request, "PyTorch's FP8 matmul")


def _fused_reasons(request: Request) -> list[str]:
    return linear_reasons(request) + hopper_reasons(request) + _multiple_reasons(request, "the kernel")


def _fused_slower(request: Request) -> list[str]:
    if request.m > MAX_ROWS and request.n * request.k > LARGEST_WEIGHT:
        shape = f"{request.n} x {request.k}"
        return [f"above {MAX_ROWS} rows PyTorch's FP8 matmul is as fast or faster with a weight of {shape}"]
    return []


def _fused(
    x_MK: Tensor, weight: Weight, bias: Tensor | None, request: Request, activation: str, row_top: Tensor
) -> Tensor:
    x_MK = aligned(x_MK)
    plan = plan_w4a8(request.m, request.n, request.k, processors(x_MK.device))
    return run_w4a8(plan, x_MK, (*weight, row_top), like(bias, x_MK), activation, request.n, request.k)


def _whole(
    x_MK: Tensor, weight: Weight, bias: Tensor | None, request: Request, activation: str, row_top: Tensor
) -> Tensor:
    q_MK, scale_M1, w_NK, scale_1N = run_prepare_e4m3(x_MK, (*weight, row_top), request.n, request.k)
    how = {"out_dtype": torch.bfloat16, "use_fast_accum": False}
    z_MN = torch.ops.aten._scaled_mm(q_MK, w_NK.t(), scale_M1, scale_1N, **how)
    if bias is not None:
        z_MN = z_MN + bias.to(z_MN.dtype)
    return activate(z_MN, activation).to(x_MK.dtype)


def _reference(
    x_MK: Tensor, weight: Weight, bias: Tensor | None, request: Request, activation: str, _row_top: Tensor
) -> Tensor:
    q_MK, scale_M1 = quantize_rows(x_MK)
    w_NK = reference.dequantize(*weight, format=FORMAT, n=request.n, k=request.k)
    return reference.linear(q_MK.to(torch.float32) * scale_M1, w_NK, bias, activation).to(x_MK.dtype)


def cpu_reasons(request: Request) -> list[str]:
    """Why what rounds inputs does not run by the reference, slow but exact, on a GPU."""
    slow = f"the tensors are on {request.device}: rounding is asked for to be fast, and this would be slow"
    return [slow] * (request.device.type == "cuda")


W4A8 = (
    Backend("fused", _fused_reasons, each_time(_fused), slower=_fused_slower),
    Backend("fp8", _fp8_reasons, each_time(_whole)),
    Backend("reference", cpu_reasons, each_time(_reference)),
)


@packed_linear(4, lambda dy, codes, scales, scale, _, *shape: fp4_linear_dx(dy, codes, scales, scale, FORMAT, *shape))
def fp4_linear_w4a8(
    x_MK: Tensor,
    codes: Tensor,
    block_scales: Tensor,
    tensor_scale: Tensor,
    row_top: Tensor,
    bias: Tensor | None,
    activation: str,
    n: int,
    k: int,
) -> Tensor:
    """``activation(x W^T + bias)`` with x (..., K), bf16 or fp16 (fp32 on the CPU), rounded to E4M3 by rows if it has
    ``MIN_ROWS``, and W of 'mxfp4-tiled' tensors and ``row_tops``, exactly; the rest as in ``fp4_linear``.

    Raises:
        ConfigurationError: tensors that do not belong together, or an unknown activation.
        Unsupported: a GPU without FP8 tensor cores, fp32 activations on a GPU, or the backend asked for refuses.
    """
    weight = (codes, block_scales, tensor_scale)
    if x_MK.numel() < MIN_ROWS * k:
        return run_rows("fp4_linear", LINEAR, x_MK, FORMAT, n, k, weight, bias, activation)
    return run_rows("fp4_linear_w4a8", W4A8, x_MK, FORMAT, n, k, weight, bias, activation, row_top)
