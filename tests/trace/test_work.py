"""Operations of attention: torch's formulas where these accept, and grouped heads,
which some of its versions refuse.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import sdpa_backward_flop_count, sdpa_flop_count

from vblackwell.machine.gpus import GPUS, find_gpu
from vblackwell.machine.rates import assumed_rates
from vblackwell.trace.trace import trace_training
from vblackwell.trace.work import (
    KERNEL,
    MANY,
    MEMORY_SHARE,
    ONE_OF_MANY,
    OWN_PASSES,
    Work,
    host_seconds,
    phase_seconds,
    slowed_by_updates,
    tiled_share,
    work_of,
)
from vblackwell.trace.workspace import reduction_bytes

OPS = torch.ops.aten


@pytest.mark.parametrize("heads_of_keys", [8, 2])
@pytest.mark.parametrize("sizes", [(2, 16, 16, 32, 32), (1, 7, 9, 16, 24)])
def test_attention_counts_the_products_of_its_queries_heads(sizes, heads_of_keys):
    batch, queries, keys, width, value_width = sizes
    query = torch.empty(batch, 8, queries, width, device="meta")
    key = torch.empty(batch, heads_of_keys, keys, width, device="meta")
    value = torch.empty(batch, heads_of_keys, keys, value_width, device="meta")
    out = torch.empty(batch, 8, queries, value_width, device="meta")
    as_many = [(batch, 8, *each.shape[2:]) for each in (key, value)]
    forward = work_of("forward", OPS._scaled_dot_product_flash_attention.default, (query, key, value), {}, (out,))
    backward = OPS._scaled_dot_product_flash_attention_backward.default
    backward_work = work_of("backward", backward, (out, query, key, value), {}, (query, key, value))
    assert forward is not None and forward.flops == sdpa_flop_count(query.shape, *as_many)
    assert backward_work is not None and backward_work.flops == sdpa_backward_flop_count(
        out.shape, query.shape, *as_many
    )
    causal = work_of(
        "forward", OPS._scaled_dot_product_flash_attention.default, (query, key, value, 0.0, True), {}, (out,)
    )
    assert causal is not None and causal.flops == forward.flops / 2


def test_a_fused_operator_of_one_tensor_is_issued_as_one():
    x, gain = torch.empty(4096, 64, device="meta"), torch.empty(64, device="meta")
    normed = work_of("forward", OPS._fused_rms_norm.default, (x, [64], gain, 1e-6), {}, (x,))
    several = work_of("forward", OPS._foreach_sqrt.default, ([x, gain],), {}, [x, gain])
    assert normed is not None and normed.issues == KERNEL
    assert several is not None and several.issues == MANY + 2 * ONE_OF_MANY


def test_a_product_loses_what_its_tiles_do_not_fill():
    assert tiled_share(128 * 132, 128, 4096) == 1.0  # one tile for each multiprocessor
    assert tiled_share(128 * 133, 128, 4096) == pytest.approx(
        0.85 * 532 / 660
    )  # a second round for one: smaller tiles lose less
    assert tiled_share(1024, 1024, 128) == pytest.approx(0.95 * 128 / 132)  # 64 tiles would leave half of them idle
    assert tiled_share(1024, 1024, 4096) == pytest.approx(128 / 132)  # unless the inner dimension is cut in two
    assert tiled_share(197, 64, 64, count=132) == pytest.approx(0.95 * 197 / 256)


def test_products_of_fp32_go_by_their_tiles():
    x, w = (torch.empty(size, device="meta") for size in ((128 * 132, 256), (256, 128)))
    product = work_of("forward", OPS.mm.default, (x, w), {}, x @ w)
    narrow = work_of("forward", OPS.mm.default, (x.bfloat16(), w.bfloat16()), {}, (x @ w).bfloat16())
    assert product is not None and narrow is not None and (product.share, narrow.share) == (1.0, 0.0)
    rates = replace(assumed_rates(find_gpu("H200")), matmul_fp32=1e12)  # slow enough for nothing else to count
    half, whole = (phase_seconds([replace(product, share=share)], rates)["forward"] for share in (0.5, 1.0))
    assert half == pytest.approx(2 * whole)
    here = [phase_seconds([replace(product, share=share)], rates, waits=True) for share in (0.5, 1.0)]
    assert here[0] == here[1]  # a CPU has no such tiles


def test_the_host_is_slower_for_the_part_of_a_step_in_which_the_cpu_updates():
    assert (
        slowed_by_updates(1.0, 0.0, 2.0) == slowed_by_updates(1.0, 9.0, 1.0) == slowed_by_updates(0.0, 1.0, 2.0) == 1.0
    )
    assert slowed_by_updates(1.0, 9.0, 2.0) == 2.0  # all the time
    # Half a second of updates leaves a quarter of a second's work undone.
    assert slowed_by_updates(1.0, 0.5, 2.0) == pytest.approx(1.25)


def test_an_optimizers_loop_has_a_rate_of_its_own():
    rates = replace(assumed_rates(find_gpu("H200")), issue_seconds=1e-5, loop_issues=0.25)
    one, many, forward = (
        Work("optimizer", 0.0, 4, 4),
        Work("optimizer", 0.0, 4, 4, issues=7.0),
        Work("forward", 0.0, 4, 4),
    )
    assert host_seconds(one, rates) == pytest.approx(0.25 * host_seconds(forward, rates))
    assert host_seconds(many, rates) == pytest.approx(7e-5)  # a foreach operator is no loop


def test_a_host_that_reads_waits_for_the_gpu_and_the_gpu_for_it():
    """Ten times 3 ms of the GPU, issued in no time, then 1 ms of the host and a read:
    what one does the other cannot hide.
    """
    rates = replace(assumed_rates(find_gpu("H200")), issue_seconds=1e-3, read_issues=1e-9, memory=1e9 / MEMORY_SHARE)
    read = Work("optimizer", kind="read", issues=1.0)
    runs, issues = Work("optimizer", 0.0, 3_000_000, 4, issues=0.0), Work("optimizer", kind="host", issues=1.0)
    alone = phase_seconds([runs, issues] * 10, rates)
    assert alone == pytest.approx({"optimizer": 30e-3})  # the longer of 30 and 10
    assert phase_seconds([runs, read, issues] * 10, rates) == pytest.approx({"optimizer": 40e-3})
    late = replace(rates, read_issues=2.0)  # a number's way takes 2 ms
    assert phase_seconds([runs, read, issues] * 10, late) == pytest.approx({"optimizer": 60e-3})
    here = phase_seconds([runs, read, issues] * 10, rates, waits=True)
    assert here == pytest.approx({"optimizer": 40e-3})  # on a CPU both add up anyway


def test_adafactor_reads_two_norms_a_parameter_and_adamw_none():
    def make(optimizer: Callable[[Any], Any]) -> list[Work]:
        loss = lambda model, batch: model(batch).sum()  # noqa: E731
        batch = lambda: torch.zeros(4, 16, device="cuda")  # noqa: E731
        model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 8))
        return [each for each in trace_training(model, batch, loss, optimizer).work if each.kind == "read"]

    assert len(make(torch.optim.Adafactor)) == 2 * 4
    assert not make(lambda parameters: torch.optim.AdamW(parameters, foreach=False))


@pytest.mark.parametrize("num_sms", [28, 132])
def test_products_and_sums_are_those_of_the_gpu_that_is_meant(num_sms):
    """A layer's gradients: products in tiles by its multiprocessors, and a bias's sum in parts of as many blocks."""
    rows, wide = 4096, 1536
    trace = trace_training(
        nn.Linear(wide, wide),
        lambda: torch.zeros(rows, wide, device="cuda"),
        lambda model, x: model(x).square().mean(),
        None,
        num_sms=num_sms,
        steps=1,
    )
    shares = {work.share for work in trace.work if work.share}
    assert shares == {tiled_share(rows, wide, wide, 1, num_sms), tiled_share(wide, wide, rows, 1, num_sms)}
    assert reduction_bytes(rows, wide, num_sms) in trace.sizes
    assert reduction_bytes(rows, wide, 28) != reduction_bytes(rows, wide, 132)


def test_every_card_says_how_many_multiprocessors_it_has():
    assert all(20 <= card.num_sms <= 200 for card in GPUS.values()) and find_gpu("RTX 3060").num_sms == 28


def test_on_a_cpu_our_operators_read_and_write_as_often_as_those_they_run_as():
    """Not next to a GPU, where each is one kernel."""
    rates = replace(assumed_rates(find_gpu("H200")), issue_seconds=1e-9)
    ours, theirs = (Work("forward", num_bytes=1 << 30, width=4, own=own) for own in (True, False))
    once = (1 << 30) / (MEMORY_SHARE * rates.memory)
    for waits, times in ((True, 1 + OWN_PASSES), (False, 1)):
        for work, passes in ((ours, times), (theirs, 1)):
            assert phase_seconds([work], rates, waits)["forward"] == pytest.approx(passes * once, rel=1e-3)


def test_the_loss_counts_its_logits():
    hidden, head = torch.empty(64, 16, device="meta"), torch.empty(5000, 16, device="meta")
    loss = torch.ops.vblackwell.linear_cross_entropy.default
    targets = torch.empty(64, dtype=torch.int64, device="meta")
    work = work_of("forward", loss, (hidden, head, targets, -100, 0.0, None, True, True, 64), {}, hidden)
    assert work.own and work.num_bytes >= 2 * 64 * 5000 * 4
