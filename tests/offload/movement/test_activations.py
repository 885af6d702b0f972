"""Boundary activations that live in host memory: the same bits, really gone meanwhile, and everything given back."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import random
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import checkpoint as torch_checkpoint

from tests.delay import set_transfer_delay
from tests.offload.conftest import MakeStack
from tests.offload.models import CASES, Case, build
from tests.waiting import wait_until
from vblackwell.errors import ConfigurationError, InsufficientMemory, StaleTensor
from vblackwell.memory.cache.stack import VGPUStack
from vblackwell.nn.decoder.checkpoint import checkpoint
from vblackwell.offload.layout.placement import AHEAD, NEWEST
from vblackwell.offload.movement import activations
from vblackwell.offload.movement.activations import ActivationStore, Ticket

CHECKPOINTING = [case for case in CASES if case.name != "mlp"]  # that one calls torch's checkpoint by itself
WIDTH, DEPTH, TOKENS = 16, 6, 8
BOUNDARY_BYTES = TOKENS * WIDTH * 4


def of_them(*names: str) -> pytest.MarkDecorator:
    """All these models, and only ``names`` not slow."""
    marks = {case.name: [] if case.name in names else [pytest.mark.slow] for case in CHECKPOINTING}
    return pytest.mark.parametrize(
        "case", [pytest.param(case, id=case.name, marks=marks[case.name]) for case in CHECKPOINTING]
    )


@pytest.fixture
def stack(make_stack: MakeStack) -> VGPUStack:
    return make_stack(1 << 20)


@pytest.fixture
def store(stack: VGPUStack) -> Iterator[ActivationStore]:
    with contextlib.closing(ActivationStore(stack, smallest_bytes=1)) as made:
        yield made


@pytest.fixture
def no_collector() -> Iterator[None]:
    """What is given back here is given back by reference counts."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


class Chain(nn.Module):
    """Checkpointed layers one after the other; ``watch`` sees what goes into each."""

    def __init__(self, depth: int = DEPTH, watch: Callable[[int, torch.Tensor], None] = lambda layer, x: None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(depth))
        self.watch = watch

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * 1  # not a leaf, as after an embedding
        for number, layer in enumerate(self.layers):
            self.watch(number, x)
            x = checkpoint(layer, x)
        return x.square().mean()


def batch(seed: int = 0) -> torch.Tensor:
    return torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(seed), requires_grad=True)


def gradients(model: nn.Module) -> list[torch.Tensor]:
    found = [param.grad.clone() for param in model.parameters() if param.grad is not None]
    model.zero_grad()
    return found


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) > 0 and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def plain_gradients(model: nn.Module, seed: int = 0) -> list[torch.Tensor]:
    twin = copy.deepcopy(model)
    twin(batch(seed)).backward()
    return gradients(twin)


def moved(stack: VGPUStack) -> tuple[int, int]:
    """Bytes out of level 0, and bytes into it. (Both levels are RAM here: links are told apart by their names.)"""
    fast, host = stack.levels[0].name, stack.levels[1].name
    links = {(link["source"], link["destination"]): link["bytes"] for link in stack.get_stats()["links"]}
    return links.get((fast, host), 0), links.get((host, fast), 0)


# -- the same bits -----------------------------------------------------------------------------------------------------


