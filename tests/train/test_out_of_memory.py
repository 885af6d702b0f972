"""A step for which memory does not suffice: undone, and begun again with half the sequences in a forward."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.train.test_trainer import Toy
from vblackwell.data.corpus import Corpus, PackedDataset
from vblackwell.errors import InsufficientMemory
from vblackwell.memory.cache.stack import VGPUStack
from vblackwell.offload.api import enable_vgpu_stack_optimization, offload_of
from vblackwell.offload.optimizer import VGPUAdamW
from vblackwell.train.config import TrainConfig
from vblackwell.train.progress import Progress
from vblackwell.train.trainer import Parts, Schedule, Trainer, TrainerState, half_of

STEPS, SEQUENCES, LENGTH = 4, 6, 8


class Refuses(TorchDispatchMode):
    """The operators of forward and backward whose numbers are ``at`` find no memory;
    `count` is how many asked for some.
    """

    def __init__(self, at: set[int], error: Exception) -> None:
        super().__init__()
        self.at, self.error, self.count, self.on = at, error, 0, False
        self.ends: list[int] = []  # of the whole steps

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        given, made = (
            {each.untyped_storage()._cdata for each in tree_leaves(part) if isinstance(each, torch.Tensor)}
            for part in ((args, kwargs), out)
        )
        if self.on and made - given:
            self.count += 1
            if self.count in self.at:
                raise self.error
        return out


@pytest.fixture
def build():
    """Makes a trainer of ``micro_batch`` sequences in a forward and 6 in a step."""
    opened = []

    def make(placement: str, micro_batch: int = SEQUENCES) -> tuple[Trainer, list]:
        config = TrainConfig(
            max_steps=STEPS,
            batch_size=micro_batch,
            accumulation_steps=SEQUENCES // micro_batch,
            seq_length=LENGTH,
            eval_every=0,
            checkpoint_every=1,
        )
        stack = VGPUStack({"levels": [{"device": "arena", "capacity_mb": 0.02}, {"device": "cpu", "capacity_mb": 1}]})
        model = Toy({})
        enable_vgpu_stack_optimization(model, stack, placement=placement)
        opened.append((model, stack))
        optimizer = VGPUAdamW(
            model.parameters(),
            lr=0.1,
            max_grad_norm=1.0,
            update_in_backward=True,
            accumulation_steps=config.accumulation_steps,
        )
        corpus = Corpus(np.arange(2000, dtype=np.uint16) % 16, None, 16, None, "", "toy")  # type: ignore[arg-type]
        train, held = (PackedDataset(corpus, LENGTH, split) for split in ("train", "validation"))
        parts = Parts(
            model,
            optimizer,
            stack,
            train,
            held,
            Schedule(0.1, 0.1, 0, STEPS),
            None,
            torch.device("cpu"),
        )
        records, states = [], []

        def checkpoint(state: TrainerState) -> None:
            params = {name: param.detach().clone() for name, param in model.named_parameters()}
            states.append((state, params, copy.deepcopy(optimizer.state_dict())))

        torch.manual_seed(3)
        stop = SimpleNamespace(wanted=False)
        trainer = Trainer(config, parts, Progress(), stop, records.append, checkpoint)  # type: ignore[arg-type]
        return trainer, [records, states]

    yield make
    for model, stack in opened:
        engine = offload_of(model)
        assert engine is not None
        engine.close()
        stack.close()


def refuse_at(trainer: Trainer, at: set[int], error: Exception) -> Refuses:
    """Let operators of forward and backward be refused, those of the optimizer's own step not."""
    mode = Refuses(at, error)
    inner, update = trainer._forward_and_backward, trainer._update

    def counted():
        mode.on = True
        with mode:
            return inner()

    def quiet(loss):
        mode.on = False
        mode.ends.append(mode.count)
        return update(loss)

    trainer._forward_and_backward, trainer._update = counted, quiet  # type: ignore[method-assign]
    return mode


