"""Attention over keys and values in pages, for many requests in one call: decoding, chunks of prompts, and both mixed.

A request's keys may lie anywhere: a table says which page holds which of its positions, and only the device knows how
many there are, so a captured call holds for every state of the cache. No gradient.

The kernels add up the keys of a row in chunks of fixed positions (`plan.CHUNK`) and the chunks in order, whichever
program does it and in whichever tile of queries the row lies. So a token's bits depend on its own query and on the keys
that it sees: not on the batch, on page numbers, or on how the prompt was cut into calls; single steps and whole prompts
give the same. The plain expression, which runs on the CPU, keeps to that for calls cut alike; so its bits depend on
nothing else where each query is a request of its own, as when all decode.

Legend: S queries of all requests, R requests, N query heads, K key heads, H head width, P positions of a page.
"""

import math

import torch
from torch import Tensor

from vblackwell.errors import ConfigurationError, Unsupported
from vblackwell.kernels.attention.op import WIDEST_HEAD, bounds, check_heads, check_options
from vblackwell.kernels.attention.reference import attention_reference
from vblackwell.kernels.runtime.registry import runs_triton

_WIDTH = 64  # in the plain expression, keys of a single query are filled up to a multiple of this
_AT_ONCE = 1 << 22  # numbers of keys that it gathers at a time


def paged_attention(
    q_SNH: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    starts: Tensor,
    table: Tensor,
    lengths: Tensor,
    max_q: int,
    *,
    window: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
) -> Tensor:
    """What each query gathers from the keys of its request up to its own, (S, N, H); the last query of a request stands
    at its last key. Rows of no request are left unwritten, those that see nothing are zero.

    Args:
        q_SNH: queries, those of a request one after the other; H up to 256.
        key_pages, value_pages: (pages, P, K, H) of the queries' type, of equal strides, the last 1; N is a multiple of
            K. The new keys are in them already (`store_pages`). What no request holds may be anything, NaN for
            example; a request holds all its pages, those too that have left its ``window``.
        starts: (R + 1,) int32, ascending from 0: where each request's queries begin; a request may have none.
        table: (R, most pages of a request) int32: the page of each P positions. Entries beyond a length are not read.
        lengths: (R,) int32: keys of each request, the new ones included; at most P times the table's width.
        max_q: most queries of a request; 1 where all decode, which saves a launch.
        window: keys seen, the query's own included; None: all up to it.
        scale: of the scores, positive; default 1 / sqrt(H).
        softcap: scores s become softcap * tanh(s / softcap) (Gemma 2, arXiv:2408.00118).

    ``starts``, ``table`` and ``lengths`` are on the device and are not looked at. Raises ConfigurationError where
    shapes, types or values do not belong together, Unsupported where a gradient is wanted.
    """
    _check_pages(q_SNH, key_pages, value_pages, "queries")
    check_heads(q_SNH, key_pages[:, 0], value_pages[:, 0], 1)
    check_options(q_SNH, scale, softcap, None, 0.0)
    requests = lengths.shape[0]
    shapes = (tuple(starts.shape), tuple(table.shape), tuple(lengths.shape))
    if shapes != ((requests + 1,), (requests, table.shape[-1]), (requests,)):
        raise ConfigurationError(f"starts, table and lengths of {shapes}: give (R + 1,), (R, pages) and (R,)")
    if not starts.dtype == table.dtype == lengths.dtype == torch.int32:
        types = (starts.dtype, table.dtype, lengths.dtype)
        raise ConfigurationError(f"starts, table and lengths of {types}: give torch.int32")
    if max_q < 1 or not starts.device == table.device == lengths.device == q_SNH.device:
        devices = (starts.device, table.device, lengths.device)
        raise ConfigurationError(
            f"at most {max_q} queries a request, starts, table and lengths on {devices}: "
            f"give at least 1, and tensors on {q_SNH.device}"
        )
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q_SNH, key_pages, value_pages)):
        raise Unsupported("attention over pages has no gradient: call it under torch.no_grad()")
    numbers = (bounds(True, window)[0], scale or 1 / math.sqrt(q_SNH.shape[-1]), softcap or 0.0)
    given = (q_SNH, key_pages, value_pages, starts, table, lengths)
    if q_SNH.numel() == 0 or requests == 0 or table.shape[1] == 0:
        return torch.zeros_like(q_SNH)
    if runs_triton("paged_attention", q_SNH, q_SNH.shape[-1]):
        from vblackwell.kernels.attention import paged_triton

        if q_SNH.shape[-1] > WIDEST_HEAD:
            raise ConfigurationError(f"heads of {q_SNH.shape[-1]} numbers: the kernels take {WIDEST_HEAD}")
        return paged_triton.attend(*given, max_q, *numbers)
    return _plain(*given, *numbers)


