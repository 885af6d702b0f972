"""Stated formats in checkpoints: plain fp32 under torch's names,
and what was read is written back to the same codes.
"""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests.offload.conftest import MakeStack
from tests.offload.storage.format_cases import (
    BF16,
    PACKED,
    Form,
    Odd,
    assert_same_states,
    loss_of,
    optimizer_of,
    packed_form,
    place,
    train,
)
from vblackwell.kernels.optimizer.adamw8 import SCALE_BLOCK, decode_moments
from vblackwell.offload.api import offload_of, release
from vblackwell.offload.engine import Offload
from vblackwell.offload.layout.groups import PACKED_MOMENTS
from vblackwell.offload.optimizer import VGPUAdamW
from vblackwell.offload.resident import Resident
from vblackwell.offload.state import export_state, import_state
from vblackwell.offload.storage.masters import moment_parts, quantised


def raw_moments(model: nn.Module, optimizer: VGPUAdamW) -> dict[str, list[torch.Tensor]]:
    """Codes and scales of each parameter as they are kept."""
    engine = offload_of(model)
    if isinstance(engine, Resident):
        names = {param: name for name, param in model.named_parameters()}
        return {
            names[param]: [state[kind].clone() for kind in PACKED_MOMENTS] for param, state in optimizer.state.items()
        }
    assert isinstance(engine, Offload)
    engine.finish()
    found: dict[str, list[torch.Tensor]] = {}
    for group in engine.groups:
        opened = {kind: engine.storage.open(group, kind).clone() for kind in PACKED_MOMENTS}
        for slot in group.slots:
            found[slot.name] = list(moment_parts(slot, opened).values())
    return found


@pytest.mark.parametrize(
    "form",
    [pytest.param(form, marks=() if form.masters == "stochastic" else pytest.mark.slow) for form in PACKED],
    ids=lambda form: f"{form.states}-{form.masters}-{form.dtype}",
)
def test_a_run_goes_on_elsewhere_as_if_it_had_not_stopped(form: Form, make_stack: MakeStack):
    model = place(Odd(), form, "tight", make_stack)
    optimizer = optimizer_of(model)
    train(model, optimizer, range(3))
    written = dict(export_state(model, optimizer))
    kept = raw_moments(model, optimizer)
    expected = train(model, optimizer, range(3, 5))
    final = dict(export_state(model, optimizer))
    for where in ("resident", "disk"):  # "tight" goes on in test_the_state_dict_is_torchs
        other = Odd()
        with torch.no_grad():
            for param in other.parameters():
                param.zero_()
        place(other, form, where, make_stack)
        resumed = optimizer_of(other)
        import_state(other, resumed, written.__getitem__)
        for name, parts in raw_moments(other, resumed).items():
            assert all(torch.equal(mine, its) for mine, its in zip(parts, kept[name], strict=True)), (where, name)
        assert_same_states(dict(export_state(other, resumed)), written)
        assert train(other, resumed, range(3, 5)) == expected
        assert_same_states(dict(export_state(other, resumed)), final)


@pytest.mark.each_value
@packed_form
@pytest.mark.parametrize("where", ["resident", "tight"])
def test_the_state_dict_is_torchs(form: Form, where: str, make_stack: MakeStack):
    model = place(Odd(), form, where, make_stack)
    optimizer = optimizer_of(model)
    train(model, optimizer, range(2))
    written = copy.deepcopy(optimizer.state_dict())
    names = [name for name, _ in model.named_parameters()]
    exported = dict(export_state(model, optimizer))
    assert list(written["state"]) == list(range(len(names)))
    for index, name in enumerate(names):
        state = written["state"][index]
        assert set(state) == {"step", "exp_avg", "exp_avg_sq"}
        assert all(torch.equal(state[key], exported[name][key]) for key in state)
    expected = train(model, optimizer, range(2, 4))

    other = place(Odd(), form, where, make_stack)
    resumed = optimizer_of(other)
    train(other, resumed, range(7, 8))  # what is loaded takes the place of something
    import_state(other, None, exported.__getitem__)
    resumed.load_state_dict(written)
    assert train(other, resumed, range(2, 4)) == expected

    theirs = torch.optim.AdamW(Odd().parameters(), fused=True)
    theirs.load_state_dict(written)
    for state, its in zip(theirs.state_dict()["state"].values(), written["state"].values(), strict=True):
        assert all(torch.equal(state[key], its[key]) for key in its)


def test_a_resident_model_keeps_moments_in_fp32_next_to_bf16_weights(make_stack: MakeStack):
    """torch would cast what it loads to the parameter's type, and leave level 0."""
    form = Form("fp32", "exact", BF16)
    model = place(Odd(), form, "resident", make_stack)
    optimizer = optimizer_of(model)
    train(model, optimizer, range(3))
    written, exported = copy.deepcopy(optimizer.state_dict()), dict(export_state(model, optimizer))
    expected = train(model, optimizer, range(3, 5))
    addresses = {name: optimizer.state[param]["exp_avg"].data_ptr() for name, param in model.named_parameters()}
    import_state(model, None, exported.__getitem__)
    optimizer.load_state_dict(written)
    assert train(model, optimizer, range(3, 5)) == expected
    for name, param in model.named_parameters():
        assert optimizer.state[param]["exp_avg"].data_ptr() == addresses[name]


