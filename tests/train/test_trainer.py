"""The loop on a toy model: what is skipped, what is undone, what is due."""

from __future__ import annotations

import json
from dataclasses import asdict
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from vblackwell.data.corpus import Corpus, PackedDataset
from vblackwell.errors import CorruptData, DiskError
from vblackwell.memory.cache.stack import VGPUStack
from vblackwell.offload.api import enable_vgpu_stack_optimization, offload_of
from vblackwell.offload.optimizer import VGPUAdamW
from vblackwell.train.config import TrainConfig
from vblackwell.train.progress import Progress
from vblackwell.train.trainer import (
    LossScaler,
    Parts,
    Schedule,
    Trainer,
    TrainerState,
    TrainingDiverged,
    capture_rng,
    restore_rng,
)

CPU = torch.device("cpu")


class Toy(nn.Module):
    """Mean squared distance of an embedding's rows to their successors', with dropout so that generators matter.

    ``spoil``: forwards (counted from 1) whose loss is multiplied by this.
    """

    def __init__(self, spoil):
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.embedding = nn.Embedding(16, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        for param in self.parameters():
            param.data.normal_(generator=generator)
        self.spoil = spoil
        self.forwards = 0
        self.on_forward = lambda count: None

    def forward(self, input_ids, targets):
        self.forwards += self.training
        self.on_forward(self.forwards)
        x = nn.functional.dropout(self.embedding(input_ids), 0.2, self.training)
        for layer in self.layers:
            x = x + layer(x).tanh()
        loss = (x - self.embedding(targets)).square().mean()
        return loss * self.spoil.get(self.forwards, 1.0) if self.training else loss


@pytest.fixture
def make():
    """Builds a trainer over a streamed toy; everything is closed at the end."""
    opened = []

    def build(spoil=None, scaler=None, stop=None, **config):
        settings = {
            "max_steps": 6,
            "batch_size": 2,
            "seq_length": 4,
            "eval_every": 2,
            "checkpoint_every": 3,
            "eval_sequences": 5,
        }
        config = TrainConfig(**(settings | config))
        stack = VGPUStack({"levels": [{"device": "arena", "capacity_mb": 0.01}, {"device": "cpu", "capacity_mb": 1}]})
        model = Toy(spoil or {})
        enable_vgpu_stack_optimization(model, stack, placement="streamed")
        opened.append((model, stack))
        optimizer = VGPUAdamW(
            model.parameters(),
            lr=0.1,
            max_grad_norm=1.0,
            update_in_backward=True,
            accumulation_steps=config.accumulation_steps,
        )
        tokens = np.arange(2000, dtype=np.uint16) % 16
        corpus = Corpus(tokens, None, 16, None, "", "toy")
        parts = Parts(
            model,
            optimizer,
            stack,
            PackedDataset(corpus, config.seq_length, "train"),
            PackedDataset(corpus, config.seq_length, "validation"),
            Schedule(0.1, 0.1, 0, 6),
            scaler,
            CPU,
        )
        records, states = [], []
        stop = stop or SimpleNamespace(wanted=False)
        torch.manual_seed(3)
        trainer = Trainer(config, parts, Progress(), stop, records.append, states.append)
        return trainer, records, states

    yield build
    for model, stack in opened:
        engine = offload_of(model)
        assert engine is not None
        engine.close()
        stack.close()


def weights(trainer):
    return {name: param.detach().clone() for name, param in trainer.parts.model.named_parameters()}


def same(left, right):
    return all(torch.equal(left[name], right[name]) for name in left)


def test_the_validation_loss_does_not_depend_on_the_batch_size(make):
    losses = [make(batch_size=size)[0].validate() for size in (1, 2, 3, 8)]
    # Means of means in fp32, grouped differently.
    assert losses == pytest.approx([losses[0]] * 4, rel=1e-5)
    assert losses[0] != pytest.approx(make(eval_sequences=1)[0].validate(), rel=1e-3)


def test_what_is_due_is_done(make):
    trainer, records, states = make()
    trainer.run()
    assert [record.step for record in records] == [1, 2, 3, 4, 5, 6]
    assert [record.step for record in records if record.val_loss is not None] == [1, 2, 4, 6]
    assert [state.step for state in states] == [3, 6] and states[1].data_position == 12
    assert all(record.link_bytes and record.level_bytes["arena"] > 0 for record in records)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_changes_nothing(make, bad, capsys):
    trainer, records, _ = make(spoil={3: bad}, max_steps=3)
    seen = []
    trainer.parts.model.on_forward = lambda count: None
    hooks_record = trainer._record

    def record(line):
        hooks_record(line)
        seen.append(weights(trainer))

    trainer._record = record
    trainer.run()
    assert [line.skipped for line in records] == [False, False, True]
    assert not same(seen[0], seen[1]) and same(seen[1], seen[2])
    assert records[2].loss is None and "SKIPPED: weights untouched" in capsys.readouterr().out


def test_skipping_leaves_no_trace_in_later_steps(make):
    """A skipped step's moments and step counts are those of a run that never saw its batch, but for the position."""
    spoiled, _, _ = make(spoil={2: float("nan")}, max_steps=1)
    spoiled.run()
    reference = weights(spoiled)
    spoiled.total_steps = 2
    spoiled.run()
    assert same(weights(spoiled), reference)
    state = offload_of(spoiled.parts.model).step_control.steps
    assert {float(step) for step in state.values()} == {1.0}


def test_too_many_in_a_row_stop_the_run(make):
    trainer, records, states = make(
        spoil={step: float("inf") for step in (2, 4, 5, 6)}, max_skipped_steps=3, max_steps=9
    )
    with pytest.raises(TrainingDiverged, match="3 steps in a row up to step 6"):
        trainer.run()
    assert [line.skipped for line in records] == [False, True, False, True, True, True]
    assert [state.step for state in states] == [3]


@pytest.mark.parametrize("scaled", [False, True])
def test_a_run_that_learnt_nothing_is_an_error(make, scaled):
    """Fewer steps than max_skipped_steps, none of them finite: what would be exported are the initial weights."""
    scaler = LossScaler() if scaled else None
    trainer, _, states = make(
        spoil={step: float("nan") for step in (1, 2)}, scaler=scaler, max_steps=2, checkpoint_every=1
    )
    before = weights(trainer)
    with pytest.raises(TrainingDiverged, match="none of the 2 steps"):
        trainer.run()
    assert same(before, weights(trainer)) and states[-1].skipped == 2
    again, _, _ = make(
        spoil={1: float("nan")}, max_steps=3
    )  # goes on from there: a third step as bad, then one that learns
    again.restore(TrainerState.from_json(vars(states[-1]) | {"scaler": None}))
    with pytest.raises(TrainingDiverged, match="none of the 3 steps"):
        again.run()
    again.total_steps = 4
    again.run()


def test_gradients_that_overflow_halve_the_scale_and_are_no_divergence(make):
    """The loss is finite; the norm of its scaled gradient, whose squares pass 2**128, is not.
    The scale falls until it is.
    """
    trainer, records, states = make(
        spoil={count: 2.0**42 for count in range(1, 9)},
        scaler=LossScaler(2.0**24),
        max_skipped_steps=2,
        max_steps=8,
    )
    trainer.run()
    skipped = [line.skipped for line in records]
    assert skipped[:3] == [True] * 3 and not skipped[-1]  # more in a row than max_skipped_steps
    assert trainer.parts.scaler.scale == 2.0 ** (24 - sum(skipped))
    assert states[-1].scaler.scale == 2.0 ** (24 - sum(skipped[:6]))


def test_scaling_by_a_power_of_two_changes_no_bit(make):
    plain, _, _ = make(max_steps=4)
    plain.run()
    scaled, _, _ = make(max_steps=4, scaler=LossScaler(2.0**10))
    scaled.run()
    assert same(weights(plain), weights(scaled))


def test_an_interrupted_step_is_undone_and_repeated(make):
    """Stopped between micro-batches, then continued: the same weights as without the stop."""
    whole, _, _ = make(accumulation_steps=3, max_steps=4)
    whole.run()

    stop = SimpleNamespace(wanted=False)
    trainer, records, states = make(stop=stop, accumulation_steps=3, max_steps=4, checkpoint_every=0)

    def on_forward(count):
        stop.wanted = count == 8  # in the third step, before its last micro-batch

    trainer.parts.model.on_forward = on_forward
    trainer.run()
    assert trainer.now.step == 2 and [line.step for line in records] == [1, 2]
    assert [state.step for state in states] == [2] and states[0].data_position == trainer.now.data_position == 12
    stop.wanted = False
    trainer.parts.model.on_forward = lambda count: None
    trainer.restore(states[0])
    trainer.run()
    assert [line.step for line in records] == [1, 2, 3, 4]
    assert same(weights(trainer), weights(whole))


def test_a_stop_during_validation_costs_no_validation_loss(make):
    """The step is in the checkpoint as one whose record lacks it, and the resumed run measures it."""
    plain, expected, _ = make()
    plain.run()
    stop = SimpleNamespace(wanted=False)
    trainer, records, states = make(stop=stop)
    measure, seen = trainer._loss, []

    def loss(*batch):
        if not trainer.parts.model.training and trainer.now.step == 4:
            seen.append(1)
            stop.wanted = len(seen) == 2
        return measure(*batch)

    trainer._loss = loss
    trainer.run()
    assert [record.val_loss is None for record in records] == [False, False, True, True]
    assert states[-1].step == 4
    stop.wanted = False
    trainer.restore(TrainerState.from_json(json.loads(json.dumps(asdict(states[-1])))))
    trainer.run()
    assert [record.step for record in records] == [1, 2, 3, 4, 4, 5, 6]
    assert [record.val_loss for record in records[:3] + records[4:]] == [record.val_loss for record in expected]
    assert states[-1].unrecorded is None


def test_a_step_that_cannot_be_recorded_is_in_a_checkpoint(make, monkeypatch):
    plain, expected, _ = make()
    plain.run()
    trainer, records, states = make()
    full = {4}

    def record(line):
        if line.step in full:
            raise DiskError("writing metrics.jsonl failed")
        records.append(line)

    trainer._record = record
    with pytest.raises(DiskError, match="metrics.jsonl failed. Step 4 is in a checkpoint"):
        trainer.run()
    full.clear()
    trainer.restore(TrainerState.from_json(json.loads(json.dumps(asdict(states[-1])))))
    trainer.run()
    assert [(line.step, line.loss, line.val_loss) for line in records] == [
        (line.step, line.loss, line.val_loss) for line in expected
    ]


def test_it_is_said_that_no_checkpoint_could_be_written_either(make):
    trainer, _, _ = make()

    def refuse(what):
        raise DiskError("no room")

    trainer._record = refuse
    trainer._checkpoint = refuse
    with pytest.raises(DiskError, match="no room. No checkpoint of step 1 could be written either: no room"):
        trainer.run()


def test_generators_continue_where_they_were():
    import random

    state = TrainerState(step=3, data_position=9, rng=json.loads(json.dumps(capture_rng(CPU))))
    expected = torch.rand(3), random.random()
    again = TrainerState.from_json(json.loads(json.dumps(vars(state))))
    restore_rng(again.rng, CPU)
    assert torch.equal(torch.rand(3), expected[0]) and random.random() == expected[1]
    with pytest.raises(CorruptData, match="data_position"):
        TrainerState.from_json({"step": 3})
