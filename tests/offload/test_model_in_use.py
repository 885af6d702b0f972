"""An offloaded model behaves like a module:
it is read, copied, saved, frozen, branched, and never shows stale bytes.
"""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures.thread import _global_shutdown_lock
from contextlib import AbstractContextManager, ExitStack

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.offload.conftest import MakeStack
from tests.offload.models import CASES, build
from tests.waiting import wait_until
from vblackwell.errors import ConfigurationError, InsufficientMemory, KeyClash, StaleTensor, StepAbandoned, Unsupported
from vblackwell.memory.cache.stack import VGPUStack
from vblackwell.nn.decoder.checkpoint import second_pass_under
from vblackwell.offload.api import VGPUStackLinear, enable_vgpu_stack_optimization, offload_of, release
from vblackwell.offload.engine import Offload
from vblackwell.offload.layout.groups import Slot, find_groups
from vblackwell.offload.optimizer import VGPUAdamW, clip_grad_norm_
from vblackwell.offload.state import export_state

MLP, DECODER, GPT2, T5, VIT = CASES
LEVEL0 = 128 << 10


@pytest.fixture
def stack(make_stack: MakeStack) -> VGPUStack:
    return make_stack(LEVEL0)


def offloaded(stack: VGPUStack, model: nn.Module, name: str = "model") -> nn.Module:
    return enable_vgpu_stack_optimization(model, stack, name, placement="streamed")


def one_step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int = 0) -> None:
    MLP.loss(model, seed).backward()
    optimizer.step()
    optimizer.zero_grad()


def test_metadata_and_reads(stack: VGPUStack):
    plain = build(MLP)
    model = offloaded(stack, copy.deepcopy(plain))
    for (name, param), reference in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert (param.shape, param.dtype, param.device) == (reference.shape, reference.dtype, reference.device)
        assert isinstance(param, nn.Parameter) and param.requires_grad and param.is_leaf and param.grad is None
        assert torch.equal(param, reference), name
        assert (param * 2).sum().item() == (reference * 2).sum().item()
        assert repr(param) == repr(reference)
        assert torch.equal(param.data, reference) and param.tolist() == reference.tolist()


def test_reads_after_a_step_wait_for_it(stack: VGPUStack):
    plain = build(MLP)
    model = offloaded(stack, copy.deepcopy(plain))
    ours, theirs = VGPUAdamW(model.parameters()), torch.optim.AdamW(plain.parameters(), fused=True)
    one_step(model, ours)
    one_step(plain, theirs)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


def test_what_was_read_stays_a_snapshot_that_refuses_writes(stack: VGPUStack):
    model = offloaded(stack, build(MLP))
    optimizer = VGPUAdamW(model.parameters())
    view = model.head.weight.detach()
    before = view.clone()
    one_step(model, optimizer)
    assert torch.equal(view, before)
    for write in (
        lambda: view.mul_(2),
        lambda: view[0].zero_(),
        lambda: view.__setitem__(0, 1.0),
        lambda: model.head.weight.data.add_(1),
    ):
        with pytest.raises(StaleTensor, match="no_grad"):
            write()


def test_in_place_writes_reach_the_storage(stack: VGPUStack):
    model = offloaded(stack, build(MLP))
    with torch.no_grad():
        model.head.weight.fill_(0.5)
        model.head.bias[2] = 3.0
        nn.init.ones_(model.layers[0][0].weight)
    offload_of(model).weights.drop_all()
    assert bool((model.head.weight == 0.5).all()) and model.head.bias[2].item() == 3.0
    assert bool((model.layers[0][0].weight == 1).all())


def test_state_dict_round_trip(stack: VGPUStack):
    for case in (MLP, GPT2, T5):
        plain = build(case)
        model = offloaded(stack, copy.deepcopy(plain), case.name)
        state = model.state_dict()
        expected = plain.state_dict()
        assert list(state) == list(expected)
        assert all(torch.equal(state[key], expected[key]) for key in expected)
        other = build(case, seed=5)
        model.load_state_dict(other.state_dict())
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
        with pytest.raises(Unsupported, match="assign"):
            model.load_state_dict(expected, assign=True)
        release(model)
    tied = build(GPT2)
    state = offloaded(stack, tied).state_dict()
    assert state["lm_head.weight"].data_ptr() == state["transformer.wte.weight"].data_ptr()


def test_a_submodules_state_dict_shares_nothing(stack: VGPUStack):
    plain = build(MLP)
    model = offloaded(stack, copy.deepcopy(plain))

    def fail(*_: object) -> None:
        raise OSError("the disk is full")

    for part, expected in ((model.layers[0], plain.layers[0]), (model.layers, plain.layers), (model.head, plain.head)):
        handle = model.head._register_state_dict_hook(fail)
        with pytest.raises(OSError, match="full"):  # nor is what it had read given out
            model.state_dict()
        handle.remove()
        for value in part.state_dict().values():
            with pytest.raises(StaleTensor):
                value.mul_(2)
            assert type(value.shape) is type(value.size()) is torch.Size
        assert all(torch.equal(value, expected.state_dict()[name]) for name, value in part.state_dict().items())


