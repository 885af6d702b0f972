"""AdamW with moments of 8 bits, for links too slow for exact ones: 2 bytes an element and two scales per 256 instead of
8. A stated choice, never a silent default: results differ from exact AdamW. With a remainder the master is exact in
fp32; without one the bf16 weight is all there is, rounded at random. CPU (plain torch) and GPU (``cuda/adamw8.cu``)
give the same bits.

A block of 256 elements shares an fp32 scale, its largest value over the largest code. Codes are small floating-point
numbers, because moments of one block spread over decades and their relative error is what an update sees:

- m: a sign, three exponent and four mantissa bits, largest over smallest 1984. Below that one may become zero.
- sqrt(v), not v: half the exponent range for the same numbers, and the divisor is what is kept. Three exponent and five
  mantissa bits, largest over smallest 4032. What is not zero is never kept as zero: a divisor too small would be an
  update too large, one too large is an update too small.

Both are rounded at random, with a probability that makes the mean right: a moving average with beta2 = 0.999 moves by a
few parts in ten thousand a step, and rounded to nearest it would stay where it is for ever. The random bits are a
function of seed, step and the element's index (Philox 2x32, seven rounds; Salmon et al., SC 2011): cutting a parameter
into pieces, or updating it on another device, changes nothing.
"""

import functools

import torch
from torch import Tensor

from vblackwell.errors import Unsupported
from vblackwell.kernels.optimizer import adamw
from vblackwell.kernels.optimizer.adamw import AdamWStep
from vblackwell.kernels.runtime.launch import Kernel, kernel

SCALE_BLOCK = 256  # elements that share a scale
MAX1, MAX2 = 124.0, 126.0  # largest values of codes of 3 + 4 and 3 + 5 bits
SMALLEST = 2.0**-100  # a block whose largest moment is smaller keeps zeros: the reciprocal of its scale might overflow
_CHUNK = 1 << 18  # elements at a time, a multiple of BLOCK
_LOW = 0xFFFFFFFF
FILES = ("ptx.cuh", "optimizer/gradient.cuh", "optimizer/adamw8.cu")
_SPLIT, _FP32, _STOCHASTIC = 0, 1, 2


def counter_words(seed: int, step: int) -> tuple[int, int]:
    """(key, salt) of a step's random bits, 32 bits each: splitmix64 (Steele et al., OOPSLA 2014) of both numbers."""
    mixed = 0
    for value in (seed, step):
        mixed = (mixed ^ value) + 0x9E3779B97F4A7C15 & (1 << 64) - 1
        mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & (1 << 64) - 1
        mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & (1 << 64) - 1
        mixed ^= mixed >> 31
    return mixed & _LOW, mixed >> 32


def random_words(first: int, n: int, key: int, salt: int) -> tuple[Tensor, Tensor]:
    """Two (n,) int64 tensors of 32 random bits each, for elements ``first`` and following of a parameter."""
    index = torch.arange(first, first + n, device="cpu")
    low, high = index & _LOW, (index >> 32) ^ salt
    for _ in range(7):
        product = low * 0xD256D193  # wraps in 64 bits; both halves are right
        low, high = ((product >> 32) & _LOW) ^ key ^ high, product & _LOW
        key = key + 0x9E3779B9 & _LOW
    return low, high


@functools.cache
def _values(mantissa: int, count: int) -> Tensor:
    """fp32 value of each of ``count`` codes: from 1 on fp32's own bits cut short, below it even steps."""
    codes = torch.arange(count, device="cpu")
    normal = ((codes + (126 << mantissa)) << (23 - mantissa)).int().view(torch.float32)
    return torch.where(codes >> mantissa > 0, normal, codes.float() / 2**mantissa)


def _encoded(values: Tensor, random: Tensor, mantissa: int) -> Tensor:
    """int32 codes of ``values`` >= 0, rounded by ``random`` of 23 - mantissa bits."""
    shift = 23 - mantissa
    normal = ((values.view(torch.int32) + random) >> shift) - (126 << mantissa)
    even = (((values + 1).view(torch.int32) + random) >> shift) - (127 << mantissa)
    return torch.where(values >= 1, normal, even)


