"""AdamW with moments of 8 bits: formats, random bits, the kernel's source against the CPU's bits, and that
it trains.
"""

import itertools
import tempfile
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from tests.kernels import emulation
from tests.kernels.machine_code import resources
from tests.kernels.optimizer.test_adamw import DTYPES, EXTREME, PLAIN, random_states
from tests.kernels.optimizer.test_adamw_source import INTRINSICS
from vblackwell.kernels.optimizer import adamw, adamw8
from vblackwell.kernels.optimizer.adamw import BLOCK, AdamWStep, adamw_piece
from vblackwell.kernels.optimizer.adamw8 import (
    SCALE_BLOCK,
    adamw8_piece,
    counter_words,
    decode_moments,
    encode_moments,
    random_words,
)
from vblackwell.kernels.runtime import nvrtc

SPLIT, FP32, STOCHASTIC = 0, 1, 2
KINDS = [*itertools.product((SPLIT, FP32, STOCHASTIC), (0, 1), (0, 1, 2)), (FP32, 2, 0)]
NUMBERS = AdamWStep(1e-2, 0.9, 0.999, 1e-8, 0.1, 7)
MAIN = """
DEVICE u32 __reduce_max_sync(u32 all, u32 v) {
    for (int apart = 16; apart > 0; apart >>= 1) v = max(v, as_bits(shuffle_xor(as_float(v), apart)));
    return v;
}
"""
RUN = """
extern "C" void run(void* w, u16* r, u8* c1, float* s1, u8* c2, float* s2, const void* g, const void* p,
        const float* f, float* s,
                    int n, int aligned, int low, int high, int key, int salt, int a0, int a1, int a2, int a3, int a4,
                    int a5, int a6) {
    launch((n + 4095) / 4096, 1, 1, 512, 64, [=] {
        adamw8(w, r, c1, s1, c2, s2, g, p, f, s, n, aligned, low, high, key, salt, as_float(a0), as_float(a1),
                as_float(a2),
               as_float(a3), as_float(a4), as_float(a5), as_float(a6));
    });
}"""


class States8:
    """What one update reads and writes, in the order of `adamw8_piece`'s positional arguments."""

    def __init__(
        self, n: int, spread: str, weight: int, gradient: int, previous: int, seed: int = 0, factor: float | None = None
    ):
        exact = random_states(n, spread, int(weight == FP32), gradient, previous, seed, factor)
        remainder = exact.remainder if weight == SPLIT else None
        generator = torch.Generator().manual_seed(seed)
        bits = [torch.randint(0, 1 << width, (n,), generator=generator, dtype=torch.int32) for width in (19, 18)]
        codes = encode_moments(exact.exp_avg, exact.exp_avg_sq.sqrt(), *bits)
        self.written: list[Tensor | None] = [exact.weight, remainder, *codes]
        self.gradient, self.previous, self.factor = exact.gradient, exact.previous, exact.factor

    def to(self, device: str) -> "States8":
        new = object.__new__(States8)
        new.written = [None if tensor is None else tensor.to(device, copy=True) for tensor in self.written]
        for name in ("gradient", "previous", "factor"):
            tensor = getattr(self, name)
            setattr(new, name, None if tensor is None else tensor.to(device))
        return new

    def update(self, numbers: AdamWStep, sums: Tensor | None = None, seed: int = 5, offset: int = 0) -> None:
        adamw8_piece(
            *self.written,
            self.gradient,
            numbers,
            previous=self.previous,
            factor=self.factor,
            square_sums=sums,
            seed=seed,
            offset=offset,
        )

    def assert_same_bits(self, other: "States8") -> None:
        for place, (mine, its) in enumerate(zip(self.written, other.written, strict=True)):
            if mine is None or its is None:
                assert mine is its
                continue
            integer = {4: torch.int32, 2: torch.int16, 1: torch.uint8}[mine.element_size()]
            wrong = (mine.cpu().view(integer) != its.cpu().view(integer)).nonzero().flatten()
            assert len(wrong) == 0, (
                f"argument {place}: {len(wrong)} of {len(mine)} differ: {mine[wrong[:4]]} {its[wrong[:4]]} "
                f"at {wrong[:4]}"
            )