def test_a_write_after_a_state_dict_that_keeps_parameters_is_not_lost(stack: VGPUStack):
    model = offloaded(stack, build(MLP))
    for part in (model.head, model.layers, model):
        kept = part.state_dict(keep_vars=True)
        assert all(any(value is param for param in part.parameters()) for value in kept.values())
        for param in part.parameters():
            with torch.no_grad(), pytest.raises(StaleTensor):
                param.detach().zero_()


def test_a_state_dict_looks_at_each_parameter_as_often_in_any_model(stack: VGPUStack, monkeypatch: pytest.MonkeyPatch):
    samples: list[Slot] = []
    original = Offload.slots

    def slots(engine: Offload) -> Iterator[Slot]:
        for slot in original(engine):
            samples.append(slot)
            yield slot

    monkeypatch.setattr(Offload, "slots", slots)
    per_layer = []
    for num_layers in (4, 12):
        model = offloaded(stack, nn.Sequential(*(nn.Linear(2, 2) for _ in range(num_layers))))
        samples.clear()
        model.state_dict()
        per_layer.append(len(samples) / num_layers)
        release(model)
    assert per_layer[0] == per_layer[1]


def test_deepcopy_is_plain_and_independent(stack: VGPUStack):
    plain = build(GPT2)
    model = offloaded(stack, copy.deepcopy(plain))
    copied = copy.deepcopy(model)
    release(model)
    assert offload_of(copied) is None
    assert copied.lm_head.weight is copied.transformer.wte.weight
    assert GPT2.loss(copied.eval(), 3).item() == GPT2.loss(plain.eval(), 3).item()


def test_release_gives_a_plain_module_and_training_goes_on(stack: VGPUStack):
    plain = build(MLP)
    model = offloaded(stack, copy.deepcopy(plain))
    ours, theirs = VGPUAdamW(model.parameters(), max_grad_norm=0.5), torch.optim.AdamW(plain.parameters(), fused=True)
    for step in range(6):
        if step == 3:
            release(model)
            assert offload_of(model) is None and type(model.head.weight) is nn.Parameter
        one_step(model, ours, step)
        MLP.loss(plain, step).backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        theirs.step()
        theirs.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
    assert all(level.used_bytes == 0 for level in stack.levels)


def test_to_where_it_is_does_nothing_and_elsewhere_is_refused(stack: VGPUStack):
    model = offloaded(stack, build(MLP))
    model.to("cpu")
    model.float()
    with pytest.raises(Unsupported, match="release"):
        model.half()
    with pytest.raises(Unsupported, match="release"):
        model.head.weight.data = torch.zeros(7, 48)


# -- gradients that left -----------------------------------------------------------------------------------------------


def test_torch_utilities_that_read_grad_say_so(stack: VGPUStack):
    model = offloaded(stack, build(MLP))
    optimizer = VGPUAdamW(model.parameters())
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # nothing to clip yet: as in PyTorch
    MLP.loss(model, 0).backward()
    for other in (
        lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, norm_type=1.0),
        lambda: torch.nn.utils.clip_grad_value_(model.parameters(), 1.0),
    ):
        with pytest.raises(Unsupported, match="global 2-norm"):
            other()
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.zeros(()))
    with pytest.raises(Unsupported, match="loss_scale"):
        scaler.unscale_(optimizer)
    with pytest.raises(Unsupported, match="VGPUAdamW"):
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    with pytest.raises(Unsupported, match="only None"):
        model.head.weight.grad = torch.zeros(7, 48)


