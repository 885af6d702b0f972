"""Memory that CUDA kernels take and give back inside one call; no operator's output shows it.

Formulas from the shapes, after torch's sources (ATen/native/cuda and native/transformers/cuda) and, for this package's
operators, which are known by name, after vblackwell/kernels; operators that are not here are taken to need none.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from vblackwell.kernels.fp4.linear import workspace_bytes as fp4_workspace_bytes
from vblackwell.kernels.fp4.mma_plan import H200, Gpu
from vblackwell.kernels.fp4.two_part import MAX_ROWS as TWO_PART_ROWS
from vblackwell.machine.gpus import GPUS, NUM_SMS
from vblackwell.trace.work import rows_of
from vblackwell.units import align_up

# Operators that call cuBLAS, whose workspace is allocated at the first one.
CUBLAS = {
    "mm", "addmm", "bmm", "baddbmm", "linear", "_addmm_activation", "shared_input_linears", "shared_input_linears_dx",
    "swiglu_linear", "normed_linears", "normed_linears_backward", "feed_forward_block", "feed_forward_block_backward",
    "linear_cross_entropy",
}  # fmt: skip
# torch's default cuBLAS workspace (`CUBLAS_WORKSPACE_CONFIG`): ':4096:2:16:8', from capability 9 on ':4096:8'; and what
# the first product with a bias takes for cuBLASLt and keeps.
CUBLAS_BYTES = {False: 2 * 4096 * 1024 + 8 * 16 * 1024, True: 32 * 1024 * 1024}
CUBLASLT_BYTES = 1024 * 1024


def workspace_bytes(
    name: str,
    args: tuple[Any, ...],
    outputs: Sequence[Tensor],
    capability: tuple[int, int] = (8, 0),
    num_sms: int = NUM_SMS,
) -> tuple[int, tuple[int, ...]]:
    """Bytes that operator ``name`` takes during its call, and for a moment after each of its ``outputs``."""
    if name in _OF_GPU:
        return _OF_GPU[name](_gpu(capability, num_sms), *args), ()
    if name == "convolution":
        return 0, _convolution(outputs[0].numel(), *[args[at] for at in (0, 1, 3, 4, 6, 8)])
    if name == "convolution_backward":
        return 0, _convolution_backward(*[args[at] for at in (0, 1, 2, 4, 5, 7, 9, 10)])
    found = _sum(num_sms, *args) if name in ("sum", "mean") else _FORMULAS[name](*args) if name in _FORMULAS else 0
    if name == "_safe_softmax" or name.startswith("_scaled_dot_product"):  # after its outputs
        return 0, (*[0] * (len(outputs) - 1), found)
    return found, ()


def _flash_backward(dy: Tensor, query: Tensor, key: Tensor, *rest: Any) -> int:
    """dQ in fp32, one dot product a row, a header; gradients a query's head of keys and values that heads share."""
    b, n, s, h = query.shape
    rows, width = -(-s // 128) * 128, -(-h // 32) * 32
    shared = 0 if key.shape[1] == n else 2 * b * n * key.shape[2] * h * key.element_size()
    return 4 * b * n * rows * (width + 1) + shared + 256


def _convolution(
    num_out: int, x: Tensor, weight: Tensor, stride: Any, padding: Any, transposed: bool, groups: int
) -> tuple[int, ...]:
    """cuDNN's kernels want channels last: it copies what is not, channels of half precision padded to 8, and weights
    that cover an area. All sizes but parts of sums, a few MiB, as two ResNets on an H200 showed them (cuDNN 9.19).
    Grouped and transposed ones: not known.
    """
    is_free = _is_plain_product(weight, stride, padding) and x.shape[2:].numel() % 4 == 0
    if is_free or not _copies(x, weight, transposed, groups):
        return ()
    return (_channels_last(x, weight, num_out),)


def _convolution_backward(
    dy: Tensor, x: Tensor, weight: Tensor, stride: Any, padding: Any, transposed: bool, groups: int, wanted: Any
) -> tuple[int, ...]:
    """Those of the input's gradient and of the weight's; a plain product's parts of the latter are one an image."""
    if not _copies(x, weight, transposed, groups):
        return ()
    copied = _channels_last(x, weight, dy.numel())
    area, plain = x.shape[2:].numel(), _is_plain_product(weight, stride, padding)
    of_input = 0 if plain and area % 4 == 0 else copied
    # Sums of parts in fp32, of 2^20 values, where a small gradient is split among blocks: 1 to 7 MB were seen.
    parts = 0 if plain else 4 * weight.numel() * ((1 << 20) // max(1, weight.numel()))
    aligned = area * x.element_size() % 16 == 0
    of_weight = 4 * x.shape[0] * weight.numel() if plain and aligned else copied + parts
    return tuple(each for each, is_wanted in zip((of_input, of_weight), wanted, strict=False) if is_wanted)


def _copies(x: Tensor, weight: Tensor, transposed: bool, groups: int) -> bool:
    return x.dim() >= 4 and not transposed and groups == 1 and x.is_contiguous() and weight.is_contiguous()


def _is_plain_product(weight: Tensor, stride: Any, padding: Any) -> bool:
    return weight.shape[2:].numel() == 1 and set(stride) == {1} and set(padding) == {0}


def _channels_last(x: Tensor, weight: Tensor, num_out: int) -> int:
    width = x.element_size()
    channels = align_up(x.shape[1], 8 if width == 2 else 1)
    of_input = x.numel() // max(1, x.shape[1]) * channels
    of_weight = 0 if weight.shape[2:].numel() == 1 else weight.numel() // max(1, x.shape[1]) * channels
    return (of_input + num_out + of_weight) * width


THREADS, VECTOR, WARP, THREADS_OF_SM = 512, 4, 32, 2048


def reduction_bytes(reduced: int, kept: int, num_sms: int) -> int:
    """What a sum of (reduced, kept) elements over the former, such as a bias's gradient, takes to add up blocks' parts.

    `gpu_reduce_kernel`'s configuration (ATen/native/cuda/Reduce.cuh): threads of a block cover ``kept`` in vectors of
    four and split ``reduced``; if each still has 256 values, blocks split it too, until the GPU is full or a thread has
    16. The buffer holds fp32 sums of the columns for every such block, times the columns that a block covers.
    """
    if not reduced or not kept:
        return 0
    vector = next(width for width in (VECTOR, 2, 1) if kept % width == 0)
    threads = THREADS // vector
    columns, depth = _power_below(kept // vector, threads), _power_below(reduced, threads)
    width = min(columns, WARP)
    height = min(depth, threads // width)
    width = min(columns, threads // height)
    values = -(-reduced // height) if reduced >= height * 16 or reduced >= 256 else reduced
    grid = -(-kept // (vector * width))
    target = num_sms * (THREADS_OF_SM // (width * height))
    if values < 256 or grid > target or values == reduced:
        return 0
    blocks = max(min(-(-target // grid), -(-values // 16)), -(-values // 256))
    return 4 * kept * blocks * width * vector if blocks > 1 else 0


def _power_below(number: int, most: int) -> int:
    return most if number >= most else 1 << max(0, number.bit_length() - 1)


def _sum(num_sms: int, x: Tensor, dims: Any = None, *rest: Any) -> int:
    if not dims or x.dim() < 2 or not x.is_contiguous():
        return 0
    outer = sorted(dim % x.dim() for dim in dims)
    if outer != list(range(len(outer))) or len(outer) == x.dim():
        return 0
    reduced = x.shape[: len(outer)].numel()
    return reduction_bytes(reduced, x.numel() // max(1, reduced), num_sms)


CHUNK_BYTES, ROW_STEP = 128 << 20, 256  # of kernels/pointwise/linears.py


def _feed_forward(x: Tensor, gate: Tensor, inner: int) -> int:
    """A chunk's normed input and ``inner`` products of the inner width."""
    rows = rows_of(x)
    count = max(1, -(-rows * len(gate) * x.element_size() // CHUNK_BYTES))
    chunk = min(rows, align_up(-(-rows // count), ROW_STEP))
    return chunk * ((x.shape[-1] + inner * len(gate)) * x.element_size() + 4)


@functools.lru_cache
def _gpu(capability: tuple[int, int], num_sms: int) -> Gpu:
    """What plans know of it, where no card is known by the rate of memory that an H200 has a multiprocessor."""
    known = (card for card in GPUS.values() if (card.capability, card.num_sms) == (capability, num_sms))
    rates = [card.memory_bytes_per_second / 1e6 for card in known]
    return Gpu(capability, num_sms, max(rates, default=H200.memory_bytes_a_us * num_sms / H200.processors))


def _fp4_linear(gpu: Gpu, x: Tensor, *rest: Any) -> int:
    n, k = rest[-2:]
    return fp4_workspace_bytes(rows_of(x), n, k, x.dtype, gpu)


def _w4a8(gpu: Gpu, x: Tensor, *rest: Any) -> int:
    """From some rows on both operands in E4M3; fewer as without."""
    n, k = rest[-2:]
    return max(_fp4_linear(gpu, x, n, k), k * (n + rows_of(x)) if rows_of(x) > 128 else 0)


def _w4a4(gpu: Gpu, x: Tensor, *rest: Any) -> int:
    """The same in nvfp4, of 9 / 16 of a byte each."""
    n, k = rest[-2:]
    return max(_fp4_linear(gpu, x, n, k), 9 * k * (n + rows_of(x)) // 16 if rows_of(x) > 128 else 0)


_OF_GPU: dict[str, Callable[..., int]] = {
    "fp4_linear": _fp4_linear,
    "fp4_linear_w4a8": _w4a8,
    "fp4_linear_w4a4": _w4a4,
}
_FORMULAS: dict[str, Callable[..., int]] = {
    "fp4_linear_dx": lambda dy, *rest: rest[-2] * rest[-1] * dy.element_size(),
    "two_part_linear": lambda x, *rest: rest[-2] * rest[-1] * x.element_size() if rows_of(x) > TWO_PART_ROWS else 0,
    "two_part_linear_dx": lambda dy, *rest: rest[-2] * rest[-1] * dy.element_size(),
    "_scaled_dot_product_flash_attention_backward": _flash_backward,
    "_scaled_dot_product_efficient_attention_backward": lambda dy, query, *rest: (
        4 * rows_of(query) * (1 + (query.shape[-1] if query.element_size() < 4 else 0))
    ),
    "embedding_dense_backward": lambda dy, indices, *rest: 40 * indices.numel() if indices.numel() > 3072 else 0,
    "_softmax_backward_data": lambda dy, *rest: dy.numel() * dy.element_size(),  # dy * y, before it is summed
    "_safe_softmax": lambda scores, *rest: scores.numel(),  # where the scores are -inf
    # The normed input and the norm's scale of each row, or gradients of that size.
    "normed_linears": lambda x, *rest: x.numel() * x.element_size() + 4 * rows_of(x),
    "normed_linears_backward": lambda dys, x, *rest: x.numel() * x.element_size() + 4 * rows_of(x),
    "feed_forward_block": lambda x, norm, eps, gate, up, down, wanted: _feed_forward(x, gate, 2) if wanted else 0,
    "feed_forward_block_backward": lambda dy, x, norm, eps, gate, *rest: _feed_forward(x, gate, 3),
    "swiglu_linear": lambda gate, up, weight, wanted: gate.numel() * gate.element_size() if wanted else 0,
    # Logits of a chunk, rows padded to 64 words; a loss a token.
    "linear_cross_entropy": lambda hidden, weight, bias, targets, ignore, chunk, *wanted: (
        min(chunk, hidden.shape[0]) * align_up(weight.shape[0], 64) * hidden.element_size() + 4 * hidden.shape[0]
    ),
}
