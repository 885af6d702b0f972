"""The order of windows: a permutation each epoch, known from one integer, the same for ever."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vblackwell.data.corpus import BatchStream, Corpus, PackedDataset, evaluation_batches, permute
from vblackwell.errors import ConfigurationError


def corpus(count: int) -> Corpus:
    """A corpus whose tokens are their own positions."""
    return Corpus(np.arange(count, dtype=np.uint32), None, count, None, "", "numbers")  # pyright: ignore


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
    stream, seen = BatchStream(data, 7), []
    while stream.state < len(data):
        inputs, targets = stream.next()
        assert inputs.dtype == targets.dtype == torch.int64 and inputs.shape == targets.shape == (7, 9)
        assert torch.equal(inputs + 1, targets)
        seen += inputs[:, 0].tolist()
    assert sorted(seen[: len(data)]) == [9 * window for window in range(len(data))]
    assert seen[: len(data)] != sorted(seen[: len(data)])


@settings(max_examples=50, deadline=None)
@given(
    count=st.integers(60, 900), seq_length=st.integers(1, 20), batch_size=st.integers(1, 9), again=st.integers(1, 9),
    stop=st.integers(0, 30), seed=st.integers(0, 2**63),
)  # fmt: skip
def test_a_stream_resumes_exactly(count, seq_length, batch_size, again, stop, seed):
    data = PackedDataset(corpus(count), seq_length, seed=seed)
    whole = BatchStream(data, batch_size)
    for _ in range(stop):
        whole.next()
    state = int(str(whole.state))  # as it comes back from JSON
    fresh = PackedDataset(corpus(count), seq_length, seed=seed)
    resumed, other_size = BatchStream(fresh, batch_size), BatchStream(fresh, again)
    resumed.state = other_size.state = state
    expected = torch.cat([whole.next()[0] for _ in range(again)])
    assert torch.equal(torch.cat([resumed.next()[0] for _ in range(again)]), expected)
    assert torch.equal(torch.cat([other_size.next()[0] for _ in range(batch_size)]), expected)
    assert resumed.state == whole.state == state + batch_size * again


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


def test_evaluation_sees_every_window_once():
    data = PackedDataset(corpus(1000), 3, "validation")
    sizes = [len(inputs) for inputs, _ in evaluation_batches(data, 4)]
    assert sizes == [4, 2] and len(data) == 6
    starts = torch.cat([inputs[:, 0] for inputs, _ in evaluation_batches(data, 4)])
    assert starts.tolist() == [980, 983, 986, 989, 992, 995]
    assert [len(inputs) for inputs, _ in evaluation_batches(data, 4, max_batches=1)] == [4]


def test_what_cannot_be_cut_is_refused():
    with pytest.raises(ConfigurationError, match="11 tokens: sequences of 5 need at least 12"):
        PackedDataset(corpus(11), 5)
    for call, word in (
        (lambda: PackedDataset(corpus(100), 0), "at least 1"),
        (lambda: PackedDataset(corpus(100), 5, "test"), "split 'test'"),
        (lambda: BatchStream(PackedDataset(corpus(100), 5), 0), "batch size 0"),
    ):  # fmt: skip
        with pytest.raises(ConfigurationError, match=word):
            call()
