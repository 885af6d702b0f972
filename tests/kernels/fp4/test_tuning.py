"""Tuning changes no order of additions, survives torn files, and belongs to one machine."""

import json
from dataclasses import replace

import pytest
import torch

from vblackwell.kernels.fp4 import mma_plan, tuning, wgmma_plan
from vblackwell.kernels.fp4.mma_plan import MmaPlan
from vblackwell.kernels.fp4.wgmma_plan import WgmmaPlan
from vblackwell.kernels.runtime import tuning as cache

GPU = torch.device("cuda", 0)
MACHINE = {"gpu": "NVIDIA H200", "multiprocessors": "132", "driver": "13000", "torch": "2.11", "triton": "3.6"}
FIXED = {
    MmaPlan: ("tokens", "row_warps", "k_warps", "splits", "x_bytes", "chunk"),
    WgmmaPlan: ("tokens", "groups", "k_groups", "splits"),
}
SHAPES = ((4096, 4096), (6144, 4096), (14336, 4096), (4096, 14336), (8192, 8192), (28672, 8192))
PLANS = [
    MmaPlan(8, 2, 2, 1, 4),
    mma_plan.plan_mma(4, 4096, 4096, True),
    wgmma_plan.plan_wgmma(64, 4096, 4096),
    wgmma_plan.plan_wgmma(256, 14336, 4096),
]


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(cache, "machine", lambda device: MACHINE)
    caches = (cache.entries, tuning._tuned)
    for each in caches:
        each.cache_clear()
    yield tmp_path
    for each in caches:
        each.cache_clear()


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_what_was_kept_is_found_again_and_adds_in_the_same_order(plan, monkeypatch, own_cache):
    monkeypatch.setattr(cache, "SHIPPED", own_cache / "none")
    here = (GPU, torch.bfloat16)
    assert tuning.tuned(plan, *here, 5, 4096, 4096) == plan
    field = "min_blocks" if isinstance(plan, MmaPlan) else "prefetch"
    fields = {field: 2, "tokens": 2 * plan.tokens, "splits": 7}  # of which two are not to be tuned
    cache.store(tuning.KIND, GPU, {tuning.entry_name(plan, torch.bfloat16, 5, 4096, 4096): fields})
    tuning._tuned.cache_clear()
    wanted = replace(plan, **{field: 2})
    assert wanted != plan and all(getattr(wanted, name) == getattr(plan, name) for name in FIXED[type(plan)])
    assert tuning.tuned(plan, *here, 5, 4096, 4096) == wanted
    assert tuning.tuned(plan, *here, 8, 4096, 4096) == wanted  # the bucket of 8
    assert tuning.tuned(plan, *here, 9, 4096, 4096) == plan
    assert tuning.tuned(plan, GPU, torch.float16, 5, 4096, 4096) == plan
    other = replace(plan, tokens=plan.tokens * 2)
    assert tuning.tuned(other, *here, 5, 4096, 4096) == other


def test_another_driver_has_another_file():
    assert cache.cache_path(tuning.KIND, MACHINE) != cache.cache_path(tuning.KIND, {**MACHINE, "driver": "13010"})


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        '{"version": 2, "entries": {"a": {"stages": 3}}}',
        "[]",
        '{"version": 1}',
        '{"version": 1, "entries": ["a"]}',
    ],
)
def test_torn_and_foreign_files_are_ignored(own_cache, content):
    path = own_cache / "file.json"
    path.write_text(content)
    assert cache.read_entries(path) == {}
    cache.write_entries(path, MACHINE, {"a": {"stages": 3}})
    assert cache.read_entries(path) == {"a": {"stages": 3}}


def test_a_plan_that_is_no_longer_allowed_is_forgotten():
    plan = WgmmaPlan(64, 1, 1, 6, k_groups=3)
    kept = {
        tuning.entry_name(plan, torch.bfloat16, 64, 4096, 4096): {"stages": 7}
    }  # three groups cannot take turns at it
    cache.write_entries(cache.cache_path(tuning.KIND, MACHINE), MACHINE, kept)
    assert tuning.tuned(plan, GPU, torch.bfloat16, 64, 4096, 4096) == plan


def test_a_plan_that_needs_more_memory_than_when_it_was_kept_is_forgotten():
    plan = WgmmaPlan(128, 1, 2, 6, k_groups=2)
    kept = {tuning.entry_name(plan, torch.bfloat16, 128, 4096, 4096): {"stages": 6, "min_blocks": 2}}
    assert plan.fits() and not replace(plan, min_blocks=2).fits()
    cache.write_entries(cache.cache_path(tuning.KIND, MACHINE), MACHINE, kept)
    assert tuning.tuned(plan, GPU, torch.bfloat16, 128, 4096, 4096) == plan


def test_a_cache_that_cannot_be_written_is_no_error(own_cache):
    (own_cache / "file").write_text("")
    cache.write_entries(own_cache / "file" / "below.json", MACHINE, {"a": {"stages": 3}})


def test_the_shipped_table_speaks_of_plans_that_exist():
    entries = json.loads(cache.shipped_path(tuning.KIND, "NVIDIA H200").read_text())["entries"]
    names = set()
    for n, k in (*SHAPES, (12288, 4096), (4096, 11008)):
        for m in (1, 2, 4, 8, 16, 32, 64, 128, 256):
            mma = (mma_plan.plan_mma(m, n, k, True, bulk) for bulk in (True, False))
            for plan in (*mma, wgmma_plan.plan_wgmma(m, n, k)):
                names.add(tuning.entry_name(plan, torch.bfloat16, m, n, k))
    assert entries and set(entries) <= names
