"""On a GPU: the AdamW kernel against torch on the CPU, bit for bit, in every combination of types."""

import itertools
import warnings
from dataclasses import replace

import pytest
import torch

from tests.kernels.optimizer.test_adamw import EXTREME, PLAIN, STEPS, gradient_after, random_states
from tests.kernels.optimizer.test_adamw_source import MANY, MIXED, gradients_apart
from vblackwell.kernels.optimizer import adamw
from vblackwell.kernels.optimizer.adamw import BLOCK, GRADIENTS, AdamWStep, Then, norm_of, norms_at, square_sums

pytestmark = pytest.mark.gpu
KINDS = [*itertools.product((0, 1), (0, 1, 2), (0, 1, 2))]


def check(
    n: int, spread: str, kind: tuple[int, int, int], numbers: AdamWStep, factor: float | None, first: int = 0
) -> None:
    """One step of elements ``first`` to n on both; a ``first`` that is not a multiple of 4 leaves pointers
    unaligned.
    """
    states = random_states(n + first, spread, *kind, seed=n, factor=factor)
    on_gpu = states.map(lambda value: value.cuda()).piece(first, n + first)
    states = states.copy().piece(first, n + first)
    sums = torch.full((-(-n // BLOCK),), torch.nan)
    sums_gpu, alone = sums.cuda(), sums.cuda()
    on_gpu.update(numbers, sums_gpu)
    states.update(numbers, sums)
    on_gpu.assert_same_bits(states)
    square_sums(on_gpu.gradient, alone, previous=on_gpu.previous)
    assert torch.equal(sums_gpu, alone) and torch.equal(sums_gpu.cpu(), sums)
    assert torch.equal(norm_of([sums_gpu]).cpu(), norm_of([sums]))


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_bits_of_torch_on_the_cpu(kind):
    for n, spread, factor in itertools.product((1, 15, 4096, 4097), (PLAIN, EXTREME), (None, 0.37)):
        check(n, spread, kind, AdamWStep(1e-2, 0.9, 0.95, 1e-8, 0.1, 7), factor)
    for beta1, spread in ((0.9, PLAIN), (0.3, EXTREME)):
        check((1 << 20) + 5, spread, kind, AdamWStep(3e-4, beta1, 0.999, 1e-8, 0.0, 1000), 0.5)


@pytest.mark.parametrize("kind", [*itertools.product((0, 1), (0, 1, 2))], ids=str)
def test_a_step_and_one_more_have_the_bits_of_the_cpu(kind):
    """From the first step on and later, aligned and not, with the weight's place ahead or elsewhere."""
    for n, spread, first, later, here in itertools.product(
        (1, 4096, 5003, 70000), (PLAIN, EXTREME), (0, 3), (0, 6), (False, True)
    ):
        states = random_states(n + first, spread, *kind, 0, seed=n)
        on_gpu = states.map(lambda value: value.cuda()).piece(first, n + first)
        states = states.copy().piece(first, n + first)
        numbers, following = (replace(each, step=each.step + later) for each in STEPS)
        then = Then(gradient_after(states), following)
        ahead, given = torch.full_like(on_gpu.weight, torch.nan), on_gpu.weight.clone()
        ahead = on_gpu.weight if here else ahead
        on_gpu.update(numbers, then=replace(then, gradient=then.gradient.cuda()), ahead=ahead)
        assert here or torch.equal(on_gpu.weight, given)
        second = states.update_twice(numbers, then)
        replace(on_gpu, weight=ahead).assert_same_bits(replace(states, weight=second))


def test_every_length_of_the_scalar_loop():
    for rest in range(1, 33):
        check(16 * BLOCK + rest, PLAIN, (0, 0, 0), AdamWStep(1e-2, 0.9, 0.95, 1e-8, 0.1, 7), None)
        check(rest, EXTREME, (1, 1, 2), AdamWStep(1e-2, 0.5, 0.95, 1e-8, 0.1, 7), None)


def test_unaligned_pointers():
    for kind in KINDS:
        check(2 * BLOCK + 5, PLAIN, kind, AdamWStep(1e-2, 0.9, 0.95, 1e-8, 0.1, 7), 0.3, first=3)


def test_fifty_steps_without_synchronisation_equal_the_cpu():
    n = 100 * BLOCK + 33
    states = random_states(n, PLAIN, 0, 0, 0, seed=3, factor=0.9)
    on_gpu = states.map(lambda value: value.cuda())
    generator = torch.Generator().manual_seed(1)
    gradients = torch.randn(50, n, generator=generator).bfloat16()
    gradients_gpu = gradients.cuda()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with warnings.catch_warnings(action="ignore"):  # it says that it does not see everything
        torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.cuda.stream(stream):
            for step in range(50):
                on_gpu.gradient = gradients_gpu[step]
                on_gpu.update(AdamWStep(1e-2, 0.9, 0.999, 1e-8, 0.1, step + 1))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    stream.synchronize()
    for step in range(50):
        states.gradient = gradients[step]
        states.update(AdamWStep(1e-2, 0.9, 0.999, 1e-8, 0.1, step + 1))
    on_gpu.assert_same_bits(states)


@pytest.mark.parametrize("sizes", [MANY, MIXED, MIXED[:1], [], [((1 << 22) + 5, torch.bfloat16)] * 3], ids=len)
def test_norms_of_gradients_in_one_launch_are_those_of_each(sizes):
    gradients = gradients_apart(sizes, "cuda")
    pieces = [(each.data_ptr(), len(each), each.dtype) for each in gradients]
    for on in ("cuda", "cpu"):
        expected = []
        for each in gradients:
            sums = torch.empty(-(-len(each) // BLOCK), device=on)
            square_sums(each.to(on), sums)
            expected.append(norm_of([sums]).item())
        assert norms_at(pieces, torch.device("cuda", torch.cuda.current_device())).tolist() == expected


def test_norms_of_gradients_are_taken_anew_by_a_graph():
    device = torch.device("cuda", torch.cuda.current_device())
    gradients = gradients_apart(MANY, "cuda")
    pieces = [(each.data_ptr(), len(each), each.dtype) for each in gradients]
    norms_at(pieces, device)  # kernels are loaded
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        norms = norms_at(pieces, device)
    for factor in (2, 0.25):
        for each in gradients:
            each.mul_(factor)
        graph.replay()
        assert torch.equal(norms, norms_at(pieces, device))


def test_kernels_that_were_compiled_ahead_are_those_that_updates_launch():
    dtypes = torch.bfloat16, torch.float32
    adamw._kernel.cache_clear()
    adamw._launcher.cache_clear()
    adamw.compile_kernels(dtypes, torch.device("cuda", torch.cuda.current_device()))
    known = adamw._kernel.cache_info().misses
    for weight, dtype in enumerate(dtypes):
        check(BLOCK, PLAIN, (weight, GRADIENTS[dtype], 0), AdamWStep(1e-2, 0.9, 0.95, 1e-8, 0.1, 7), None)
    assert adamw._kernel.cache_info().misses == known


def test_kernels_of_one_step_more_that_were_compiled_ahead_are_those_that_updates_launch():
    dtypes = torch.bfloat16, torch.float32
    adamw._kernel.cache_clear()
    adamw._ahead_launcher.cache_clear()
    adamw.compile_kernels(dtypes, torch.device("cuda", torch.cuda.current_device()), ahead=True)
    known = adamw._kernel.cache_info().misses
    for weight, dtype in enumerate(dtypes):
        states = random_states(BLOCK, PLAIN, weight, GRADIENTS[dtype], 0, seed=0).map(lambda value: value.cuda())
        states.update(STEPS[0], then=Then(gradient_after(states), STEPS[1]), ahead=states.weight)
    assert adamw._kernel.cache_info().misses == known
