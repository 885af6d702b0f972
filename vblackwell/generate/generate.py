"""Text from a ``Decoder`` or a causal model of ``transformers``, token by token, with a KV cache. The model is only
called, so one whose weights stream works the same; under ``no_grad``: what it allocates at first may be needed by a
later backward. On CUDA the host reads a token while the next is computed; where a text ends early that is in vain.

Several prompts are rows of one batch, filled up on the left; a mask hides the filling, or each is read alone. Every row
draws with the same seed from its own logits, as it would alone but for last bits. Legend: B batch, S sequence, V
vocabulary.
"""

import inspect
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import nullcontext
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from vblackwell.errors import ConfigurationError, Unsupported
from vblackwell.folders.checked import check_length
from vblackwell.generate import steps
from vblackwell.generate.sampling import Arrival, Sampling, sample
from vblackwell.nn.convert.assignment import evaluating
from vblackwell.nn.decoder.block import KVCache
from vblackwell.nn.decoder.decoder import Decoder
from vblackwell.units import format_bytes, format_seconds

# Not cuDNN's attention, which plans anew, for about a second, for every length of a prompt: more than it gains up to
# some ten thousand positions.
_ATTENTION = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
CONTEXT = 32  # tokens by which a decoder tells how the next ones are written


def generate(
    model: nn.Module,
    tokenizer: Tokenizer,
    prompt: str,
    max_new_tokens: int | None = None,
    temperature: float = 0.8,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    **others: Any,
) -> str:
    """What the model, a ``Decoder`` or a causal one of ``transformers``, writes after ``prompt``; ``temperature`` and
    so on as in ``Sampling``, the ``others`` as in `generate_batch`."""
    sampling = Sampling(temperature, top_k, top_p, min_p)
    (text,) = generate_batch(model, tokenizer, [prompt], max_new_tokens, sampling, **others)
    return text


def generate_batch(
    model: nn.Module,
    tokenizer: Tokenizer,
    prompts: list[str],
    max_new_tokens: int | None,
    sampling: Sampling,
    seed: int = 0,
    prefill_chunk: int | None = None,
    *,
    ends: Collection[int] = (),
    special_tokens: bool = True,
    pace: "Pace | None" = None,
    on_token: Callable[[str], None] | None = None,
) -> list[str]:
    """What the model writes after each prompt (empty: a document begins), until its end-of-text token, one of ``ends``,
    ``max_new_tokens`` or its limit, in one pass a token for all.

    ``prefill_chunk``: tokens of a prompt that are read in one pass over the weights, by default all;
    ``special_tokens``: False where prompts have those that begin a text; ``pace`` counts the tokens. Raises
    ConfigurationError: prompt and new tokens exceed the model's limit; or a value out of range.
    """
    if not -(1 << 63) <= seed < 1 << 63:  # what the draws are keyed by
        raise ConfigurationError(f"seed {seed}: give a number from {-(1 << 63)} to {(1 << 63) - 1}")
    check_chunk(prefill_chunk)
    config: Any = model.config
    if getattr(config, "is_encoder_decoder", False):
        raise Unsupported(f"{type(model).__name__} is an encoder-decoder: generate works with causal models")
    steps.check_one_pass(model, prefill_chunk)
    pace = pace or Pace()
    pace.begin()
    if not prompts:
        return []
    numbers = [encode(model, tokenizer, prompt, special_tokens) for prompt in prompts]
    texts = [_Text(tokenizer, row, on_token) for row in numbers]
    longest = max(map(len, numbers))
    count = count_allowed(model, longest, max_new_tokens)
    over, open_rows = end_tokens(model) | set(ends), [*range(len(numbers))]
    with evaluating(model), steps.level0_for(model, len(numbers), longest + count) as (cache, chunk):
        for tokens in columns(model, numbers, count, sampling, seed, prefill_chunk or chunk, cache):
            open_rows = [row for row in open_rows if tokens[row] not in over]
            if not open_rows:
                break
            pace.tick(len(open_rows))
            for row in open_rows:
                texts[row].add(tokens[row])
    return [text.finish() for text in texts]


def check_chunk(prefill_chunk: int | None) -> None:
    """Raises ConfigurationError for a chunk that reads nothing."""
    if prefill_chunk is not None and prefill_chunk < 1:
        raise ConfigurationError(f"prefill chunk {prefill_chunk}: give at least 1 token, better thousands")


def draws(
    step: Callable[[Tensor], Tensor], prompt_BS: Tensor, count: int, sampling: Sampling, seed: int, ahead: int
) -> Iterator[list[int]]:
    """``count`` tokens of every row after the prompts (B, S); CorruptData where logits are not finite.

    ``step`` maps tokens (B, S) that follow what it has seen to the logits (B, V) after the last. So many steps
    ``ahead`` are begun before a token is handed out, but for the first, which comes at once.
    """
    arriving, tokens_BS = deque[Arrival](), prompt_BS
    for position in range(count):
        token_B = sample(step(tokens_BS), sampling, seed, position)
        tokens_BS = token_B.clamp(min=0)[:, None]  # the host learns of a -1 later, and no embedding must meet it before
        arriving.append(Arrival(token_B))
        if len(arriving) > ahead or position == 0:
            yield arriving.popleft().numbers()
    for arrival in arriving:
        yield arrival.numbers()


