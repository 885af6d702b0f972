"""Attention over pages: against its definition in float64, and equal bits whatever shares the batch, wherever the pages
lie and however a prompt is cut. Pages that nobody owns, and places beyond a length, hold NaN.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple
from unittest import mock

import numpy
import pytest
import torch
from torch import Tensor

from tests.kernels.attention.oracle import DEVICE, normal, relative
from tests.kernels.pointwise.oracle import poisoned
from vblackwell.errors import ConfigurationError, Unsupported
from vblackwell.kernels.attention.op import bounds
from vblackwell.kernels.attention.paged import paged_attention, store_pages
from vblackwell.kernels.attention.reference import attention_reference
from vblackwell.kernels.runtime.registry import use_backend

BACKENDS = ("triton", "torch")
# Relative RMS error. fp32: sums of some hundred terms, each product and exponential of 2^-23. fp16: probabilities and
# the result are rounded to 2^-11 each.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3}


@pytest.fixture(autouse=True, scope="module")
def rows_apart() -> Iterator[None]:
    """In the interpreter, products that are the same of a row wherever it lies, as of tensor cores, but not BLAS."""
    if DEVICE == "cuda":
        yield
        return
    from triton.runtime import interpreter

    class Numpy:
        def __getattr__(self, name: str) -> Any:
            return getattr(numpy, name)

        def matmul(self, a: Any, b: Any, dtype: Any) -> Any:
            return numpy.einsum("ik,kj->ij", a.astype(dtype), b.astype(dtype))

    with mock.patch.object(interpreter, "np", Numpy()):
        yield


class Case(NamedTuple):
    """Requests of ``queries`` new and ``keys`` positions in all."""

    queries: tuple[int, ...]
    keys: tuple[int, ...]
    heads: int = 4
    kv_heads: int = 2
    width: int = 32
    page: int = 32


class Cache:
    """Keys and values of requests, by themselves and in pages that lie in no order, with holes of NaN between them."""

    def __init__(self, case: Case, dtype: torch.dtype = torch.float32, seed: int = 0) -> None:
        self.case = case
        shape = (case.kv_heads, case.width)
        self.keys, self.values = (
            [normal(n, *shape, dtype=dtype, seed=seed + 7 * i + j) for i, n in enumerate(case.keys)] for j in (1, 2)
        )
        self.queries = [normal(n, case.heads, case.width, dtype=dtype, seed=seed + 100 + n) for n in case.queries]
        needed = [-(-n // case.page) for n in case.keys]
        total = 2 * sum(needed) + 3
        order = torch.randperm(total, generator=torch.Generator().manual_seed(seed)).tolist()
        self.table = torch.full((len(needed), max(needed) + 1), 2**31 - 1, dtype=torch.int32)
        # As an engine has them: a page of all layers in one piece, keys and values apart.
        held = torch.full((total, 2, case.page, *shape), float("nan"), dtype=dtype, device=DEVICE)
        self.key_pages, self.value_pages = held[:, 0], held[:, 1]
        for row, count in enumerate(needed):
            self.table[row, :count] = torch.tensor([order.pop() for _ in range(count)], dtype=torch.int32)
        for row in range(len(needed)):
            store_pages(self.keys[row], self.values[row], self.key_pages, self.value_pages, self.slots(row))

    def slots(self, row: int) -> Tensor:
        position = torch.arange(self.case.keys[row])
        page = self.table[row].long()[position // self.case.page]
        return (page * self.case.page + position % self.case.page).to(DEVICE)

    def attend(self, calls: list[tuple[int, int, int]] | None = None, **options) -> list[Tensor]:
        """What queries ``begin`` to ``end`` of requests gather, for (request, begin, end) in one call, in which three
        rows of no request follow."""
        calls = calls or [(row, 0, n) for row, n in enumerate(self.case.queries)]
        counts = torch.tensor([0, *(end - begin for _, begin, end in calls)])
        seen = [self.case.keys[row] - self.case.queries[row] + end for row, _, end in calls]
        spare = torch.full((3, self.case.heads, self.case.width), float("nan")).to(self.queries[0])
        queries = torch.cat([*(self.queries[row][begin:end] for row, begin, end in calls), spare])
        with poisoned():
            out = paged_attention(
                queries,
                self.key_pages,
                self.value_pages,
                counts.cumsum(0).to(DEVICE, torch.int32),
                self.table[[row for row, _, _ in calls]].to(DEVICE),
                torch.tensor(seen, dtype=torch.int32, device=DEVICE),
                max(1, int(counts.max())),
                **options,
            )
        return list(out[:-3].split(counts[1:].tolist()))

    def exact(self, window: int | None = None, scale: float | None = None, softcap: float | None = None):
        found = []
        for given in zip(self.queries, self.keys, self.values, strict=True):
            q, k, v = (x.double().transpose(0, 1)[None] for x in given)
            how = {"left": bounds(True, window)[0], "right": 0, "bottom_right": True}
            found.append(attention_reference(q, k, v, **how, scale=scale, softcap=softcap or 0.0)[0].transpose(0, 1))
        return found


def check(case: Case, dtype: torch.dtype = torch.float32, **options) -> None:
    cache = Cache(case, dtype)
    for own, right in zip(cache.attend(**options), cache.exact(**options), strict=True):
        assert relative(own, right) <= TOLERANCE[dtype]


@pytest.mark.each_pair
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("case", "options"),
    [
        (Case((1,), (1,)), {}),
        (Case((1, 1, 1), (130, 64, 65)), {}),
        (Case((5, 1, 0, 20), (5, 70, 7, 130)), {}),
        (Case((40, 1), (40, 70), heads=3, kv_heads=1, width=24), {"scale": 0.3}),
        (Case((17, 1), (80, 130), page=16), {}),
        (Case((17, 1), (100, 70), page=96), {"softcap": 1.5}),
        (Case((17, 1, 1), (80, 130, 20), page=5), {"window": 40}),
        (Case((1, 4), (130, 3), heads=2), {"window": 1}),  # the first of four sees nothing
    ],
    ids=str,
)
def test_against_float64(backend, case, options):
    with use_backend("paged_attention", backend), use_backend("store_pages", backend):
        check(case, **options)


def test_half_precision():
    with use_backend("paged_attention", "triton"):
        check(Case((1, 20, 1), (70, 50, 60), page=16), torch.float16)


@pytest.mark.parametrize("options", [pytest.param({}, marks=pytest.mark.slow), {"window": 70, "softcap": 5.0}], ids=str)
@pytest.mark.parametrize("page", [8, pytest.param(64, marks=pytest.mark.slow)])
def test_bits_are_a_request_s_own(page, options):
    """Alone, in a batch, on other pages, with the chunks of a row in one program or in several."""
    case = Case((1, 17, 1, 9), (140, 77, 1, 70), page=page)
    with use_backend("paged_attention", "triton"):
        together, elsewhere = Cache(case).attend(**options), Cache(case)
        order = torch.randperm(len(elsewhere.key_pages), generator=torch.Generator().manual_seed(5))
        for pages in (elsewhere.key_pages, elsewhere.value_pages):
            pages.copy_(pages[order])
        places = order.argsort()
        owned = elsewhere.table < len(order)
        elsewhere.table[owned] = places[elsewhere.table[owned].long()].int()
        for row, expected in enumerate(together):
            alone = elsewhere.attend([(row, 0, case.queries[row])], **options)
            assert torch.equal(alone[0], expected), row
        with mock.patch("vblackwell.kernels.attention.paged_triton._PROGRAMS", 1):
            assert all(map(torch.equal, Cache(case).attend(**options), together))


@pytest.mark.each_value
@pytest.mark.parametrize("options", [{}, {"window": 50}], ids=str)
@pytest.mark.parametrize("cuts", [pytest.param((1, 40), marks=pytest.mark.slow), (32, 40), (17, 18, 39, 40)], ids=str)
def test_a_prompt_in_chunks_has_the_bits_of_the_whole(cuts, options):
    cache = Cache(Case((40, 1), (110, 80), page=16))
    with use_backend("paged_attention", "triton"):
        whole = cache.attend(**options)[0]
        for begin, end in zip((0, *cuts), cuts, strict=False):
            got = cache.attend([(1, 0, 1), (0, begin, end)], **options)[1]
            assert torch.equal(got, whole[begin:end]), (begin, end)


def test_the_plain_expression_has_the_bits_of_a_request_alone():
    cache = Cache(Case((1, 37, 1, 50), (140, 77, 1, 90)))
    with use_backend("paged_attention", "torch"):
        together = cache.attend()
        for row, expected in enumerate(together):
            assert torch.equal(cache.attend([(row, 0, cache.case.queries[row])])[0], expected), row


def test_requests_share_pages():
    case = Case((20, 1), (84, 65))
    cache = Cache(case)
    cache.table[1, :2] = cache.table[0, :2]
    cache.keys[1][:64], cache.values[1][:64] = cache.keys[0][:64], cache.values[0][:64]
    with use_backend("paged_attention", "triton"):
        for own, right in zip(cache.attend(), cache.exact(), strict=True):
            assert relative(own, right) <= TOLERANCE[torch.float32]


@pytest.mark.parametrize("backend", BACKENDS)
def test_stored_rows_are_the_rows(backend):
    pages = torch.full((4, 2, 8, 3, 24), float("nan"), device=DEVICE)
    k, v = normal(5, 3, 24, seed=1), normal(24, 5, 3, seed=2).permute(1, 2, 0)
    slots = torch.tensor([9, -1, 0, 31, 17], device=DEVICE)
    with use_backend("store_pages", backend):
        store_pages(k, v, pages[:, 0], pages[:, 1], slots)
    rows = pages.transpose(1, 2).reshape(32, 2, 3, 24)
    kept = slots >= 0
    assert torch.equal(rows[slots[kept], 0], k[kept]) and torch.equal(rows[slots[kept], 1], v[kept])
    others = torch.ones(32, dtype=torch.bool).index_fill(0, slots[kept].cpu(), False)
    assert rows[others.to(DEVICE)].isnan().all()


def test_what_does_not_fit_is_refused():
    cache = Cache(Case((1,), (40,)))
    starts, lengths = torch.tensor([0, 1], dtype=torch.int32), torch.tensor([40], dtype=torch.int32)
    given = [
        cache.queries[0],
        cache.key_pages,
        cache.value_pages,
        *(x.to(DEVICE) for x in (starts, cache.table, lengths)),
    ]

    def refused(match: str, place: int, x: Tensor, **options) -> None:
        with pytest.raises(ConfigurationError, match=match):
            paged_attention(*given[:place], x, *given[place + 1 :], 1, **options)

    refused("3 query heads over 2", 0, normal(1, 3, 32))
    refused("equal strides", 2, cache.value_pages.contiguous())
    refused("give torch.int32", 5, given[5].long())
    refused("give .R . 1,.", 3, given[3][:1])
    refused("must match", 0, given[0].half())
    refused("a window of 0", 0, given[0], window=0)
    with pytest.raises(ConfigurationError, match="at most 0 queries"):
        paged_attention(*given, 0)
    with pytest.raises(Unsupported, match="no gradient"):
        paged_attention(given[0].clone().requires_grad_(), *given[1:], 1)
    with pytest.raises(ConfigurationError, match="torch.int64"):
        store_pages(cache.keys[0], cache.values[0], cache.key_pages, cache.value_pages, cache.slots(0).int())
