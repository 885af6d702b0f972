"""Launches of attention's kernels have one key only where Triton compiles one kernel for them."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

triton = pytest.importorskip("triton")
from triton.backends.compiler import GPUTarget  # noqa: E402 - where there is triton
from triton.compiler import make_backend  # noqa: E402
from triton.runtime.jit import JITFunction, create_function_from_signature  # noqa: E402

from tests.kernels.attention.oracle import use_plans  # noqa: E402
from vblackwell.kernels.attention import blocks, launch, paged_triton  # noqa: E402
from vblackwell.kernels.attention.device import LISTED  # noqa: E402
from vblackwell.kernels.attention.plan import AttentionPlan  # noqa: E402

OPTIONS = [
    {},
    {"right": 0},
    {"left": 15, "right": 0},
    {"left": 16, "right": 0, "bottom_right": True},
    {"softcap": 2.0},
    {"dropout": 0.5},
    {"slopes": True},
    {"mask": "boolean"},
    {"mask": "padding", "right": 0},
    {"mask": "additive"},
    {"mask": "expanded", "left": 1},
]
PLANS = (AttentionPlan(32, 32, 4, 1), AttentionPlan(64, 32, 4, 2, True), AttentionPlan(32, 64, 4, 2, True, 128))


def tensor(*shape: int, dtype: torch.dtype = torch.float16, place: str = "dense") -> Tensor:
    if place == "dense":
        return torch.zeros(shape, dtype=dtype)
    if place == "transposed":
        return torch.zeros(shape[0], shape[2], shape[1], shape[3], dtype=dtype).transpose(1, 2)
    return torch.zeros(torch.Size(shape).numel() + 1, dtype=dtype)[1:].view(shape)  # not at 16 bytes


def options_of(heads: int, queries: int, keys: int, given: dict, place: str) -> launch.Options:
    kind = given.get("mask")
    shape = {"padding": (2, 1, 1, keys), "additive": (1, heads, queries, keys)}.get(kind, (2, 1, queries, keys))
    mask = None if kind is None else tensor(*shape, dtype=torch.float16 if kind == "additive" else torch.bool)
    if kind == "expanded":
        mask = tensor(1, 1, queries, keys, dtype=torch.bool).expand(2, heads, -1, -1)
    if mask is not None and place == "unaligned":
        mask = tensor(*mask.shape, dtype=mask.dtype, place=place)
    slopes = torch.zeros(heads) if given.get("slopes") else None
    seed = torch.zeros(2, dtype=torch.int64) if given.get("dropout") else None
    bounds = (given.get("left"), given.get("right"), given.get("bottom_right", False))
    rest = (0.25, *bounds, given.get("softcap", 0.0), given.get("dropout", 0.0))
    return launch.Options(mask, slopes, seed, None, None, queries, keys, *rest)


def packed(heads: int, lengths: tuple[int, ...]) -> tuple[list[Tensor], launch.Options]:
    starts = torch.tensor((0, *itertools.accumulate(lengths)), dtype=torch.int32)
    tensors = [torch.zeros(sum(lengths), count, 32, dtype=torch.float16) for count in (heads, 1, 1)]
    rest = (sum(lengths), sum(lengths), 0.25, None, 0, False, 0.0, 0.0)
    return tensors, launch.Options(None, None, None, starts, starts, *rest)


def cases():
    for given, place, (heads, kv_heads, queries, keys, head) in itertools.product(
        OPTIONS,
        ("dense", "transposed", "unaligned"),
        ((2, 2, 16, 32, 32), (4, 1, 17, 32, 32), (2, 1, 33, 48, 40), (16, 16, 1, 64, 32), (2, 2, 16, 33, 64)),
    ):
        shapes = ((2, heads, queries, head), (2, kv_heads, keys, head), (2, kv_heads, keys, head))
        yield [tensor(*shape, place=place) for shape in shapes], options_of(heads, queries, keys, given, place)
    for heads, lengths in ((2, (16, 16)), (2, (16, 17)), (4, (1, 5, 26)), (1, (32,))):
        yield packed(heads, lengths)


@pytest.fixture
def recorded(monkeypatch):
    """Launches that were asked for, as (kernel, key); fails where Triton would compile two kernels for one of them."""
    backend = make_backend(GPUTarget("cuda", 90, 32))
    binders, found, launches = {}, {}, []

    def record(kernel, key, grid, arguments, **options):
        if kernel not in binders:
            listed = LISTED if "list_batch" in kernel.arg_names else ()
            made = JITFunction(kernel.fn, do_not_specialize=listed)
            binders[kernel] = create_function_from_signature(made.signature, made.params, backend)
        _, specialization, others = binders[kernel](*arguments, debug=False, **options)
        launches.append((kernel, key))
        compiled = f"{specialization} {others}"
        assert found.setdefault((kernel, key), compiled) == compiled, key

    for module in (launch, blocks, paged_triton):
        monkeypatch.setattr(module, "queue", record)
    return launches


def test_one_key_is_one_compiled_kernel(recorded):
    for plan in PLANS:
        with use_plans(forward=plan, dq=plan, dkv=plan):
            for _ in range(2):
                for (q, k, v), options in cases():
                    out, lse = launch.forward(q, k, v, options)
                    launch.backward(out, q, k, v, out, lse, options)
    assert len({kernel for kernel, _ in recorded}) == 8  # three of attention, five of masks
    assert len(set(recorded)) * 2 <= len(recorded)  # each was launched again


def test_one_key_is_one_compiled_kernel_of_pages(recorded):
    sizes = ((2, 2, 32), (16, 1, 40), (4, 4, 16))
    shapes = list(itertools.product((1, 3, 16), sizes, (5, 16), (1, 7, 160), (1, 16)))
    for _ in range(2):
        for requests, (heads, kv_heads, head), page, width, max_q in shapes:
            starts, lengths = torch.zeros(2, requests + 1, dtype=torch.int32)
            table = torch.zeros(requests, width, dtype=torch.int32)
            for place, left, softcap in (("dense", None, 0.0), ("dense", 15, 2.0), ("unaligned", 16, 0.0)):
                q, rows = (tensor(1, requests * max_q, n, head, place=place)[0] for n in (heads, kv_heads))
                pages = tensor(width, 2 * page, kv_heads, head, place=place)
                pages = (pages[:, :page], pages[:, page:])
                numbers = (starts, table, lengths[:requests], max_q, left, 0.25, softcap)
                paged_triton.attend(q, *pages, *numbers)
                paged_triton.store(rows, rows, *pages, torch.zeros(len(q), dtype=torch.int64))
    assert len({kernel for kernel, _ in recorded}) == 3
    assert len(set(recorded)) * 2 <= len(recorded)
