"""Attention over pages on a GPU: tensor cores, sizes of models, graphs."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.attention.oracle import relative
from tests.kernels.attention.test_paged import Cache, Case
from vblackwell.kernels.attention.paged import paged_attention

pytestmark = pytest.mark.gpu
# Relative RMS error: probabilities and the result are rounded to 2^-9 (bf16) or 2^-12 (fp16) at most each; fp32: scores
# of up to 2^4 in units of log2, and a soft cap of 8 times what is left of 1 - 2 / (1 + e^x), each to a few 2^-24.
TOLERANCE = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 1e-5}
CASE = Case((1, 300, 1, 7, 0, 128), (2100, 1500, 3, 1031, 9, 640), heads=8, width=128, page=64)
BF16, FP16, FP32 = TOLERANCE


@pytest.mark.parametrize(
    ("case", "options", "dtype"),
    [
        (CASE, {}, BF16),
        (CASE, {}, FP16),
        (CASE._replace(page=16), {"window": 700}, BF16),
        (CASE._replace(page=48, heads=14), {"softcap": 8.0}, BF16),
        (CASE._replace(width=64, heads=2), {"window": 33}, BF16),
        (CASE._replace(width=64, page=16), {"softcap": 8.0}, FP32),
        (CASE._replace(width=256, page=128), {}, BF16),
        (CASE._replace(width=80, heads=6), {}, BF16),
    ],
    ids=str,
)
def test_against_float64(case, options, dtype):
    cache = Cache(case, dtype)
    for own, right in zip(cache.attend(**options), cache.exact(**options), strict=True):
        assert relative(own, right) <= TOLERANCE[dtype]


ROWS = pytest.mark.parametrize(
    ("width", "page", "dtype"),
    [(64, 64, BF16), (128, 16, BF16), (128, 64, BF16), (128, 64, FP16), (256, 64, BF16), (64, 16, FP32)],
    ids=str,
)


@ROWS
def test_bits_are_a_row_s_own(width, page, dtype):
    """Alone or in a batch, and in a chunk of a prompt that is cut anywhere."""
    cache = Cache(CASE._replace(width=width, page=page), dtype)
    together = cache.attend()
    for row, expected in enumerate(together):
        assert torch.equal(cache.attend([(row, 0, cache.case.queries[row])])[0], expected) or not len(expected), row
    for cuts in ((2, 300), (32, 64, 300), (17, 298, 300), (150, 300)):
        for begin, end in zip((0, *cuts), cuts, strict=False):
            got = cache.attend([(3, 0, 7), (1, begin, end), (0, 0, 1)])
            assert torch.equal(got[1], together[1][begin:end]), (begin, end)
            assert torch.equal(got[0], together[3]) and torch.equal(got[2], together[0])


@ROWS
def test_a_step_has_the_bits_of_the_prompt(width, page, dtype):
    cache = Cache(CASE._replace(width=width, page=page), dtype)
    prompt = cache.attend()[1]
    for at in (0, 1, 63, 64, 150, 299):
        step = cache.attend([(0, 0, 1), (1, at, at + 1)])[1]
        assert torch.equal(step, prompt[at : at + 1]), at


def test_a_captured_call_follows_the_lengths():
    cache = Cache(CASE, torch.bfloat16)
    counts = torch.tensor([0, *cache.case.queries], device="cuda").cumsum(0).int()
    lengths = torch.ones(len(cache.case.keys), dtype=torch.int32, device="cuda")
    queries, table = torch.cat(cache.queries), cache.table.cuda()
    given = (queries, cache.key_pages, cache.value_pages, counts, table.zero_(), lengths, 300)
    paged_attention(*given)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = paged_attention(*given)
    table.copy_(cache.table)
    lengths.copy_(torch.tensor(cache.case.keys))
    graph.replay()
    assert torch.equal(out, torch.cat(cache.attend()))