def norm_loop(model: nn.Module, spelling: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
    """What people write to log norms, and to clip by hand."""
    norms = [spelling(param.grad) for param in model.parameters() if param.grad is not None]
    for param in model.parameters():
        if param.grad is not None:
            param.grad.data.mul_(0.5)
            param.grad *= 0.25
    return norms


@pytest.mark.parametrize(
    "spelling",
    [
        lambda grad: grad.norm(),
        lambda grad: grad.data.norm(2),
        lambda grad: grad.detach().norm(p=2.0),
        lambda grad: torch.norm(grad),
        lambda grad: torch.linalg.vector_norm(grad, 2),
    ],
)
def test_a_users_own_norm_loop_sees_the_gradients(stack: VGPUStack, spelling: Callable[[torch.Tensor], torch.Tensor]):
    plain = build(MLP)
    model = offloaded(stack, copy.deepcopy(plain))
    ours, theirs = VGPUAdamW(model.parameters()), torch.optim.AdamW(plain.parameters(), fused=True)
    assert norm_loop(model, spelling) == []
    for module in (model, plain):
        MLP.loss(module, 0).backward()
    grads = [param.grad for param in model.parameters()]
    assert all(torch.equal(grad.cpu(), param.grad) for grad, param in zip(grads, plain.parameters(), strict=True))
    assert all(a.shape == b.shape and a.dtype == b.dtype for a, b in zip(grads, plain.parameters(), strict=True))
    assert norm_loop(model, spelling) == norm_loop(plain, spelling)
    for optimizer in (ours, theirs):
        optimizer.step()
        optimizer.zero_grad()
    assert all(param.grad is None for param in model.parameters())
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


def test_what_a_departed_gradient_cannot_do_says_what_to_do(stack: VGPUStack):
    model = offloaded(stack, build(MLP))
    MLP.loss(model, 0).backward()
    grad = model.head.weight.grad
    assert "'head.weight'" in repr(grad)
    for use in (
        lambda: grad.abs().max(),
        lambda: grad.norm(1),
        lambda: grad.div_(2),
        lambda: torch.zeros(7, 48).add_(grad),
        lambda: torch._foreach_mul_([grad], 2.0),
        lambda: torch.optim.AdamW(model.parameters()).step(),
    ):
        with pytest.raises(Unsupported, match=r"(head|layers).*cpu\(\).*VGPUAdamW"):
            use()


def test_a_gradient_that_was_cleared_is_refused(stack: VGPUStack):
    model = offloaded(stack, build(MLP))
    optimizer = VGPUAdamW(model.parameters())
    for clear in (optimizer.zero_grad, lambda: release(model)):
        MLP.loss(model, 0).backward()
        grad = model.head.weight.grad
        assert grad is not None and grad.norm() > 0
        clear()
        for use in (grad.norm, grad.cpu, grad.zero_, lambda grad=grad: grad.mul_(2.0)):
            with pytest.raises(Unsupported, match="'head.weight' was cleared, or its model released"):
                use()
        assert grad.shape == (7, 48)


@pytest.mark.parametrize("clip", [clip_grad_norm_, torch.nn.utils.clip_grad_norm_])
def test_our_clip_is_torchs_and_so_is_torchs(clip, stack: VGPUStack):
    plain = build(MLP)
    model = offloaded(stack, copy.deepcopy(plain))
    for update_in_backward in (False, True):
        ours = VGPUAdamW(model.parameters(), update_in_backward=update_in_backward)
        theirs = torch.optim.AdamW(plain.parameters(), fused=True)
        for step, limit in enumerate((0.3, 0.3, 1e3, torch.inf, 0.3)):
            MLP.loss(model, step).backward()
            MLP.loss(plain, step).backward()
            norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), limit)
            assert torch.equal(clip(model.parameters(), limit), norm) and norm > 0.3
            for optimizer in (ours, theirs):
                optimizer.step()
                optimizer.zero_grad()
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
        release(model)
        plain.load_state_dict(model.state_dict())
        offloaded(stack, model)


@pytest.mark.parametrize("transposed", [False, True])
def test_our_clip_takes_one_norm_of_resident_and_streamed_parameters(transposed: bool, make_stack: MakeStack):
    """However the gradient lies in memory."""
    seen = []
    for placement in ("streamed", "resident"):
        model = build(MLP)
        stack = make_stack(4 << 20)
        enable_vgpu_stack_optimization(model, stack, placement=placement, compute_dtype=torch.bfloat16)
        optimizer = VGPUAdamW(model.parameters())
        norms = []
        for step in range(3):
            with torch.autocast("cpu", torch.bfloat16):
                MLP.loss(model, step).backward()
            for param in model.parameters():
                if transposed and placement == "resident" and param.grad is not None and param.dim() == 2:
                    param.grad = param.grad.t().contiguous().t()
            norms.append(clip_grad_norm_(model.parameters(), 0.05).item())
            optimizer.step()
            optimizer.zero_grad()
        seen.append((norms, dict(export_state(model))))
        release(model)
    (norms, state), (resident_norms, resident_state) = seen
    assert norms == resident_norms and min(norms) > 0.05
    assert all(torch.equal(state[name]["weight"], resident_state[name]["weight"]) for name in state)


def test_torchs_clip_is_ours_for_narrow_weights(stack: VGPUStack):
    models = [
        enable_vgpu_stack_optimization(build(MLP), stack, name, placement="streamed", compute_dtype=torch.bfloat16)
        for name in ("ours", "torchs")
    ]
    optimizers = [VGPUAdamW(model.parameters()) for model in models]
    for step in range(2):
        norms = []
        for model, clip in zip(models, (clip_grad_norm_, torch.nn.utils.clip_grad_norm_), strict=True):
            with torch.autocast("cpu", torch.bfloat16):
                MLP.loss(model, step).backward()
            norms.append(clip(model.parameters(), 0.05))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert torch.equal(*norms) and norms[0] > 0.05 and norms[0].dtype == torch.float32
    (ours, torchs) = (dict(export_state(model)) for model in models)
    assert all(torch.equal(ours[name]["weight"], torchs[name]["weight"]) for name in ours)