def columns(
    model: Any,
    numbers: list[list[int]],
    count: int,
    sampling: Sampling,
    seed: int,
    chunk: int | None,
    cache: Any = None,
) -> Iterator[list[int]]:
    """`draws` after prompts, given as tokens, of one length or several; ``chunk`` and ``cache`` as for `stepper`."""
    device, longest = next(model.parameters()).device, max(map(len, numbers))
    prompt_BS = torch.tensor([[0] * (longest - len(row)) + row for row in numbers], device=device)
    # Of rows that are equally long nothing is masked: without a mask attention takes its fast path.
    masked = any(len(row) < longest for row in numbers)
    if steps.keeps_own_state(model) or (masked and not steps.reads_masks(model)):
        rows = [torch.tensor([row], device=device) for row in numbers]
        step = _one_by_one([stepper(model, longest + count, chunk) for _ in numbers], rows)
    else:
        mask = [[0] * (longest - len(row)) + [1] * len(row) for row in numbers]
        step = stepper(model, longest + count, chunk, cache, torch.tensor(mask, device=device) if masked else None)
    yield from draws(step, prompt_BS, count, sampling, seed, int(device.type == "cuda"))


def _one_by_one(readers: list[Callable[[Tensor], Tensor]], rows: list[Tensor]) -> Callable[[Tensor], Tensor]:
    """A step that reads each row by a separate step; first ``rows``, which need not be equally long."""
    waiting = list(rows)

    def step(input_ids_BS: Tensor) -> Tensor:
        given = waiting or input_ids_BS.split(1)
        logits_BV = torch.cat([reader(row_1S) for reader, row_1S in zip(readers, given, strict=True)])
        waiting.clear()
        return logits_BV

    return step


def encode(model: nn.Module, tokenizer: Tokenizer, prompt: str, special_tokens: bool = True) -> list[int]:
    """The prompt's tokens, with those that the tokenizer adds unless told not to; of an empty one the token that begins
    a document (ConfigurationError where the model has none). Other threads run while a long one is read."""
    numbers = tokenizer.encode_batch_fast([prompt], add_special_tokens=special_tokens)[0].ids
    config: Any = model.config
    start = config.eos_token_id if config.bos_token_id is None else config.bos_token_id
    if not numbers and not isinstance(start, int):
        raise ConfigurationError("an empty prompt: this model has no token that begins a document; give some text")
    return numbers or [start]


def count_allowed(model: nn.Module, prompt_length: int, max_new_tokens: int | None) -> int:
    """How many tokens may be added; raises ConfigurationError for none, fewer than were asked for, or no limit stated
    and none given."""
    limit, count = position_limit(model), max_new_tokens
    if count is not None and count < 1:
        raise ConfigurationError(f"{count} new tokens: give at least 1")
    if limit is not None:
        check_length(prompt_length, count or 0, limit)
        return limit - prompt_length if count is None else count
    if count is None:
        raise ConfigurationError("this model states no limit: say how many new tokens to write")
    return count


def position_limit(model: nn.Module) -> int | None:
    """The longest sequence that the model's config allows; None if it names none."""
    config: Any = model.config
    names = ("max_position", "max_position_embeddings", "n_positions")
    return next((getattr(config, name) for name in names if getattr(config, name, None)), None)


def end_tokens(model: nn.Module) -> set[int]:
    source: Any = getattr(model, "generation_config", None) or model.config
    ends = source.eos_token_id
    return set() if ends is None else set(ends) if isinstance(ends, list) else {ends}


