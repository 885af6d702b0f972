"""Stated formats of optimizer states: one result wherever the bytes live,
in what order and in what pieces they are updated.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests.offload.conftest import MakeStack
from tests.offload.storage.format_cases import (
    BF16,
    LIMIT,
    PACKED,
    Embedded,
    Form,
    Odd,
    Vectors,
    assert_same_states,
    each_form,
    loss_of,
    optimizer_of,
    packed_form,
    place,
    stack_of,
    train,
)
from vblackwell.errors import ConfigurationError, InsufficientMemory, Unsupported
from vblackwell.kernels.optimizer.adamw import AdamWStep
from vblackwell.kernels.optimizer.adamw8 import SCALE_BLOCK, adamw8_piece
from vblackwell.offload.api import enable_vgpu_stack_optimization, offload_of, release
from vblackwell.offload.engine import Offload
from vblackwell.offload.layout.groups import PACKED_MOMENTS, Formats
from vblackwell.offload.optimizer import VGPUAdamW
from vblackwell.offload.resident import Resident
from vblackwell.offload.state import ParameterState, export_state
from vblackwell.offload.storage.masters import round_from_fp32


@functools.cache
def resident_run(form: Form) -> tuple[list[tuple[float, ...]], dict[str, ParameterState]]:
    """What `train` sees in three steps of a resident model, and the states after them:
    of that form the same for every placement.
    """
    stack = stack_of(8 << 20)
    model = place(Odd(), form, "resident", lambda fast, host: stack)
    optimizer = optimizer_of(model)
    seen = train(model, optimizer, range(3))
    assert isinstance(offload_of(model), Resident)
    states = {name: {key: part.clone() for key, part in its.items()} for name, its in export_state(model, optimizer)}
    release(model)
    stack.close()
    return seen, states


@pytest.mark.each_value
@pytest.mark.parametrize("where", ["tight", "roomy", "disk", "kept"])
@each_form
def test_streamed_is_resident(form: Form, where: str, make_stack: MakeStack):
    expected, states = resident_run(form)
    model = place(Odd(), form, where, make_stack)
    optimizer = optimizer_of(model)
    assert train(model, optimizer, range(3)) == expected
    assert isinstance(offload_of(model), Offload)
    assert_same_states(dict(export_state(model, optimizer)), states)
    clipped = [norm > LIMIT for *_, norm in expected]
    assert any(clipped) and not all(clipped), expected  # both branches
    if where == "disk":
        kinds = offload_of(model).summary()["bytes_by_level"]
        assert sum(kinds[kind][2] for kind in kinds) > 0, kinds


@pytest.mark.each_value
@packed_form
@pytest.mark.parametrize(
    "more", [{"update_in_backward": False}, {}, {"accumulation_steps": 2}, {"undo": False}], ids=str
)
def test_when_an_update_runs_changes_nothing(form: Form, more: dict[str, Any], make_stack: MakeStack):
    accumulation = more.get("accumulation_steps", 1)
    limit = (
        None if "undo" in more else LIMIT if accumulation == 1 else 2.5
    )  # a final update cannot be clipped afterwards
    found = []
    for where in ("resident", "tight"):
        model = place(Odd(), form, where, make_stack)
        optimizer = optimizer_of(model, **({"max_grad_norm": limit} | more))
        engine = offload_of(model)
        if isinstance(engine, Offload):
            engine.step_control.follow_clipping = False  # every step that clips is speculated upon first, and redone
        seen = train(model, optimizer, range(3), accumulation)
        found.append((seen, dict(export_state(model, optimizer))))
        if isinstance(engine, Offload) and more == {}:
            assert engine.summary()["undo_bytes"] > 0, "nothing was speculated upon"
    if limit is not None:
        clipped = [norm > limit for *_, norm in found[0][0]]
        assert any(clipped) and not all(clipped), found[0][0]
    for seen, states in found[1:]:
        assert seen == found[0][0]
        assert_same_states(states, found[0][1])


class Plain:
    """The same training written plainly: a parameter at a time, each in separate tensors,
    with the kernel that is tested elsewhere.
    """

    def __init__(self, model: nn.Module, form: Form) -> None:
        self.model, self.formats = model, Formats(form.states, form.masters)
        self.states: dict[str, list[torch.Tensor]] = {}
        self.remainders: dict[str, torch.Tensor | None] = {}
        for name, param in model.named_parameters():
            wide, n = param.data.reshape(-1), param.numel()
            blocks = -(-n // SCALE_BLOCK)
            self.states[name] = [torch.zeros(n, dtype=torch.uint8), torch.zeros(blocks)] * 2
            self.states[name] = [tensor.clone() for tensor in self.states[name]]
            self.remainders[name] = None
            if form.dtype is not None:
                narrow = torch.empty(n, dtype=form.dtype)
                round_from_fp32(wide, narrow)
                if form.masters == "exact":
                    high = narrow.view(torch.int16).int() << 16
                    self.remainders[name] = (wide.view(torch.int32) - high).to(torch.int16)
                param.data = narrow.view(param.shape)

    def step(self, count: int, limit: float) -> float:
        grads = {name: param.grad.float().reshape(-1) for name, param in self.model.named_parameters()}
        norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(grad) for grad in grads.values()]))
        factor = torch.clamp(limit / (norm + 1e-6), max=1.0)
        for name, param in self.model.named_parameters():
            adamw8_piece(
                param.data.view(-1),
                self.remainders[name],
                *self.states[name],
                grads[name],
                AdamWStep(3e-3, 0.9, 0.95, 1e-8, 0.01, count),
                factor=factor,
                seed=self.formats.seed_of(name),
                offset=0,
            )
            param.grad = None
        return norm.item()


@packed_form
def test_resident_is_the_kernel_on_each_parameter(form: Form, make_stack: MakeStack):
    plain = Plain(Odd(), form)
    model = place(Odd(), form, "resident", make_stack)
    optimizer = optimizer_of(model)
    for step in range(1, 4):
        ((loss, norm),) = train(model, optimizer, range(step, step + 1))
        expected = loss_of(plain.model, 100 * step)
        expected.backward()
        assert loss == expected.item() and norm == plain.step(step, LIMIT)
    for name, param in model.named_parameters():
        assert torch.equal(param, plain.model.get_parameter(name)), name
        state = optimizer.state[param]
        assert all(torch.equal(state[kind], its) for kind, its in zip(PACKED_MOMENTS, plain.states[name], strict=True))


# -- sizes -------------------------------------------------------------------------------------------------------------


# Around scale blocks, pieces' cuts and the ring's buffers, and anything in between.
SIZES = st.sampled_from([1, 255, 256, 257, 4095, 4096, 4097, 8191, 8192, 8193, 12289]) | st.integers(1, 20_000)


@given(st.lists(st.lists(SIZES, min_size=1, max_size=4), min_size=1, max_size=3), st.sampled_from(PACKED))
@settings(max_examples=5, deadline=None)
def test_any_sizes(sizes: list[list[int]], form: Form):
    found = []
    for where in ("resident", "streamed"):
        model = Vectors(sizes)
        group = max(sum(-(-size // 256) * 256 for size in row) for row in sizes) * (2 if form.dtype else 4)
        # The ring is a quarter of level 0 and must hold 92 KiB; the rest takes weights and gradients of two groups.
        stack = stack_of(8 << 20 if where == "resident" else max(380 << 10, 6 * group))
        try:
            enable_vgpu_stack_optimization(model, stack, placement=where, **form.given)
            optimizer = VGPUAdamW(model.parameters(), lr=1e-2, max_grad_norm=100.0, update_in_backward=True)
            for step in range(3):
                model(torch.tensor(0.5 * step)).backward()
                optimizer.step()
                optimizer.zero_grad()
            found.append((optimizer.grad_norm, dict(export_state(model, optimizer))))
        finally:
            release(model)
            stack.close()
    assert found[0][0] == found[1][0]
    assert_same_states(found[1][1], found[0][1])


def test_bytes_a_parameter(make_stack: MakeStack):
    """From the stack's books, where no parameter is padded and gradients have no range:
    docs/numerics.md has the sums.
    """
    expected = {
        ("8bit", "exact", BF16): 6 + 8 / 256,
        ("8bit", "stochastic", BF16): 4 + 8 / 256,
        ("8bit", "exact", None): 6 + 8 / 256,
    }
    for key, each in expected.items():
        model = Vectors([[1 << 16, 1 << 15], [3 << 14]])
        total = sum(param.numel() for param in model.parameters())
        stack = make_stack(4 << 20)
        enable_vgpu_stack_optimization(model, stack, placement="streamed", **Form(*key).given)
        optimizer = VGPUAdamW(model.parameters(), update_in_backward=True, undo=False)
        engine = offload_of(model)
        assert isinstance(engine, Offload)
        for step in range(2):
            model(torch.tensor(0.5 * step)).backward()
            optimizer.step()
            optimizer.zero_grad()
            engine.finish()
        kinds = engine.summary()["bytes_by_level"]
        assert sum(map(sum, kinds.values())) == each * total
        level, ranges = stack.levels[1], len(kinds) * len(engine.groups)
        assert level.used_bytes < each * total + ranges * level.alignment, "nothing else is kept"
        assert engine.summary()["formats"] == {"states": "8bit", "masters": key[1]}
        assert engine.summary()["updated_on_level0"] == [group.name for group in engine.groups]


def test_a_resident_model_takes_so_many_bytes(make_stack: MakeStack):
    for form in PACKED:
        stack = make_stack(8 << 20)
        model = Vectors([[1 << 16, 1 << 15], [3 << 14]])
        enable_vgpu_stack_optimization(model, stack, placement="resident", **form.given)
        optimizer = optimizer_of(model)
        total = sum(param.numel() for param in model.parameters())
        each = {"stochastic": 4, "exact": 6}[form.masters] + 8 / 256
        level, kinds = stack.levels[0], offload_of(model).summary()["bytes_by_level"]
        assert sum(map(sum, kinds.values())) == each * total
        assert level.used_bytes < each * total + 2 * len(kinds) * level.alignment, "nothing else is kept"
        assert all(set(state) == {"step", *PACKED_MOMENTS} for state in optimizer.state.values())


# -- random bits -------------------------------------------------------------------------------------------------------


def test_random_bits_depend_on_seed_and_name_alone(make_stack: MakeStack):
    form = Form("8bit", "stochastic", BF16)

    def after(seed: int, names: list[str]) -> list[torch.Tensor]:
        model = nn.ModuleDict({name: nn.Linear(300, 300, bias=False) for name in names})
        with torch.no_grad():
            for param in model.parameters():
                param.copy_(torch.linspace(0.1, 1, 90_000).view(300, 300))
        enable_vgpu_stack_optimization(
            model, make_stack(4 << 20), placement="resident", rounding_seed=seed, **form.given
        )
        optimizer = VGPUAdamW(model.parameters(), lr=1e-4, weight_decay=0.0)
        for param in model.parameters():
            param.grad = torch.ones_like(param, dtype=param.grad_dtype)
        optimizer.step()
        found = [param.detach().clone() for param in model.parameters()]
        release(model)
        return found

    one, two = after(0, ["a", "b"])
    assert torch.equal(one, after(0, ["a"])[0]) and torch.equal(two, after(0, ["c", "b"])[1])
    assert not torch.equal(one, two) and not torch.equal(one, after(1, ["a"])[0])
    # A step of 1e-4 is a tenth of a bf16's: rounded to nearest nothing would move; this moves by that in the mean.
    moved = (torch.linspace(0.1, 1, 90_000) - one.float().view(-1)).mean()
    assert (
        abs(float(moved) - 1e-4) < 1e-5
    )  # 90,000 roundings of a spread of 1e-3: six standard deviations of the mean are 2e-5 at most


# -- what else is in a model -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "form",
    [pytest.param(form, marks=() if form.masters == "stochastic" else pytest.mark.slow) for form in PACKED],
    ids=str,
)
def test_sliced_leaves_are_updated_on_level_0_too(form: Form, make_stack: MakeStack):
    found = []
    for where in ("resident", "streamed"):
        model = Embedded()
        enable_vgpu_stack_optimization(
            model, make_stack(16 << 20 if where == "resident" else 800 << 10), placement=where, **form.given
        )
        optimizer = VGPUAdamW(model.parameters(), lr=1e-2, max_grad_norm=0.05, update_in_backward=True)
        norms = []
        for step in range(3):
            tokens = torch.randint(5001, (2, 300), generator=torch.Generator().manual_seed(step))
            model(tokens).backward()
            optimizer.step()
            optimizer.zero_grad()
            norms.append(optimizer.grad_norm)
        summary = offload_of(model).summary()
        assert summary["sliced"] == (["embedding"] if where == "streamed" else [])
        if where == "streamed":
            assert summary["updated_on_level0"][0] == "embedding" and "master" not in summary["bytes_by_level"]
        found.append((norms, dict(export_state(model, optimizer))))
    assert found[0][0] == found[1][0]
    assert_same_states(found[1][1], found[0][1])


def test_a_sliced_leaf_that_would_fit_without_its_gradient_is_not_loaded_whole(make_stack: MakeStack):
    """Writes to a sliced leaf reach the storage: a copy on level 0 would be what the next update begins with."""
    model = Embedded(2500)
    enable_vgpu_stack_optimization(model, make_stack(940 << 10), placement="streamed", **PACKED[0].given)
    engine = offload_of(model)
    assert isinstance(engine, Offload) and engine.summary()["sliced"] == ["embedding"]
    engine.level0.at_once = (
        False  # as on a GPU: a late update is queued when somebody needs it, and level 0 is empty by then
    )
    optimizer = VGPUAdamW(model.parameters(), lr=1e-2, update_in_backward=True)
    model(torch.arange(300)[None]).backward()
    optimizer.step()
    optimizer.zero_grad()
    while engine.gradients.end_oldest():
        pass
    engine.step_control.wait_for_updates(engine.groups[0])
    assert not engine.weights.is_loaded(engine.groups[0])


@pytest.mark.each_value
@packed_form
@pytest.mark.parametrize("placement", ["resident", "streamed"])
def test_frozen_parts_stay_and_are_refused_when_thawed(form: Form, placement: str, make_stack: MakeStack):
    model = Odd()
    model.layers[0].requires_grad_(False)  # a whole group
    model.layers[1][0].weight.requires_grad_(False)  # a part of one
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    enable_vgpu_stack_optimization(model, make_stack(8 << 20), placement=placement, **form.given)
    optimizer = VGPUAdamW([param for param in model.parameters() if param.requires_grad], lr=1e-2)
    train(model, optimizer, range(2))
    exported = {name: state["weight"] for name, state in export_state(model)}
    for name, value in before.items():
        wanted = value if form.dtype is None or form.masters == "exact" and "layers.0" not in name else value.to(BF16)
        assert torch.equal(exported[name], wanted.to(exported[name].dtype)) == (
            name.startswith("layers.0") or name == "layers.1.0.weight"
        ), name
    thawed = list(model.layers[0].requires_grad_(True).parameters())
    if placement == "streamed" or (form.dtype is not None and form.masters == "exact"):
        with pytest.raises(Unsupported, match="frozen when it was offloaded.*release and enable again"):
            optimizer.add_param_group({"params": thawed})


def test_a_model_in_use_reads_what_is_kept(make_stack: MakeStack):
    """state_dict, in-place writes and load_state_dict of weights that have no master."""
    model = place(Odd(), Form("8bit", "stochastic", BF16), "tight", make_stack)
    optimizer = optimizer_of(model)
    train(model, optimizer, range(2))
    exported = {name: state["weight"] for name, state in export_state(model)}
    assert all(torch.equal(value.float(), exported[name]) for name, value in model.state_dict().items())
    with torch.no_grad():
        model.head.weight.mul_(2)
    assert torch.equal(dict(export_state(model))["head.weight"]["weight"], 2 * exported["head.weight"])
    model.load_state_dict({name: value + 1e-4 for name, value in exported.items()})
    for name, state in export_state(model):
        assert torch.equal(state["weight"], (exported[name] + 1e-4).to(BF16).float())


# -- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        ({"states": "4bit"}, ConfigurationError, "'4bit' is none of fp32, 8bit"),
        ({"masters": "none"}, ConfigurationError, "'none' is none of exact, stochastic"),
        ({"masters": "stochastic", "compute_dtype": BF16}, ConfigurationError, "goes with states='8bit' alone"),
        ({"states": "8bit", "update": "host"}, ConfigurationError, "update='host'.*level 0 alone"),
        ({"states": "8bit", "update": 0.5}, ConfigurationError, "update=0.5.*level 0 alone"),
        ({"states": "8bit", "compute_dtype": torch.float16}, Unsupported, "bf16 or fp32.*has float16"),
        (
            {"states": "8bit", "masters": "stochastic"},
            Unsupported,
            "compute in bf16 alone.*has float32.*compute_dtype=torch.bfloat16",
        ),
    ],
)
@pytest.mark.parametrize("placement", ["resident", "streamed"])
def test_what_cannot_be_kept_is_refused(
    given: dict[str, Any], error: type[Exception], text: str, placement: str, make_stack: MakeStack
):
    model, stack = Odd(), make_stack(8 << 20)
    with pytest.raises(error, match=text):
        enable_vgpu_stack_optimization(model, stack, placement=placement, **given)
    assert offload_of(model) is None and all(level.used_bytes == 0 for level in stack.levels)
    loss_of(model, 0).backward()  # as it was


def test_mixed_types_in_one_group_are_refused(make_stack: MakeStack):
    model = Odd()
    model.layers[2][0].to(BF16)
    with pytest.raises(Unsupported, match=r"'layers\.2' has bfloat16, float32"):
        enable_vgpu_stack_optimization(model, make_stack(8 << 20), placement="streamed", states="8bit")
    enable_vgpu_stack_optimization(model, make_stack(8 << 20), placement="streamed", states="8bit", compute_dtype=BF16)


def test_a_level_0_without_room_for_the_ring_is_refused(make_stack: MakeStack):
    with pytest.raises(InsufficientMemory, match="updates on level 0 pass through 92.0 KiB"):
        place(Odd(), Form("8bit", "exact", BF16), "tight", lambda fast, host: make_stack(360 << 10, host))