def test_torchs_clip_of_a_final_update_is_refused(stack: VGPUStack):
    model = offloaded(stack, build(MLP))
    VGPUAdamW(model.parameters(), update_in_backward=True, undo=False)
    MLP.loss(model, 0).backward()
    with pytest.raises(StepAbandoned):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def test_module_zero_grad_forgets(stack: VGPUStack):
    plain = build(MLP)
    model = offloaded(stack, copy.deepcopy(plain))
    ours, theirs = VGPUAdamW(model.parameters()), torch.optim.AdamW(plain.parameters(), fused=True)
    for module, optimizer in ((model, ours), (plain, theirs)):
        MLP.loss(module, 0).backward()
        module.zero_grad()
        MLP.loss(module, 1).backward()
        optimizer.step()
        MLP.loss(module, 2).backward()
        module.zero_grad(set_to_none=False)  # zeros: the next step decays weights and moments
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


def test_sparse_gradients_are_refused(stack: VGPUStack):
    model = offloaded(stack, nn.Embedding(10, 4, sparse=True))
    with pytest.raises(Unsupported, match="sparse"):
        model(torch.tensor([1])).sum().backward()


@pytest.mark.each_value
@pytest.mark.parametrize("placement", ["streamed", "resident"])
@pytest.mark.parametrize("compute_dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("update_in_backward", [False, True])
def test_a_second_optimizer_begins_anew_and_the_first_says_so(
    placement: str, compute_dtype: torch.dtype | None, update_in_backward: bool, make_stack: MakeStack
):
    """A notebook's cell that runs again."""
    level0 = {"streamed": LEVEL0, "resident": 4 << 20}[placement]
    states = []
    for again in (True, False):  # a released and enabled model has fresh states for sure
        model = build(MLP)
        options = {"placement": placement, "compute_dtype": compute_dtype}
        enable_vgpu_stack_optimization(model, make_stack(level0), **options)
        first = VGPUAdamW(model.parameters(), update_in_backward=update_in_backward)
        with torch.autocast("cpu", torch.bfloat16, enabled=compute_dtype is not None):
            for seed in range(2):
                one_step(model, first, seed)
            MLP.loss(model, 9).backward()  # given up with the first optimizer, or its gradients are
            model.zero_grad()
            if not again:
                release(model)
                enable_vgpu_stack_optimization(model, make_stack(level0), **options)
            second = VGPUAdamW([{"params": model.layers.parameters()}, {"params": model.head.parameters()}])
            for seed in range(3, 5):
                one_step(model, second, seed)
        if again:
            for use in (first.step, first.zero_grad, first.state_dict):
                with pytest.raises(Unsupported, match="replaced"):
                    use()
            with pytest.raises(Unsupported, match="replaced"):
                first.load_state_dict(second.state_dict())
        states.append(dict(export_state(model, second)))
        release(model)
    for name, state in states[0].items():
        assert state.keys() == states[1][name].keys() and state["step"] == 2
        assert all(torch.equal(value, states[1][name][key]) for key, value in state.items())


@pytest.mark.each_value
@pytest.mark.parametrize("placement", ["streamed", "resident"])
@pytest.mark.parametrize("bad", [{"betas": (1.5, 0.9)}, {"eps": -1.0}, {"weight_decay": "x"}, {"lr": -1.0}])
def test_an_optimizer_that_cannot_be_made_replaces_none(placement: str, bad: dict[str, object], make_stack: MakeStack):
    model = build(MLP)
    enable_vgpu_stack_optimization(model, make_stack(4 << 20), placement=placement)
    first = VGPUAdamW(model.parameters())
    one_step(model, first)
    before = dict(export_state(model, first))
    with pytest.raises((ValueError, TypeError)):
        VGPUAdamW(model.parameters(), **bad)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="duplicate|more than one"):
        VGPUAdamW([{"params": list(model.parameters())}, {"params": list(model.head.parameters())}])
    after = dict(export_state(model, first))
    assert all(torch.equal(state["exp_avg"], after[name]["exp_avg"]) for name, state in before.items())
    one_step(model, first)


def test_an_optimizer_of_two_models_is_replaced_whole(make_stack: MakeStack):
    stack = make_stack(4 << 20)
    one, other = (offloaded(stack, build(MLP), name) for name in ("one", "other"))
    both = [*one.parameters(), *other.parameters()]
    first = VGPUAdamW(both)
    for part in (one, other):
        with pytest.raises(Unsupported, match="some of these parameters and others"):
            VGPUAdamW(part.parameters())
        one_step(part, first)
    second = VGPUAdamW(both)
    with pytest.raises(Unsupported, match="replaced"):
        first.zero_grad()
    one_step(one, second)


