"""What is made of a mask before attention reads it: bits in both directions, lists of tiles, their order."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.attention.oracle import DEVICE, normal
from vblackwell.kernels.attention.blocks import Bounds, bits_of, list_tiles

ROWS, COLUMNS = 100, 200


def mask_of(*shape: int) -> torch.Tensor:
    """Random, with empty and whole tiles, in a view whose last stride is not 1."""
    mask = (normal(*shape[:2], shape[3], shape[2], seed=3) > 0).transpose(2, 3)
    mask[..., :64, 64:128] = True
    mask[..., 64:, :64] = False
    return mask


def unpacked(words: torch.Tensor, lines: int, length: int) -> torch.Tensor:
    """(B, N, lines, length) of words (B, N, words, lines), broadcast where there is one."""
    bits = (words[..., None] >> torch.arange(64, device=words.device) & 1).bool()  # (B, N, words, lines, 64)
    if words.shape[2] == 1:
        bits = bits.expand(-1, -1, -(-length // 64), -1, -1)
    bits = bits.transpose(2, 3).flatten(3)[..., :length]
    return bits.expand(-1, -1, lines, -1) if words.shape[3] == 1 else bits[:, :, :lines]


@pytest.mark.parametrize("shape", [(2, 1, ROWS, COLUMNS), (1, 1, 1, COLUMNS), (1, 2, ROWS, 1)], ids=str)
def test_bits(shape):
    mask = mask_of(*shape)
    if shape[3] > 1:  # any byte that is not zero is True
        mask.view(torch.uint8).mul_(128 + torch.arange(COLUMNS, device=mask.device, dtype=torch.uint8) % 128)
    bits = bits_of(mask.view(torch.uint8), with_keys=True)
    mask = mask.view(torch.uint8) != 0
    whole = mask.expand(-1, -1, ROWS, COLUMNS)
    assert torch.equal(unpacked(bits.by_query, ROWS, COLUMNS), whole)
    assert bits.by_key is not None
    assert torch.equal(unpacked(bits.by_key, COLUMNS, ROWS).transpose(2, 3), whole)
    if shape[3] > 1:  # a tile may reach beyond the last key
        beyond = unpacked(bits.by_query, ROWS, bits.by_query.shape[2] * 64)[..., COLUMNS:]
        assert beyond.shape[3] == 56 and not beyond.any()


def longest_run(whole: list[bool]) -> list[int]:
    """The tiles of the first of the longest runs of whole ones."""
    runs, run = [[]], []
    for tile, is_whole in enumerate(whole):
        run = [*run, tile] if is_whole else []
        runs.append(run)
    return max(runs, key=len)


# tiles of less and more than a word; bounds (left, right)
@pytest.mark.parametrize(
    ("shape", "tile", "bounds"),
    [
        ((1, 2, ROWS, COLUMNS), (32, 128), (None, None)),
        ((1, 2, ROWS, COLUMNS), (64, 32), (None, 0)),
        ((2, 1, ROWS, 1), (64, 64), (None, None)),
        ((1, 1, 1, COLUMNS), (32, 64), (70, 20)),
        pytest.param((1, 2, 1, COLUMNS), (32, 16), (None, None), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_lists(shape, tile, bounds):
    """Empty tiles are left out, the longest run of whole ones leads, and lines stand by length, equal ones
    as they lie.
    """
    mask = mask_of(*shape)
    if shape[2] == 1:  # several runs: of 1, 3 and 2 tiles of 16 keys, the last at the end
        for start, end in ((16, 32), (64, 112), (160, 192)):
            mask[..., start:end] = True
    left, right = bounds
    distance = (
        torch.arange(COLUMNS, device=DEVICE)[None] - torch.arange(ROWS, device=DEVICE)[:, None]
    )  # of key and query
    seen = mask.expand(-1, -1, ROWS, COLUMNS).clone()
    if right is not None:
        seen &= distance <= right
    if left is not None:
        seen &= distance >= -left
    some = torch.zeros((*mask.shape[:2], -(-ROWS // tile[0]), -(-COLUMNS // tile[1])), dtype=torch.bool)
    whole = some.clone()
    for i in range(some.shape[2]):
        for j in range(some.shape[3]):
            part = seen[:, :, i * tile[0] : (i + 1) * tile[0], j * tile[1] : (j + 1) * tile[1]]
            some[:, :, i, j] = part.any(-1).any(-1)
            whole[:, :, i, j] = part.all(-1).all(-1) & (part.shape[3] == tile[1])
    bits = bits_of(mask.view(torch.uint8), with_keys=False)
    for by_column in (False, True):
        lists = list_tiles(mask.view(torch.uint8), bits, tile, Bounds(ROWS, COLUMNS, 0, left, right), by_column)
        expected, full = (x.transpose(2, 3) if by_column else x for x in (some, whole))
        lines = expected.shape[2]
        length = lists.counts.sum(1).reshape(-1, lines)
        for index, line in enumerate(lists.items.tolist()):
            b, rest = divmod(index, mask.shape[1] * lines)
            n, place = divmod(rest, lines)
            num_whole, num_partial = lists.counts[index].tolist()
            listed = line[: num_whole + num_partial]
            assert line[:num_whole] == longest_run(full[b, n, place].tolist())
            assert listed[num_whole:] == sorted(listed[num_whole:])
            missed = set(expected[b, n, place].nonzero().flatten().tolist()) - set(listed)
            assert not missed and len(set(listed)) == len(listed)
            if left is None and right is None:  # bounds may keep a tile whose visible part the mask hides
                assert len(listed) == expected[b, n, place].sum()
        order = lists.order.reshape(-1, lines).long()
        assert torch.equal(order.cpu(), length.cpu().argsort(dim=1, descending=True, stable=True))
