"""One of transformers' causal models, called as it is, for tokens of many texts at once, with keys and values in pages.

The tokens are one row (1, S) with their positions; S is filled up to whole tiles of rows (`row_tiles`), and nothing
that a text gets depends on the others, on how it was cut into passes, or on what was computed again. Tiles of prompts
are larger than those of written tokens, which never share a pass with them, not even when they are read again. On the
CPU, where the plain attention's bits depend on how many queries a call has, each query is a request of its own.

Legend: S rows of a pass, R texts of a pass, L rows whose logits are wanted, P positions of a page, K key heads, H head
width, V vocabulary.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from vblackwell.errors import Unsupported
from vblackwell.generate.generate import stepper
from vblackwell.generate.steps import keeps_own_state
from vblackwell.kernels.attention.op import WIDEST_HEAD
from vblackwell.kernels.attention.paged import paged_attention, store_pages
from vblackwell.nn.convert.assignment import evaluating
from vblackwell.serve.draw import on_device
from vblackwell.serve.form import attending, configs_of, layers_of
from vblackwell.serve.request import ServedModel
from vblackwell.serve.row_tiles import RowTiles, tile_packed
from vblackwell.serve.step_graphs import Kind, StepGraphs, kind_of

# Rows of a tile: a GPU reads weights for 64 in the time of one, and multiplies 256 in little more than that.
CPU_TILE, GPU_TILE = 16, 64
CPU_PROMPT_TILE, GPU_PROMPT_TILE = 16, 256
LEAST_POSITIONS = 16  # of a page
ALIGNMENT = 256  # bytes, of a block
SEVERAL_PASSES = 2048  # tokens of a prompt that a model without pages reads at a time


@dataclass(frozen=True)
class Share:
    """What one text has of a pass: tokens at positions ``begin`` to ``end``, and the pages of all up to ``end``.
    ``wanted``: of how many of its last rows the logits are given. ``of_prompt``: of all of a pass, or of none."""

    tokens: Sequence[int]
    begin: int
    pages: Sequence[int]
    wanted: int
    of_prompt: bool = False

    @property
    def end(self) -> int:
        return self.begin + len(self.tokens)


class PagedModel:
    """``served`` as the engine calls it. ``reason`` is empty where texts share passes, else why each is read alone."""

    def __init__(self, served: ServedModel) -> None:
        self.served = served
        self.forms, self.reason = layers_of(served.module)
        widest = max((form.width for form in self.forms), default=0)
        if served.device.type == "cuda" and widest > WIDEST_HEAD:
            self.reason = f"its heads have {widest} numbers, and the kernels take {WIDEST_HEAD}"
        on_cpu = served.device.type == "cpu"
        self.tile, self.prompt_tile = (CPU_TILE, CPU_PROMPT_TILE) if on_cpu else (GPU_TILE, GPU_PROMPT_TILE)
        if self.paged:
            tile_packed(served.module)
        self._modules = [*served.module.modules()]
        self._configs = configs_of(served.module)
        self.positions = 0  # of a page
        on_gpu = self.paged and served.device.type == "cuda"
        self.graphs = StepGraphs(served.name) if on_gpu else None
        self._views: list[tuple[Tensor, Tensor]] = []

    @property
    def paged(self) -> bool:
        return not self.reason

    @property
    def token_bytes(self) -> int:
        """Bytes of the keys and values of a position, of all layers."""
        return 2 * self.served.dtype.itemsize * sum(form.key_heads * form.width for form in self.forms)

    def place(self, pool: Tensor, block_bytes: int) -> None:
        """Take the blocks of ``pool``, uint8, for pages: as many positions in each as fit, in whole sixteens."""
        self.positions = block_bytes // self.token_bytes // LEAST_POSITIONS * LEAST_POSITIONS
        assert self.positions, "a block is made for the widest model"
        typed, size = pool.view(self.served.dtype), block_bytes // self.served.dtype.itemsize
        start = typed.storage_offset()
        self._views = []
        for form in self.forms:
            width = self.positions * form.key_heads * form.width
            shape = (typed.numel() // size, self.positions, form.key_heads, form.width)
            strides = (size, form.key_heads * form.width, form.width, 1)
            keys, values = (typed.as_strided(shape, strides, start + part * width) for part in (0, 1))
            self._views.append((keys, values))
            start += 2 * width

    def is_one_launch(self, pages: Sequence[int]) -> bool:
        """Whether a pass of a token of each text, with so many pages each, is one if their model stays awake."""
        return self.graphs is not None and self.graphs.has(kind_of(len(pages), max(pages)))

    @torch.no_grad()
    def logits(self, shares: Sequence[Share], tokens_R: Tensor | None = None) -> Tensor:
        """The logits (L, V) fp32 of the rows that are wanted, text by text, which the next call may overwrite; keys and
        values of all are in the pages then. ``tokens_R``: on the device, instead of the one that each text has."""
        count, of_prompt = sum(share.wanted for share in shares), shares[0].of_prompt
        with self._evaluating(), self.served.held() as place:
            several = of_prompt or any(len(share.tokens) > 1 for share in shares)
            if self.graphs is None or place is None or several:
                lists, form = _lay_out(self, shares)
                rows = _Rows(form, on_device(lists, torch.int64, self.served.device), self.positions)
                if tokens_R is not None:
                    rows.ids_1S[0, : len(tokens_R)] = tokens_R.clamp(min=0)
                return self._compute(rows)[:count].float()
            kind = kind_of(len(shares), max(len(share.pages) for share in shares))
            lists, form = _lay_out(self, shares, kind)
            numbers = on_device(lists, torch.int64, self.served.device)
            compute = lambda given: self._compute(_Rows(form, given, self.positions))[: kind[0]].float()  # noqa: E731
            return self.graphs.logits(place, kind, numbers, tokens_R, compute)[:count]

    def _compute(self, rows: "_Rows") -> Tensor:
        calls = iter(self._views)

        def attend(
            module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, options: dict[str, Any]
        ) -> Tensor:
            pages = next(calls, None)
            if pages is None or mask is not None:
                raise Unsupported(f"{self.served.name}: a layer attends otherwise than it did without weights")
            each = (x[0].transpose(0, 1) for x in (query, key, value))
            q_SNH, k_SKH, v_SKH = (x if x.is_cuda else x.contiguous() for x in each)  # strides choose a CPU's kernels
            return rows.attend(q_SNH, k_SKH, v_SKH, *pages, options)[None]

        model: Any = self.served.module
        with attending(self._configs, attend), RowTiles(rows.tile):
            output = model(rows.ids_1S, position_ids=rows.positions_1S, use_cache=False, logits_to_keep=rows.wanted_L)
        return output.logits[0]

    def forget(self) -> None:
        """Its weights are gone, or its pages."""
        if self.graphs is not None:
            self.graphs.clear()

    def _evaluating(self) -> AbstractContextManager[None]:
        """As `evaluating`, which goes through all modules, where some are in training."""
        return evaluating(self.served.module) if any(each.training for each in self._modules) else nullcontext()

    def step_of(self, max_length: int) -> Callable[[Sequence[int]], Tensor]:
        """For a model whose texts cannot share passes: what reads one text alone, and gives the logits (1, V) fp32
        after tokens that follow those it has read. Keys and values are the model's own."""
        module, device = self.served.module, self.served.device
        step = stepper(module, max_length, None if keeps_own_state(module) else SEVERAL_PASSES)

        def read(tokens: Sequence[int]) -> Tensor:
            with self._evaluating():
                return step(torch.tensor([[*tokens]], device=device)).float()

        return read