# -- deviations --------------------------------------------------------------------------------------------------------


class Wayward(nn.Module):
    """Branches, calls a layer twice, reads parameters without their module's forward, has one that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.scale = nn.Parameter(torch.ones(16))
        self.unused = nn.Linear(16, 16)
        self.norm = nn.BatchNorm1d(16)

    def forward(self, x: torch.Tensor, branch: int) -> torch.Tensor:
        for layer in self.layers[branch:]:
            x = torch.tanh(layer(x))
        x = self.layers[0](x) @ self.layers[1].weight  # a weight of a layer that may not have run
        x = nn.functional.layer_norm(x, (16,), self.scale)
        x = x + self.attention(x[None], x[None], x[None], need_weights=False)[0][0]
        return (self.norm(x) * self.layers[2].bias).square().mean() + self.layers[3].weight.abs().mean()


@pytest.mark.parametrize("update_in_backward", [False, True])
def test_deviations_are_served_and_exact(stack: VGPUStack, update_in_backward: bool):
    torch.manual_seed(0)
    plain = Wayward()
    small = 12 << 10  # level 0 must not hold it all
    with VGPUStack(
        {"levels": [{"capacity_mb": small / (1 << 20), "device": "cpu"}, {"capacity_mb": 8, "device": "cpu"}]}
    ) as tight:
        model = offloaded(tight, copy.deepcopy(plain))
        ours = VGPUAdamW(model.parameters(), update_in_backward=update_in_backward, max_grad_norm=1e-2)
        theirs = torch.optim.AdamW(plain.parameters(), fused=True)
        x = torch.randn(8, 16)
        for step in range(12):
            branch = (0, 2, 1, 3)[step % 4]
            for module, optimizer in ((model, ours), (plain, theirs)):
                loss = module(x, branch)
                loss.backward()
                if module is plain:
                    torch.nn.utils.clip_grad_norm_(plain.parameters(), 1e-2)
                optimizer.step()
                optimizer.zero_grad()
                if module is model:
                    seen = loss.item()
            assert seen == loss.item()
        release(model)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(model.buffers(), plain.buffers(), strict=True))


def test_freezing_and_unfreezing(stack: VGPUStack):
    plain = build(MLP)
    model = offloaded(stack, copy.deepcopy(plain))
    ours, theirs = VGPUAdamW(model.parameters()), torch.optim.AdamW(plain.parameters(), fused=True)
    for step, frozen in enumerate((False, True, True, False)):
        for module, optimizer in ((model, ours), (plain, theirs)):
            module.layers[1].requires_grad_(not frozen)
            module.head.bias.requires_grad_(not frozen)
            one_step(module, optimizer, step)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


def test_a_backward_after_the_step_is_an_error_not_a_wrong_number(stack: VGPUStack):
    model = offloaded(stack, build(MLP))
    optimizer = VGPUAdamW(model.parameters())
    loss = MLP.loss(model, 0)
    loss.backward(retain_graph=True)
    optimizer.step()
    with pytest.raises(StaleTensor, match="optimizer step"):
        loss.backward()


def test_two_backwards_of_one_graph(stack: VGPUStack):
    plain = build(MLP)
    model = offloaded(stack, copy.deepcopy(plain))
    for module, optimizer in (
        (model, VGPUAdamW(model.parameters(), update_in_backward=True)),
        (plain, torch.optim.AdamW(plain.parameters(), fused=True)),
    ):
        loss = MLP.loss(module, 0)
        loss.backward(retain_graph=True)
        loss.backward()
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


@pytest.mark.parametrize("case", (GPT2, DECODER), ids=lambda case: case.name)
def test_a_checkpoints_second_pass_uses_each_layer_once(case, stack: VGPUStack, monkeypatch: pytest.MonkeyPatch):
    """From transformers 5.23 on a layer's hooks are outside its checkpoint: weights would come one by one."""
    model, used = offloaded(stack, build(case, True)), list[int]()
    engine = offload_of(model)
    assert isinstance(engine, Offload)
    using = engine.used.using

    def counted(slots: Iterable[Slot]) -> AbstractContextManager[None]:
        slots = list(slots)
        used.append(len(slots))
        return using(slots)

    monkeypatch.setattr(engine.used, "using", counted)
    loss = case.loss(model, 0)
    forward, layer = used.copy(), max(used)
    used.clear()
    loss.backward()
    # The head's weight is read again by its own backward; everything else is a layer's second pass.
    assert [count for count in used if count == layer] == [count for count in forward if count == layer]
    assert sum(count < layer for count in used) <= 1, used


