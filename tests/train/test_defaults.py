"""What a run does where nothing was said, by invented machines, folders and data."""

from __future__ import annotations

from dataclasses import asdict, replace

import numpy as np
import pytest
import torch

from vblackwell.data.corpus import Corpus
from vblackwell.errors import ConfigurationError, InsufficientMemory
from vblackwell.machine.gpus import find_gpu
from vblackwell.machine.rates import rates_of
from vblackwell.nn.decoder.config import DecoderConfig
from vblackwell.nn.decoder.decoder import Decoder
from vblackwell.planner.forecast import Machine
from vblackwell.planner.placement import Bounds
from vblackwell.train.auto import apply_plan, plan_on
from vblackwell.train.config import TrainConfig, resolve
from vblackwell.train.defaults import (
    Facts,
    bound_length,
    choose,
    longest_document,
    longest_that_fits,
    most_sequences,
    shorter_lengths,
)
from vblackwell.units import GiB, MiB

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
GPU, OLD_GPU, CPU = Facts(True, True, BF16, 4096), Facts(True, False, BF16, 4096), Facts(False, True, BF16, 4096)


def chosen(facts, **flags):
    return choose(resolve({"model": "folder", **flags}), facts)


@pytest.mark.parametrize(
    ("machine", "weights", "precision"),
    [
        (GPU, BF16, "bf16"), (GPU, FP16, "bf16"), (GPU, FP32, "bf16"), (GPU, None, "auto"),
        (OLD_GPU, BF16, "fp16"), (OLD_GPU, FP16, "fp16"), (OLD_GPU, FP32, "fp16"),
        (CPU, BF16, "fp32"), (CPU, FP16, "fp32"), (CPU, FP32, "fp32"), (CPU, None, "auto"),
    ],
)  # fmt: skip
def test_a_folder_computes_in_its_type_and_a_preset_as_its_recipe(machine, weights, precision):
    config, reasons = chosen(replace(machine, weights=weights))
    assert config.precision == precision and config.vgpu_auto is machine.gpu
    assert any(reason.startswith(f"{precision}, ") for reason in reasons) == (weights is not None)
    sizes = (config.auto_batch_size, config.auto_seq_length)
    assert sizes == ((False, False) if weights is None else (machine.gpu, True))


def test_what_is_said_is_not_chosen():
    for flags in ({"precision": "fp32"}, {"mixed_precision": True}):
        assert chosen(GPU, **flags)[0].precision == flags.get("precision", "auto")
    config, _ = chosen(GPU, batch_size="4", seq_length="512")
    assert (config.auto_batch_size, config.batch_size) == (False, 4)
    assert (config.auto_seq_length, config.seq_length) == (False, 512)
    config, _ = chosen(CPU, batch_size="auto", seq_length="auto")
    assert config.auto_batch_size and config.auto_seq_length
    assert chosen(CPU, vgpu_auto=True)[0].vgpu_auto is True
    assert chosen(GPU, deterministic=True)[0].auto_batch_size is False  # it goes by the bytes that are free just now


def test_a_preset_keeps_its_sizes_and_is_planned_on_a_gpu():
    preset = resolve({"config": "small"})
    config, reasons = choose(preset, replace(GPU, weights=None))
    assert config == replace(preset, vgpu_auto=True) and len(reasons) == 1 and "planned, on a GPU" in reasons[0]
    assert choose(preset, replace(CPU, weights=None)) == (replace(preset, vgpu_auto=False), [])


@pytest.mark.parametrize("machine", [GPU, CPU])
def test_no_vgpu_auto_chooses_nothing(machine):
    config, reasons = chosen(machine, vgpu_auto=False)
    nothing = {"vgpu_auto": False, "auto_batch_size": False, "auto_seq_length": False}
    assert config == TrainConfig(model="folder", learning_rate=2e-5, **nothing) and reasons == []
    assert (config.batch_size, config.seq_length, config.precision, config.mixed_precision) == (8, 256, "auto", False)


@pytest.mark.parametrize("then", [GPU, CPU])
def test_a_resumed_run_chooses_nothing_anew(then):
    """Also of a version that chose nothing, whose settings say so."""
    began = replace(chosen(then)[0], resume=True)
    assert choose(began, replace(GPU, weights=FP32))[0] == began
    older = TrainConfig(**(asdict(TrainConfig(model="folder")) | {"vgpu_auto": False, "auto_batch_size": False}))
    found, reasons = choose(replace(older, resume=True), GPU)
    assert found.precision == "auto" and not found.vgpu_auto and not found.auto_seq_length and reasons == []


