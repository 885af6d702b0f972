"""AdamW pieces on the CPU against torch.optim.AdamW(fused=True); the states that the other AdamW tests start from."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import pytest
import torch
from torch import Tensor

from vblackwell.kernels.optimizer import adamw
from vblackwell.kernels.optimizer.adamw import (
    BLOCK,
    AdamWStep,
    Then,
    adamw_piece,
    join,
    norm_of,
    split,
    square_sums,
    torch_order,
)

PLAIN, EXTREME = "plain", "extreme"
DTYPES = {0: torch.bfloat16, 1: torch.float32, 2: torch.float16}


@dataclass
class States:
    """What one update reads and writes."""

    weight: Tensor
    remainder: Tensor | None
    exp_avg: Tensor
    exp_avg_sq: Tensor
    gradient: Tensor
    previous: Tensor | None
    factor: Tensor | None

    def map(self, to) -> States:
        return States(*(None if value is None else to(value) for value in self._values()))

    def copy(self) -> States:
        return self.map(Tensor.clone)

    def piece(self, start: int, stop: int) -> States:
        return replace(self.map(lambda value: value if value.ndim == 0 else value[start:stop]))

    def _values(self) -> list[Tensor | None]:
        return [getattr(self, field.name) for field in fields(self)]

    def update(
        self,
        numbers: AdamWStep,
        sums: Tensor | None = None,
        then: Then | None = None,
        ahead: Tensor | None = None,
    ) -> None:
        adamw_piece(
            self.weight,
            self.remainder,
            self.exp_avg,
            self.exp_avg_sq,
            self.gradient,
            numbers,
            previous=self.previous,
            factor=self.factor,
            square_sums=sums,
            then=then,
            ahead=ahead,
        )

    def update_twice(self, numbers: AdamWStep, then: Then) -> Tensor:
        """By two updates, the second one of a copy: the weight after it; here, that of before them stays."""
        weight, self.weight = self.weight, self.weight.clone()
        self.update(numbers)
        second = replace(self.copy(), gradient=then.gradient)
        second.update(then.numbers)
        self.weight = weight
        return second.weight

    def assert_same_bits(self, other: States) -> None:
        for field, mine, its in zip(fields(self), self._values(), other._values(), strict=True):
            if mine is None or its is None:
                assert mine is its, field.name
                continue
            integer = {4: torch.int32, 2: torch.int16}[mine.element_size()]
            wrong = (mine.view(integer) != its.to(mine.device).view(integer)).nonzero().flatten()
            assert len(wrong) == 0, f"{field.name}: {len(wrong)} of {len(mine)} differ, first at {wrong[:4].tolist()}"


def random_states(
    n: int, spread: str, weight: int, gradient: int, previous: int, seed: int, factor: float | None = None
) -> States:
    """Numbers of usual sizes, or with subnormals, zeros and what nearly overflows among them. ``previous``: 0 none, 1
    bf16, 2 fp32.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal() -> Tensor:
        return torch.randn(n, generator=generator)

    def power(low: float, high: float) -> Tensor:
        return 10 ** (torch.rand(n, generator=generator) * (high - low) + low)

    g, p, m, v, w = normal() * power(-6, 2), normal() * power(-6, 2), normal() * power(-6, 1), power(-12, 2), normal()
    if spread == EXTREME:
        g, m, v = g * power(-38, 16), m * power(-38, 16), v * power(-34, 36)
        for value, every in ((g, 7), (m, 5), (v, 3)):
            value[::every] = 0
        g[1::9], m[2::13], v[1::17], w[::11] = 1e-39, -1e-40, 1e-42, 1e-41
    master = w.float()
    remainder = None
    if weight == 0:
        half, remainder = torch.empty(n, dtype=torch.bfloat16), torch.empty(n, dtype=torch.int16)
        split(master.view(torch.int32).clone(), half, remainder, torch.empty(n, dtype=torch.int32))
        master = half
    if DTYPES[gradient] == torch.float16:
        g = g.clamp(-6e4, 6e4)
    earlier = None if previous == 0 else p.to(DTYPES[previous - 1])
    scale = None if factor is None else torch.tensor(factor)
    return States(master, remainder, m.float(), v.float(), g.to(DTYPES[gradient]), earlier, scale)


