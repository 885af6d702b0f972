"""Documents that share rows: every token sees itself and what is before it in its document.

On CUDA the rows are one sequence of documents for `flash_attention_varlen`: a mask has S times as many bytes as there
are tokens, and every layer would read it. Where that does not run there is a mask, made once a step.

Legend: B batch, S sequence, N documents, or query heads; K key heads, H head width.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from vblackwell.kernels.attention import op
from vblackwell.kernels.runtime import registry

BUCKET = 16  # N is a multiple, so that launches repeat; an empty document costs them next to nothing


def document_starts(first_BS: Tensor) -> Tensor:
    """Where documents begin in all rows one after the other, (N + 1,) int32 as `flash_attention_varlen` takes them:
    with each row, and where ``first_BS`` (bool) is True; then empty ones, unless N is B. A GPU is waited for.
    """
    rows, length = first_BS.shape
    starts = functional.pad(first_BS[:, 1:], (1, 0), value=True).flatten().nonzero().squeeze(1)
    more = 0 if starts.shape[0] == rows else -starts.shape[0] % BUCKET
    return functional.pad(starts, (0, more + 1), value=rows * length).int()


def document_starts_at(positions_BS: Tensor) -> Tensor:
    """`document_starts` of documents that begin at position 0."""
    return document_starts(positions_BS == 0)


def within_documents(positions_BS: Tensor) -> Tensor:
    """What each token may attend to, (B, S, S): itself and what precedes it in its document, which begins at 0."""
    document_BS = (positions_BS == 0).cumsum(1)
    length = positions_BS.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool, device=positions_BS.device).tril()
    return (document_BS[:, :, None] == document_BS[:, None, :]) & causal


@functools.cache
def runs_packed(device: torch.device, dtype: torch.dtype, head: int) -> bool:
    """Whether documents go through `flash_attention_varlen` there; its interpreter is for tests."""
    fits = device.type == "cuda" and dtype in registry.DTYPES and head <= op.WIDEST_HEAD
    return fits and not registry.triton_reasons(device, registry.capability(device))


@dataclass(eq=False)
class Documents:
    """Those of a batch. ``starts``: of `document_starts`, None: as ``make_starts`` gives them where they are needed;
    ``make_mask``: gives the same as a mask, True where one attends; ``window``: how many tokens of its document one
    sees with its own; None: all before it.
    """

    starts: Tensor | None
    make_mask: Callable[[], Tensor]
    window: int | None = None
    make_starts: Callable[[], Tensor] | None = None
    made: Tensor | None = None

    @property
    def mask(self) -> Tensor:
        if self.made is None:
            self.made = self.make_mask()
        return self.made

    def attention(self, q_BNSH: Tensor, k_BKSH: Tensor, v_BKSH: Tensor, **scores: Any) -> Tensor | None:
        """What queries gather (B, N, S, H) by `flash_attention_varlen`, which takes ``scores``; None: use ``mask``."""
        runs = k_BKSH.shape == v_BKSH.shape and runs_packed(q_BNSH.device, q_BNSH.dtype, q_BNSH.shape[3])
        if not runs or registry.asked_for("attention") not in (None, "triton"):
            return None
        if self.starts is None and self.make_starts is not None and registry.computes_at_once():
            self.starts = self.make_starts()
        if self.starts is None:  # a trace cannot know how many documents there are
            return None
        q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q_BNSH, k_BKSH, v_BKSH))
        how = {"causal": True, "window": self.window, **scores}
        y_TNH = op.flash_attention_varlen(q, k, v, self.starts, self.starts, **how)
        return y_TNH.unflatten(0, (q_BNSH.shape[0], -1)).transpose(1, 2)


def mask_or_documents(**asked: Any) -> Tensor | Documents | None:
    """transformers' `sdpa_mask`; on CUDA, of packed rows, `Documents` in its place.

    Their starts are asked of transformers' own function of who sees whom: a token that does not see the one before it
    is a first. So it is in chunked attention, where ``local_size`` is the chunk: a window that hides nothing more.
    """
    from transformers.masking_utils import sdpa_mask

    make: Any = functools.partial(sdpa_mask, **asked)
    rows, length, device = asked["batch_size"], asked.get("q_length", 0), torch.device(asked["device"])
    other = asked.get("allow_is_causal_skip", True) or asked.get("use_vmap", True) or asked["kv_length"] != length
    other = other or asked["attention_mask"] is not None or not registry.computes_at_once()
    if other or not runs_packed(device, asked["dtype"], 1):
        return make()
    place_1S = torch.arange(length, device=device)[None]
    sees = functools.partial(asked["mask_function"], torch.arange(rows, device=device)[:, None], 0)
    if sees(place_1S[:, :-1], place_1S[:, 1:]).any():  # what comes after it
        return make()
    starts = document_starts(~sees(place_1S, place_1S - 1).expand(rows, -1))
    return Documents(starts, make, asked.get("local_size"))
