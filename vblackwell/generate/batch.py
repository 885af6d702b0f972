"""Several prompts written on at once, by a causal model of transformers whose weights may stream: one pass over them
serves all rows.

Rows are filled up on the left, so that all end at the same place; a mask hides the filling and positions are counted
without it. Every row draws with the same seed from its own logits: it is written as it would be alone, but for the last
bits of sums of other lengths. A model that cannot hide the filling reads its rows one by one.

Legend: B batch, S sequence.
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable, Collection, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from vblackwell.generate.generate import (
    Pace,
    attending,
    cache_of,
    check_chunk,
    check_kind,
    encode,
    end_tokens,
    room,
    stepper,
    writing,
)
from vblackwell.generate.own_state import check_one_pass, keeps_own_state, reads_masks
from vblackwell.generate.room import read_in_chunks, room_for, step_after
from vblackwell.generate.sampling import Arrival, Sampling, check_seed, sample

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def generate_batch(
    model: nn.Module, tokenizer: Tokenizer, prompts: list[str], max_new_tokens: int, sampling: Sampling, seed: int = 0,
    prefill_chunk: int | None = None, *, ends: Collection[int] = (), special_tokens: bool = True,
    pace: Pace | None = None,
) -> list[str]:  # fmt: skip
    """What the model writes after each prompt, until its end-of-text token or ``max_new_tokens``.

    Args:
        model: a causal model of transformers, in a stack or not.
        tokenizer: the one it was trained with.
        seed: of every row's draws.
        prefill_chunk: positions of the prompts that are read in one pass; by default all.
        ends, special_tokens, pace: as for `generate`.

    Raises:
        ConfigurationError: a prompt exceeds the model's limit, or a value is out of range.
        CorruptData: logits are not finite.
    """
    check_seed(seed)
    check_chunk(prefill_chunk)
    check_kind(model)
    check_one_pass(model, prefill_chunk)
    if not prompts:
        return []
    pace = pace or Pace()
    pace.begin()
    numbers = [encode(model, tokenizer, prompt, special_tokens) for prompt in prompts]
    longest = max(map(len, numbers))
    count = room(model, longest, max_new_tokens)
    written: list[list[int]] = [[] for _ in prompts]
    over, open_rows = end_tokens(model) | set(ends), set(range(len(prompts)))
    with writing(model), room_for(model, len(prompts), longest + count) as (cache, chunk):
        for tokens in columns(model, numbers, count, sampling, seed, prefill_chunk or chunk, cache):
            for row in list(open_rows):
                if tokens[row] in over:
                    open_rows.discard(row)
                else:
                    written[row].append(tokens[row])
            pace.tick(len(open_rows))
            if not open_rows:
                break
    return [_new_text(tokenizer, prompt, new) for prompt, new in zip(numbers, written, strict=True)]


def _new_text(tokenizer: Tokenizer, prompt: list[int], new: list[int]) -> str:
    return tokenizer.decode(prompt + new)[len(tokenizer.decode(prompt)) :]


@torch.no_grad()
def columns(
    model: Any, numbers: list[list[int]], count: int, sampling: Sampling, seed: int, chunk: int | None,
    cache: Any = None,
) -> Iterator[list[int]]:  # fmt: skip
    """The next token of every row, ``count`` times. On CUDA the host reads them while the next ones are being computed.

    Args:
        numbers: the prompts' tokens.
        chunk: positions that are read in one pass; None: all.
        cache: empty; by default what the model makes.
    """
    device, longest = next(model.parameters()).device, max(map(len, numbers))
    filled = [[0] * (longest - len(row)) + row for row in numbers]
    input_ids_BS = torch.tensor(filled, device=device)
    mask_BS = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in numbers], device=device)
    # Of rows that are equally long nothing is masked: without a mask attention takes its fast path, and the host does
    # not wait to look at it.
    masked = any(len(row) < longest for row in numbers)
    takes_positions = masked and "position_ids" in inspect.signature(type(model).forward).parameters
    alone = keeps_own_state(model) or (masked and not reads_masks(model))
    readers = [stepper(model, longest + count) for _ in numbers] if alone else []
    known: Any = cache
    step: Callable[[Tensor], Tensor] | None = None

    def read(input_ids_BS: Tensor, mask_BS: Tensor) -> Tensor:
        nonlocal known
        if readers:
            parts = zip(readers, input_ids_BS, mask_BS[:, -input_ids_BS.shape[1] :].bool(), strict=True)
            return torch.cat([reader(row_S[mask_S][None]) for reader, row_S, mask_S in parts])
        options: dict[str, Any] = {"attention_mask": mask_BS if masked else None, "past_key_values": known}
        if takes_positions:
            options["position_ids"] = (mask_BS.cumsum(1) - 1).clamp(min=0)[:, -input_ids_BS.shape[1] :]
        with attending(input_ids_BS):
            output = model(input_ids_BS, use_cache=True, logits_to_keep=1, **options)
        known = cache_of(output, model)
        return output.logits[:, -1]

    logits_BV = read_in_chunks(
        lambda begin, end: read(input_ids_BS[:, begin:end], mask_BS[:, :end]), longest, chunk or longest, cache
    )
    arriving = deque[Arrival]()
    for position in range(count):
        token_B = sample(logits_BV, sampling, seed, position)
        arriving.append(Arrival(token_B))
        if position + 1 < count:
            if position == 0 or len(arriving) > int(device.type == "cuda"):  # the caller wants the first at once
                yield arriving.popleft().numbers()
            if position == 0 and not masked:
                step = step_after(model, cache, len(numbers), count - 1)
            if step is not None:
                logits_BV = step(token_B.clamp(min=0)[:, None])
                continue
            mask_BS = torch.cat((mask_BS, torch.ones_like(mask_BS[:, :1])), 1)
            logits_BV = read(token_B.clamp(min=0)[:, None], mask_BS)
    for arrival in arriving:
        yield arrival.numbers()