def store_pages(k_SKH: Tensor, v_SKH: Tensor, key_pages: Tensor, value_pages: Tensor, slots: Tensor) -> None:
    """Put keys and values (S, K, H) into pages (pages, P, K, H) of equal strides, the last 1.

    ``slots``: (S,) int64 on the device, page * P + place within it for each row, no two alike; -1: the row is left out.
    They are not looked at. Raises ConfigurationError for shapes or types that do not belong together.
    """
    _check_pages(k_SKH, key_pages, value_pages, "new keys")
    same = k_SKH.shape == v_SKH.shape and k_SKH.shape[1] == key_pages.shape[2] and slots.shape == k_SKH.shape[:1]
    if not same or slots.dtype != torch.int64 or not k_SKH.dtype == v_SKH.dtype == key_pages.dtype:
        what = f"{k_SKH.dtype} {tuple(k_SKH.shape)} and {v_SKH.dtype} {tuple(v_SKH.shape)}"
        raise ConfigurationError(
            f"keys and values of {what} at {slots.dtype} {tuple(slots.shape)}, for pages of {key_pages.dtype} "
            f"{tuple(key_pages.shape)}: give (S, K, H) twice in the pages' type, and (S,) torch.int64"
        )
    if k_SKH.numel() == 0:
        return
    if runs_triton("store_pages", k_SKH, 0):
        from vblackwell.kernels.attention import paged_triton

        paged_triton.store(k_SKH, v_SKH, key_pages, value_pages, slots)
        return
    kept = slots >= 0
    at = (slots[kept] // key_pages.shape[1], slots[kept] % key_pages.shape[1])
    key_pages[at], value_pages[at] = k_SKH[kept], v_SKH[kept]


def _check_pages(x: Tensor, key_pages: Tensor, value_pages: Tensor, what: str) -> None:
    if not (x.dim() == 3 and key_pages.dim() == 4 and key_pages.shape == value_pages.shape and key_pages.shape[1] > 0):
        raise ConfigurationError(
            f"{what} {tuple(x.shape)}, pages {tuple(key_pages.shape)} and {tuple(value_pages.shape)}: "
            "give (S, heads, H), and (pages, P, K, H) twice"
        )
    if x.shape[2] != key_pages.shape[3] or key_pages.stride() != value_pages.stride() or key_pages.stride(3) != 1:
        raise ConfigurationError(
            f"{what} of width {x.shape[2]}, pages of width {key_pages.shape[3]} and strides {key_pages.stride()} and "
            f"{value_pages.stride()}: give one width, and equal strides whose last is 1"
        )


def _plain(  # type: ignore[no-untyped-def]
    q_SNH, key_pages, value_pages, starts, table, lengths, left, scale, softcap
) -> Tensor:
    out_SNH, begins = torch.zeros_like(q_SNH), starts.tolist()
    singles: dict[int, list[int]] = {}  # requests of one query, by their width
    for request, (begin, end, length) in enumerate(zip(begins, begins[1:], lengths.tolist(), strict=False)):
        if end - begin == 1 and length:
            singles.setdefault(-(-length // _WIDTH) * _WIDTH, []).append(request)
            continue
        position = torch.arange(length, device=q_SNH.device)
        at = (table[request, position // key_pages.shape[1]], position % key_pages.shape[1])
        q, k, v = (x.float().transpose(0, 1)[None] for x in (q_SNH[begin:end], key_pages[at], value_pages[at]))
        y = attention_reference(q, k, v, left=left, right=0, bottom_right=True, scale=scale, softcap=softcap)
        out_SNH[begin:end] = y[0].transpose(0, 1).to(out_SNH.dtype)
    for width, requests in singles.items():
        for part in torch.tensor(requests).split(max(1, _AT_ONCE // (width * key_pages[0, 0].numel()))):
            _singles(out_SNH, part, width, q_SNH, key_pages, value_pages, starts, table, lengths, left, scale, softcap)
    return out_SNH


def _singles(  # type: ignore[no-untyped-def]
    out_SNH, requests_R, width, q_SNH, key_pages, value_pages, starts, table, lengths, left, scale, softcap
) -> None:
    """Requests of one query each, in one call: their keys filled up to ``width``, of which nothing is seen."""
    size, rows_R = key_pages.shape[1], starts[requests_R].long()
    position_T = torch.arange(width, device=q_SNH.device)
    block_T = (position_T // size).clamp(max=table.shape[1] - 1)
    behind_RT = lengths[requests_R].long()[:, None] - 1 - position_T
    seen_RT = (behind_RT >= 0) if left is None else (behind_RT >= 0) & (behind_RT <= left)
    at = (table[requests_R][:, block_T].long().masked_fill(~seen_RT, 0), position_T % size)
    k_RTKH, v_RTKH = (x[at].float().masked_fill(~seen_RT[:, :, None, None], 0) for x in (key_pages, value_pages))
    q_RKGH = q_SNH[rows_R].float().unflatten(1, (key_pages.shape[2], -1))
    scores_RKGT = q_RKGH @ k_RTKH.permute(0, 2, 3, 1).contiguous() * scale
    if softcap:
        scores_RKGT = softcap * torch.tanh(scores_RKGT / softcap)
    weights_RKGT = scores_RKGT.masked_fill(~seen_RT[:, None, None], float("-inf")).softmax(-1)
    y_RKGH = weights_RKGT @ v_RTKH.transpose(1, 2).contiguous()
    out_SNH[rows_R] = y_RKGH.flatten(1, 2).to(out_SNH.dtype)