@pytest.mark.parametrize(
    ("facts", "needed", "tokens", "length", "why"),
    [
        (GPU, None, 10**9, 4096, "the model's positions"),
        (replace(GPU, positions=None), None, 10**9, 2048, "its positions are not known"),
        (GPU, 700, 10**9, 704, "the longest document has 700"),
        (GPU, 700, 0, 704, "the longest document has 700"),
        (GPU, 40, 0, 40, "the longest document has 40"),
        (GPU, 1, 0, 2, "the longest document has 1"),  # a sequence has a token and the next one
        (GPU, 9000, 100_000, 960, "an epoch of 100,000 tokens keeps 100 rows"),
        (GPU, 9000, 5000, 128, "keeps 100 rows"),
        (GPU, 9000, 200, 99, "one held out"),
        (CPU, 9000, 10**9, 256, "quick on a CPU"),
        (replace(CPU, positions=64), 9000, 10**9, 64, "the model's positions"),
    ],
)
def test_a_length_is_what_the_model_learnt_and_the_data_needs(facts, needed, tokens, length, why):
    found, said = bound_length(facts, needed, tokens)
    assert found == length and said.startswith(f"{length:,} tokens a sequence: ") and why in said


def test_the_longest_document(monkeypatch):
    tokens = np.array([5, 5, 0, 5, 5, 5, 5, 0, 5, 0, 5, 5, 5], dtype=np.uint16)
    corpus = Corpus(tokens, None, 8, 0, "", "toy")
    for at_once in (100, 4, 3, 1):
        monkeypatch.setattr("vblackwell.train.defaults.SCANNED_AT_ONCE", at_once)
        assert longest_document(corpus, 100) == 4 and longest_document(corpus, 3) == 3
        assert longest_document(replace(corpus, tokens=tokens[8:]), 100) == 3  # the last has no mark
    assert longest_document(replace(corpus, end_of_text_id=None), 100) is None


def test_a_batch_leaves_an_epoch_its_steps():
    assert [most_sequences(rows) for rows in (1, 99, 100, 250, 10_000)] == [1, 1, 1, 2, 100]
    assert list(shorter_lengths(1000)) == [1000, 500, 250] and list(shorter_lengths(64)) == [64]


MODEL = DecoderConfig(512, 256, 512, 4, 4, max_position=8192)


def planned(free_bytes, config, length, most=1024):
    """On an RTX 3060 with so much of its memory free."""
    card = find_gpu("RTX 3060")
    machine = Machine(Bounds(free_bytes, 4 * GiB), rates_of(card), capability=card.capability)
    model = Decoder(MODEL, device="meta", dtype=torch.float32)

    def plan_of(length):
        tried = replace(config, seq_length=length)
        return tried, plan_on(machine, tried, model, BF16, card.num_sms, most)

    tried, plan = longest_that_fits(shorter_lengths(length), plan_of)
    return apply_plan(tried, plan)


def test_the_length_and_the_batch_are_what_fits():
    config = replace(chosen(GPU)[0], placement="resident", gradient_checkpointing=False)
    narrow, roomy = (planned(size * MiB, config, 2048, most=3) for size in (160, 1024))
    assert 128 <= narrow.seq_length < roomy.seq_length == 2048
    assert narrow.batch_size == 1 < roomy.batch_size <= 3
    with pytest.raises(InsufficientMemory, match="not one sequence of 128 tokens fits"):
        planned(90 * MiB, config, 256)


def test_layers_are_computed_again_where_that_fits_more_unless_it_was_said():
    config, _ = chosen(GPU, batch_size="4")
    assert config.gradient_checkpointing is None
    found = {size: planned(size * MiB, config, 1024).gradient_checkpointing for size in (160, 8192)}
    assert found == {160: True, 8192: False}
    for said in (True, False):
        assert planned(8 * GiB, replace(config, gradient_checkpointing=said), 512).gradient_checkpointing is said
    same = planned(8 * GiB, replace(config, deterministic=True), 512)
    assert same.gradient_checkpointing is False


def test_auto_is_a_size_and_other_words_are_not():
    assert resolve({"model": "x", "seq_length": "auto"}).auto_seq_length is True
    assert resolve({"config": "tiny"}).auto_seq_length is False
    with pytest.raises(ConfigurationError, match="--seq-length 'long' is not a whole number"):
        resolve({"model": "x", "seq_length": "long"})
