"""AdamW as torch's fused CPU kernel rounds it: what its order of operations is on this machine, and the update on CPU tensors.

``torch._fused_adamw_`` on fp32 CPU tensors is the definition of this package's update. It works in fp32, with scalars derived in
double (`AdamWStep`), on vectors of 4 to 16 elements and then one by one on the rest of the tensor. Its C++ leaves it to the compiler
which sums become fused multiply-adds: builds of torch, instruction sets, and the vector and scalar loops of one build do differ.
`torch_order` therefore asks the torch at hand, once, and the CUDA kernel is compiled for the answer.

A *split master* is an fp32 number kept as a bf16 and a signed 16-bit remainder: bits(master) = (bits(bf16) << 16) + remainder, where
the bf16 is the master rounded to nearest, ties away from zero. Both are cheaper to make than the master is to keep twice.
"""

from __future__ import annotations

import functools
import math
import struct
from dataclasses import dataclass

import torch
from torch import Tensor

from vblackwell.errors import Unsupported

BLOCK = 4096  # elements a partial sum of squares covers
CHUNK = 1 << 20  # elements worked on at once: a multiple of BLOCK; what one operation wrote is in cache for the next
_NORM_LANES = 1024  # partial sums that are added side by side


@dataclass(frozen=True)
class AdamWStep:
    """AdamW's numbers for one parameter at one step; ``step`` is 1 at the first update. Derived numbers are torch's, in double."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    step: int

    def __post_init__(self) -> None:
        if self.step < 1:
            raise ValueError(f"AdamW at step {self.step}: steps count from 1; count up before the update")

    @property
    def bias_correction1(self) -> float:
        return 1 - self.beta1 ** float(self.step)

    @property
    def bias_correction2_root(self) -> float:
        return math.sqrt(1 - self.beta2 ** float(self.step))

    @property
    def step_size(self) -> float:
        return self.lr / self.bias_correction1

    @property
    def decay(self) -> float:
        """What weights are multiplied by. Without weight decay torch skips the product; one by 1 changes nothing."""
        return 1 - self.lr * self.weight_decay

    @functools.cached_property
    def words(self) -> tuple[int, ...]:
        """fp32 bits of (decay, 1 - beta1, beta2, 1 - beta2, bias_correction2_root, eps, -step_size), a kernel's arguments."""
        numbers = (self.decay, 1 - self.beta1, self.beta2, 1 - self.beta2, self.bias_correction2_root, self.eps)
        return struct.unpack("<7i", struct.pack("<7f", *numbers, -self.step_size))


@dataclass(frozen=True)
class Order:
    """How torch's fused CPU AdamW rounds here.

    Attributes:
        width: elements of a vector; the last ``n % width`` of a tensor are done by the scalar loop.
        lerp: whether m + w (g - m) is one fused multiply-add, in the vector and in the scalar loop.
        square: v beta2 + (w g) g, in the vector and in the scalar loop: 0 plain, 1 the first product fused into the sum, 2 the second.
    """

    width: int
    lerp: tuple[bool, bool]
    square: tuple[int, int]

    def tail_start(self, n: int) -> int:
        """First element of the scalar loop."""
        return n if (self.lerp[0], self.square[0]) == (self.lerp[1], self.square[1]) else n - n % self.width


def _fused(weights: Tensor, gradient: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, numbers: AdamWStep) -> None:
    torch._fused_adamw_(  # pyright: ignore[reportPrivateImportUsage]
        [weights], [gradient], [exp_avg], [exp_avg_sq], [], [torch.tensor(float(numbers.step))],
        lr=numbers.lr, beta1=numbers.beta1, beta2=numbers.beta2, weight_decay=numbers.weight_decay, eps=numbers.eps,
        amsgrad=False, maximize=False,
    )  # fmt: skip


@functools.cache
def torch_order() -> Order:
    """Ask torch: 256 random elements, each in all 31 places of a tensor that has vectors and a rest.

    Raises:
        Unsupported: torch rounds in a way the kernels do not know.
    """
    generator = torch.Generator().manual_seed(0)
    g, m, v = (torch.rand(256, 1, generator=generator) + 1 for _ in range(3))
    numbers = AdamWStep(1e-3, 0.7, 0.4, 1e-8, 0.0, 1)
    weight, beta2, weight2 = (torch.tensor(x).double() for x in (1 - numbers.beta1, numbers.beta2, 1 - numbers.beta2))
    # All numbers are of one size, so that float64 holds products and their sums exactly: fused means rounded once.
    step = weight * (g - m).double()
    lerps = [m + step.float(), (m.double() + step).float()]
    kept, added = v.double() * beta2, (weight2 * g.double()).float().double() * g.double()
    squares = [
        kept.float() + added.float(),
        (kept + added.float().double()).float(),
        (kept.float().double() + added).float(),
    ]
    exp_avg, exp_avg_sq, gradient = (source.expand(-1, 31).contiguous() for source in (m, v, g))
    for row in range(len(g)):
        _fused(torch.ones(31), gradient[row], exp_avg[row], exp_avg_sq[row], numbers)
    # For each place, the one form that gives all 256 results.
    lerp = [[kind for kind, form in enumerate(lerps) if torch.equal(form[:, 0], exp_avg[:, i])] for i in range(31)]
    square = [
        [kind for kind, form in enumerate(squares) if torch.equal(form[:, 0], exp_avg_sq[:, i])] for i in range(31)
    ]
    for width in (1, 4, 8, 16):
        start = 31 - 31 % width
        if all(
            kinds == [kinds[0]] * start + [kinds[-1]] * (31 - start) and len(kinds[0]) == len(kinds[-1]) == 1
            for kinds in (lerp, square)
        ):
            return Order(width, (lerp[0] == [1], lerp[-1] == [1]), (square[0][0], square[-1][0]))
    raise Unsupported(
        f"torch {torch.__version__} rounds AdamW on this CPU ({torch.backends.cpu.get_cpu_capability()}) in a way that the "
        f"kernel does not know (lerp {lerp}, square {square}): update on the CPU instead"
    )