def cap_refused() -> InsufficientMemory:
    """What a level says whose books have room while the device has none."""
    error = InsufficientMemory("gave no 8 B", needed_bytes=8, available_bytes=0)
    error.__cause__ = torch.OutOfMemoryError("CUDA out of memory")
    return error


@pytest.mark.parametrize("placement", ["resident", "streamed"])
def test_at_any_place_the_step_is_begun_again_smaller(build, placement, capsys):
    """After it, the run is bit by bit one with that micro-batch from the last whole step on."""
    whole, (undisturbed, _) = build(placement)
    counter = refuse_at(whole, set(), RuntimeError())
    whole.run()
    places = np.random.default_rng(0).integers(counter.ends[0] + 1, counter.ends[2], 4)
    smaller = 0
    for index, place in enumerate(places):
        trainer, (records, states) = build(placement)
        mode = refuse_at(
            trainer, {int(place)}, torch.OutOfMemoryError("CUDA out of memory") if index % 2 else cap_refused()
        )
        capsys.readouterr()
        trainer.run()
        said = [line for line in capsys.readouterr().out.splitlines() if "out of memory" in line]
        if not said:  # the engine did without what it was refused, e.g. weights ahead of their use
            assert [line.loss for line in records] == [line.loss for line in undisturbed]
            continue
        smaller += 1
        begun = sum(end < place for end in mode.ends)  # whole steps before it
        assert said == [
            f"step {begun + 1}: out of memory with 6 sequences in a forward; begun again with 3, "
            "2 forwards a step, the same 48 tokens"
        ]
        assert (trainer.now.micro_batch, trainer.accumulation_steps) == (3, 2)
        reference, (expected, _) = build(placement, 3)
        state, params, optimizer = states[begun - 1]
        reference.parts.model.load_state_dict(params)
        reference.parts.optimizer.load_state_dict(optimizer)
        reference.restore(TrainerState(**{**vars(state), "micro_batch": None}))
        reference.run()
        assert [line.loss for line in records[begun:]] == [line.loss for line in expected]
        last = {name: param.detach() for name, param in reference.parts.model.named_parameters()}
        assert all(torch.equal(param, last[name]) for name, param in trainer.parts.model.named_parameters())
    assert smaller >= 2


def test_it_halves_until_one_sequence_is_too_many(build):
    trainer, (records, _) = build("resident")
    refuse_at(trainer, {5, 12}, torch.OutOfMemoryError("CUDA out of memory"))
    trainer.run()
    assert len(records) == STEPS and (trainer.now.micro_batch, trainer.accumulation_steps) == (1, 6)
    last, _ = build("resident", 1)
    refuse_at(last, {5}, torch.OutOfMemoryError("CUDA out of memory"))
    with pytest.raises(torch.OutOfMemoryError):
        last.run()


def test_what_has_nothing_to_do_with_the_device_is_raised(build):
    trainer, _ = build("streamed")
    refuse_at(trainer, {9}, InsufficientMemory("the host is full", needed_bytes=1, available_bytes=0))
    with pytest.raises(InsufficientMemory, match="host is full"):
        trainer.run()
    assert trainer.now.micro_batch == SEQUENCES


def test_a_resumed_run_goes_on_with_the_smaller_micro_batch(build):
    trainer, _ = build("resident")
    refuse_at(trainer, {4}, torch.OutOfMemoryError("CUDA out of memory"))
    trainer.run()
    again, _ = build("resident")
    again.restore(TrainerState.from_json(vars(trainer.state())))
    assert (again.now.micro_batch, again.parts.optimizer.accumulation_steps) == (3, 2)


def test_micro_batches_divide_the_sequences_of_a_step():
    assert [half_of(size, 12) for size in (12, 6, 4, 3, 2)] == [6, 3, 2, 1, 1]
    assert half_of(7, 7) == 1 and half_of(10, 20) == 5
