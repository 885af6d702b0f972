"""Gumbel-max sampling: Philox, the distribution, what is cut, the kernels against the reference, independence of the
batch.
"""

from __future__ import annotations

import warnings

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.kernels.pointwise.oracle import DEVICE, normal, poisoned
from vblackwell.errors import ConfigurationError, Unsupported
from vblackwell.kernels.pointwise import sampling_triton
from vblackwell.kernels.pointwise.sampling import sample_tokens
from vblackwell.kernels.pointwise.sampling_reference import GROUP, exponential, gumbel, kept_tokens, philox
from vblackwell.kernels.runtime.registry import use_backend

SETTINGS = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.7, "top_k": 5},
    {"top_p": 0.6},
    {"min_p": 0.2, "temperature": 2.0},
    {"top_k": 40, "top_p": 0.9, "min_p": 0.02, "temperature": 1.5},
]


def column(*values, dtype=torch.int64) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device=DEVICE)


@pytest.mark.parametrize(
    ("key", "counter", "words"),
    [
        # Random123's published answers (tests/kat_vectors, philox4x32 10)
        (0, (0, 0, 0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (-1, (0xFFFFFFFF,) * 4, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            0x299F31D0A4093822,
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_published_words(key, counter, words):
    assert tuple(int(word) for word in philox(column(key), *(column(x) for x in counter))) == words


def test_exponentials_keep_the_digits_of_those_that_win():
    u = torch.cat([torch.logspace(-9.6, -0.001, 4001), torch.tensor([1.0 - 2.0**-24])])
    exact = -torch.log1p(-u.double())
    # beyond the series: 1 - u has an error of 2^-25, at most 32 times as much of the value, and the logarithm rounds
    # once more
    assert ((exponential(u).double() - exact) / exact).abs().max() < 33 * 2.0**-25 + 2.0**-23
    noise = gumbel(column(1), column(0), 3 * GROUP + 5)
    assert noise.shape == (1, 3 * GROUP + 5) and noise.isfinite().all()
    assert noise.unique().numel() > 0.999 * noise.numel()
    # Euler's constant and pi^2 / 6, each within five standard errors
    assert noise.mean().item() == pytest.approx(0.5772, abs=5 * 1.2825 / noise.numel() ** 0.5)
    assert noise.var().item() == pytest.approx(1.6449, abs=5 * 1.6449 * (4.4 / noise.numel()) ** 0.5)


def chi_square_tail(tokens: torch.Tensor, chances_V: torch.Tensor) -> float:
    """Probability of counts as far from ``chances_V`` as these; tokens without a chance must not occur."""
    counts_V = torch.bincount(tokens.cpu(), minlength=len(chances_V)).double()
    possible = chances_V > 0
    assert not counts_V[~possible].any()
    expected = chances_V[possible] * len(tokens)
    assert expected.min() > 5  # or the statistic does not follow the distribution
    statistic = ((counts_V[possible] - expected).square() / expected).sum()
    return torch.special.gammaincc((possible.sum().double() - 1) / 2, statistic / 2).item()


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({}, 12),
        ({"temperature": 1.7}, 12),
        ({"temperature": 0.6, "top_k": 4}, 4),
        ({"top_p": 0.7}, 4),
        ({"min_p": 0.3}, 3),
        ({"top_k": 6, "top_p": 0.8, "temperature": 1.3}, 4),
    ],
    ids=str,
)
def test_draws_follow_the_softmax_of_what_is_kept(options, kept):
    logits_V = torch.tensor([0.3, 2.0, -0.5, 1.0, 0.1, -1.0, 1.5, -0.2, 0.5, -0.8, 0.0, 0.2])
    rows, scaled_V = 20_000, logits_V.double() / options.get("temperature", 1.0)
    # the oracle goes through the tokens one after the other
    order = scaled_V.sort(descending=True).indices.tolist()[: options.get("top_k") or None]
    chances, total, chosen = scaled_V.exp(), scaled_V[order].exp().sum(), []
    for token in order:
        if sum(chances[t] for t in chosen) < options.get("top_p", 1.0) * total:
            chosen.append(token)
    chosen = [token for token in chosen if chances[token] >= options.get("min_p", 0.0) * chances.max()]
    assert len(chosen) == kept
    expected_V = torch.zeros(12).double()
    expected_V[chosen] = chances[chosen] / chances[chosen].sum()
    tokens = sample_tokens(logits_V.expand(rows, -1).to(DEVICE), 7, torch.arange(rows, device=DEVICE), **options)
    assert chi_square_tail(tokens, expected_V) > 1e-3  # of one fixed seed
    wrong_V = expected_V.clone()
    wrong_V[chosen] += torch.tensor([0.02, -0.02] + [0.0] * (kept - 2)).double()
    assert chi_square_tail(tokens, wrong_V) < 1e-3


def test_draws_over_a_large_vocabulary_are_not_drawn_to_one_end():
    rows, vocabulary, bins = 400, 10_000, 10
    tokens = sample_tokens(torch.zeros(1, 1, device=DEVICE).expand(rows, vocabulary), torch.arange(rows, device=DEVICE))
    assert chi_square_tail(tokens * bins // vocabulary, torch.full((bins,), 1 / bins).double()) > 1e-3
    assert tokens.unique().numel() > 380  # 8 expected to be equal to another


@pytest.mark.each_value
@pytest.mark.parametrize("options", SETTINGS, ids=str)
@pytest.mark.parametrize("vocabulary", [1, 7, 1000, 2 * GROUP + 77])
def test_the_kernels_draw_what_the_reference_draws(vocabulary, options):
    """A difference needs two tokens within some 1e-6 of each other: one chance in some 10,000 here."""
    for dtype in (torch.float32, torch.bfloat16)[vocabulary > GROUP // 2 :]:  # the interpreter is slow
        logits = (normal(3, vocabulary, seed=vocabulary) * 3).to(dtype)
        seeds, positions = column(3, 1 << 40, 5), column(0, 9, 1 << 33)
        with use_backend("sampling", "torch"):
            expected = sample_tokens(logits, seeds, positions, **options)
        with use_backend("sampling", "triton"), poisoned():
            got = sample_tokens(logits, seeds, positions, **options)
        assert torch.equal(got, expected)
        assert got.dtype == torch.int64 and ((got >= 0) & (got < vocabulary)).all()


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_the_batch_and_its_parts_draw_the_same(backend):
    logits = normal(4, 1500, seed=2)
    seeds, positions = column(11, 12, 13, 14), column(0, 1, 2, 3)
    with use_backend("sampling", backend):
        whole = sample_tokens(logits, seeds, positions, top_p=0.95)
        order = column(3, 0, 2)
        assert torch.equal(sample_tokens(logits[order], seeds[order], positions[order], top_p=0.95), whole[order])
        alone = [sample_tokens(logits[i : i + 1], int(seeds[i]), int(positions[i]), top_p=0.95) for i in range(4)]
        assert torch.equal(torch.cat(alone), whole)
        strided = torch.empty(4, 1600, device=DEVICE)[:, :1500].copy_(logits)
        assert torch.equal(sample_tokens(strided, seeds, positions, top_p=0.95), whole)
        same = logits[:1].expand(4, -1)
        assert sample_tokens(same, seeds, 0).unique().numel() == 4
        assert sample_tokens(same, 5, positions).unique().numel() == 4


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_ties_masks_and_rows_that_are_no_logits(backend):
    infinite = float("inf")
    logits = torch.tensor(
        [
            [1.0, 3.0, 3.0, 0.0],
            [-infinite, 0.0, -infinite, -infinite],
            [-infinite] * 4,
            [0.0, float("nan"), 1.0, 2.0],
            [0.0, infinite, 0.0, 0.0],
            [-0.0, 0.0, -0.0, -1.0],
        ],
        device=DEVICE,
    )
    with use_backend("sampling", backend):
        assert sample_tokens(logits, 0, temperature=0.0).tolist() == [1, 1, -1, -1, -1, 0]
        # In the interpreter the cases that differ in code: none, and the search that top-k and top-p share.
        for options in ({}, {"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.5})[:: 1 if backend == "torch" else 2]:
            tokens = sample_tokens(logits, 3, **options).tolist()
            assert tokens[1:5] == [1, -1, -1, -1]
        tied = torch.tensor([[2.0, 2.0, 1.0, 2.0]], device=DEVICE).expand(14, -1)
        every = ({"top_p": 0.2}, {"top_k": 1}, {"min_p": 1.0})
        for options in every if backend == "torch" else every[:1]:  # as likely as the last one kept: kept
            drawn = sample_tokens(tied, torch.arange(14, device=DEVICE), **options)
            assert set(drawn.tolist()) == {0, 1, 3}
        assert sample_tokens(logits[:0], column(), 0).shape == (0,)


def test_what_is_kept_by_a_probability_of_almost_one():
    scaled = torch.tensor([[0.0, -20.0, -40.0]])
    kept = kept_tokens(scaled, torch.tensor([0]), torch.tensor([1.0]), torch.tensor([0.0]))
    assert kept.all()
    kept = kept_tokens(scaled, torch.tensor([0]), torch.tensor([0.999]), torch.tensor([0.0]))
    assert kept.tolist() == [[True, False, False]]


def test_what_lanes_have_dropped_is_looked_for(monkeypatch):
    """16 lanes keep four words each of rows of 83: where the answer may lie below those, the whole row is searched."""
    monkeypatch.setattr(sampling_triton, "CUT_LANES", 16)
    lanes = torch.arange(83, device=DEVICE) % 16
    spread = normal(83, seed=5) * 3
    one_lane = spread + 20.0 * (lanes == 3)
    rows: list[tuple[torch.Tensor, int, float]] = [
        (spread, 5, 1.0),
        (spread, 0, 0.97),
        (one_lane, 5, 1.0),
        (one_lane, 0, 0.97),
        (torch.linspace(-9, 9, 83, device=DEVICE), 70, 0.4),
        (spread.round(), 4, 1.0),
        (torch.where(lanes < 14, float("-inf"), spread), 0, 0.4),
        (spread * 0 + 0.5, 1, 0.4),
    ]
    scaled = torch.stack([row for row, _, _ in rows]) / 0.8 + 0.0
    cuts = (
        column(*(k for _, k, _ in rows), dtype=torch.int32),
        column(*(p for _, _, p in rows), dtype=torch.float32),
        torch.zeros(len(rows), device=DEVICE),
    )
    temperature = torch.full((len(rows),), 0.8, device=DEVICE)
    least = sampling_triton.least_keys(torch.stack([row for row, _, _ in rows]), temperature, *cuts)
    possible = scaled > float("-inf")  # what is not has no probability: whether it is kept is nobody's concern
    assert torch.equal(from_key_on(scaled, least) & possible, kept_tokens(scaled, *cuts) & possible)


def from_key_on(scaled: torch.Tensor, least: torch.Tensor) -> torch.Tensor:
    """Which words have an ordered image of at least ``least`` of their row."""
    bits = scaled.view(torch.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >= least[:, None]


@pytest.mark.parametrize("options", SETTINGS, ids=str)
def test_nothing_waits_for_the_device(options):
    """Fake tensors have no values: whatever looked at one would raise."""
    with FakeTensorMode():
        logits, seeds = torch.empty(4, 100), torch.empty(4, dtype=torch.int64)
        assert sample_tokens(logits, seeds, seeds, **options).shape == (4,)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"seeds_B": torch.ones(3)}, r"seeds, positions or settings of \(3,\)"),
        ({"logits_BV": torch.zeros(4)}, r"logits of \(4,\)"),
        ({"logits_BV": torch.zeros(2, 4, dtype=torch.float64)}, "float64"),
    ],
    ids=str,
)
def test_what_is_refused(options, words):
    with pytest.raises(ConfigurationError, match=words):
        sample_tokens(**{"logits_BV": torch.zeros(2, 4), "seeds_B": 0, **options})


def test_settings_of_each_row_are_as_for_the_row_alone():
    logits, seeds = torch.randn(6, 50, generator=torch.Generator().manual_seed(0)), torch.arange(6)
    settings = [
        (0.0, 0, 1.0, 0.0),
        (1.0, 0, 1.0, 0.0),
        (2.0, 3, 1.0, 0.0),
        (1.0, 99, 0.5, 0.0),
        (1.5, 0, 1.0, 0.2),
        (0.7, 9, 0.9, 0.05),
    ]
    names = ("temperature", "top_k", "top_p", "min_p")
    mixed = {name: torch.tensor([row[place] for row in settings]) for place, name in enumerate(names)}
    for position in range(20):
        together = sample_tokens(logits, seeds, position, **mixed)
        for row, alone in enumerate(settings):
            options = dict(zip(names, alone, strict=True))
            assert sample_tokens(logits[row : row + 1], row, position, **options).tolist() == [int(together[row])]
    with pytest.raises(ConfigurationError, match="settings"):
        sample_tokens(logits, seeds, top_k=torch.tensor([1]))


def test_a_backend_by_name_says_why_not(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with use_backend("sampling", "triton"), pytest.raises(Unsupported, match="needs a CUDA GPU"):
        sample_tokens(torch.zeros(2, 4), 0)


@pytest.mark.gpu
def test_lanes_that_drop_words_on_a_gpu():
    """Compiled, with the lanes that are in use: few likely words, thousands of them (top_p of a flat row), and all in
    one lane.
    """
    logits = normal(3, 128_000, seed=6) * column(4.0, 0.5, 4.0, dtype=torch.float32)[:, None]
    logits[2, :: sampling_triton.CUT_LANES] += 30.0
    for options in ({"top_k": 50}, {"top_k": 3000}, {"top_p": 0.9}, {"top_k": 200, "top_p": 0.5}):
        top_k, top_p = options.get("top_k", 0), options.get("top_p", 1.0)
        cuts = (
            column(*[top_k] * 3, dtype=torch.int32),
            column(*[top_p] * 3, dtype=torch.float32),
            column(0, 0, 0, dtype=torch.float32),
        )
        least = sampling_triton.least_keys(logits, column(1, 1, 1, dtype=torch.float32), *cuts)
        kept = from_key_on(logits, least)
        # fp32 sums of 128,000 terms against float64: a few words at the edge of top_p may fall on its other side
        assert (kept != kept_tokens(logits, *cuts)).sum(1).max() <= (0 if top_p == 1 else 64)


@pytest.mark.gpu
def test_on_a_gpu_without_waiting_and_in_a_graph():
    logits = normal(64, 128_000, dtype=torch.bfloat16, seed=3)
    seeds, positions = torch.arange(64, device="cuda"), torch.zeros(64, dtype=torch.int64, device="cuda")
    for options in SETTINGS:
        with use_backend("sampling", "torch"):
            expected = sample_tokens(logits, seeds, positions, **options)
        got = sample_tokens(logits, seeds, positions, **options)
        torch.cuda.synchronize()
        with warnings.catch_warnings(action="ignore"):  # it says that it does not see everything
            torch.cuda.set_sync_debug_mode("error")
        try:
            again = sample_tokens(logits, seeds, positions, **options)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert torch.equal(got, again)
        # logarithms of the two may differ in the last bit: one row of 384 at most has two tokens as near as that, or a
        # cut there
        assert (got != expected).sum() <= 1
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens = sample_tokens(logits, seeds, positions, top_p=0.9)
    positions += 1
    graph.replay()
    assert torch.equal(tokens, sample_tokens(logits, seeds, positions, top_p=0.9))
