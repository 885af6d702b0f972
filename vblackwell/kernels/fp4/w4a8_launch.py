"""Launches of ``cuda/w4a8.cu``: rows of x rounded to E4M3 times an mxfp4 weight that is decoded while the product runs (Hopper).

``M`` rows, ``N`` out features, ``K`` in features. A step is 128 columns.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from vblackwell.kernels.fp4.blocks import ceil_div
from vblackwell.kernels.fp4.reference import ACTIVATIONS
from vblackwell.kernels.runtime import counters
from vblackwell.kernels.runtime.nvrtc import kernel

FILES = (
    "ptx.cuh", "barrier.cuh", "ring.cuh", "wgmma.cuh", "wgmma_e4m3.cuh", "decode.cuh", "e4m3.cuh", "epilogue.cuh", "round_row.cuh",
    "w4a8.cu",
)  # fmt: skip
CLUSTER = 2  # blocks, each of 128 tokens
THREADS = 512
FIRST_COUNTER = 32  # the queue has a cache line of its own
# By features of a tile, as timed on an H200 (docs/log-fp4.md): cycles of a step, and stages. Of 256 and 192 one more fits; the rest is L1.
STEP_CYCLES = {256: 1180, 224: 1105, 192: 955}
STAGES = {256: 3, 224: 4, 192: 4}
HEAD_ROWS = 1024  # the tokens of four pairs of tiles, which go side by side
MAY_WAIT = 4  # clusters whose first rows the product's own warps round, behind the weight
LARGE_WEIGHT = 4096 * 4096  # elements; above, those warps come too late to the rows of a second round of tiles as well


@dataclass(frozen=True)
class W4A8Plan:
    """How ``w4a8`` cuts a product.

    Attributes:
        features: of a tile, which has 128 tokens; a multiple of 32.
        stages: of 128 columns of both operands in shared memory.
        head_steps: steps of the first tiles' weights that ``w4a8_head`` decodes.
        head_rows: of x, that it rounds; a multiple of 128.
    """

    features: int
    stages: int
    head_steps: int = 8
    head_rows: int = HEAD_ROWS

    def shared_bytes(self) -> int:
        """Of a block, as the source lays them out."""
        outputs, units = 8 * 16 * 144, 2 * (self.features // 2 * 16 + 128 * 4)  # of eight warps; of two tiles
        return self.stages * (128 + self.features) * 128 + outputs + units + 16 * self.stages + 16

    def macros(self, fp16: bool, k: int) -> dict[str, int]:
        """What the source is compiled with for rows of ``k`` columns, ``fp16`` or bf16."""
        return {
            "FP16": 0, "X_FP16": int(fp16), "KEPT": min(4, ceil_div(k, 1024)), "ROUND_WARPS": 4, "COLUMNS": self.features // 2,
            "STAGES": self.stages, "SPLITS": CLUSTER, "HEAD_ROWS": self.head_rows, "HEAD_STEPS": self.head_steps, "TOKENS": 0, "OUT32": 0,
        }  # fmt: skip


def of_width(features: int) -> W4A8Plan:
    """The plan of tiles of these many features."""
    return W4A8Plan(features, STAGES[features])


def plan_w4a8(m: int, n: int, k: int, processors: int) -> W4A8Plan:
    """The tile by which a GPU of so many multiprocessors is done first: whole rounds of tiles, each of which takes its width's cycles.

    The head rounds the rows that all clusters but ``MAY_WAIT`` begin with; of a ``LARGE_WEIGHT`` 2,048 at least, unless the first four
    pairs' tiles fill a round and a half.
    """
    pairs, clusters = ceil_div(m, 128 * CLUSTER), processors // CLUSTER
    width = min(STEP_CYCLES, key=lambda width: ceil_div(pairs * ceil_div(n, width), clusters) * STEP_CYCLES[width])
    four = 4 * ceil_div(n, width)  # tiles
    late = n * k > LARGE_WEIGHT and 2 * four < 3 * clusters
    fours = max(1 + late, ceil_div(clusters - MAY_WAIT, four))
    return replace(of_width(width), head_rows=HEAD_ROWS * min(fours, ceil_div(m, HEAD_ROWS)))


@dataclass(frozen=True)
class Cut:
    """Sizes of a product (M, N, K) by a plan on so many clusters.

    Attributes:
        pairs: of token tiles.
        columns: of tiles.
        steps: of K.
        chunk: columns of tiles that the clusters are at work on at a time; their weights are decoded first.
        head_blocks: of ``w4a8_head``.
    """

    pairs: int
    columns: int
    steps: int
    chunk: int
    head_blocks: int

    @property
    def counters(self) -> int:
        """32-bit counters: the queue, what is made of each tile of the weight, and of each tile of x."""
        return FIRST_COUNTER + self.columns * self.steps + self.pairs * CLUSTER


def cut(plan: W4A8Plan, m: int, n: int, k: int, clusters: int) -> Cut:
    pairs, columns, steps = ceil_div(m, 128 * CLUSTER), ceil_div(n, plan.features), ceil_div(k, 128)
    chunk = min(columns, ceil_div(clusters, min(4, pairs)))
    items = min(plan.head_steps, steps) * min(chunk * plan.features // 32, ceil_div(n, 32))
    return Cut(pairs, columns, steps, chunk, ceil_div(min(m, plan.head_rows), 2) + ceil_div(items, 8))


def run_w4a8(
    plan: W4A8Plan,
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
    """``activation(x W^T + bias)`` (M, N), of the type of x and bias: bf16 or fp16; N and K are multiples of 16."""
    m, device = x_MK.shape[0], x_MK.device
    clusters = torch.cuda.get_device_properties(device).multi_processor_count // CLUSTER
    sizes, macros = cut(plan, m, n, k, clusters), plan.macros(x_MK.dtype == torch.float16, k)
    image = torch.empty(sizes.pairs * CLUSTER * sizes.steps * 128 * 128, dtype=torch.uint8, device=device)
    weight = torch.empty(sizes.columns * sizes.steps * plan.features * 128, dtype=torch.uint8, device=device)
    scale_M = torch.empty(m, dtype=torch.float32, device=device)
    y_MN = torch.empty(m, n, dtype=x_MK.dtype, device=device)
    head, product = (kernel(FILES, name, macros, device) for name in ("w4a8_head", "w4a8"))
    operands, shape = (x_MK, image, scale_M, codes, block_scales), (m, n, k)
    with counters.zeroed(sizes.counters, device) as (now, stale, stale_count):
        head.launch(
            (sizes.head_blocks, 1, 1), 256, 32,
            (*operands, row_top, weight, now, stale, stale_count, *shape, sizes.chunk),
            (codes, block_scales, tensor_scale, row_top),
        )  # fmt: skip
        product.launch(
            (clusters, CLUSTER, 1), THREADS, plan.shared_bytes(),
            (*operands, tensor_scale, row_top, bias, y_MN, weight, now, *shape, ACTIVATIONS.index(activation), clusters, sizes.chunk),
        )  # fmt: skip
    return y_MN
