"""Operations of attention: torch's formulas where these accept, and grouped heads, which some of its versions refuse."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import sdpa_backward_flop_count, sdpa_flop_count

from vblackwell.plan.work import KERNEL, MANY, ONE_OF_MANY, work_of

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
    forward = work_of(
        "forward", OPS._scaled_dot_product_flash_attention.default, (query, key, value), {}, (out,), False
    )
    backward = OPS._scaled_dot_product_flash_attention_backward.default
    behind = work_of("backward", backward, (out, query, key, value), {}, (query, key, value), False)
    assert forward is not None and forward.flops == sdpa_flop_count(query.shape, *as_many)
    assert behind is not None and behind.flops == sdpa_backward_flop_count(out.shape, query.shape, *as_many)
    causal = work_of(
        "forward", OPS._scaled_dot_product_flash_attention.default, (query, key, value, 0.0, True), {}, (out,), False
    )
    assert causal is not None and causal.flops == forward.flops / 2


def test_a_fused_operator_of_one_tensor_is_issued_as_one():
    x, gain = torch.empty(4096, 64, device="meta"), torch.empty(64, device="meta")
    normed = work_of("forward", OPS._fused_rms_norm.default, (x, [64], gain, 1e-6), {}, (x,), False)
    several = work_of("forward", OPS._foreach_sqrt.default, ([x, gain],), {}, [x, gain], False)
    assert normed is not None and normed.issues == KERNEL
    assert several is not None and several.issues == MANY + 2 * ONE_OF_MANY