def decode_moments(codes1: Tensor, scales1: Tensor, codes2: Tensor, scales2: Tensor) -> tuple[Tensor, Tensor]:
    """(m, sqrt(v)) in fp32; all (n,) and (ceil(n / 256),)."""
    n = len(codes1)
    by1, by2 = (scales.repeat_interleave(SCALE_BLOCK)[:n] for scales in (scales1, scales2))
    values1, values2 = _values(4, 128).to(codes1.device), _values(5, 256).to(codes1.device)
    magnitude = values1[(codes1 & 127).int()] * by1
    return torch.where(codes1 >= 128, -magnitude, magnitude), values2[codes2.int()] * by2


def _scales(values: Tensor, most: float) -> tuple[Tensor, Tensor]:
    """Of ``values`` >= 0: each block's scale, and for each element what it is multiplied by to be a code's value."""
    n = len(values)
    largest = torch.nn.functional.pad(values, (0, -n % SCALE_BLOCK)).view(-1, SCALE_BLOCK).amax(1)
    some = largest >= SMALLEST
    whole = largest.new_full((), most)
    up = torch.where(some, whole / largest, 0.0)
    return torch.where(some, largest / whole, 0.0), up.repeat_interleave(SCALE_BLOCK)[:n]


def encode_moments(
    m: Tensor, root_v: Tensor, random1: Tensor, random2: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """codes and scales of m and of sqrt(v); ``random1`` of 19 and ``random2`` of 18 bits, int32."""
    scales1, up1 = _scales(m.abs(), MAX1)
    scales2, up2 = _scales(root_v, MAX2)
    codes1 = _encoded((m.abs() * up1).clamp(max=MAX1), random1, 4) + 128 * (m < 0)
    codes2 = _encoded((root_v * up2).clamp(max=MAX2), random2, 5)
    codes2 = torch.where((codes2 == 0) & (up2 > 0) & (root_v > 0), 1, codes2)
    return codes1.to(torch.uint8), scales1, codes2.to(torch.uint8), scales2


def _update_cpu(
    weight: Tensor,
    remainder: Tensor | None,
    states: tuple[Tensor, Tensor, Tensor, Tensor],
    g: Tensor,
    numbers: AdamWStep,
    counter: tuple[int, int],
    first: int,
) -> None:
    """Every line is one rounded operation of the kernel; scalars are fp32 tensors so that torch keeps their order."""
    n = len(weight)
    fp32_numbers = torch.tensor(numbers.words, dtype=torch.int32, device="cpu").view(torch.float32)
    decay, weight1, beta2, weight2, root, eps, minus_step_size = fp32_numbers
    m, root_v = decode_moments(*states)
    m = m + weight1 * (g - m)
    v = (root_v * root_v) * beta2 + (weight2 * g) * g
    # Correctly rounded, which torch's fp32 square root is not where a vector library does it.
    root_v = v.double().sqrt().float()
    words = random_words(first, n, *counter)
    random1, random2 = (words[1] >> 13).int(), (((words[0] >> 16) << 2) | 2).int()
    for state, new in zip(states, encode_moments(m, root_v, random1, random2), strict=True):
        state.copy_(new)
    change = (minus_step_size * m) / (root_v / root + eps)
    if weight.dtype == torch.float32:
        weight.copy_(weight * decay + change)
    elif remainder is not None:
        scratch = torch.empty(n, dtype=torch.int32, device="cpu")
        bits = (adamw.join(weight, remainder, scratch) * decay + change).view(torch.int32)
        adamw.split(bits, weight, remainder, scratch)
    else:
        bits = (weight.float() * decay + change).view(torch.int32)
        weight.view(torch.int16).copy_((bits + (words[0] & 0xFFFF).int()) >> 16)
        adamw.keep_nan(bits, weight)


def macros(weight: int, gradient: torch.dtype, previous: torch.dtype | None) -> dict[str, int]:
    return {"FP16": 0, "WEIGHT": weight, "GRADIENT": adamw.GRADIENTS[gradient], "PREVIOUS": adamw.PREVIOUS[previous]}


@functools.cache
def _kernel(weight: int, gradient: torch.dtype, previous: torch.dtype | None, device: torch.device) -> Kernel:
    if torch.cuda.get_device_capability(device) < (8, 0):
        needed = "which AdamW with 8-bit moments needs"
        raise Unsupported(f"{device} is older than sm_80, {needed}: update on the CPU instead")
    return kernel(FILES, "adamw8", macros(weight, gradient, previous), device)


def counter_args(seed: int, step: int, offset: int) -> tuple[int, int, int, int]:
    """The kernel's (first_low, first_high, key, salt), as signed 32-bit numbers."""
    words = (offset & 0xFFFFFFFF, offset >> 32, *counter_words(seed, step))
    first_low, first_high, key, salt = (word - (word >> 31 << 32) for word in words)
    return first_low, first_high, key, salt


def adamw8_piece(
    weight: Tensor,
    remainder: Tensor | None,
    exp_avg_codes: Tensor,
    exp_avg_scales: Tensor,
    exp_avg_sq_codes: Tensor,
    exp_avg_sq_scales: Tensor,
    gradient: Tensor,
    numbers: AdamWStep,
    *,
    previous: Tensor | None = None,
    factor: Tensor | None = None,
    square_sums: Tensor | None = None,
    seed: int,
    offset: int,
) -> None:
    """One AdamW step in place on the first six; on a GPU, enqueued on the current stream. Pieces, and arguments not
    named here, are those of `adamw_piece`. All codes and scales zero are zero moments, the states to start from.

    Args:
        weight, remainder: (n,) bf16 and int16, a split master; fp32 and None; or bf16 and None, rounded at random.
        exp_avg_codes, exp_avg_sq_codes: (n,) uint8, the second of the square root; scales (ceil(n / 256),) fp32.
        seed: of the random bits, 64 bits, another one for each parameter.
        offset: the piece's first element within its parameter.

    Raises:
        ValueError: a tensor of another shape, dtype, layout or device; an offset that no piece starts at.
        Unsupported: a GPU before sm_80, or no NVRTC.
    """
    adamw.check_gradients(gradient, previous, square_sums, factor)
    device, (n,) = gradient.device, gradient.shape
    masters = () if remainder is not None else adamw.FP32
    adamw.check(weight, "weight", (n,), (torch.bfloat16, *masters), device)
    adamw.check(remainder, "remainder", (n,), (torch.int16,), device)
    states = exp_avg_codes, exp_avg_scales, exp_avg_sq_codes, exp_avg_sq_scales
    for name, codes, scales in (("exp_avg", *states[:2]), ("exp_avg_sq", *states[2:])):
        adamw.check(codes, f"{name}_codes", (n,), (torch.uint8,), device)
        adamw.check(scales, f"{name}_scales", (-(-n // SCALE_BLOCK),), adamw.FP32, device)
    if offset < 0 or offset % adamw.BLOCK or offset >> 32 != (offset + max(n, 1) - 1) >> 32:
        raise ValueError(
            f"{n} elements at offset {offset}: pieces start at multiples of {adamw.BLOCK} and do not cross one of 2^32"
        )
    if device.type != "cuda":
        counter = counter_words(seed, numbers.step)
        with torch.no_grad():
            for part, g in adamw.chunks(gradient, previous, factor, square_sums, _CHUNK):
                blocks = slice(part.start // SCALE_BLOCK, part.stop // SCALE_BLOCK)
                low = None if remainder is None else remainder[part]
                moments = exp_avg_codes[part], exp_avg_scales[blocks], exp_avg_sq_codes[part], exp_avg_sq_scales[blocks]
                _update_cpu(weight[part], low, moments, g, numbers, counter, offset + part.start)
    elif n:
        kind = _SPLIT if remainder is not None else _FP32 if weight.dtype == torch.float32 else _STOCHASTIC
        tensors = (weight, remainder, *states, gradient, previous, factor, square_sums)
        whole = adamw.aligned(weight, remainder, exp_avg_codes, exp_avg_sq_codes, gradient, previous)
        args = (*tensors, n, whole, *counter_args(seed, numbers.step, offset), *numbers.words)
        compiled = _kernel(kind, gradient.dtype, adamw.dtype_of(previous), device)
        compiled.launch((-(-n // adamw.BLOCK), 1, 1), adamw.THREADS, 64, args)