def train(case: Case, model: nn.Module, store: ActivationStore | None, steps: int = 3) -> list[torch.Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    torch.manual_seed(1)
    for step in range(steps):
        for micro in range(2):
            with contextlib.nullcontext() if store is None else store.forward_of(model):
                loss = case.loss(model, 100 * step + micro)
            loss.backward()
            losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", CHECKPOINTING, ids=lambda case: case.name)
def test_training_is_bitwise_the_same(case: Case, dtype: torch.dtype, stack: VGPUStack, store: ActivationStore):
    plain = build(case, use_checkpoint=True)
    for module in plain.modules():  # images stay fp32 outside; the models' own convolutions cast nothing
        if dtype == torch.bfloat16 and isinstance(module, nn.Conv2d):
            module.register_forward_pre_hook(lambda module, args: tuple(arg.to(module.weight.dtype) for arg in args))
    plain = plain.to(dtype)
    model = copy.deepcopy(plain)
    expected = train(case, plain, None)
    losses = train(case, model, store)
    assert same(losses, expected)
    assert same(list(model.parameters()), list(plain.parameters()))
    out, back = moved(stack)
    assert out > 0 and back > 0


def test_the_newest_stay(stack: VGPUStack, store: ActivationStore):
    model = Chain()
    expected = plain_gradients(model)
    for step in range(3):
        before = moved(stack)
        with store.forward_of(model):
            loss = model(batch())
        loss.backward()
        assert same(gradients(model), expected)
        out, back = (now - then for now, then in zip(moved(stack), before, strict=True))
        assert back == (DEPTH - NEWEST) * BOUNDARY_BYTES
        assert out == back if step else out == DEPTH * BOUNDARY_BYTES  # the first forward cannot know its end


def test_random_delays_change_no_bit(stack: VGPUStack, store: ActivationStore):
    chance = random.Random(0)
    model = Chain(depth=10)
    expected = [plain_gradients(model, seed) for seed in range(3)]
    set_transfer_delay(lambda kind: time.sleep(chance.random() * 3e-3))
    try:
        for _ in range(4):
            for seed in range(3):
                with store.forward_of(model):
                    loss = model(batch(seed))
                loss.backward()
                assert same(gradients(model), expected[seed])
    finally:
        set_transfer_delay(None)
    assert stack.get_stats()["stall_seconds"] > 0


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_several_forwards_before_their_backwards(order: tuple[int, ...], store: ActivationStore):
    model = Chain()
    expected = [plain_gradients(model, seed) for seed in range(3)]
    for _ in range(2):
        losses = []
        for seed in range(3):
            with store.forward_of(model):
                losses.append(model(batch(seed)))
        for seed in order:
            losses[seed].backward()
            assert same(gradients(model), expected[seed])


def test_backward_twice(store: ActivationStore):
    model = Chain()
    expected = plain_gradients(model)
    for _ in range(2):
        with store.forward_of(model):
            loss = model(batch())
        loss.backward(retain_graph=True)
        assert same(gradients(model), expected)
        with store.forward_of(model):  # nothing of the retained graph may be written over meanwhile
            model(batch(1)).backward()
        gradients(model)
        loss.backward()
        assert same(gradients(model), expected)


def test_second_derivatives(store: ActivationStore):
    def second(model: nn.Module, x: torch.Tensor, context: Any) -> torch.Tensor:
        with context:
            loss = model(x)
        (first,) = torch.autograd.grad(loss, x, create_graph=True)
        return torch.autograd.grad(first.square().sum(), x)[0]

    model = Chain()
    expected = second(model, batch(), contextlib.nullcontext())
    assert torch.equal(second(model, batch(), store.forward_of(model)), expected)


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "transposed": lambda x: x.reshape(4, 8, 64).transpose(0, 1),
    "with holes": lambda x: x.reshape(32, 64)[:, :48],
    "in the middle": lambda x: x.reshape(32, 64)[3:20],
    "expanded": lambda x: x.reshape(1, 32, 64).expand(5, 32, 64),
    "not aligned": lambda x: x[3:2001],
    "channels last": lambda x: x.reshape(2, 16, 8, 8).contiguous(memory_format=torch.channels_last),
    "complex": lambda x: torch.view_as_complex(x.reshape(-1, 2)),
    "scalar": lambda x: x.sum(),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides_alignment_and_bytes_come_back(
    layout: str, dtype: torch.dtype, stack: VGPUStack, store: ActivationStore
):
    if layout == "complex" and dtype == torch.bfloat16:
        pytest.skip("torch has no complex bfloat16")
    x = LAYOUTS[layout](torch.randn(2048, generator=torch.Generator().manual_seed(0)).to(dtype).requires_grad_() * 1)
    packed = store.pack(x)
    fillers = [store.pack(torch.randn(64, requires_grad=True) * 1) for _ in range(NEWEST)]  # so that x must go
    assert not isinstance(packed, torch.Tensor) and packed.boundary.resident is None and fillers
    back = store.unpack(packed)
    assert (back.shape, back.stride(), back.dtype) == (x.shape, x.stride(), x.dtype)
    assert back.data_ptr() % 64 == x.data_ptr() % 64 and back.data_ptr() != x.data_ptr()
    assert not back.requires_grad and back._base is None and back.is_leaf
    assert torch.equal(back, x)


def test_what_does_not_leave(stack: VGPUStack):
    weight = torch.randn(64, 64)
    weights = Mock(find=lambda tensor: weight if tensor.data_ptr() == weight.data_ptr() else None)
    with contextlib.closing(ActivationStore(stack, smallest_bytes=1024)) as store:
        store.leave_out(weights)
        x = torch.randn(64, 64, requires_grad=True) * 1
        stay = [
            weight,
            x[0],
            x[:, :16],
            x.detach().requires_grad_(),
            nn.Parameter(torch.randn(64, 64)),
            x.to_sparse(),
            torch.empty(64, 64, device="meta"),
            torch.view_as_complex(x.reshape(-1, 2)).conj(),
            torch.empty(0, 99),
            "no",
        ]
        assert all(store.pack(tensor) is tensor for tensor in stay[:-1])
        assert store.pack(x) is not x
        assert all(store.unpack(tensor) is tensor for tensor in stay[:-1])


# -- really gone -------------------------------------------------------------------------------------------------------


def test_the_memory_is_free_meanwhile(store: ActivationStore, no_collector: None):
    storages: dict[int, StorageWeakRef] = {}
    alive: dict[int, set[int]] = {}

    def watch(layer: int, x: torch.Tensor) -> None:
        storages[layer] = StorageWeakRef(x.untyped_storage())
        alive[layer] = {number for number, storage in storages.items() if not storage.expired()}

    model = Chain(watch=watch)
    for _ in range(2):
        storages.clear()
        with store.forward_of(model):
            loss = model(batch())
        # When a layer begins, its own input and the NEWEST before it are there (the store learns of it a moment later).
        assert all(there == set(range(max(0, layer - NEWEST), layer + 1)) for layer, there in alive.items())
        loss.backward()
        del loss
        assert all(storage.expired() for storage in storages.values())


def test_host_memory_is_taken_once(stack: VGPUStack, store: ActivationStore, no_collector: None):
    model = Chain()
    used = []
    for step in range(5):
        with store.forward_of(model):
            loss = model(batch(step))
        loss.backward()
        used.append(stack.levels[1].used_bytes)
    assert used == used[:1] * 5 and used[0] == store.summary()["host_bytes"] >= DEPTH * BOUNDARY_BYTES


def test_longer_batches_take_the_place_of_shorter_ones(stack: VGPUStack, store: ActivationStore):
    model = Chain()
    for length in (100, 3000, 700, 6000, 100):
        x = torch.randn(length, WIDTH, generator=torch.Generator().manual_seed(length))
        twin = copy.deepcopy(model)
        twin(x).backward()
        with store.forward_of(model):
            loss = model(x)
        loss.backward()
        assert same(gradients(model), gradients(twin))
    longest = DEPTH * 6000 * WIDTH * 4
    assert longest * (DEPTH - NEWEST) / DEPTH <= stack.levels[1].used_bytes <= longest * 9 / 8


def test_an_interrupted_forward_gives_its_buffers_back(stack: VGPUStack, store: ActivationStore, no_collector: None):
    class Interrupt(BaseException):
        pass

    def watch(layer: int, x: torch.Tensor) -> None:
        if interrupting and layer == DEPTH - 1:
            raise Interrupt

    model = Chain(watch=watch)
    used = []
    for interrupting in (False, True, True, True, False):  # noqa: B007 (`watch` reads it)
        with contextlib.suppress(Interrupt), store.forward_of(model):
            loss = model(batch())
            loss.backward()
        used.append(stack.levels[1].used_bytes)
    assert used == used[:1] * 5
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    assert same(gradients(model), [2 * gradient for gradient in plain_gradients(model)])  # of the first and the last


def test_without_gradients_nothing_happens(stack: VGPUStack, store: ActivationStore):
    model = Chain()
    with torch.no_grad(), store.forward_of(model):
        model(batch())
    assert moved(stack) == (0, 0) and stack.levels[1].used_bytes == 0


def test_validation_between_steps_does_not_unlearn(stack: VGPUStack, store: ActivationStore):
    model = Chain()
    for step in range(3):
        before = moved(stack)[0]
        with store.forward_of(model):
            loss = model(batch())
        loss.backward()
        assert moved(stack)[0] - before == (DEPTH - NEWEST if step else DEPTH) * BOUNDARY_BYTES
        with torch.no_grad(), store.forward_of(model):
            model(batch())


def test_one_tensor_leaves_once(stack: VGPUStack, store: ActivationStore):
    def both(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return (a * b).sin()

    def run(context: Any) -> torch.Tensor:
        leaf = batch()
        with context:
            x = leaf * 1
            for _ in range(DEPTH):
                x = checkpoint(both, x, x) + checkpoint(torch.cos, x)
        x.sum().backward()
        assert leaf.grad is not None
        return leaf.grad

    expected = run(contextlib.nullcontext())
    assert torch.equal(run(store.forward_of()), expected)
    out, back = moved(stack)
    assert out == DEPTH * BOUNDARY_BYTES  # and not three times that
    assert back == (DEPTH - NEWEST) * BOUNDARY_BYTES


def test_what_every_layer_shares_stays(stack: VGPUStack, store: ActivationStore):
    def layer(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        return (x * table).sin()

    def run(context: Any) -> torch.Tensor:
        leaf, table = batch(), torch.linspace(0, 1, TOKENS * WIDTH).reshape(TOKENS, WIDTH)
        with context:
            x = leaf * 1
            for _ in range(DEPTH):
                x = checkpoint(layer, x, table)
        x.sum().backward()
        assert leaf.grad is not None
        return leaf.grad

    expected = run(contextlib.nullcontext())
    assert torch.equal(run(store.forward_of()), expected)
    out, back = moved(stack)
    assert out == (DEPTH + 1) * BOUNDARY_BYTES and back == (DEPTH - NEWEST) * BOUNDARY_BYTES


def pack_some(store: ActivationStore, count: int) -> tuple[list[torch.Tensor], list[Ticket]]:
    """Tensors as ``count`` checkpoints would save them, and what autograd would hold."""
    tensors = [torch.full((TOKENS, WIDTH), float(number)) for number in range(count)]
    tickets = []
    for tensor in tensors:
        with store.hooks():
            tickets.append(store.pack(tensor))
    return tensors, tickets


def test_what_comes_next_is_loaded_ahead(stack: VGPUStack, store: ActivationStore):
    tensors, tickets = pack_some(store, 8)
    loads = []
    for tensor, ticket in reversed(list(zip(tensors, tickets, strict=True))):
        assert torch.equal(store.unpack(ticket), tensor)
        loads.append(moved(stack)[1] // BOUNDARY_BYTES)
    assert AHEAD == 3 and NEWEST == 2
    assert loads == [2, 3, 4, 5, 6, 6, 6, 6]  # the newest two are there; then always three more than were asked for


def test_large_inputs_of_checkpoints_come_one_by_one_next_to_small_ones(
    stack: VGPUStack, store: ActivationStore, monkeypatch: pytest.MonkeyPatch
):
    """As many as the largest tensor of a checkpoint allows, whichever of them is asked for: no load is cancelled."""
    ahead = lambda size, room, on_gpu: 1 if size >= BOUNDARY_BYTES else 3  # noqa: E731
    monkeypatch.setattr(activations, "checkpoints_ahead", ahead)
    large, small = [], []
    for _ in range(8):
        with store.hooks():
            large.append(store.pack(torch.randn(TOKENS, WIDTH)))
            small.append(store.pack(torch.randn(TOKENS, WIDTH // 2)))
    for pair in reversed(list(zip(large, small, strict=True))):
        for ticket in pair:
            store.unpack(ticket)
            assert sum(each.boundary.load is not None for each in large) <= 1
    assert moved(stack)[1] == 7 * (BOUNDARY_BYTES + BOUNDARY_BYTES // 2)  # the newest checkpoint's never left


def test_what_was_loaded_in_vain_is_let_go(stack: VGPUStack, store: ActivationStore, no_collector: None):
    tensors, tickets = pack_some(store, 12)
    store.unpack(tickets[9])  # loads those before it
    vain = [StorageWeakRef(tickets[number].boundary.load.flat.untyped_storage()) for number in range(8, 8 - AHEAD, -1)]
    for number in (2, 8):  # another way; and back, where 8 has to come again
        assert torch.equal(store.unpack(tickets[number]), tensors[number])
        loading = [number for number, ticket in enumerate(tickets) if ticket.boundary.load is not None]
        assert loading == list(range(max(0, number - AHEAD), number))
    assert all(storage.expired() for storage in vain)


def test_a_buffer_waits_for_the_copy_of_a_graph_that_died(stack: VGPUStack, store: ActivationStore, no_collector: None):
    seconds = [0.05]
    set_transfer_delay(lambda kind: time.sleep(seconds.pop() if seconds else 0))
    try:
        (_, tickets) = pack_some(store, 1)
        used = stack.levels[1].used_bytes
        del tickets  # its copy is still under way
        tensor = torch.full((TOKENS, WIDTH), 7.0)
        ticket = store.pack(tensor)
        assert stack.levels[1].used_bytes == used  # the same buffer
        pack_some(store, NEWEST)
        time.sleep(0.1)  # a copy that nobody waited for would be over now, in the buffer's new bytes
        assert ticket.boundary.resident is None and torch.equal(store.unpack(ticket), tensor)
    finally:
        set_transfer_delay(None)


# -- together with others ----------------------------------------------------------------------------------------------


def test_hooks_that_were_there_first_keep_what_they_want(stack: VGPUStack, store: ActivationStore):
    model = Chain()
    expected = plain_gradients(model)
    taken = []

    def pack(tensor: torch.Tensor) -> Any:
        if len(taken) < 2 and tensor.shape == (TOKENS, WIDTH):
            taken.append(tensor.detach().clone())
            return len(taken) - 1
        return tensor

    def unpack(packed: Any) -> torch.Tensor:
        return taken[packed] if isinstance(packed, int) else packed

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack), store.forward_of(model):
        loss = model(batch())
    loss.backward()
    assert same(gradients(model), expected)
    assert moved(stack)[0] == (DEPTH - len(taken)) * BOUNDARY_BYTES and len(taken) == 2


def test_checkpoints_inside_checkpoints(stack: VGPUStack, store: ActivationStore):
    class Nested(Chain):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x * 1
            for layer in self.layers:
                x = checkpoint(lambda x, layer=layer: checkpoint(layer, x.sin()).cos(), x)
            return x.mean()

    model = Nested()
    expected = plain_gradients(model)
    for _ in range(2):
        with store.forward_of(model):
            loss = model(batch())
            loss.backward()  # inside, so that the recompute's own checkpoints could be caught
        assert same(gradients(model), expected)
    assert moved(stack)[0] == (2 * DEPTH - NEWEST) * BOUNDARY_BYTES  # the outer inputs only


@pytest.mark.parametrize("reentrant", [False, True])
def test_modules_that_checkpoint_as_transformers_do(reentrant: bool, stack: VGPUStack, store: ActivationStore):
    class Layer(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self._gradient_checkpointing_func(super().forward, x).sin()

    function = functools.partial(torch_checkpoint.checkpoint, use_reentrant=reentrant)
    model = nn.Sequential(*(Layer(WIDTH, WIDTH) for _ in range(DEPTH)))
    for layer in model:
        layer._gradient_checkpointing_func = function
    model(batch() * 1).sum().backward()
    expected = gradients(model)
    with store.forward_of(model):
        loss = model(batch() * 1).sum()
    loss.backward()
    assert same(gradients(model), expected)
    assert moved(stack)[0] == DEPTH * BOUNDARY_BYTES
    assert all(layer._gradient_checkpointing_func is function for layer in model)


@of_them("gpt2", "t5")
def test_with_streamed_weights(case: Case, make_stack: MakeStack):
    from vblackwell.offload.api import enable_vgpu_stack_optimization, offload_of, release
    from vblackwell.offload.layout.groups import find_groups

    plain = build(case, use_checkpoint=True)
    model = copy.deepcopy(plain)
    expected = train(case, plain, None, steps=1)
    expected_gradients = []
    for seed in range(3):
        torch.manual_seed(seed)
        case.loss(plain, seed).backward()
        expected_gradients.append(gradients(plain))

    groups, _ = find_groups(model)
    stack = make_stack(3 * max(group.num_bytes for group in groups) + (16 << 10))
    twin = copy.deepcopy(plain)
    model.load_state_dict(twin.state_dict())
    enable_vgpu_stack_optimization(model, stack)
    engine = offload_of(model)
    assert engine is not None and engine.placement == "streamed" and expected
    with contextlib.closing(ActivationStore(stack, smallest_bytes=1)) as store:
        store.leave_out(engine.weights)
        for seed in range(3):
            torch.manual_seed(seed)
            with store.forward_of(model):
                loss = case.loss(model, seed)
            loss.backward()
            engine.finish()
            out = store.summary()["host_bytes"]
        assert out > 0
    release(model)
    for param, *parts in zip(model.parameters(), *expected_gradients, strict=True):
        assert param.grad is not None and torch.equal(param.grad, sum(parts[1:], parts[0]))


@of_them("decoder", "vit")  # test_training_is_bitwise_the_same has all
def test_whole_training_through_the_engine(case: Case, make_stack: MakeStack):
    from vblackwell.offload.api import enable_vgpu_stack_optimization, offload_of, release
    from vblackwell.offload.optimizer import VGPUAdamW

    initial = build(case, use_checkpoint=True)
    runs = []
    for place in ("level0", "host"):
        model = copy.deepcopy(initial)
        stack = make_stack(1 << 20)
        enable_vgpu_stack_optimization(model, stack, placement="streamed", activations=place)
        engine = offload_of(model)
        if place == "host":
            engine.activations._smallest_bytes = 1  # these models are small
        optimizer = VGPUAdamW(model.parameters(), lr=3e-3, max_grad_norm=0.5, update_in_backward=True)
        losses = []
        torch.manual_seed(1)
        for step in range(3):
            loss = case.loss(model, step)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        taken = engine.activations.summary()["host_bytes"] if place == "host" else 0
        release(model)
        runs.append((losses, list(model.parameters()), taken))
    assert same(runs[0][0], runs[1][0]) and same(runs[0][1], runs[1][1])
    assert runs[1][2] > 0


def test_a_store_keeps_no_model_alive(make_stack: MakeStack):
    from vblackwell.offload.api import enable_vgpu_stack_optimization, offload_of

    model = build(CHECKPOINTING[0], use_checkpoint=True)
    stack = make_stack(1 << 20)
    enable_vgpu_stack_optimization(model, stack, placement="streamed", activations="host")
    assert offload_of(model) is not None and stack.levels[1].used_bytes > 0
    dead = weakref.ref(model)
    del model
    # The worker's thread gives the ranges back.
    wait_until(lambda: gc.collect() >= 0 and dead() is None and stack.levels[1].used_bytes == 0)


# -- refusals and ends -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("late", [False, True], ids=["resident", "left"])
def test_writing_to_a_boundary_is_an_error(late: bool, store: ActivationStore):
    class Careless(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x * 1
            y = checkpoint(torch.sin, x)
            with torch.no_grad():
                x.add_(1)
            for _ in range(DEPTH if late else 0):
                y = checkpoint(torch.sin, y)
            return y.sum()

    with store.forward_of():
        loss = Careless()(batch())
    with pytest.raises(StaleTensor, match=r"\(8, 16\).*in place"):
        loss.backward()


def test_a_full_host_level_is_refused_with_numbers(make_stack: MakeStack):
    stack = make_stack(1 << 20, host_bytes=16 << 10)
    model = Chain(depth=40)
    with contextlib.closing(ActivationStore(stack, "acts", smallest_bytes=1)) as store:
        words = r"'acts' holds 16.*needs 4.*raise host_memory"
        with pytest.raises(InsufficientMemory, match=words) as caught:  # noqa: SIM117
            with store.forward_of(model):
                model(batch())
        assert caught.value.needed_bytes == 4096 and caught.value.available_bytes == 0
        del caught
        small = Chain(depth=3)
        with store.forward_of(small):
            loss = small(batch())
        loss.backward()
        assert same(gradients(small), plain_gradients(small))
    assert stack.levels[1].used_bytes == 0


def test_close_gives_everything_back(stack: VGPUStack):
    model = Chain()
    store = ActivationStore(stack, smallest_bytes=1)
    with store.forward_of(model):
        loss = model(batch())
    assert stack.levels[1].used_bytes > 0
    store.close()
    store.close()
    assert stack.levels[1].used_bytes == 0
    with pytest.raises(StaleTensor, match="closed"):
        loss.backward()
    with pytest.raises(ConfigurationError, match="closed"), store.forward_of(model):
        pass
    ActivationStore(stack).close()  # the name is free again


def test_a_stack_without_ram_below_level_0_is_refused():
    with (
        VGPUStack({"levels": [{"capacity_mb": 1, "device": "cpu"}]}) as stack,
        pytest.raises(ConfigurationError, match="add a 'cpu' level"),
    ):
        ActivationStore(stack)
