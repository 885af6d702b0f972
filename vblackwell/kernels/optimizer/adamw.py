"""One AdamW for CPU and GPU: a piece of a parameter is updated where its tensors are, to the same bits on both.

``torch._fused_adamw_`` on fp32 CPU tensors says what the bits are; ``cuda/adamw.cu`` computes the same, so an update
may move between host and GPU from one step to the next. torch's kernel works in fp32, with scalars derived in double
(`AdamWStep`), on vectors of 4 to 16 elements and then one by one on the rest. Its C++ leaves it to the compiler which
sums become fused multiply-adds, and builds of torch, instruction sets, and the two loops of one build differ.
`torch_order` therefore asks the torch at hand, once, and the CUDA kernel, as `adamw.c`, is compiled for the answer.

A piece is flat and contiguous, starts at a multiple of 4096 elements from its parameter's start, and only a parameter's
last piece may have a length that is not such a multiple, because of the scalar loop at the end.

A *split master* is an fp32 number kept as a bf16 and a signed 16-bit remainder: bits(master) = (bits(bf16) << 16) +
remainder, where the bf16 is the master rounded to nearest, ties away from zero.
"""

import functools
import itertools
import math
import operator
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vblackwell.errors import Unsupported
from vblackwell.kernels.runtime.launch import Kernel, Launcher, kernel

BLOCK = 4096  # elements a partial sum of squares covers
CHUNK = 1 << 20  # elements worked on at once: a multiple of BLOCK; what one operation wrote is in cache for the next
_NORM_LANES = 1024  # partial sums that are added side by side
FILES = ("ptx.cuh", "optimizer/gradient.cuh", "optimizer/adamw.cu")
THREADS = 512
MAX_ELEMENTS = 2**31 - BLOCK  # elements of a piece: the kernels index in 32 bits
MAX_GRADIENTS = 32  # whose norms one launch takes: a layer's, and half a KiB of the 4 that a kernel's arguments may be
GRADIENTS = {torch.bfloat16: 0, torch.float32: 1, torch.float16: 2}
PREVIOUS = {None: 0, torch.bfloat16: 1, torch.float32: 2}