@pytest.mark.each_value
@packed_form
@pytest.mark.parametrize("where", ["resident", "tight"])
def test_a_released_model_is_plain(form: Form, where: str, make_stack: MakeStack):
    model = place(Odd(), form, where, make_stack)
    optimizer = optimizer_of(model, max_grad_norm=None)
    train(model, optimizer, range(3))
    exported = dict(export_state(model, optimizer))
    release(model)
    for name, param in model.named_parameters():
        assert param.dtype == torch.float32 and torch.equal(param, exported[name]["weight"])
        state = optimizer.state[param]
        assert all(torch.equal(state[key], exported[name][key]) for key in ("exp_avg", "exp_avg_sq", "step"))
    theirs = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), fused=True)
    theirs.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    reference = copy.deepcopy({name: param.detach() for name, param in model.named_parameters()})
    loss_of(model, 5).backward()
    optimizer.step()
    after = {name: param.detach().clone() for name, param in model.named_parameters()}
    with torch.no_grad():
        for name, param in model.named_parameters():
            param.copy_(reference[name])
    theirs.step()
    assert all(torch.equal(param, after[name]) for name, param in model.named_parameters())


@given(st.data())
@settings(max_examples=25, deadline=None)
def test_what_was_read_is_written_back(data: st.DataObject):
    n = data.draw(st.integers(1, 1500))
    random = torch.Generator().manual_seed(data.draw(st.integers(0, 1 << 30)))
    blocks = -(-n // SCALE_BLOCK)
    # Scales from the smallest that the update keeps; moments of 1e-15 and less are squares that fp32 still holds whole.
    exponents = torch.randint(-60, 20, (blocks,), generator=random)
    scales = torch.ldexp(1 + torch.rand(blocks, generator=random), exponents)
    codes = torch.randint(0, 256, (n,), generator=random, dtype=torch.uint8)
    largest = torch.arange(0, n, SCALE_BLOCK)
    if data.draw(st.booleans()):  # a block may hold nothing but zeros
        scales[0], codes[:SCALE_BLOCK] = 0.0, 0
    first, second = codes.clone(), codes.clone()
    # Of the first moment the largest code may be the last but one, where random rounding took it down.
    first[largest] = 127 - torch.randint(0, 2, (blocks,), generator=random, dtype=torch.uint8)
    second[largest] = 255
    if scales[0] == 0:
        first[0], second[0] = 0, 0
    m, root_v = decode_moments(first, scales, second, scales)
    found1, found2 = quantised(m, "exp_avg"), quantised(root_v * root_v, "exp_avg_sq")
    again = decode_moments(found1[0], found1[1], found2[0], found2[1])
    assert torch.equal(again[0].view(torch.int32), m.view(torch.int32))
    assert torch.equal(again[1] * again[1], root_v * root_v)
    if n >= 2 * SCALE_BLOCK:  # (of few elements another code and scale may give the same values)
        whole = slice(0, n - n % SCALE_BLOCK)
        assert torch.equal(found1[0][whole], first[whole]) and torch.equal(found2[0][whole], second[whole])


@given(st.lists(st.floats(-(2.0**50), 2.0**50, width=32, allow_subnormal=False), min_size=1, max_size=600))
@settings(max_examples=25, deadline=None)
def test_moments_from_elsewhere_are_rounded_to_nearest(values: list[float]):
    m = torch.tensor(values)
    v = m * m
    codes1, scales1 = quantised(m, "exp_avg")
    codes2, scales2 = quantised(v, "exp_avg_sq")
    again = quantised(m, "exp_avg"), quantised(v, "exp_avg_sq")
    assert all(
        torch.equal(a, b)
        for pair, other in zip(again, ((codes1, scales1), (codes2, scales2)), strict=True)
        for a, b in zip(pair, other, strict=True)
    )
    read, root = decode_moments(codes1, scales1, codes2, scales2)
    for got, true, mantissa, most in ((read, m, 4, 124.0), (root, v.sqrt(), 5, 126.0)):
        largest = torch.zeros(-(-len(m) // SCALE_BLOCK) * SCALE_BLOCK)
        largest[: len(m)] = true.abs()
        largest = largest.view(-1, SCALE_BLOCK).amax(1).repeat_interleave(SCALE_BLOCK)[: len(m)]
        # Half a code's step; of sqrt(v), what is not zero keeps the smallest code, at worst that one away. A millionth
        # for fp32.
        step = torch.maximum(true.abs() * 2.0**-mantissa, largest * 2.0**-mantissa / most)
        slack = step / 2 * 1.001 if most == 124.0 else torch.maximum(step / 2 * 1.001, largest * 2.0**-mantissa / most)
        kept = largest >= 2.0**-99
        assert ((got - true).abs() <= slack)[kept].all()
    positive = (v.sqrt() > 0) & (root == 0)
    assert not positive[v.sqrt() >= 2.0**-99].any()