def test_what_checkpoints_a_layer_is_put_back(stack: VGPUStack):
    """Whoever enters and leaves first, threads or forwards that were interrupted."""
    model = offloaded(stack, build(GPT2, True))
    layer = model.transformer.h[1]
    before = vars(layer)["_gradient_checkpointing_func"]
    with ExitStack() as first, ExitStack() as second:
        first.enter_context(second_pass_under(ExitStack, layer))
        second.enter_context(second_pass_under(ExitStack, layer))
        first.close()
        assert vars(layer)["_gradient_checkpointing_func"] is before
    assert vars(layer)["_gradient_checkpointing_func"] is before

    def interrupt(*args: object) -> None:
        raise KeyboardInterrupt

    handle = layer.mlp.register_forward_pre_hook(interrupt)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            GPT2.loss(model, 0)
    handle.remove()
    GPT2.loss(model, 0).backward()
    assert vars(layer)["_gradient_checkpointing_func"] is before


def test_reentrant_checkpointing(stack: VGPUStack):
    class Reentrant(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in [*self.layers, *self.layers]:  # each twice: gradients come in two parts
                x = torch.utils.checkpoint.checkpoint(layer, torch.tanh(x), use_reentrant=True)
            return x.square().mean()

    plain = Reentrant()
    with VGPUStack(
        {"levels": [{"capacity_mb": 6 / 1024, "device": "cpu"}, {"capacity_mb": 8, "device": "cpu"}]}
    ) as tight:
        model = offloaded(tight, copy.deepcopy(plain))
        x = torch.randn(4, 16, requires_grad=True)
        for module, optimizer in (
            (model, VGPUAdamW(model.parameters(), update_in_backward=True)),
            (plain, torch.optim.AdamW(plain.parameters(), fused=True)),
        ):
            for _ in range(3):
                module(x).backward()
                optimizer.step()
                optimizer.zero_grad()
        release(model)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


def test_two_parts_of_a_group_that_has_an_earlier_gradient(stack: VGPUStack):
    """The first part completes the group's gradient, of which the rest is from before, and the second is no new one."""

    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(16, 16, bias=False), nn.Linear(16, 16, bias=False)

        def forward(self, x: torch.Tensor, both: bool) -> torch.Tensor:
            x = torch.tanh(self.first(x))
            return self.second(x) if both else x

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Pair()])

        def forward(self, x: torch.Tensor, both: bool) -> torch.Tensor:
            x = torch.utils.checkpoint.checkpoint(self.layers[0], x, both, use_reentrant=True)
            return self.layers[0](x, both).square().mean()

    plain = Twice()
    model = offloaded(stack, copy.deepcopy(plain))
    x = torch.randn(4, 16, requires_grad=True)
    for module, optimizer in (
        (model, VGPUAdamW(model.parameters(), update_in_backward=True, accumulation_steps=2)),
        (plain, torch.optim.AdamW(plain.parameters(), fused=True)),
    ):
        for _ in range(2):
            module(x, True).backward()
            module(x, False).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


def test_inference_mode_does_not_spoil_training(stack: VGPUStack):
    plain = build(MLP)
    model = offloaded(stack, copy.deepcopy(plain))
    ours, theirs = VGPUAdamW(model.parameters()), torch.optim.AdamW(plain.parameters(), fused=True)
    for module, optimizer in ((model, ours), (plain, theirs)):
        with torch.inference_mode():
            MLP.loss(module, 9)
        one_step(module, optimizer)
        with torch.no_grad():
            MLP.loss(module, 8)
        one_step(module, optimizer, 1)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


def test_autocast_sees_updated_weights(stack: VGPUStack):
    plain = build(MLP)
    model = offloaded(stack, copy.deepcopy(plain))
    ours, theirs = VGPUAdamW(model.parameters()), torch.optim.AdamW(plain.parameters(), fused=True)
    with torch.autocast("cpu", torch.bfloat16):
        for module, optimizer in ((model, ours), (plain, theirs)):
            for step in range(3):
                # The plain run must not use torch's cache across steps either.
                with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
                    loss = MLP.loss(module, step)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


