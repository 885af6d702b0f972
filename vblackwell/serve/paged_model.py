"""One of transformers' causal models, called as it is, for tokens of many texts at once, with keys and values in pages.

The tokens are one row (1, S) with their positions; S is filled up to whole tiles of rows (`row_tiles`), and nothing
that a text gets depends on the others, on how it was cut into passes, or on what was computed again. Tiles of prompts
are larger than those of written tokens, which never share a pass with them, not even when they are read again. On the
CPU, where the plain attention's bits depend on how many queries a call has, each query is a request of its own.

Legend: S rows of a pass, R texts of a pass, L rows whose logits are wanted, P positions of a page, K key heads, H head
width, V vocabulary.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vblackwell.errors import Unsupported
from vblackwell.generate.generate import stepper
from vblackwell.generate.steps import keeps_own_state
from vblackwell.kernels.attention.op import WIDEST_HEAD
from vblackwell.kernels.attention.paged import paged_attention, store_pages
from vblackwell.nn.convert.assignment import evaluating
from vblackwell.serve.form import attending, configs_of, layers_of
from vblackwell.serve.pass_graphs import Form, PassGraphs
from vblackwell.serve.request import ServedModel
from vblackwell.serve.row_tiles import RowTiles, has_packed, tile_packed, tiles_of

# Rows of a tile: a GPU reads weights for 64 in the time of one, packed ones for 16, and multiplies 256 in little more.
CPU_TILE, GPU_TILE, GPU_PACKED_TILE = 16, 64, 16
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
        self.forms, self.reason, others = layers_of(served.module)
        widest = max((form.width for form in self.forms), default=0)
        if served.device.type == "cuda" and widest > WIDEST_HEAD:
            self.reason = f"its heads have {widest} numbers, and the kernels take {WIDEST_HEAD}"
        on_cpu, packed = served.device.type == "cpu", has_packed(served.module)
        self.prompt_tile = CPU_PROMPT_TILE if on_cpu else GPU_PROMPT_TILE
        self.tile = CPU_TILE if on_cpu else GPU_PACKED_TILE if packed else GPU_TILE  # rows of a pass are multiples
        if self.paged:
            tile_packed(served.module)
        self._least = CPU_TILE if on_cpu else GPU_TILE  # rows that linears which are not packed compute
        self._modules = [*served.module.modules()]
        # Looking at every function of torch takes the host as long as a model's own code.
        self._tiles = RowTiles if others or any(type(each) is nn.Linear for each in self._modules) else tiles_of
        self._configs = configs_of(served.module)
        self.positions = 0  # of a page
        on_gpu = self.paged and served.device.type == "cuda"
        self.graphs = PassGraphs(served.name) if on_gpu else None
        self._views: list[tuple[Tensor, Tensor]] = []
        self._keeps_rows = False

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
        texts = len(pages)
        return self.graphs is not None and self.graphs.has(self._form(False, texts, texts, texts, max(pages), 1))

    def _form(self, of_prompt: bool, rows: int, wanted: int, requests: int, pages: int, queries: int) -> Form:
        tile = self.prompt_tile if of_prompt else self.tile
        if self.graphs is not None:
            requests, pages, queries = 1 << (requests - 1).bit_length(), _rounded(pages), min(queries, 2)
            rows, wanted = max(rows, requests), max(wanted, requests)
        several = wanted > requests
        rows, wanted = (-(-max(1, count) // tile) * tile for count in (rows, wanted))
        return Form(tile, rows, wanted, wanted if several else requests, requests, pages, queries)

    @torch.no_grad()
    def logits(self, shares: Sequence[Share], tokens_R: Tensor | None = None) -> Tensor:
        """The logits (L, V) fp32 of the rows that are wanted, text by text, which the next call may overwrite; keys and
        values of all are in the pages then. ``tokens_R``: on the device, instead of the one that each text has."""
        count, form, numbers = self._lay_out(shares)
        with self._evaluating(), self.served.held() as place:
            if self.graphs is not None and place is not None and not self._keeps_rows:  # which a replay does not tell

                def compute(given: Tensor) -> Tensor:
                    return self._compute(_Rows(form, given, self.positions))[: form.given].float()

                return self.graphs.logits(place, form, numbers, self.served.device, tokens_R, compute)[:count]
            rows = _Rows(form, numbers.to(self.served.device, non_blocking=True), self.positions)
            if tokens_R is not None:
                rows.ids_1S[0, : len(tokens_R)] = tokens_R.clamp(min=0)
            return self._compute(rows)[:count].float()

    def _lay_out(self, shares: Sequence[Share]) -> tuple[int, Form, Tensor]:
        """How many logits are wanted, and all numbers of a pass on the host, as `_Rows` takes them: for one copy, as
        each wait of the host would cost a pass its overlap."""
        size, device = self.positions, self.served.device
        ids, positions, slots = list[int](), list[int](), list[int]()
        starts, wanted = [0], list[int]()
        for share in shares:
            ids.extend(share.tokens)
            places = range(share.begin, share.end)
            positions.extend(places)
            slots.extend(share.pages[place // size] * size + place % size for place in places)
            starts.append(len(ids))
            wanted.extend(range(len(ids) - share.wanted, len(ids)))
        pages, lengths = [share.pages for share in shares], [share.end for share in shares]
        if device.type == "cpu":
            pages = [share.pages for share in shares for _ in share.tokens]
            lengths = [place + 1 for share in shares for place in range(share.begin, share.end)]
            starts = [*range(len(ids) + 1)]
        queries = max(end - begin for begin, end in zip(starts, starts[1:], strict=False))
        form = self._form(shares[0].of_prompt, len(ids), len(wanted), len(pages), max(map(len, pages)), queries)
        numbers = np.zeros(sum(form.sizes), np.int64)
        ids_S, positions_S, slots_S, wanted_L, starts_R, lengths_R, table = np.split(
            numbers, np.cumsum(form.sizes)[:-1]
        )
        # Rows of no text stand at position 0, keep nothing and are looked at by nobody; requests of none have no query.
        slots_S[:], starts_R[:] = -1, len(ids)
        for to, given in ((ids_S, ids), (positions_S, positions), (slots_S, slots), (wanted_L, wanted)):
            to[: len(given)] = given
        starts_R[: len(starts)], lengths_R[: len(lengths)] = starts, lengths
        for row_P, held in zip(table.reshape(form.requests, form.pages), pages, strict=False):
            row_P[: len(held)] = held
        laid = torch.from_numpy(numbers)
        return len(wanted), form, laid.pin_memory() if device.type == "cuda" else laid

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
        with attending(self._configs, attend), self._tiles(max(rows.tile, self._least), rows.tile):
            output = model(rows.ids_1S, position_ids=rows.positions_1S, use_cache=False, logits_to_keep=rows.wanted_L)
        return output.logits[0]

    def forget(self) -> None:
        """Its pages are gone."""
        if self.graphs is not None:
            self.graphs.clear()

    def forget_unless_whole(self) -> None:
        """Its graphs take memory, and are of no use where weights come and go."""
        if self.graphs is not None and self.graphs.count and not self.served.is_whole:
            self.graphs.clear()

    @contextmanager
    def keeping_rows(self) -> Iterator[list[Tensor]]:
        """Inside, each call of `logits` adds the rows (S, D) after the last norm to the list. Raises Unsupported at the
        end for a model that does not call its base model for them, as OPT."""
        trunk, kept = self.served.module.base_model, list[Tensor]()

        def keep(module: Any, given: Any, output: Any) -> None:
            if trunk is not self.served.module:
                kept.append(output.last_hidden_state[0])

        handle = trunk.register_forward_hook(keep)
        self._keeps_rows = True
        try:
            yield kept
        finally:
            self._keeps_rows = False
            handle.remove()
        if not kept:
            said = "the head is not called on the base model's rows, so that it has no embeddings here"
            raise Unsupported(f"{self.served.name}: {said}")

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


class _Rows:
    """The tensors of a pass of one form, from its ``numbers``; ``positions`` of a page."""

    def __init__(self, form: Form, numbers: Tensor, positions: int) -> None:
        self.tile = form.tile
        ids_S, positions_S, self._slots_S, self.wanted_L, *given = numbers.split(form.sizes)
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


def _rounded(pages: int) -> int:
    """Powers of four from 16 on."""
    width = 16
    while width < pages:
        width *= 4
    return width


def block_bytes_of(models: Sequence[PagedModel]) -> int:
    """Bytes of a block that holds `LEAST_POSITIONS` of the widest model, and about 1 MiB, where a model is as large as
    that: of small ones a page has 16 positions too, so that little is wasted on short texts."""
    widest = max((LEAST_POSITIONS * model.token_bytes for model in models if model.paged), default=ALIGNMENT)
    return -(-widest // ALIGNMENT) * ALIGNMENT