def stepper(
    model: nn.Module, max_length: int, chunk: int | None = None, cache: Any = None, mask_BS: Tensor | None = None
) -> Callable[[Tensor], Tensor]:
    """A function that reads more tokens (B, S), up to ``max_length`` in all, and returns the logits (B, V) after the
    last; ``chunk`` tokens a row in one pass, by default all. Of transformers' models: ``cache``, empty, by default what
    they make themselves; ``mask_BS`` hides the filling of the prompts."""
    if steps.keeps_own_state(model):
        return steps.OwnState(model)
    known: Any = KVCache(model.config, max_length) if isinstance(model, Decoder) else cache
    captured: Callable[[Tensor], Tensor] | None = None  # a token's step in CUDA graphs, once the prompt is read
    asked = mask_BS is not None or (cache is None and not isinstance(model, Decoder))  # whether there is such a step
    takes_positions = "position_ids" in inspect.signature(type(model).forward).parameters
    seen = 0  # positions

    @torch.no_grad()
    def step(input_ids_BS: Tensor) -> Tensor:
        nonlocal captured, asked, mask_BS, seen
        rows, length = input_ids_BS.shape
        if length == 1 and seen and not asked:
            asked, left = True, max_length - seen
            if not isinstance(model, Decoder):
                from vblackwell.generate.streamed_step import streamed_step  # with transformers, imported by now

                captured = streamed_step(model, known, rows, left)
            elif left >= steps.MIN_STEPS and steps.may_capture(model):
                captured = steps.DecodeGraph(model, known, rows).step
        if captured is not None:
            assert length == 1, "the host's count of positions ends where the graph begins"
            return captured(input_ids_BS)
        if mask_BS is not None and seen:
            mask_BS = torch.cat((mask_BS, torch.ones_like(input_ids_BS)), 1)
        before, seen = seen, seen + length
        return steps.read_in_chunks(
            lambda begin, end: read(input_ids_BS[:, begin:end], before + end), length, chunk or length, cache
        )

    def read(input_ids_BS: Tensor, end: int) -> Tensor:
        nonlocal known
        options: dict[str, Any] = {}
        if mask_BS is not None:
            options["attention_mask"] = mask_BS[:, :end]
            if takes_positions:
                counted_BS = options["attention_mask"].cumsum(1) - 1
                options["position_ids"] = counted_BS.clamp(min=0)[:, -input_ids_BS.shape[1] :]
        with sdpa_kernel(_ATTENTION) if input_ids_BS.is_cuda else nullcontext():
            if isinstance(model, Decoder):
                hidden_BSD = model.hidden(input_ids_BS, known)
                return model.lm_head(hidden_BSD[:, -1])  # a prompt's other logits would only cost memory
            output = model(input_ids_BS, past_key_values=known, use_cache=True, logits_to_keep=1, **options)
        if getattr(output, "past_key_values", None) is None:
            raise Unsupported(
                f"{type(model).__name__} gives no past_key_values, as encoders do: generate works with causal models "
                "(is_decoder in its config.json says whether it is one)"
            )
        known = output.past_key_values
        return output.logits[:, -1]

    return step


class _Text:
    """New tokens as text; a character that is not complete yet is held back.

    Decoding starts `CONTEXT` tokens before what is new, because a decoder of words drops the space before the first
    token that it is given; not at the beginning, or a token would take the longer the more came before.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: list[int], on_token: Callable[[str], None] | None) -> None:
        self._tokenizer, self._on_token = tokenizer, on_token
        self._numbers, self._prompt, self._told = list(prompt), tokenizer.decode(prompt), 0
        self._look_from(len(prompt))

    def _look_from(self, place: int) -> None:
        """What is before the token at ``place`` is over."""
        self._place, self._begin, self._shown = place, max(0, place - CONTEXT), 0
        self._before = len(self._tokenizer.decode(self._numbers[self._begin : place]))

    def add(self, token: int) -> None:
        self._numbers.append(token)
        if self._on_token is not None:
            text = self._tokenizer.decode(self._numbers[self._begin :])[self._before :]
            whole = text.rstrip("\ufffd")
            self._show(whole[self._shown :])
            self._shown = max(self._shown, len(whole))
            if whole == text and len(self._numbers) - self._place >= CONTEXT:
                self._look_from(len(self._numbers))

    def finish(self) -> str:
        text = self._tokenizer.decode(self._numbers)[len(self._prompt) :]
        self._show(text[self._told :])
        return text

    def _show(self, text: str) -> None:
        if self._on_token is not None and text:
            self._on_token(text)
            self._told += len(text)


class Pace:
    """How fast texts come: notes when each token is on the host, and says so in a line. Made before the model is
    opened; ``clock`` is of seconds."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock, self._made = clock, clock()
        self._texts: list[list[tuple[float, int]]] = []  # when each was asked for, then each token's time and rows

    def begin(self) -> None:
        """A text, or several at once, is asked for."""
        self._texts.append([(self._clock(), 0)])

    def tick(self, rows: int = 1) -> None:
        """The next token of so many rows is here."""
        self._texts[-1].append((self._clock(), rows))

    def line(self, level0_bytes: int | None = None) -> str:
        """What is said at the end; with the peak of a stack's level 0, if there is one."""
        tokens = sum(rows for text in self._texts for _, rows in text)
        begun = self._texts[0] if self._texts else [(self._made, 0)]
        parts = [f"opened in {format_seconds(begun[0][0] - self._made)}", f"{tokens} token{'s' * (tokens != 1)}"]
        if len(begun) > 1:
            parts.append(f"the first after {format_seconds(begun[1][0] - begun[0][0])}")
        later = sum(rows for text in self._texts for _, rows in text[2:])
        if seconds := sum(text[-1][0] - text[1][0] for text in self._texts if len(text) > 1):
            parts.append(f"then {later / seconds:.1f} a second")
        if level0_bytes is not None:
            parts.append(f"took at most {format_bytes(level0_bytes)} of fast memory")
        return ", ".join(parts)