def test_random_words_are_philox():
    # Random123's known answers for philox2x32 of seven rounds
    words = [random_words(0, 1, 0, 0), random_words(0xFFFFFFFF, 1, 0xFFFFFFFF, 0xFFFFFFFF)]
    assert [[int(word) for word in pair] for pair in words] == [[0x257A3673, 0xCD26BE2A], [0xAB302C4D, 0x3DC9D239]]
    key, salt = counter_words(3, 4)
    far = random_words((1 << 32) - 2, 4, key, salt)
    assert torch.equal(far[0][2:], random_words(1 << 32, 2, key, salt)[0])
    assert len({counter_words(seed, step) for seed in range(20) for step in range(20)}) == 400
    low, high = random_words(0, 1 << 16, key, salt)
    for word in (low, high):  # every bit is one half of the time: 6 standard deviations of 2^15 +- 128
        for bit in range(32):
            assert abs(int(((word >> bit) & 1).sum()) - (1 << 15)) < 6 * 128


def test_values_of_codes_are_rounded_to_themselves():
    codes = torch.arange(256).to(torch.uint8)
    half = [torch.full((256,), 1 << width - 1, dtype=torch.int32) for width in (19, 18)]  # to nearest
    for scale in (torch.tensor([0.37]), torch.tensor([2.0**-90]), torch.tensor([2.0**100])):
        m, root_v = decode_moments(codes, scale, codes, scale)
        assert m.unique().numel() == 255 and root_v.unique().numel() == 256  # -0 and 0 are equal
        assert (root_v.diff() > 0).all() and (m[:128].diff() > 0).all() and torch.equal(m[128:], -m[:128])
        assert float(root_v[255]) == 126 * scale and float(m[127]) == 124 * scale
        again = encode_moments(m, root_v, *half)
        assert torch.equal(again[0][1:128], codes[1:128]) and torch.equal(again[0][129:], codes[129:])
        assert torch.equal(again[2], codes)
        assert torch.allclose(again[1], scale, rtol=2**-22, atol=0) and torch.allclose(
            again[3], scale, rtol=2**-22, atol=0
        )