class UsedAgain(nn.Module):
    """Layers that are called three times, and a weight of two modules, as ALBERT and tied projections have them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))
        self.up, self.down = nn.Linear(32, 32, bias=False), nn.Linear(32, 32, bias=False)
        self.down.weight = self.up.weight

    def forward(self, x: torch.Tensor, recompute: bool) -> torch.Tensor:
        for layer in [*self.layers] * 3:
            x = torch.tanh(checkpoint(layer, x, use_reentrant=False) if recompute else layer(x))
        return self.down(torch.tanh(self.up(x))).float().square().mean()


@pytest.mark.each_value
@pytest.mark.parametrize("within", ["forward", "step", "model"])
@pytest.mark.parametrize("recompute", [False, True])
def test_a_weight_used_again_under_autocast_is_the_same_resident_and_streamed(
    recompute: bool, within: str, make_stack: MakeStack
):
    """Each use is cast anew, as plain PyTorch does without its cache, whatever the autocast context holds."""
    torch.manual_seed(0)
    plain, losses = UsedAgain(), {}
    for kind in ("plain", "resident", "streamed"):
        model = copy.deepcopy(plain)
        if kind == "plain":
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        else:
            stack = make_stack(1 << 20 if kind == "resident" else 13 << 10)
            enable_vgpu_stack_optimization(model, stack, placement=kind)
            optimizer = VGPUAdamW(model.parameters(), lr=1e-2)
        if within == "model":
            model.register_forward_pre_hook(lambda module, args: torch.set_autocast_enabled("cpu", True))
            model.register_forward_hook(lambda module, args, out: torch.set_autocast_enabled("cpu", False))
        cache = torch.is_autocast_cache_enabled() and kind != "plain"
        losses[kind] = []
        with torch.autocast("cpu", torch.bfloat16, enabled=within == "step", cache_enabled=cache):
            for step in range(4):
                x = torch.randn(8, 32, generator=torch.Generator().manual_seed(step))
                with torch.autocast("cpu", torch.bfloat16, enabled=within != "model", cache_enabled=cache):
                    loss = model(x, recompute)
                assert torch.is_autocast_cache_enabled() == cache
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses[kind].append(loss.item())
        if kind != "plain":
            release(model)
            assert len(model._forward_pre_hooks) == int(within == "model")
    assert losses["streamed"] == losses["resident"] == losses["plain"]


@pytest.mark.each_value
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("grads", [False, True])
@pytest.mark.parametrize("kind", ["encoder", "layer", "attention"])
def test_in_eval_torchs_transformer_runs_the_kernels_of_a_plain_one(kind: str, grads: bool, make_stack: MakeStack):
    """They choose them by the parameters of modules inside, whose forwards they do not call."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    plain = {
        "encoder": nn.TransformerEncoder(layer, 3),
        "layer": nn.Sequential(layer, nn.Linear(32, 32)),
        "attention": nn.MultiheadAttention(32, 4, batch_first=True),
    }[kind].eval()
    model = offloaded(make_stack(114 << 10), copy.deepcopy(plain))
    x = torch.randn(2, 6, 32)
    padding = torch.zeros(2, 6, dtype=torch.bool)
    padding[1, 3:] = True
    calls = {
        "encoder": [((x,), {}), ((x,), {"src_key_padding_mask": padding}), ((x, None, padding), {})],
        "layer": [((x,), {})],
        "attention": [((x, x, x), {}), ((x, x, x), {"key_padding_mask": padding, "need_weights": False})],
    }[kind]
    with torch.set_grad_enabled(grads):
        for args, kwargs in calls:
            found, wanted = (module(*args, **kwargs) for module in (model, plain))
            if kind == "attention":
                found, wanted = found[0], wanted[0]
            assert torch.equal(found, wanted)


# -- stacks and names --------------------------------------------------------------------------------------------------


def test_two_models_share_a_stack_and_an_optimizer(stack: VGPUStack):
    plain = [build(MLP, seed=seed) for seed in (0, 1)]
    models = [offloaded(stack, copy.deepcopy(module), f"m{i}") for i, module in enumerate(plain)]
    ours = VGPUAdamW([param for model in models for param in model.parameters()], max_grad_norm=0.2)
    theirs = torch.optim.AdamW([param for model in plain for param in model.parameters()], fused=True)
    for step in range(3):
        for modules, optimizer in ((models, ours), (plain, theirs)):
            (MLP.loss(modules[0], step) + MLP.loss(modules[1], step + 50)).backward()
            if optimizer is theirs:
                torch.nn.utils.clip_grad_norm_([p for group in theirs.param_groups for p in group["params"]], 0.2)
            optimizer.step()
            optimizer.zero_grad()
    for model, module in zip(models, plain, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), module.parameters(), strict=True))


def test_names_keep_two_models_apart(stack: VGPUStack):
    """A name that is taken, or a range's name that is a key, is refused before anything of the first model changed."""
    plain, model = build(MLP), offloaded(stack, build(MLP), "first")
    before = stack.get_stats()["levels"]
    other = build(MLP)
    with pytest.raises(KeyClash, match="'first'.*another name="):
        offloaded(stack, other, "first")
    stack.register(f"second/{find_groups(other)[0][0].name}/weight", torch.ones(4))
    with pytest.raises(KeyClash, match="'second/.*different names"):
        offloaded(stack, other, "second")
    stack.remove(next(iter(stack)))
    after = stack.get_stats()["levels"]
    assert [level["used_bytes"] for level in after] == [level["used_bytes"] for level in before]
    offloaded(stack, other, "third")
    for each in (model, other):
        assert all(torch.equal(a, b) for a, b in zip(each.parameters(), plain.parameters(), strict=True))