@dataclass(frozen=True)
class AdamWStep:
    """AdamW's numbers for one parameter at one step, from 1 on; derived numbers are torch's, in double."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    step: int

    def __post_init__(self) -> None:
        if self.step < 1:
            raise ValueError(f"AdamW at step {self.step}: steps count from 1; count up before the update")

    @functools.cached_property
    def words(self) -> tuple[int, ...]:
        """fp32 bits of (what weights are multiplied by, 1 - beta1, beta2, 1 - beta2, the root of the second bias
        correction, eps, minus the step's size), a kernel's arguments."""
        decay = 1 - self.lr * self.weight_decay  # torch skips a product by 1, which changes nothing
        root, size = math.sqrt(1 - self.beta2 ** float(self.step)), self.lr / (1 - self.beta1 ** float(self.step))
        numbers = (decay, 1 - self.beta1, self.beta2, 1 - self.beta2, root, self.eps, -size)
        return struct.unpack("<7i", struct.pack("<7f", *numbers))


@dataclass(frozen=True)
class Then:
    """One step more after another one, of which the weight alone is kept, so that the step can still be dropped.
    ``gradient``: (n,), to which no factor is applied."""

    gradient: Tensor
    numbers: AdamWStep


@dataclass(frozen=True)
class Order:
    """How torch's fused CPU AdamW rounds here, in the vector and in the scalar loop."""

    width: int  # elements of a vector; the last ``n % width`` of a tensor are done by the scalar loop
    lerp: tuple[bool, bool]  # whether m + w (g - m) is one fused multiply-add
    square: tuple[int, int]  # v beta2 + (w g) g: 0 plain, 1 the first product fused into the sum, 2 the second

    def tail_start(self, n: int) -> int:
        """First element of the scalar loop."""
        return n if (self.lerp[0], self.square[0]) == (self.lerp[1], self.square[1]) else n - n % self.width


def _fused(weights: Tensor, gradient: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, numbers: AdamWStep) -> None:
    betas: dict[str, Any] = {"beta1": numbers.beta1, "beta2": numbers.beta2, "amsgrad": False, "maximize": False}
    others: dict[str, Any] = {"lr": numbers.lr, "weight_decay": numbers.weight_decay, "eps": numbers.eps}
    step = torch.tensor(float(numbers.step), dtype=torch.float32, device="cpu")
    tensors = ([weights], [gradient], [exp_avg], [exp_avg_sq], [], [step])
    torch._fused_adamw_(*tensors, **betas, **others)  # pyright: ignore[reportPrivateImportUsage]


@functools.cache
def torch_order() -> Order:
    """Ask torch: 256 random elements, each in all 31 places of a tensor that has vectors and a rest. Raises Unsupported
    where torch rounds in a way the kernels do not know."""
    with torch.device("cpu"):
        return _torch_order()


def _torch_order() -> Order:
    generator = torch.Generator().manual_seed(0)
    g, m, v = (torch.rand(256, 1, generator=generator, dtype=torch.float32) + 1 for _ in range(3))
    numbers = AdamWStep(1e-3, 0.7, 0.4, 1e-8, 0.0, 1)
    factors = 1 - numbers.beta1, numbers.beta2, 1 - numbers.beta2
    weight, beta2, weight2 = (torch.tensor(x, dtype=torch.float32).double() for x in factors)
    # All numbers are of one size, so that float64 holds products and their sums exactly: fused means rounded once.
    step = weight * (g - m).double()
    lerps = [m + step.float(), (m.double() + step).float()]
    kept, added = v.double() * beta2, (weight2 * g.double()).float().double() * g.double()
    in_one = (kept + added.float().double()).float(), (kept.float().double() + added).float()
    squares = [kept.float() + added.float(), *in_one]
    exp_avg, exp_avg_sq, gradient = (source.expand(-1, 31).contiguous() for source in (m, v, g))
    for row in range(len(g)):
        _fused(torch.ones(31, dtype=torch.float32), gradient[row], exp_avg[row], exp_avg_sq[row], numbers)
    # For each place, the one form that gives all 256 results.
    lerp, square = (
        [[kind for kind, form in enumerate(forms) if torch.equal(form[:, 0], found[:, i])] for i in range(31)]
        for forms, found in ((lerps, exp_avg), (squares, exp_avg_sq))
    )
    for width in (1, 4, 8, 16):
        start = 31 - 31 % width
        if all(
            kinds == [kinds[0]] * start + [kinds[-1]] * (31 - start) and len(kinds[0]) == len(kinds[-1]) == 1
            for kinds in (lerp, square)
        ):
            return Order(width, (lerp[0] == [1], lerp[-1] == [1]), (square[0][0], square[-1][0]))
    raise Unsupported(
        f"torch {torch.__version__} rounds AdamW on this CPU ({torch.backends.cpu.get_cpu_capability()}) in a way that"
        f" the kernels do not know (lerp {lerp}, square {square})"
    )


def join(weight: Tensor, remainder: Tensor, bits: Tensor) -> Tensor:
    """The fp32 master of a split one, as a view of the int32 ``bits`` that it is written to."""
    bits.copy_(weight.view(torch.int16)).bitwise_left_shift_(16).add_(remainder)
    return bits.view(torch.float32)


def split(bits: Tensor, weight: Tensor, remainder: Tensor, scratch: Tensor) -> None:
    """The other way: the int32 ``bits`` of a master to its bf16 and its remainder, the low half read as signed: where
    it is negative, rounding has carried one into the high half."""
    remainder.copy_(bits.view(torch.int16)[0::2])  # the low halves, on a little-endian machine
    weight.view(torch.int16).copy_(torch.add(bits, 0x8000, out=scratch).view(torch.int16)[1::2])
    keep_nan(bits, weight)


def keep_nan(bits: Tensor, weight: Tensor) -> None:
    """Where the int32 ``bits`` of masters are NaN, so be ``weight``: one with a full low half rounds up to a zero."""
    values = bits.view(torch.float32)
    if values.numel() and bool(values.amax().isnan()):  # which is NaN if any is; no memory for an answer each
        weight.masked_fill_(values.isnan(), math.nan)


def block_sums(values: Tensor, out: Tensor) -> None:
    """``out`` = the sum of squares of each 4096 of the fp32 ``values``, to the bits of `cuda/adamw.cu`."""
    squares = values * values
    if rest := len(values) % BLOCK:
        squares = torch.nn.functional.pad(squares, (0, BLOCK - rest))
    squares = squares.view(-1, 2, BLOCK // 8, 4)
    threads = squares[:, 0] + squares[:, 1]
    threads = (threads[..., 0] + threads[..., 1]) + (threads[..., 2] + threads[..., 3])
    out.copy_(_halve(_halve(threads.view(-1, BLOCK // 256, 32))))


def _halve(values: Tensor) -> Tensor:
    """Sums over the last dimension, a power of two: the second half onto the first until one is left."""
    while values.shape[-1] > 1:
        half = values.shape[-1] // 2
        values = values[..., :half] + values[..., half:]
    return values[..., 0]


def chunks(
    gradient: Tensor, previous: Tensor | None, factor: Tensor | None, sums: Tensor | None, size: int
) -> Iterator[tuple[slice, Tensor]]:
    """(elements, fp32 values of (``previous`` + ``gradient``) * ``factor``), ``size`` at a time; ``sums`` receives the
    sums of squares before ``factor``."""
    scratch = torch.empty(min(size, len(gradient)), dtype=torch.float32, device=gradient.device)
    for start in range(0, len(gradient), size):
        part = slice(start, start + size)
        values, memory = gradient[part], scratch[: len(gradient[part])]
        if previous is not None:
            values = memory.copy_(previous[part]).add_(values)
        elif values.dtype != torch.float32:
            values = memory.copy_(values)
        if sums is not None:
            block_sums(values, sums[start // BLOCK : (start + size) // BLOCK])
        yield part, values if factor is None else torch.mul(values, factor, out=memory)


def macros(weight: int, gradient: int, previous: int, then: int = 0) -> dict[str, int]:
    """What ``adamw.cu`` is compiled with, for torch's order on this machine; ``then``: whether for one step more."""
    lerp, square = torch_order().lerp, torch_order().square
    order = {"LERP": int(lerp[0]), "TAIL_LERP": int(lerp[1]), "SQUARE": square[0], "TAIL_SQUARE": square[1]}
    types = {"WEIGHT": weight, "GRADIENT": gradient, "PREVIOUS": previous, "THEN": then}
    return {"FP16": 0, "MAX_GRADIENTS": MAX_GRADIENTS, **types, **order}


@functools.cache
def _kernel(
    entry: str, weight: int, gradient: torch.dtype, previous: torch.dtype | None, device: torch.device, then: int = 0
) -> Kernel:
    if torch.cuda.get_device_capability(device) < (7, 5):
        raise Unsupported(f"{device} is older than sm_75, which the AdamW kernel needs: update on the CPU instead")
    return kernel(FILES, entry, macros(weight, GRADIENTS[gradient], PREVIOUS[previous], then), device)


def compile_kernels(dtypes: Iterable[torch.dtype], device: torch.device, *, ahead: bool = False) -> None:
    """Compile and load what updates of bf16 and fp32 weights from one gradient each (``ahead``: one, and one of the
    next step), and its norm, launch on a GPU: 2 s of one thread that their first use would take. Raises Unsupported as
    `adamw_piece`.
    """
    for dtype in dtypes:
        if ahead:
            _ahead_launcher(int(dtype == torch.float32), dtype, device)
        else:
            _launcher(int(dtype == torch.float32), dtype, None, device)
        _kernel("square_sums", 0, dtype, None, device)
    _kernel("block_norms", 0, torch.float32, None, device)


FP32 = (torch.float32,)


def check(
    tensor: Tensor | None, name: str, shape: Sequence[int], dtypes: tuple[torch.dtype, ...], device: torch.device
) -> None:
    if tensor is None:
        return
    if tensor.dtype not in dtypes or tensor.shape != shape or tensor.device != device or not tensor.is_contiguous():
        raise ValueError(
            f"{name} is {tensor.dtype} {tuple(tensor.shape)} with strides {tensor.stride()} on {tensor.device}; "
            f"it must be {' or '.join(map(str, dtypes))}, {tuple(shape)}, contiguous, on {device}"
        )


def check_gradients(
    gradient: Tensor, previous: Tensor | None, sums: Tensor | None, factor: Tensor | None = None
) -> None:
    n, device = gradient.numel(), gradient.device
    check(gradient, "gradient", (n,), tuple(GRADIENTS), device)
    check(previous, "previous", (n,), (torch.bfloat16, torch.float32), device)
    check(sums, "square_sums", (-(-n // BLOCK),), FP32, device)
    if n > MAX_ELEMENTS:
        raise ValueError(f"a piece of {n} elements: at most {MAX_ELEMENTS} at once, cut it at a multiple of {BLOCK}")
    if factor is not None and (factor.numel() != 1 or factor.dtype != torch.float32 or factor.device != device):
        raise ValueError(
            f"factor is {factor.dtype} {tuple(factor.shape)} on {factor.device}; it must be one fp32 number on {device}"
        )


def dtype_of(tensor: Tensor | None) -> torch.dtype | None:
    return None if tensor is None else tensor.dtype


def aligned(*tensors: Tensor | None) -> int:
    """Whether four elements can be read at once: 16 bytes of fp32, 8 of narrower types."""
    address = 0
    for tensor in tensors:
        if tensor is not None:
            address |= tensor.data_ptr() * (1 if tensor.itemsize == 4 else 2)
    return int(address % 16 == 0)


def adamw_piece(
    weight: Tensor,
    remainder: Tensor | None,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    gradient: Tensor,
    numbers: AdamWStep,
    *,
    previous: Tensor | None = None,
    factor: Tensor | None = None,
    square_sums: Tensor | None = None,
    then: Then | None = None,
    ahead: Tensor | None = None,
) -> None:
    """One AdamW step in place on weight, remainder, exp_avg and exp_avg_sq; on a GPU, enqueued on the current stream.

    The gradient is g = (previous + gradient) * factor, each operation rounded to fp32. Nothing is checked for being
    finite. With ``then``, ``weight`` is only read, and ``ahead`` receives what it would be after that step too.

    Args:
        weight, remainder: (n,) bf16 and int16, a split master; or fp32 and None.
        exp_avg, exp_avg_sq: (n,) fp32.
        gradient, previous: (n,) bf16 or fp32, or the first fp16; the second is the sum of earlier micro-batches.
        numbers: with ``step`` already counted up.
        factor: fp32 scalar on the same device, what clipping multiplies gradients by.
        square_sums: (ceil(n / 4096),) fp32; receives each block's sum of squares before ``factor``.
        then: one step more, whose gradient has the type of ``gradient``.
        ahead: (n,) of the type of ``weight``, which it may be.

    Raises:
        ValueError: a tensor of another shape, dtype, layout or device; ``then`` without ``ahead`` or the other way, or
            with ``previous``, ``factor`` or ``square_sums``.
        Unsupported: a GPU before sm_75, no NVRTC, or a CPU on which torch rounds in a way the kernel does not know.
    """
    check_gradients(gradient, previous, square_sums, factor)
    device, shape = gradient.device, gradient.shape
    check(weight, "weight", shape, FP32 if remainder is None else (torch.bfloat16,), device)
    check(remainder, "remainder", shape, (torch.int16,), device)
    check(exp_avg, "exp_avg", shape, FP32, device)
    check(exp_avg_sq, "exp_avg_sq", shape, FP32, device)
    n, then_at = shape[0], None
    if then is not None or ahead is not None:
        if then is None or ahead is None or previous is not None or factor is not None or square_sums is not None:
            raise ValueError("then and ahead are given together, and without previous, factor or square_sums")
        check(then.gradient, "then.gradient", shape, (gradient.dtype,), device)
        check(ahead, "ahead", shape, (weight.dtype,), device)
        then_at = ThenAddresses(ahead.data_ptr(), then.gradient.data_ptr(), then.numbers)
        if device.type != "cuda":
            return _two_steps(weight, remainder, exp_avg, exp_avg_sq, gradient, numbers, then, ahead)
    if device.type != "cuda":
        with torch.no_grad():
            size = 0 if remainder is None else min(CHUNK, n)
            bits, rounded = (torch.empty(size, dtype=torch.int32, device=device) for _ in range(2))
            for part, values in chunks(gradient, previous, factor, square_sums, CHUNK):
                if remainder is None:
                    _fused(weight[part], values, exp_avg[part], exp_avg_sq[part], numbers)
                else:
                    count = len(values)
                    master = join(weight[part], remainder[part], bits[:count])
                    _fused(master, values, exp_avg[part], exp_avg_sq[part], numbers)
                    split(bits[:count], weight[part], remainder[part], rounded[:count])
    elif n:
        tensors = (weight, remainder, exp_avg, exp_avg_sq, gradient, previous, factor, square_sums)
        at = Addresses(*(0 if tensor is None else tensor.data_ptr() for tensor in tensors))
        with torch.cuda.device(device):
            stream = torch.cuda.current_stream(device)
            adamw_at(at, n, numbers, gradient.dtype, dtype_of(previous), stream, then_at)


@torch.no_grad()
def _two_steps(
    weight: Tensor,
    remainder: Tensor | None,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    gradient: Tensor,
    numbers: AdamWStep,
    then: Then,
    ahead: Tensor,
) -> None:
    """`adamw_piece` with ``then`` on the CPU: a step, and another one on copies of what it made."""
    for start in range(0, len(gradient), CHUNK):
        part = slice(start, start + CHUNK)
        rest, m, v = None if remainder is None else remainder[part], exp_avg[part], exp_avg_sq[part]
        made = weight[part].clone()
        adamw_piece(made, rest, m, v, gradient[part], numbers)
        rest = None if rest is None else rest.clone()
        adamw_piece(made, rest, m.clone(), v.clone(), then.gradient[part], then.numbers)
        ahead[part] = made


class Addresses(NamedTuple):
    """Where the tensors of `adamw_piece` are, on one GPU; 0 for None."""

    weight: int
    remainder: int
    exp_avg: int
    exp_avg_sq: int
    gradient: int
    previous: int
    factor: int
    square_sums: int


class ThenAddresses(NamedTuple):
    """Of the step after it: where `adamw_piece`'s ``ahead`` and ``then.gradient`` are, of the types of the weight and
    the gradient, and its numbers."""

    ahead: int
    gradient: int
    numbers: AdamWStep


def adamw_at(
    at: Addresses,
    num_elements: int,
    numbers: AdamWStep,
    gradient: torch.dtype,
    previous: torch.dtype | None,
    stream: torch.cuda.Stream,
    then: ThenAddresses | None = None,
) -> None:
    """`adamw_piece` of at least one element, by address and unchecked, on ``stream`` of the current device: for a
    caller that queues hundreds of pieces a step. ``gradient``, ``previous``: their types, or None. Without
    ``square_sums`` only vectors count: a piece may start at any multiple of them, and be several parameters of which
    the last alone has elements for the scalar loop. With ``then``, there is no ``previous``,
    factor or square_sums."""
    weight = 2 if at.remainder else 4
    itemsizes = (weight, 2, 4, 4, gradient.itemsize, 0 if previous is None else previous.itemsize)
    unaligned = 0
    for address, itemsize in zip(at, itemsizes, strict=False):
        unaligned |= address * 4 // itemsize if itemsize else 0
    if then is not None:
        unaligned |= then.ahead * 4 // weight | then.gradient * 4 // gradient.itemsize
    words = (num_elements, torch_order().tail_start(num_elements), int(unaligned % 16 == 0), *numbers.words)
    if then is None:
        launch = _launcher(int(at.remainder == 0), gradient, previous, stream.device)
    else:
        assert previous is None and not at.factor and not at.square_sums
        launch = _ahead_launcher(int(at.remainder == 0), gradient, stream.device)
        words += (then.ahead, then.gradient, *then.numbers.words)
    launch((-(-num_elements // BLOCK), 1, 1), (*at, *words), stream.cuda_stream)


@functools.cache
def _launcher(weight: int, gradient: torch.dtype, previous: torch.dtype | None, device: torch.device) -> Launcher:
    return Launcher(_kernel("adamw", weight, gradient, previous, device), THREADS, 64, len(Addresses._fields) + 10)


@functools.cache
def _ahead_launcher(weight: int, gradient: torch.dtype, device: torch.device) -> Launcher:
    """That of a step and one more: ``ahead``, the second gradient and 7 numbers are added."""
    compiled = _kernel("adamw", weight, gradient, None, device, then=1)
    return Launcher(compiled, THREADS, 64, len(Addresses._fields) + 10 + 9)


def square_sums(gradient: Tensor, out: Tensor, *, previous: Tensor | None = None) -> None:
    """The sums of squares that `adamw_piece` gives, written to ``out`` to the same bits, without an update."""
    check_gradients(gradient, previous, out)
    n = len(gradient)
    if gradient.device.type != "cuda":
        for _ in chunks(gradient, previous, None, out, CHUNK):
            pass
    elif n:
        compiled = _kernel("square_sums", 0, gradient.dtype, dtype_of(previous), gradient.device)
        before = 0 if previous is None else previous.data_ptr()
        values = (out.data_ptr(), before, 1, *gradients_argument([(gradient.data_ptr(), n, len(out))]))
        compiled.launcher(THREADS, 64, len(values)).queue((len(out), 1, 1), values)


def norm_of(square_sums_list: Sequence[Tensor]) -> Tensor:
    """A parameter's gradient norm, an fp32 scalar, from its pieces' block sums in order, to the same bits on CPU and
    GPU and however it was cut: the root of the sum, both in double. No synchronisation."""
    sums = square_sums_list[0] if len(square_sums_list) == 1 else torch.cat(list(square_sums_list))
    if sums.device.type != "cuda":
        padded = torch.nn.functional.pad(sums.double(), (0, -len(sums) % _NORM_LANES))
        total = torch.zeros(_NORM_LANES, dtype=torch.float64)
        for row in padded.view(len(padded) // _NORM_LANES, _NORM_LANES):
            total += row
        return _halve(total).sqrt().float()
    out = torch.empty((), dtype=torch.float32, device=sums.device)
    compiled = _kernel("block_norms", 0, torch.float32, None, sums.device)
    values = (sums.data_ptr(), out.data_ptr(), *gradients_argument([(0, 0, len(sums))]))
    compiled.launcher(THREADS, THREADS * 8, len(values)).queue((1, 1, 1), values)
    return out


def gradients_argument(pieces: Iterable[tuple[int, int, int]]) -> list[int]:
    """``Gradients`` of ``cuda/adamw.cu``, in words of 64 bits: (address, elements, blocks) of each."""
    words, stop = list[int](), 0
    for address, elements, blocks in pieces:
        stop += blocks
        words += address, elements | stop << 32
    return words + [0] * (2 * MAX_GRADIENTS - len(words))


def norms_at(pieces: Sequence[tuple[int, int, torch.dtype]], device: torch.device) -> Tensor:
    """`norm_of` of gradients on a GPU, (address, elements, type) each: (len(pieces),) fp32. Two launches on the current
    stream for up to `MAX_GRADIENTS` in a row of one type, and nothing else of the host, for a caller with hundreds of
    parameters. Raises ValueError as `adamw_piece` for one of too many elements."""
    if (longest := max((elements for _, elements, _ in pieces), default=0)) > MAX_ELEMENTS:
        raise ValueError(f"a gradient of {longest} elements: at most {MAX_ELEMENTS} at once")
    norms = torch.empty(len(pieces), dtype=torch.float32, device=device)
    norm_at, norm = norms.data_ptr(), _kernel("block_norms", 0, torch.float32, None, device)
    for dtype, same in itertools.groupby(pieces, key=operator.itemgetter(2)):
        left = [(address, elements, -(-elements // BLOCK)) for address, elements, _ in same]
        while left:
            batch, left = left[:MAX_GRADIENTS], left[MAX_GRADIENTS:]
            words, blocks = gradients_argument(batch), sum(count for _, _, count in batch)
            sums = torch.empty(blocks, dtype=torch.float32, device=device)
            if blocks:
                values = (sums.data_ptr(), 0, len(batch), *words)
                launcher = _kernel("square_sums", 0, dtype, None, device).launcher(THREADS, 64, len(values))
                launcher.queue((blocks, 1, 1), values)
            values = (sums.data_ptr(), norm_at, *words)
            norm.launcher(THREADS, THREADS * 8, len(values)).queue((len(batch), 1, 1), values)
            norm_at += 4 * len(batch)
    return norms
