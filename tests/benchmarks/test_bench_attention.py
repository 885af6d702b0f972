"""The benchmark of attention draws the same cases for a seed, and sees what is wrong before it is timed."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from benchmarks import bench_attention
from benchmarks.lib.draw import worst_and_median
from benchmarks.lib.kernels.attention_case import Case
from benchmarks.lib.kernels.attention_draw import KINDS, Attention, Times, draws, summary
from vblackwell.kernels.attention.reference import attention_reference, visible_ST

PLAIN = Attention("plain", 2, 4, 2, 65, 65, 32, True)
DOCUMENTS = replace(PLAIN, kind="documents", batch=1, ends=(7, 8, 65))


def test_draws_are_those_of_the_seed_alone():
    # Written down: the same on every machine and Python.
    assert [str(case) for case in draws(6, 7)] == [
        "plain, 8 x 1 heads of 64, 9735 over 41, backward",
        "causal, 16 x 16 heads of 64, 5, backward",
        "window of 4, 16 x 2 heads of 168, 8, backward",
        "boolean 4x1x1x723, 4 x 128/16 heads of 144, 723, backward",
        "additive 1x1x3047x3047, 16 x 8 heads of 112, 3047, backward",
        "documents (7), 1 x 64/16 heads of 64, 7",
    ]
    found = draws(40, 7)
    assert found == draws(40, 7) and found[:10] == draws(10, 7)
    assert found != draws(40, 8)


def test_draws_are_in_their_ranges_and_fit():
    found = [case for seed in range(200) for case in draws(40, seed)]
    for kind in KINDS:
        mine = [case for case in found if case.kind == kind]
        assert {case.gradient for case in mine} == {case.heads > case.kv_heads for case in mine} == {False, True}
        assert {(case.keys.bit_length() - 1) for case in mine} >= set(range(14)), "every octave"
        assert any(case.keys % 2 for case in mine) and any(case.keys >= 64 and case.keys % 64 == 0 for case in mine)
    assert all(1 <= case.queries <= 32768 and 1 <= case.keys <= 32768 for case in found)
    assert {case.head for case in found} == set(range(32, 257, 8))
    assert all(case.batch and case.kv_heads and case.heads % case.kv_heads == 0 for case in found)
    for case in found:
        unequal = case.queries != case.keys
        assert not unequal or case.kind in ("plain", "boolean", "additive")
        assert (case.window is not None) == (case.kind == "window") and (case.mask is not None) == (
            case.kind in ("boolean", "additive")
        )
        assert not case.ends or (
            case.batch == 1 and case.ends[-1] == case.keys and list(case.ends) == sorted({*case.ends})
        )
        # PyTorch's: queries, keys, values, output, their gradients; a mask, which becomes bf16, and with grouped heads
        # scores, twice, because a graph is captured after a call of its own
        heads = case.heads * case.queries + case.kv_heads * case.keys
        mask = case.queries * case.keys if case.mask is None else math.prod(case.mask)
        written = case.scores * 24 * 2 if case.masked and case.heads > case.kv_heads else 0
        assert 16 * case.batch * case.head * heads + (4 * mask if case.masked else 0) + written < 20e9, case
        assert case.flops <= 1.2e12


def test_the_masks_are_what_the_case_says():
    window = Case(replace(PLAIN, kind="window", window=5), "cpu").mask
    assert torch.equal(window, visible_ST(65, 65, 4, 0, False, torch.device("cpu")))
    blocks = [torch.ones(size, size, dtype=torch.bool).tril() for size in (7, 1, 57)]
    assert torch.equal(Case(DOCUMENTS, "cpu").mask, torch.block_diag(*blocks).bool())
    for shape in ((2, 1, 1, 65), (1, 1, 65, 65), (2, 4, 65, 65)):
        mask = Case(replace(PLAIN, kind="boolean", mask=shape), "cpu").mask
        assert mask.shape == shape and mask[..., 0].all() and not mask.all()
    assert Case(replace(PLAIN, kind="additive", mask=(1, 1, 65, 65)), "cpu").mask.dtype == torch.bfloat16


CASES = [
    PLAIN,
    replace(PLAIN, gradient=False),
    replace(PLAIN, queries=3),
    replace(PLAIN, kind="causal"),
    replace(PLAIN, kind="window", window=33),
    replace(PLAIN, kind="boolean", mask=(2, 1, 1, 65)),
    replace(PLAIN, kind="additive", mask=(2, 4, 65, 65)),
    DOCUMENTS,
]


@pytest.mark.parametrize("described", CASES, ids=str)
def test_what_is_right_passes_and_what_is_wrong_is_seen(described, monkeypatch):
    """Ours is given by the reference in fp32, rounded once, and spoiled."""
    torch.manual_seed(0)
    case = Case(described, "cpu")

    def right() -> torch.Tensor:
        q, k, v = (x.float() if not described.ends else x.float().transpose(0, 1)[None] for x in case.inputs)
        mask = case.mask
        if described.kind == "causal":
            mask = visible_ST(65, 65, None, 0, False, torch.device("cpu"))
        out = attention_reference(q, k, v, mask=mask).bfloat16()
        return out if not described.ends else out[0].transpose(0, 1)

    monkeypatch.setattr(case, "ours", right)
    assert case.error_over_bound() <= 1
    monkeypatch.setattr(case, "ours", lambda: right() * 1.03)
    assert case.error_over_bound() > 1
    monkeypatch.setattr(case, "ours", lambda: right().index_fill(-2, torch.tensor([0]), float("nan")))
    assert case.error_over_bound() == math.inf
    if described.gradient:  # the output is right, and its gradient is not

        def crooked() -> torch.Tensor:
            out = right()
            return out + 0.1 * (out - out.detach())

        monkeypatch.setattr(case, "ours", crooked)
        assert case.error_over_bound() > 1


def test_the_summary_and_the_line_have_what_a_draw_is_judged_by():
    found = [
        Times(10.0, 9.5, {"ours": 8.0, "cudnn": 9.0, "flash": 8.4, "triton": 7.0}),
        Times(10.0, 8.0, {"ours": 8.0, "flash": 7.2}),
        Times(10.0, 20.0, {"ours": 8.0, "math": 80.0}),
    ]
    said = [" ".join(line.split()) for line in summary(found)]
    assert said == [
        "eager, over PyTorch's own choice, worst of 3 0.800 0.9 1 MISSED",
        "... the median 0.950 1 1 MISSED",
        "graphed, over PyTorch's best backend, worst of 3 0.900 0.97 1 MISSED",
    ]
    line = "eager 0.0100 ms, PyTorch 0.0095 ms: 0.950; graphed 0.0080 ms, flash 0.0084 ms: 1.050; own kernel 0.0070 ms"
    assert str(found[0]) == line
    assert summary([]) == [f"{words}: no case" for words in (said[0].split(", worst")[0], said[2].split(", worst")[0])]


def test_floors_and_aims_may_be_missing():
    met = [" ".join(line.split()) for line in worst_and_median("x", [1.0, 3.0], (1.0, None), (None, 2.5))]
    assert met == ["x, worst of 2 1.000 1 floor met", "... the median 2.000 2.5"]
    assert worst_and_median("x", [2.0], (None, None))[0].split()[-1] == "2.000"


def test_the_listed_cases_fit_and_are_of_every_kind():
    found = bench_attention.listed()
    assert {case.kind for case in found} == set(KINDS) and {case.gradient for case in found} == {False, True}
    assert len({str(case) for case in found}) == len(found)
