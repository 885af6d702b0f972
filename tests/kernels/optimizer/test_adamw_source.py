"""cuda/adamw.cu's own source on the CPU (emulation.py) against torch's kernel, and compiled for every architecture."""

import itertools
import tempfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.kernels import emulation
from tests.kernels.machine_code import resources
from tests.kernels.optimizer.test_adamw import EXTREME, PLAIN, States, gradient_after, random_states, update_with_torch
from vblackwell.kernels.optimizer import adamw
from vblackwell.kernels.optimizer.adamw import BLOCK, AdamWStep, Then
from vblackwell.kernels.runtime import nvrtc
from vblackwell.units import align_up

# The roundings of the kernel's intrinsics; the host's arithmetic is IEEE and g++ fuses nothing for plain x86-64.
INTRINSICS = """
DEVICE float __fmul_rn(float a, float b) { return a * b; }
DEVICE float __fadd_rn(float a, float b) { return a + b; }
DEVICE float __fdiv_rn(float a, float b) { return a / b; }
DEVICE float __fsqrt_rn(float a) { return sqrtf(a); }
DEVICE float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
DEVICE double __dadd_rn(double a, double b) { return a + b; }
DEVICE double __dsqrt_rn(double a) { return sqrt(a); }
DEVICE float __double2float_rn(double a) { return (float)a; }
#define __shfl_xor_sync(all, v, mask) shuffle_xor(v, mask)
"""
MAIN = """
extern "C" void run(void* w, u16* r, u32* m, u32* v, const void* g, const void* p, const float* f, float* s, int n,
        int tail,
                    int aligned, int a0, int a1, int a2, int a3, int a4, int a5, int a6) {
    launch((n + 4095) / 4096, 1, 1, 512, 64, [=] {
        adamw(w, r, m, v, g, p, f, s, n, tail, aligned, as_float(a0), as_float(a1), as_float(a2), as_float(a3),
                as_float(a4),
              as_float(a5), as_float(a6));
    });
}"""
MAIN_THEN = """
extern "C" void run(void* w, u16* r, u32* m, u32* v, const void* g, const void* p, const float* f, float* s, int n,
                    int tail, int aligned, int a0, int a1, int a2, int a3, int a4, int a5, int a6, void* ahead,
                    const void* then, int b0, int b1, int b2, int b3, int b4, int b5, int b6) {
    launch((n + 4095) / 4096, 1, 1, 512, 64, [=] {
        adamw(w, r, m, v, g, p, f, s, n, tail, aligned, as_float(a0), as_float(a1), as_float(a2), as_float(a3),
              as_float(a4), as_float(a5), as_float(a6), ahead, then, as_float(b0), as_float(b1), as_float(b2),
              as_float(b3), as_float(b4), as_float(b5), as_float(b6));
    });
}"""
MAIN_SUMS = """
extern "C" void run(float* sums, const void* previous, const u64* words, int count, int blocks) {
    Gradients gradients;
    memcpy(&gradients, words, sizeof gradients);
    launch(blocks, 1, 1, 512, 64, [=] { square_sums(sums, previous, count, gradients); });
}"""
MAIN_NORMS = """
extern "C" void run(const float* sums, float* norms, const u64* words, int count) {
    Gradients gradients;
    memcpy(&gradients, words, sizeof gradients);
    launch(count, 1, 1, 512, 4096, [=] { block_norms(sums, norms, gradients); });
}"""
KINDS = [*itertools.product((0, 1), (0, 1), (0, 1, 2)), (0, 2, 0), (1, 2, 2)]
THEN_KINDS = [(*kind, 0, 1) for kind in itertools.product((0, 1), (0, 1, 2))]


@pytest.fixture(scope="module")
def files():
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "intrinsics.h"
        path.write_text(INTRINSICS)
        yield (str(path), "optimizer/gradient.cuh", "optimizer/adamw.cu")