def update_with_torch(states: States, numbers: AdamWStep) -> States:
    """The same step by one call of torch's kernel on whole fp32 tensors."""
    states = states.copy()
    gradient = states.gradient.float()
    if states.previous is not None:
        gradient = states.previous.float() + gradient
    if states.factor is not None:
        gradient = gradient * states.factor
    n = len(gradient)
    bits = torch.empty(n, dtype=torch.int32)
    master = states.weight if states.remainder is None else join(states.weight, states.remainder, bits)
    torch._fused_adamw_(
        [master],
        [gradient],
        [states.exp_avg],
        [states.exp_avg_sq],
        [],
        [torch.tensor(float(numbers.step))],
        lr=numbers.lr,
        beta1=numbers.beta1,
        beta2=numbers.beta2,
        weight_decay=numbers.weight_decay,
        eps=numbers.eps,
        amsgrad=False,
        maximize=False,
    )
    if states.remainder is not None:
        split(bits, states.weight, states.remainder, torch.empty(n, dtype=torch.int32))
    return states


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("n", [1, 15, 4097, 3 * BLOCK + 77])
def test_fifty_steps_of_split_masters_equal_torchs_optimizer(n, weight_decay, monkeypatch):
    monkeypatch.setattr(adamw, "CHUNK", 2 * BLOCK)  # several chunks
    torch.manual_seed(n)
    parameter = torch.nn.Parameter(torch.randn(n))
    optimizer = torch.optim.AdamW([parameter], lr=1e-2, betas=(0.9, 0.99), weight_decay=weight_decay, fused=True)
    states = random_states(n, PLAIN, 0, 0, 1, seed=0, factor=0.3)
    assert states.remainder is not None and states.factor is not None
    split(
        parameter.detach().view(torch.int32).clone(), states.weight, states.remainder, torch.empty(n, dtype=torch.int32)
    )
    states.exp_avg.zero_(), states.exp_avg_sq.zero_()
    for step in range(1, 51):
        states.gradient = torch.randn(n).bfloat16()
        states.previous = torch.randn(n).to(DTYPES[step % 2])
        parameter.grad = (states.previous.float() + states.gradient.float()) * states.factor
        optimizer.step()
        states.update(AdamWStep(1e-2, 0.9, 0.99, 1e-8, weight_decay, step))
        master = join(states.weight, states.remainder, torch.empty(n, dtype=torch.int32))
        assert torch.equal(master, parameter)
    kept = optimizer.state[parameter]
    assert torch.equal(states.exp_avg, kept["exp_avg"]) and torch.equal(states.exp_avg_sq, kept["exp_avg_sq"])
    assert (states.weight.float() - parameter).abs().max() <= parameter.abs().max() * 2**-8  # half a unit of bf16


@pytest.mark.parametrize("gradient_type", [1, 2], ids=["fp32", "fp16"])
@pytest.mark.parametrize("spread", [PLAIN, EXTREME])
def test_fp32_weights_and_gradients(spread, gradient_type):
    states = random_states(BLOCK + 3, spread, 1, gradient_type, 0, seed=1)
    given = states.gradient.clone()
    expected = update_with_torch(states, AdamWStep(1e-3, 0.9, 0.999, 1e-8, 0.01, 3))
    states.update(AdamWStep(1e-3, 0.9, 0.999, 1e-8, 0.01, 3))
    states.assert_same_bits(expected)
    assert torch.equal(states.gradient, given)


STEPS = [AdamWStep(1e-2, 0.9, 0.95, 1e-8, 0.1, 1), AdamWStep(3e-3, 0.4, 0.9, 1e-6, 0.0, 2)]


def gradient_after(states: States) -> Tensor:
    """Another one of its type."""
    generator = torch.Generator().manual_seed(9)
    return torch.randn(len(states.gradient), generator=generator).to(states.gradient)


@pytest.mark.parametrize("weight", [0, 1])
@pytest.mark.parametrize("gradient", [0, 1, 2])
@pytest.mark.parametrize("n", [1, 4096, 5003, 70000])
def test_a_step_and_one_more_are_two_of_which_the_second_leaves_its_weight(n, gradient, weight, monkeypatch):
    monkeypatch.setattr(adamw, "CHUNK", 2 * BLOCK)
    for spread, later in ((PLAIN, 0), (EXTREME, 6)):
        states = random_states(n, spread, weight, gradient, 0, seed=n)
        numbers, following = (replace(each, step=each.step + later) for each in STEPS)
        then = Then(gradient_after(states), following)
        elsewhere, here, given = states.copy(), states.copy(), states.copy()
        ahead = torch.full_like(states.weight, torch.nan)
        second = states.update_twice(numbers, then)
        elsewhere.update(numbers, then=then, ahead=ahead)
        elsewhere.assert_same_bits(states)  # whose weight is that of before
        assert torch.equal(elsewhere.weight, given.weight)
        here.update(numbers, then=then, ahead=here.weight)
        for found in (here, replace(elsewhere, weight=ahead)):
            found.assert_same_bits(replace(states, weight=second))