def test_rounding_at_random_is_right_in_the_mean():
    n = 1 << 16
    values = torch.rand(SCALE_BLOCK) ** 4  # a few below the smallest code
    values[0] = 1.0
    m = (values * torch.where(torch.rand(SCALE_BLOCK) < 0.5, -1.0, 1.0)).repeat(n // SCALE_BLOCK)
    first, second = random_words(0, n, *counter_words(1, 2))
    codes = encode_moments(m, values.repeat(n // SCALE_BLOCK), (second >> 13).int(), ((first >> 16 << 2) | 2).int())
    for got, true, mantissa in zip(decode_moments(*codes), (m, values.repeat(n // SCALE_BLOCK)), (4, 5), strict=True):
        step = torch.maximum(true.abs() * 2.0**-mantissa, torch.tensor(2.0**-mantissa / 124))
        assert ((got - true).abs() <= 1.001 * step).all()
        means = (got - true).view(-1, SCALE_BLOCK).mean(0) / step[:SCALE_BLOCK]
        large = values > (0.0 if mantissa == 4 else 2 / 4032)  # the smallest code of sqrt(v) is never zero
        # of 256 roundings, each off by half a step at most in the root mean square: 6 standard deviations
        assert (means[large].abs() < 6 * 0.5 / 16).all()
    assert ((codes[2] > 0) | (values.repeat(n // SCALE_BLOCK) == 0)).all()


@pytest.fixture(scope="module")
def files():
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "intrinsics.h"
        path.write_text(INTRINSICS + MAIN)
        yield (str(path), "optimizer/gradient.cuh", "optimizer/adamw8.cu")


@emulation.needs_compiler
@pytest.mark.parametrize(
    "kind",
    [  # one in four, which show each value, and what has no gradient
        pytest.param(kind, marks=[pytest.mark.slow] * (place % 4 > 0 and place < len(KINDS) - 1))
        for place, kind in enumerate(KINDS)
    ],
    ids=str,
)
def test_the_source_has_the_cpus_bits(files, kind):
    for n, spread, aligned, offset in ((4096 + 300, PLAIN, 1, 3 << 32), (1037, EXTREME, 0, 5 * BLOCK)):
        states = States8(n, spread, *kind, factor=0.37)
        mine, sums = states.to("cpu"), torch.full((-(-n // BLOCK),), torch.nan)
        counter = adamw8.counter_args(5, NUMBERS.step, offset)
        macros = adamw8.macros(
            kind[0], states.gradient.dtype, None if states.previous is None else states.previous.dtype
        )
        tensors = [*mine.written, states.gradient, states.previous, states.factor, sums]
        emulation._call(files, macros, RUN, [*tensors, n, aligned, *counter, *NUMBERS.words])
        expected = torch.empty_like(sums)
        states.update(NUMBERS, expected, offset=offset)
        mine.assert_same_bits(states)
        assert torch.equal(sums, expected)


def test_pieces_equal_the_whole(monkeypatch):
    monkeypatch.setattr(adamw8, "_CHUNK", BLOCK)
    n = 3 * BLOCK + 301
    whole = States8(n, PLAIN, STOCHASTIC, 0, 0)
    cut = whole.to("cpu")
    whole.update(NUMBERS)
    for start, stop in ((0, BLOCK), (BLOCK, n)):
        weight, remainder, *states = cut.written
        scales = slice(start // SCALE_BLOCK, -(-stop // SCALE_BLOCK))
        parts = [state[scales if i % 2 else slice(start, stop)] for i, state in enumerate(states)]
        adamw8_piece(weight[start:stop], remainder, *parts, cut.gradient[start:stop], NUMBERS, seed=5, offset=start)
    cut.assert_same_bits(whole)


def test_zero_moments_start_from_zero_codes():
    n = 2 * SCALE_BLOCK
    states = States8(n, PLAIN, FP32, 1, 0)
    weight, exact = states.written[0], states.written[0].clone()
    for tensor in states.written[2:]:
        tensor.zero_()
    states.gradient[:SCALE_BLOCK] = 0
    before = weight.clone()
    first = AdamWStep(1e-2, 0.9, 0.999, 1e-8, 0.0, 1)
    states.update(first)
    adamw_piece(exact, None, torch.zeros(n), torch.zeros(n), states.gradient, first)
    assert torch.equal(weight[:SCALE_BLOCK], before[:SCALE_BLOCK])
    assert all((tensor[: len(tensor) // 2] == 0).all() for tensor in states.written[2:])
    # moments are rounded after their use: the first step is exact AdamW but for the order of roundings
    assert torch.allclose(weight, exact, rtol=2**-22, atol=1e-8)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"offset": 5}, "at offset 5: pieces start at multiples of 4096"),
        ({"offset": -4096}, "at offset -4096"),
        ({"exp_avg_codes": torch.zeros(300)}, "^exp_avg_codes is"),
        ({"exp_avg_sq_scales": torch.zeros(1)}, "^exp_avg_sq_scales is"),
        ({"weight": torch.zeros(300).half()}, "^weight is"),
        ({"remainder": torch.zeros(300)}, "^remainder is"),
    ],
)
def test_wrong_arguments_are_refused(arguments, message):
    names = ("weight", "remainder", "exp_avg_codes", "exp_avg_scales", "exp_avg_sq_codes", "exp_avg_sq_scales")
    states = States8(300, PLAIN, SPLIT, 0, 0)
    given = {
        **dict(zip(names, states.written, strict=True)),
        "gradient": states.gradient,
        "seed": 0,
        "offset": 0,
        **arguments,
    }
    with pytest.raises(ValueError, match=message):
        adamw8_piece(**given, numbers=NUMBERS)


def test_moving_averages_follow_in_the_mean():
    # Half of a block's gradients fall to a tenth: each step moves sqrt(v) by at most 1/2000 of itself, a sixtieth of a
    # code's step. Rounded to nearest, codes would stay, and v with them, at ten times what it should be.
    n = 64 * SCALE_BLOCK
    weight = torch.zeros(n)
    states = [torch.zeros(n, dtype=torch.uint8), torch.zeros(n // SCALE_BLOCK)] * 2
    states = [state.clone() for state in states]
    gradient, exact = torch.ones(n), torch.zeros(n)
    for step in range(1, 601):
        if step == 201:
            gradient[::2] = 0.1
        exact = exact * 0.995 + 0.005 * gradient.square()
        adamw8_piece(weight, None, *states, gradient, AdamWStep(0.0, 0.9, 0.995, 1e-8, 0.0, step), seed=0, offset=0)
    m, root_v = decode_moments(*states)
    assert exact[0] < 0.25 * exact[1]
    for half in (0, 1):
        # 8192 independent walks; rounding the root at random adds its variance to the mean of v
        assert abs(root_v[half::2].square().mean() / exact[half] - 1) < 0.03
        assert abs(m[half::2].mean() / gradient[half] - 1) < 0.01


def train(kind: str, steps: int = 200) -> float:
    """Mean loss of the last 20 steps of a small network that learns a fixed random one, weights in bf16 where computed
    with.
    """
    torch.manual_seed(0)
    teacher = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 8))
    model = nn.Sequential(nn.Linear(32, 128), nn.Tanh(), nn.Linear(128, 8))
    parameters = list(model.parameters())
    weight = parameters_to_vector(parameters).detach().bfloat16()
    n, blocks = weight.numel(), -(-weight.numel() // SCALE_BLOCK)
    remainder = None if kind == "8 bits, no remainder" else torch.zeros(n, dtype=torch.int16)
    exact, codes = [torch.zeros(n) for _ in range(2)], [torch.zeros(n, dtype=torch.uint8) for _ in range(2)]
    scales = [torch.zeros(blocks) for _ in range(2)]
    losses = []
    for step in range(1, steps + 1):
        vector_to_parameters(weight.float(), parameters)
        x = torch.randn(64, 32)
        loss = (model(x) - teacher(x)).square().mean()
        model.zero_grad()
        loss.backward()
        losses.append(loss.item())
        numbers = AdamWStep(3e-3 * (1 - (step - 1) / steps), 0.9, 0.999, 1e-8, 0.01, step)
        gradient = torch.cat([parameter.grad.flatten() for parameter in parameters])
        if kind == "exact":
            adamw_piece(weight, remainder, *exact, gradient, numbers)
        else:
            states = codes[0], scales[0], codes[1], scales[1]
            adamw8_piece(weight, remainder, *states, gradient, numbers, seed=0, offset=0)
    return sum(losses[-20:]) / 20


def test_it_trains_as_exact_adamw_does():
    exact = train("exact")
    assert exact < 0.1 * train("exact", 20)  # it learns at all
    # With other random bits the losses spread by 0.1 per cent around the exact one's.
    assert train("8 bits") < 1.02 * exact
    assert train("8 bits, no remainder") < 1.02 * exact


def test_bf16_weights_move_by_less_than_their_step():
    n = 16 * SCALE_BLOCK
    weight = torch.ones(n, dtype=torch.bfloat16)
    states = [torch.zeros(n, dtype=torch.uint8), torch.zeros(n // SCALE_BLOCK)] * 2
    states = [state.clone() for state in states]
    for step in range(1, 101):  # constant gradients: each step is one of 1e-4, and bf16's step below 1 is 2^-8
        adamw8_piece(weight, None, *states, torch.ones(n), AdamWStep(1e-4, 0.9, 0.99, 0.0, 0.0, step), seed=0, offset=0)
    # variance of a step: 1e-4 * 2^-8; 6 standard deviations of the mean of 4096 sums of 100 steps
    assert abs(weight.double().mean() - 0.99) < 6 * (100 * 1e-4 * 2**-8 / n) ** 0.5


@pytest.mark.skipif(bool(nvrtc.why_not()), reason="nvidia-cuda-nvrtc is not installed")
@pytest.mark.parametrize(
    ("arch", "kinds"),
    [
        ("sm_90a", KINDS[-1:]),
        *(pytest.param(arch, KINDS[::5], marks=pytest.mark.slow) for arch in ("sm_80", "sm_86", "sm_89", "sm_90a")),
    ],
)
def test_compiles_without_spills(arch, kinds, tmp_path):
    for weight, gradient, previous in kinds:
        macros = adamw8.macros(weight, DTYPES[gradient], None if previous == 0 else DTYPES[previous - 1])
        usage = resources(nvrtc.compile_cubin(adamw8.FILES, macros, arch), tmp_path)["adamw8"]
        assert usage["STACK"] == usage["LOCAL"] == 0 and usage["REG"] * adamw.THREADS <= 65536, (macros, usage)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_bits_of_the_cpu_on_a_gpu(kind):
    for n, spread, offset in (
        (1, PLAIN, 0),
        (255, EXTREME, 0),
        (4097, EXTREME, 3 << 32),
        ((1 << 20) + 5, PLAIN, BLOCK),
    ):
        states = States8(n, spread, *kind, factor=0.37)
        on_gpu, sums = states.to("cuda"), torch.empty(-(-n // BLOCK))
        sums_gpu = sums.cuda()
        for step in range(1, 4):
            numbers = AdamWStep(1e-2, 0.9, 0.999, 1e-8, 0.1, step)
            states.update(numbers, sums, offset=offset)
            on_gpu.update(numbers, sums_gpu, offset=offset)
        on_gpu.assert_same_bits(states)
        assert torch.equal(sums_gpu.cpu(), sums)
