"""The order of windows: a permutation each epoch, known from one integer, the same for ever."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vblackwell.data.corpus import Corpus, PackedDataset, permute
from vblackwell.errors import ConfigurationError


def corpus(count: int) -> Corpus:
    """A corpus whose tokens are their own positions."""
    return Corpus(np.arange(count, dtype=np.uint32), None, count, None, "", "numbers")  # pyright: ignore


@settings(deadline=None)
@given(count=st.integers(1, 3000), seed=st.integers(0, 2**64 - 1), epoch=st.integers(0, 10**6))
def test_permute_is_a_permutation(count, seed, epoch):
    assert sorted(permute(np.arange(count), count, seed, epoch)) == list(range(count))


def test_permute_mixes_and_stays_what_it_was():
    order = permute(np.arange(10_000), 10_000, 0, 0)
    assert abs(np.corrcoef(np.arange(10_000), order)[0, 1]) < 0.05  # 5 sigma of 1 / sqrt(10,000)
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.05
    other = permute(np.arange(10_000), 10_000, 0, 1)
    assert (order == other).sum() < 10 and abs(np.corrcoef(order, other)[0, 1]) < 0.05
    # a checkpoint's position means these windows; numbers that change here break every resumed run
    assert permute(np.arange(8), 8, 0, 0).tolist() == PINNED_8
    assert permute(np.arange(3), 1000, 7, 2).tolist() == PINNED_1000


PINNED_8 = [6, 3, 0, 1, 2, 7, 4, 5]
PINNED_1000 = [677, 814, 225]


def test_an_epoch_is_every_window_once():
    data = PackedDataset(corpus(1000), 9)
    seen = []
    for start in range(0, len(data), 7):
        inputs, targets = data.batch(np.arange(start, start + 7))
        assert inputs.dtype == targets.dtype == torch.int64 and inputs.shape == targets.shape == (7, 9)
        assert torch.equal(inputs + 1, targets)
        seen += inputs[:, 0].tolist()
    assert sorted(seen[: len(data)]) == [9 * window for window in range(len(data))]
    assert seen[: len(data)] != sorted(seen[: len(data)])


@settings(max_examples=50, deadline=None)
@given(
    count=st.integers(60, 900),
    seq_length=st.integers(1, 20),
    batch_size=st.integers(1, 9),
    again=st.integers(1, 9),
    position=st.integers(0, 300),
    seed=st.integers(0, 2**63),
)
def test_a_position_means_the_same_window_in_every_batch(count, seq_length, batch_size, again, position, seed):
    total = batch_size * again

    def from_position(size: int) -> list[torch.Tensor]:
        data = PackedDataset(corpus(count), seq_length, seed=seed)
        starts = range(position, position + total, size)
        batches = [data.batch(np.arange(start, start + size)) for start in starts]
        return [torch.cat(parts) for parts in zip(*batches, strict=True)]

    whole = PackedDataset(corpus(count), seq_length, seed=seed).batch(np.arange(position + total))
    for size in (batch_size, again):
        for found, expected in zip(from_position(size), whole, strict=True):
            assert torch.equal(found, expected[position:])


@pytest.mark.parametrize("count, seq_length, held_out", [(1000, 9, 20), (1000, 60, 61), (12, 5, 6)])
def test_held_out_tokens_are_the_last_and_never_trained_on(count, seq_length, held_out):
    train = PackedDataset(corpus(count), seq_length)
    validation = PackedDataset(corpus(count), seq_length, "validation")
    assert len(validation) >= 1 and validation.tokens.tolist() == list(range(count - held_out, count))
    assert all(rows.max() < count - held_out for rows in train.batch(np.arange(len(train))))
    inputs, targets = validation.batch(np.arange(len(validation)))
    other = PackedDataset(corpus(count), seq_length, "validation", seed=9).batch(np.arange(len(validation)))
    assert torch.equal(inputs, other[0]) and torch.equal(targets, other[1])
    first = [*inputs[0].tolist(), int(targets[0, -1])]
    assert first == list(range(count - held_out, count - held_out + seq_length + 1))


def test_held_out_windows_are_in_order():
    data = PackedDataset(corpus(1000), 3, "validation")
    inputs, _ = data.batch(np.arange(len(data)))
    assert inputs[:, 0].tolist() == [980, 983, 986, 989, 992, 995]


def test_what_cannot_be_cut_is_refused():
    with pytest.raises(ConfigurationError, match="11 tokens: sequences of 5 need at least 12"):
        PackedDataset(corpus(11), 5)
    for call, word in (
        (lambda: PackedDataset(corpus(100), 0), "at least 1"),
        (lambda: PackedDataset(corpus(100), 5, "test"), "split 'test'"),
    ):
        with pytest.raises(ConfigurationError, match=word):
            call()