def run_source(files: tuple[str, ...], states: States, numbers: AdamWStep, aligned: int) -> torch.Tensor:
    """One step by the emulated kernel; returns its sums of squares."""
    n = len(states.gradient)
    sums = torch.full((-(-n // BLOCK),), torch.nan)
    previous = None if states.previous is None else states.previous.dtype
    macros = adamw.macros(
        int(states.remainder is None), adamw.GRADIENTS[states.gradient.dtype], adamw.PREVIOUS[previous]
    )
    tensors = [states.weight, states.remainder, states.exp_avg, states.exp_avg_sq, states.gradient, states.previous]
    tail_start = adamw.torch_order().tail_start(n)
    emulation._call(files, macros, MAIN, [*tensors, states.factor, sums, n, tail_start, aligned, *numbers.words])
    return sums


@emulation.needs_compiler
@pytest.mark.parametrize(
    ("weight", "gradient", "previous"),
    [  # one in five, which show each value
        pytest.param(*kind, marks=[pytest.mark.slow] * (place % 5 > 0 and place < len(KINDS) - 2))
        for place, kind in enumerate(KINDS)
    ],
)
def test_the_source_has_torchs_bits(files, weight, gradient, previous):
    for n, spread, beta1, aligned in ((4096 + 4095, PLAIN, 0.9, 1), (4101, EXTREME, 0.3, 0)):
        numbers = AdamWStep(1e-2, beta1, 0.95, 1e-8, 0.1, 7)
        states = random_states(n, spread, weight, gradient, previous, seed=n, factor=0.37)
        expected = update_with_torch(states, numbers)
        given = states.copy()
        sums = run_source(files, states, numbers, aligned)
        states.assert_same_bits(expected)
        exact = torch.zeros(-(-n // BLOCK))
        adamw.square_sums(given.gradient, exact, previous=given.previous)
        assert torch.equal(sums, exact)


def pointer(address: int) -> Any:
    return SimpleNamespace(data_ptr=lambda: address)


@emulation.needs_compiler
@pytest.mark.each_value
@pytest.mark.parametrize("weight", [0, 1])
@pytest.mark.parametrize("gradient", [0, 1, 2])
def test_a_step_and_one_more_have_the_bits_of_two(files, weight, gradient, monkeypatch):
    """Aligned and not, with the weight's place ahead or elsewhere; as many arguments as the kernel is loaded with."""
    n, launched, made = BLOCK + 4091, list[bool](), adamw._ahead_launcher.__wrapped__

    def launcher(weight: int, gradient: torch.dtype, device: None) -> Any:
        def launch(grid: tuple[int, int, int], values: tuple[int, ...], stream: int) -> None:
            assert grid == (2, 1, 1)
            places, numbers = [pointer(at) for at in values[:8]], values[8:18]
            after = [pointer(at) for at in values[18:20]]
            macros = adamw.macros(weight, adamw.GRADIENTS[gradient], 0, 1)
            emulation._call(files, macros, MAIN_THEN, [*places, *numbers, *after, *values[20:]])
            launched.append(bool(values[10]))

        with monkeypatch.context() as patch:
            patch.setattr(adamw, "_kernel", lambda *kind, then: (*kind, then))
            patch.setattr(adamw, "Launcher", lambda *given: given)
            kernel, *block, count = made(weight, gradient, device)
        assert kernel == ("adamw", weight, gradient, None, device, 1) and block == [512, 64] and count == 20 + 7
        return launch

    monkeypatch.setattr(adamw, "_ahead_launcher", launcher)
    for here, first, after_first, step in ((0, 0, 0, 1), (1, 0, 0, 7), (0, 3, 3, 2), (1, 0, 1, 2)):
        states = random_states(n + 3, EXTREME if here else PLAIN, weight, gradient, 0, seed=n)
        after = gradient_after(states)[after_first : after_first + n]
        states = states.piece(first, first + n)
        numbers, following = AdamWStep(1e-2, 0.9, 0.95, 1e-8, 0.1, step), AdamWStep(3e-3, 0.4, 0.9, 1e-6, 0.0, step + 1)
        expected, given = states.copy(), states.weight.clone()
        second = expected.update_twice(numbers, Then(after, following))
        ahead = states.weight if here else torch.full_like(states.weight, torch.nan)
        tensors = [states.weight, states.remainder, states.exp_avg, states.exp_avg_sq, states.gradient]
        at = adamw.Addresses(*(0 if each is None else each.data_ptr() for each in tensors), 0, 0, 0)
        then = adamw.ThenAddresses(ahead.data_ptr(), after.data_ptr(), following)
        stream: Any = SimpleNamespace(device=None, cuda_stream=0)
        adamw.adamw_at(at, n, numbers, states.gradient.dtype, None, stream, then)
        assert here or torch.equal(states.weight, given)
        replace(states, weight=ahead).assert_same_bits(replace(expected, weight=second))
    assert launched == [True, True, False, False]


@emulation.needs_compiler
def test_masters_halfway_between_two_weights_round_away_from_zero(files):
    n = 2 * BLOCK + 8
    states = random_states(n, PLAIN, 0, 0, 0, seed=0)
    assert states.remainder is not None
    states.weight.copy_(torch.linspace(-3, 3, n))  # even and odd
    states.remainder.copy_(torch.tensor([-(2**15), 2**15 - 1, -(2**15), 0]).repeat(n // 4))
    given, on_cpu = states.copy(), states.copy()
    numbers = AdamWStep(0.0, 0.9, 0.95, 1e-8, 0.0, 1)  # moments move, masters stay
    run_source(files, states, numbers, 1)
    on_cpu.update(numbers)
    states.assert_same_bits(on_cpu)
    assert torch.equal(states.weight, given.weight) and torch.equal(states.remainder, given.remainder)


@emulation.needs_compiler
def test_sums_of_squares_have_the_cpus_bits(files):
    n = 3 * BLOCK + 1000
    for gradient_type in (torch.float32, torch.float16):
        gradient, previous = torch.randn(n).to(gradient_type), torch.randn(n).bfloat16()
        sums, expected = torch.full((4,), torch.nan), torch.empty(4)
        words = torch.tensor(adamw.gradients_argument([(gradient.data_ptr(), n, 4)]))
        macros = adamw.macros(0, adamw.GRADIENTS[gradient_type], 1)
        emulation._call(files, macros, MAIN_SUMS, [sums, previous, words, 1, 4])
        adamw.square_sums(gradient, expected, previous=previous)
        assert torch.equal(sums, expected)


def gradients_apart(sizes: list[tuple[int, torch.dtype]], device: str = "cpu") -> list[torch.Tensor]:
    """Gradients in one piece of memory, aligned and not, between NaN."""
    num_bytes = sum(n * dtype.itemsize + 1024 for n, dtype in sizes)
    memory, found, at = torch.full((num_bytes,), 0xFF, dtype=torch.uint8, device=device), [], 0
    for index, (n, dtype) in enumerate(sizes):
        at = align_up(at, 512) + 4 * (index % 2)
        found.append(memory[at : at + n * dtype.itemsize].view(dtype))
        found[-1].copy_(torch.randn(n, generator=torch.Generator().manual_seed(index)))
        at += n * dtype.itemsize
    return found


BF16, FP32 = torch.bfloat16, torch.float32
MANY = [(n, BF16) for n in (BLOCK, 2 * BLOCK + 77, 0, 3, BLOCK - 1)] + [(7 + n, BF16) for n in range(2 * 32)]
MIXED = [(0, BF16), (5, BF16), (BLOCK + 4, FP32), (0, FP32), (BLOCK, torch.float16), (9, BF16), (0, BF16)]


@emulation.needs_compiler
@pytest.mark.parametrize(("sizes", "launches"), [(MANY, 6), (MIXED, 8), (MIXED[:1], 1), ([], 0)])
def test_norms_of_gradients_in_one_launch_are_those_of_each(files, sizes, launches, monkeypatch):
    """All gradients of a type in a row, at most 32, are one launch of sums and one of norms."""
    queued = list[str]()

    def kernel(entry: str, weight: int, gradient: torch.dtype, previous: None, device: torch.device) -> Any:
        macros = adamw.macros(weight, adamw.GRADIENTS[gradient], 0)

        def queue(grid: tuple[int, int, int], values: tuple[int, ...]) -> None:
            assert grid[1:] == (1, 1) and grid[0] > 0
            first, second, *others = values
            words = torch.tensor(others[-2 * adamw.MAX_GRADIENTS :])
            count = others[0] if entry == "square_sums" else grid[0]
            args = [pointer(first), pointer(second), words, count, *([grid[0]] if entry == "square_sums" else [])]
            emulation._call(files, macros, MAIN_SUMS if entry == "square_sums" else MAIN_NORMS, args)
            queued.append(entry)

        return SimpleNamespace(launcher=lambda threads, shared, num_parameters: SimpleNamespace(queue=queue))

    monkeypatch.setattr(adamw, "_kernel", kernel)
    gradients, expected = gradients_apart(sizes), list[float]()
    for each in gradients:
        sums = torch.empty(-(-len(each) // BLOCK))
        adamw.square_sums(each, sums)
        expected.append(adamw.norm_of([sums]).item())
    pieces = [(each.data_ptr(), len(each), each.dtype) for each in gradients]
    norms = adamw.norms_at(pieces, torch.device("cpu"))
    assert norms.tolist() == expected
    assert len(queued) == launches


def test_a_gradient_of_too_many_elements_is_refused():
    with pytest.raises(ValueError, match="at most"):
        adamw.norms_at([(512, adamw.MAX_ELEMENTS + 1, BF16)], torch.device("cpu"))


@pytest.mark.skipif(bool(nvrtc.why_not()), reason="nvidia-cuda-nvrtc is not installed")
@pytest.mark.parametrize(
    ("arch", "kinds"),
    [
        ("sm_90a", KINDS[-1:] + THEN_KINDS[-1:]),
        pytest.param("sm_90a", KINDS + THEN_KINDS, marks=pytest.mark.slow),
        *(
            pytest.param(arch, KINDS[::5] + THEN_KINDS, marks=pytest.mark.slow)
            for arch in ("sm_75", "sm_80", "sm_86", "sm_89")
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else str(len(value)),
)
def test_compiles_without_spills(arch, kinds, tmp_path):
    for kind in kinds:
        for name, usage in resources(nvrtc.compile_cubin(adamw.FILES, adamw.macros(*kind), arch), tmp_path).items():
            assert usage["STACK"] == usage["LOCAL"] == 0, (name, kind, usage)
            assert usage["REG"] * adamw.THREADS * 2 <= 65536 or name == "block_norms", (name, kind, usage)
