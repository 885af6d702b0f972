"""Leaves larger than level 0: computed in slices, trained like whole ones."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

from tests.offload.conftest import MakeStack
from vblackwell.errors import InsufficientMemory, StaleTensor
from vblackwell.offload.api import enable_vgpu_stack_optimization, offload_of, release
from vblackwell.offload.optimizer import VGPUAdamW
from vblackwell.offload.state import export_state

ROWS, WIDTH = 1000, 32  # 125 KiB in fp32
LEVEL0 = 64 << 10


class Model(nn.Module):
    """An embedding and a head around two small layers; ``tied`` shares their weight."""

    def __init__(self, head_rows: int = ROWS, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(ROWS, WIDTH, padding_idx=3)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, head_rows, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.head(x)


def loss_of(model: nn.Module, seed: int) -> torch.Tensor:
    tokens = torch.randint(ROWS, (4, 16), generator=torch.Generator().manual_seed(seed))
    logits = model(tokens).float()
    return nn.functional.cross_entropy(logits.flatten(0, 1), (7 * tokens.flatten() + 1) % logits.shape[-1])


def train(model: nn.Module, optimizer: torch.optim.Optimizer, max_norm: float = 0.5) -> list[float]:
    losses = []
    for step in range(6):
        for micro in range(2):
            loss = loss_of(model, 2 * step + micro)
            loss.backward()
            losses.append(loss.item())
        if not isinstance(optimizer, VGPUAdamW):
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.parametrize(
    ("update_in_backward", "transposed"),
    [(False, False), pytest.param(True, False, marks=pytest.mark.slow), (True, True)],
)
def test_a_sliced_embedding_is_bitwise_the_whole_one(update_in_backward: bool, transposed: bool, make_stack: MakeStack):
    torch.manual_seed(0)
    plain = Model(head_rows=40)
    if transposed:  # in memory
        plain.embedding.weight = nn.Parameter(plain.embedding.weight.detach().t().contiguous().t())
    model = copy.deepcopy(plain)
    stack = make_stack(LEVEL0)
    enable_vgpu_stack_optimization(model, stack)
    assert offload_of(model).summary()["sliced"] == ["embedding"]
    ours = VGPUAdamW(model.parameters(), max_grad_norm=0.5, update_in_backward=update_in_backward, accumulation_steps=2)
    losses = train(model, ours)
    assert losses == train(plain, torch.optim.AdamW(plain.parameters(), fused=True))
    assert stack.get_stats()["levels"][0]["peak_bytes"] <= LEVEL0
    release(model)
    assert type(model.embedding) is nn.Embedding
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


@pytest.mark.each_value
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_a_sliced_head_trains_like_the_whole_one(tied: bool, dtype: torch.dtype | None, make_stack: MakeStack):
    torch.manual_seed(0)
    initial = Model(tied=tied)
    runs = []
    for fast_bytes in (LEVEL0, 4 << 20):
        model = copy.deepcopy(initial)
        stack = make_stack(fast_bytes)
        enable_vgpu_stack_optimization(model, stack, placement="streamed", compute_dtype=dtype)
        expected = ["embedding"] if tied else ["embedding", "head"]
        assert offload_of(model).summary()["sliced"] == (expected if fast_bytes == LEVEL0 else [])
        optimizer = VGPUAdamW(model.parameters(), max_grad_norm=0.5, update_in_backward=True, accumulation_steps=2)
        runs.append((train(model, optimizer), dict(export_state(model, optimizer))))
        release(model)
    (sliced, sliced_state), (whole, whole_state) = runs
    # Only the head's input gradient is summed in another order, over 9 slices: a few units in the last place of the
    # compute type (2^-24, 2^-8), seen through six steps of 1e-3.
    tolerance = 2e-6 if dtype is None else 2e-3
    assert max(abs(a - b) / b for a, b in zip(sliced, whole, strict=True)) < tolerance
    assert sliced[0] == whole[0] and list(sliced_state) == list(whole_state)
    assert all(state["step"].item() == 6 for state in sliced_state.values())


def test_reading_and_staleness(make_stack: MakeStack):
    torch.manual_seed(0)
    plain = Model(head_rows=40)
    model = copy.deepcopy(plain)
    enable_vgpu_stack_optimization(model, make_stack(LEVEL0))
    assert torch.equal(model.state_dict()["embedding.weight"], plain.embedding.weight)
    with pytest.raises(InsufficientMemory, match="embedding"):
        model.embedding.weight.sum()  # whole, on a level 0 that cannot hold it
    copied = copy.deepcopy(model.layers)
    assert len(copied) == 2
    with torch.no_grad():
        assert loss_of(model, 0).item() == loss_of(plain, 0).item()
    head = Model()
    enable_vgpu_stack_optimization(head, make_stack(LEVEL0))
    optimizer = VGPUAdamW(head.parameters())
    loss = loss_of(head, 0)
    loss.backward(retain_graph=True)
    optimizer.step()
    with pytest.raises(StaleTensor, match="head"):
        loss.backward()


def test_a_tied_leaf_is_updated_from_both_of_its_gradients(make_stack: MakeStack):
    """Without a way back, too: an update from the head's half alone would have to be undone for the embedding's."""

    def trained(**how: bool) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        model = Model(tied=True)
        enable_vgpu_stack_optimization(model, make_stack(LEVEL0))
        assert offload_of(model).summary()["sliced"]
        optimizer = VGPUAdamW(model.parameters(), **how)
        for step in range(3):
            loss_of(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()
        release(model)
        return model.state_dict()

    at_step, early = trained(), trained(update_in_backward=True, undo=False)
    assert all(torch.equal(early[name], value) for name, value in at_step.items())


@pytest.mark.parametrize("index", [ROWS, 5 * ROWS, -1, -100])
def test_an_index_that_is_no_row_is_refused(index: int, make_stack: MakeStack):
    model = Model()
    enable_vgpu_stack_optimization(model, make_stack(LEVEL0))
    with pytest.raises(IndexError, match=r"embedding 'embedding' is not from 0 to 999"):
        model(torch.tensor([[1, index]]))


def test_too_small_even_for_slices(make_stack: MakeStack):
    with pytest.raises(InsufficientMemory, match="largest layer group"):
        enable_vgpu_stack_optimization(Model(), make_stack(12 << 10))


def test_a_failed_slice_gives_its_bytes_back(make_stack: MakeStack):
    torch.manual_seed(0)
    model = Model()
    stack = make_stack(LEVEL0)
    enable_vgpu_stack_optimization(model, stack)
    errors = []
    for _ in range(6):
        with pytest.raises(RuntimeError) as caught:
            model.head(torch.randn(2, WIDTH - 1))
        errors.append(caught)  # the traceback keeps the frames alive
    assert stack.levels[0].used_bytes == 0
    loss_of(model, 0).backward()


def test_sliced_leaves_under_autocast_and_in_state_dicts(make_stack: MakeStack):
    torch.manual_seed(0)
    plain = Model()
    model = copy.deepcopy(plain)
    enable_vgpu_stack_optimization(model, make_stack(LEVEL0))
    with torch.autocast("cpu", torch.bfloat16):
        loss = loss_of(model, 0)
    loss.backward()
    model.zero_grad()
    other = Model()
    model.load_state_dict(other.state_dict())
    copied = copy.deepcopy(model)
    assert all(torch.equal(a, b) for a, b in zip(copied.parameters(), other.parameters(), strict=True))
    assert loss_of(copied, 1).item() == loss_of(other, 1).item()


def test_slices_change_what_level_0_holds_under_the_lock_of_its_stack(
    make_stack: MakeStack, monkeypatch: pytest.MonkeyPatch
):
    """Another thread's model may ask for room at any moment, and frees what has left level 0."""
    model = enable_vgpu_stack_optimization(Model(), make_stack(LEVEL0), placement="streamed")
    engine, seen = offload_of(model), dict[str, bool]()

    def noting(name: str, real: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object) -> object:
            seen[name] = seen.get(name, True) and engine.lock._is_owned()
            return real(*args)

        return call

    leaf = model.embedding._vb_leaf
    for owner, name in (
        (engine.gradients, "begin_slices"),
        (engine.gradients, "send_slice"),
        (engine.gradients, "finish_slices"),
        (engine.weights, "wait_for"),
        (leaf._control, "wait_for_updates"),
        (leaf._control, "before_gradient"),
    ):
        monkeypatch.setattr(owner, name, noting(name, getattr(owner, name)))
    loss_of(model, 0).backward()
    assert len(seen) == 6 and all(seen.values()), seen