def join(weight: Tensor, remainder: Tensor, bits: Tensor) -> Tensor:
    """The fp32 master of a split one, as a view of the int32 ``bits`` that it is written to."""
    bits.copy_(weight.view(torch.int16)).bitwise_left_shift_(16).add_(remainder)
    return bits.view(torch.float32)


def split(bits: Tensor, weight: Tensor, remainder: Tensor, scratch: Tensor) -> None:
    """The other way: the int32 ``bits`` of a master to its bf16 and its remainder; ``scratch`` is int32 of the same length.

    The remainder is the low half read as signed: where it is negative, rounding has carried one into the high half.
    """
    remainder.copy_(bits.view(torch.int16)[0::2])  # the low halves, on a little-endian machine
    weight.view(torch.int16).copy_(torch.add(bits, 0x8000, out=scratch).view(torch.int16)[1::2])
    keep_nan(bits, weight)


def keep_nan(bits: Tensor, weight: Tensor) -> None:
    """Where the int32 ``bits`` of masters are NaN, so be the bf16 ``weight``: one with a full low half rounds up to a zero."""
    wrong = bits.view(torch.float32).isnan()
    if bool(wrong.any()):
        weight.masked_fill_(wrong, math.nan)


def block_sums(values: Tensor, out: Tensor) -> None:
    """``out`` = the sum of squares of each 4096 of the fp32 ``values``, added as `cuda/adamw.cu` does, to the same bits."""
    whole = len(values) // BLOCK
    if whole:
        out[:whole] = _sums_of_whole_blocks(values[: whole * BLOCK])
    if len(values) > whole * BLOCK:
        last = torch.zeros(BLOCK)
        last[: len(values) - whole * BLOCK] = values[whole * BLOCK :]
        out[whole:] = _sums_of_whole_blocks(last)


def _sums_of_whole_blocks(values: Tensor) -> Tensor:
    squares = (values * values).view(-1, 2, BLOCK // 8, 4)
    threads = squares[:, 0] + squares[:, 1]
    threads = (threads[..., 0] + threads[..., 1]) + (threads[..., 2] + threads[..., 3])
    return _halve(_halve(threads.view(-1, BLOCK // 256, 32)))


def _halve(values: Tensor) -> Tensor:
    """Sums over the last dimension, a power of two: the second half onto the first until one is left."""
    while values.shape[-1] > 1:
        half = values.shape[-1] // 2
        values = values[..., :half] + values[..., half:]
    return values[..., 0]


def norm(sums: Tensor) -> Tensor:
    """sqrt of the sum of all block sums, in double and in one order; fp32 scalar."""
    rows = -(-len(sums) // _NORM_LANES)
    padded = torch.zeros(rows * _NORM_LANES, dtype=torch.float64)
    padded[: len(sums)] = sums
    total = torch.zeros(_NORM_LANES, dtype=torch.float64)
    for row in padded.view(rows, _NORM_LANES):
        total += row
    return _halve(total).sqrt().float()


def _summed(gradient: Tensor, previous: Tensor | None, scratch: Tensor) -> Tensor:
    """fp32 values of ``previous`` + ``gradient``; the gradient itself where that is all there is to it."""
    if previous is None:
        return gradient if gradient.dtype == torch.float32 else scratch.copy_(gradient)
    return scratch.copy_(previous).add_(gradient)


def square_sums(gradient: Tensor, out: Tensor, previous: Tensor | None) -> None:
    scratch = torch.empty(min(CHUNK, len(gradient)))
    for start in range(0, len(gradient), CHUNK):
        part = slice(start, start + CHUNK)
        source = gradient[part]
        values = _summed(source, None if previous is None else previous[part], scratch[: len(source)])
        block_sums(values, out[start // BLOCK : (start + CHUNK) // BLOCK])


@torch.no_grad()
def piece(
    weight: Tensor,
    remainder: Tensor | None,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    gradient: Tensor,
    numbers: AdamWStep,
    previous: Tensor | None,
    factor: Tensor | None,
    sums: Tensor | None,
) -> None:
    """`adamw_piece` on CPU tensors: torch's own kernel, chunk by chunk."""
    size = min(CHUNK, len(weight))
    scratch = torch.empty(size)
    bits, rounded = (torch.empty(size if remainder is not None else 0, dtype=torch.int32) for _ in range(2))
    for start in range(0, len(weight), CHUNK):
        part = slice(start, start + CHUNK)
        source, count = gradient[part], len(gradient[part])
        values = _summed(source, None if previous is None else previous[part], scratch[:count])
        if sums is not None:
            block_sums(values, sums[start // BLOCK : (start + CHUNK) // BLOCK])
        if factor is not None:
            values = torch.mul(values, factor, out=scratch[:count])
        if remainder is None:
            _fused(weight[part], values, exp_avg[part], exp_avg_sq[part], numbers)
        else:
            master = join(weight[part], remainder[part], bits[:count])
            _fused(master, values, exp_avg[part], exp_avg_sq[part], numbers)
            split(bits[:count], weight[part], remainder[part], rounded[:count])