def test_refusals(stack: VGPUStack):
    model = offloaded(stack, build(MLP))
    with pytest.raises(ConfigurationError, match="already"):
        offloaded(stack, model, "again")
    with pytest.raises(KeyClash, match="model"):
        offloaded(stack, build(MLP))
    with pytest.raises(ConfigurationError, match="no parameters"):
        offloaded(stack, nn.ReLU(), "empty")
    with pytest.raises(ConfigurationError, match="placement"):
        enable_vgpu_stack_optimization(build(MLP), stack, "x", placement="fast")
    VGPUAdamW(model.parameters())
    with pytest.raises(Unsupported, match="one VGPUAdamW"):
        VGPUAdamW(model.head.parameters())
    release(model)
    offloaded(stack, model)  # the name is free again


def test_a_cap_below_the_largest_group_is_refused_with_both_numbers(make_stack: MakeStack):
    model = build(MLP)
    stack = make_stack(40 << 10)
    with pytest.raises(InsufficientMemory, match=r"40\.0 KiB.*layers\.0.*needs 7\d\.\d KiB"):
        offloaded(stack, model)
    assert all(level.used_bytes == 0 for level in stack.levels)
    assert offload_of(model) is None
    MLP.loss(model, 0).backward()  # the model is as it was


def test_lower_levels_too_small_is_refused_and_undone(make_stack: MakeStack):
    model = build(MLP)
    stack = make_stack(LEVEL0, host_bytes=64 << 10, disk_bytes=64 << 10)
    with pytest.raises(InsufficientMemory, match="host_memory or disk_memory"):
        offloaded(stack, model)
    assert all(level.used_bytes == 0 for level in stack.levels)


def test_all_fits_means_plain(make_stack: MakeStack):
    plain = build(DECODER)
    stack = make_stack(8 << 20)
    model = enable_vgpu_stack_optimization(copy.deepcopy(plain), stack)
    assert offload_of(model).placement == "resident"
    assert all(type(param) is nn.Parameter for param in model.parameters())
    inside = [module for module in model.modules() if module is not model]
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in inside)
    assert len(model._forward_pre_hooks) == len(model._forward_hooks) == 1  # autocast's cache is off (`cast_cache`)
    ours, theirs = VGPUAdamW(model.parameters()), torch.optim.AdamW(plain.parameters(), fused=True)
    for step in range(3):
        for module, optimizer in ((model, ours), (plain, theirs)):
            DECODER.loss(module, step).backward()
            torch.nn.utils.clip_grad_norm_(module.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
    assert stack.levels[0].used_bytes >= 3 * sum(param.nbytes for param in plain.parameters())
    release(model)
    del ours
    assert stack.levels[0].used_bytes == 0


def test_collected_models_give_their_bytes_back(stack: VGPUStack):
    model = offloaded(stack, build(MLP))
    MLP.loss(model, 0).backward()
    offload_of(model).finish()
    del model
    # The worker thread may hold its last task a moment longer.
    wait_until(lambda: gc.collect() >= 0 and [level.used_bytes for level in stack.levels] == [0, 0, 0])


@pytest.mark.parametrize("placement", ["streamed", "resident"])
def test_a_model_is_collected_under_any_lock(placement: str, make_stack: MakeStack):
    """Python collects wherever it allocates: inside a call of the stack, or in a thread that another one is starting,
    which waits for it with the lock of all executors."""
    stack = make_stack(LEVEL0 if placement == "streamed" else 8 << 20)
    model = enable_vgpu_stack_optimization(build(MLP), stack, placement=placement)
    one_step(model, VGPUAdamW(model.parameters()))
    if placement == "streamed":
        offload_of(model).worker.drain()
    dead, collected = weakref.ref(model), threading.Event()

    def collect() -> None:
        with ExitStack() as held:
            for lock in [
                _global_shutdown_lock,
                stack._lock,
                stack._turn._condition,
                *(level._lock for level in stack.levels),
            ]:
                held.enter_context(lock)
            while dead() is not None:  # the worker thread may hold its last task a moment longer
                gc.collect()
        collected.set()

    del model
    threading.Thread(target=collect, daemon=True).start()
    assert collected.wait(60)
    assert [level.used_bytes for level in stack.levels] == [0, 0, 0]


def test_stack_linear_trains(stack: VGPUStack):
    torch.manual_seed(0)
    layer = VGPUStackLinear(24, 8, vgpu_stack=stack)
    second = VGPUStackLinear(8, 8, vgpu_stack=stack, bias=False)
    plain = nn.Sequential(nn.Linear(24, 8), nn.Linear(8, 8, bias=False))
    plain.load_state_dict({"0.weight": layer.weight, "0.bias": layer.bias, "1.weight": second.weight})
    model = nn.Sequential(layer, second)
    x = torch.randn(4, 24)
    for module, optimizer in (
        (model, VGPUAdamW(model.parameters())),
        (plain, torch.optim.AdamW(plain.parameters(), fused=True)),
    ):
        for _ in range(3):
            module(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
    assert isinstance(offload_of(layer), Offload)