def test_pieces_equal_the_whole():
    n, numbers = 5 * BLOCK + 9, AdamWStep(1e-3, 0.9, 0.999, 1e-8, 0.01, 3)
    states = random_states(n, PLAIN, 0, 0, 2, seed=2)
    whole, sums, parts = states.copy(), torch.empty(6), []
    whole.update(numbers, sums)
    for start, stop in ((0, 2 * BLOCK), (2 * BLOCK, 3 * BLOCK), (3 * BLOCK, n)):
        parts.append(torch.full((-(-(stop - start) // BLOCK),), torch.nan))
        states.piece(start, stop).update(numbers, parts[-1])
    states.assert_same_bits(whole)
    assert torch.equal(torch.cat(parts), sums)
    assert torch.equal(norm_of(parts), norm_of([sums]))


def test_split_masters_round_trip():
    halves = torch.arange(-(2**15), 2**15, dtype=torch.int32)
    for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF):
        bits = (halves << 16) | low
        values = bits.view(torch.float32)
        bits = bits[values.isfinite()]
        n = len(bits)
        weight, remainder = torch.empty(n, dtype=torch.bfloat16), torch.empty(n, dtype=torch.int16)
        split(bits, weight, remainder, torch.empty(n, dtype=torch.int32))
        joined = join(weight, remainder, torch.empty(n, dtype=torch.int32))
        assert torch.equal(joined.view(torch.int32), bits)
        upper = (bits + 0x8000) >> 16
        assert torch.equal(weight.view(torch.int16).int(), upper)
        assert torch.equal(remainder.int(), bits - (upper << 16))


@pytest.mark.parametrize("gradient_type", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("n", [1, 4095, 4096, 4097, 5 * BLOCK + 3])
def test_sums_of_squares_against_float64(n, gradient_type, monkeypatch):
    monkeypatch.setattr(adamw, "CHUNK", 2 * BLOCK)
    gradient, previous = torch.randn(n).to(gradient_type), torch.randn(n)
    sums = torch.full((-(-n // BLOCK),), torch.nan)
    square_sums(gradient, sums, previous=previous)
    exact = (previous + gradient.float()).double().square()
    for block, part in enumerate(exact.split(BLOCK)):
        # a product and 12 additions of non-negative numbers: at most 13 roundings of 2^-24 each
        assert abs(sums[block].double() - part.sum()) <= 13 * 2**-24 * part.sum()
    assert abs(norm_of([sums]).double() / exact.sum().sqrt() - 1) <= 7.5 * 2**-24  # half of that and one rounding


def test_torchs_order_is_known_and_says_where_the_scalar_loop_starts():
    order = torch_order()
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.bfloat16)  # of a user who builds another model meanwhile
        assert torch_order.__wrapped__() == order
    finally:
        torch.set_default_dtype(before)
    assert order.width in (1, 4, 8, 16)
    assert order.tail_start(BLOCK) == BLOCK
    if order.lerp[0] != order.lerp[1] or order.square[0] != order.square[1]:
        assert order.tail_start(BLOCK + order.width + 1) == BLOCK + order.width


def test_numbers_are_torchs():
    numbers = AdamWStep(3e-4, 0.9, 0.95, 1e-8, 0.1, 1000)
    words = torch.tensor(numbers.words, dtype=torch.int32).view(torch.float32)
    assert len(words) == 7 and words[-1] == torch.tensor(-3e-4 / (1 - 0.9**1000))
    with pytest.raises(ValueError, match="steps count from 1"):
        AdamWStep(3e-4, 0.9, 0.95, 1e-8, 0.1, 0)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"weight": torch.zeros(8)}, "weight"),
        ({"remainder": torch.zeros(8)}, "remainder"),
        ({"exp_avg": torch.zeros(9)}, "exp_avg"),
        ({"exp_avg_sq": torch.zeros(16)[::2]}, "exp_avg_sq"),
        ({"gradient": torch.zeros(8).double()}, "gradient"),
        ({"previous": torch.zeros(7)}, "previous"),
        ({"factor": torch.zeros(2)}, "factor"),
    ],
)
def test_wrong_tensors_are_refused(change, name):
    states = replace(random_states(8, PLAIN, 0, 0, 1, seed=0, factor=1.0), **change)
    with pytest.raises(ValueError, match=f"^{name} is"):
        states.update(AdamWStep(1e-3, 0.9, 0.999, 1e-8, 0.01, 3))
    with pytest.raises(ValueError, match="^square_sums is"):
        adamw.square_sums(torch.zeros(BLOCK + 1), torch.zeros(1))


@pytest.mark.parametrize(
    ("change", "gradient", "ahead", "message"),
    [
        ({}, torch.zeros(8), None, "then and ahead are given together"),
        ({}, None, torch.zeros(8), "then and ahead are given together"),
        ({"previous": torch.zeros(8)}, torch.zeros(8), torch.zeros(8), "without previous, factor or square_sums"),
        ({"factor": torch.tensor(1.0)}, torch.zeros(8), torch.zeros(8), "without previous, factor or square_sums"),
        ({"sums": torch.zeros(1)}, torch.zeros(8), torch.zeros(8), "without previous, factor or square_sums"),
        ({}, torch.zeros(8).bfloat16(), torch.zeros(8), "^then.gradient is"),
        ({}, torch.zeros(7), torch.zeros(8), "^then.gradient is"),
        ({}, torch.zeros(8), torch.zeros(8).bfloat16(), "^ahead is"),
        ({}, torch.zeros(8), torch.zeros(16)[::2], "^ahead is"),
    ],
)
def test_what_does_not_go_with_one_step_more_is_refused(change, gradient, ahead, message):
    sums = change.pop("sums", None)
    states = replace(random_states(8, PLAIN, 1, 1, 0, seed=0), **change)
    given, then = states.copy(), None if gradient is None else Then(gradient, STEPS[1])
    with pytest.raises(ValueError, match=message):
        states.update(STEPS[0], sums, then, ahead)
    states.assert_same_bits(given)