class _Form(NamedTuple):
    """What the tensors of a pass are for: rows of a tile, rows in whole tiles, how many logits, requests, pages of the
    longest, and most queries of a request."""

    tile: int
    rows: int
    wanted: int
    requests: int
    pages: int
    queries: int


def _lay_out(model: PagedModel, shares: Sequence[Share], least: Kind = (1, 1)) -> tuple[list[int], _Form]:
    """All numbers of a pass one after the other, as `_Rows` takes them apart, for at least so many texts and pages."""
    size, on_cpu = model.positions, model.served.device.type == "cpu"
    tile = model.prompt_tile if shares[0].of_prompt else model.tile
    ids, positions, slots = list[int](), list[int](), list[int]()
    starts, wanted = [0], list[int]()
    for share in shares:
        ids.extend(share.tokens)
        places = range(share.begin, share.end)
        positions.extend(places)
        slots.extend(share.pages[place // size] * size + place % size for place in places)
        starts.append(len(ids))
        wanted.extend(range(len(ids) - share.wanted, len(ids)))
    texts, width = least
    width = max(width, *[len(share.pages) for share in shares])
    real = len(ids)
    filling = max(real, texts) - real
    filling += -(real + filling) % tile
    # Rows of no text stand at position 0, keep nothing and are looked at by nobody.
    ids, positions, slots = ids + [0] * filling, positions + [0] * filling, slots + [-1] * filling
    told = max(1, len(wanted), texts)
    wanted += [0] * (told + -told % tile - len(wanted))
    table = [[*share.pages, *[0] * (width - len(share.pages))] for share in shares]
    lengths = [share.end for share in shares]
    if on_cpu:
        table = [row for row, share in zip(table, shares, strict=True) for _ in share.tokens]
        lengths = [place + 1 for share in shares for place in range(share.begin, share.end)]
        starts = [*range(real + 1)]
    queries = max(end - begin for begin, end in zip(starts, starts[1:], strict=False))
    missing = max(0, texts - len(lengths))  # texts of no query
    starts, lengths = starts + [real] * missing, lengths + [0] * missing
    cells = [page for row in table for page in row] + [0] * (missing * width)
    lists = (ids, positions, slots, wanted, starts, lengths, cells)
    # In one copy to the device: each wait of the host for it would cost a pass its overlap.
    form = _Form(tile, len(ids), len(wanted), len(lengths), width, queries)
    return [number for each in lists for number in each], form


class _Rows:
    """The tensors of a pass of one form, from its ``numbers``; ``positions`` of a page."""

    def __init__(self, form: _Form, numbers: Tensor, positions: int) -> None:
        self.tile = form.tile
        sizes = [form.rows] * 3 + [form.wanted, form.requests + 1, form.requests, form.requests * form.pages]
        ids_S, positions_S, self._slots_S, self.wanted_L, *given = numbers.split(sizes)
        self.ids_1S, self.positions_1S = ids_S[None], positions_S[None]
        self._starts, self._lengths, table_RP = (each.to(torch.int32) for each in given)
        self._table, self._max_q = table_RP.view(form.requests, form.pages), form.queries
        self._of_no_text_S11 = (self._slots_S < 0)[:, None, None]

    def attend(
        self, q_SNH: Tensor, k_SKH: Tensor, v_SKH: Tensor, keys: Tensor, values: Tensor, options: dict[str, Any]
    ) -> Tensor:
        width = v_SKH.shape[-1]
        if width < k_SKH.shape[-1]:
            v_SKH = F.pad(v_SKH, (0, k_SKH.shape[-1] - width))
        k_SKH, v_SKH = k_SKH.to(keys.dtype), v_SKH.to(keys.dtype)
        store_pages(k_SKH, v_SKH, keys, values, self._slots_S)
        out_SNH = paged_attention(
            q_SNH.to(keys.dtype),
            keys,
            values,
            self._starts,
            self._table,
            self._lengths,
            self._max_q,
            window=options.get("sliding_window"),
            scale=options.get("scaling"),
            softcap=options.get("softcap"),
        )
        out_SNH.masked_fill_(self._of_no_text_S11, 0)  # what is left unwritten may be anything
        return out_SNH[..., :width].to(q_SNH.dtype)


def block_bytes_of(models: Sequence[PagedModel]) -> int:
    """Bytes of a block that holds `LEAST_POSITIONS` of the widest model, and about 1 MiB, where a model is as large as
    that: of small ones a page has 16 positions too, so that little is wasted on short texts."""
    widest = max((LEAST_POSITIONS * model.token_bytes for model in models if model.paged), default=ALIGNMENT)
    return -(-widest // ALIGNMENT) * ALIGNMENT
