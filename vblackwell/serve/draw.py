"""The next token of each text of a pass, by each text's own settings, and the probabilities that it wants to know.

Every row is worked on alone or by operations on rows: a token does not depend on which others are drawn with it.
Probabilities are of the model's own distribution; penalties, biases and grammar change what is drawn only. The host
waits for the device once, for all that it wants to know of a pass, when it wants to; and for grammars, which live
there.

Legend: L rows, V vocabulary, K likeliest tokens.
"""

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from vblackwell.errors import CorruptData, Unsupported, VBError
from vblackwell.generate.sampling import Arrival, Sampling
from vblackwell.kernels.pointwise.sampling import sample_tokens
from vblackwell.serve.request import Request

Told = tuple[float | None, tuple[tuple[int, float], ...]]  # a token's log probability, and the likeliest with theirs


class Drawing:
    """What drawing the tokens of one ``request`` keeps on the device, from its first token on."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.drawn = 0
        self._kept = request.repetition_penalty != 1 or request.presence_penalty or request.frequency_penalty
        self._counts_V: Tensor | None = None  # of each token in the new text
        self._in_prompt_V: Tensor | None = None

    @property
    def changes_logits(self) -> bool:
        return bool(self._kept or self.request.logit_bias) or self.request.constraint is not None

    def change(self, logits_V: Tensor) -> None:
        """Penalties, biases and grammar, in place. What a grammar raises goes on."""
        request, device = self.request, logits_V.device
        if self._kept and self._counts_V is None:
            self._counts_V, self._in_prompt_V = (torch.zeros_like(logits_V) for _ in range(2))
            self._in_prompt_V[on_device(sorted(set(request.tokens)), torch.int64, device)] = 1
        if self._counts_V is not None and self._in_prompt_V is not None:
            seen_V, penalty = self._counts_V + self._in_prompt_V > 0, request.repetition_penalty
            if penalty != 1:
                less_V = torch.where(logits_V > 0, logits_V / penalty, logits_V * penalty)
                logits_V.copy_(torch.where(seen_V, less_V, logits_V))
            logits_V -= self._counts_V * request.frequency_penalty
            logits_V -= (self._counts_V > 0) * request.presence_penalty
        if request.logit_bias:
            where = on_device([*request.logit_bias], torch.int64, device)
            logits_V.index_add_(0, where, on_device([*request.logit_bias.values()], torch.float32, device))
        if request.constraint is not None:
            request.constraint.mask(logits_V)

    def note(self, token: int) -> None:
        """``token`` follows."""
        self.drawn += 1
        if self._counts_V is not None:
            self._counts_V[token] += 1


class Drawn:
    """What was drawn: the token of each row, -1 where there is none to draw, on the device as ``tokens_L``; what rows'
    grammars raised; and what texts want told, on its way."""

    def __init__(self, tokens_L: Tensor, errors: dict[int, Exception], told: dict[int, Tensor]) -> None:
        self.tokens_L, self.errors, self._rows = tokens_L, errors, [*told]
        self._coming = _Coming([tokens_L, *told.values()])

    def arrive(self) -> tuple[list[int], dict[int, Told]]:
        """Tokens of all rows, and what is told of some, once they are here."""
        tokens, *numbers = self._coming.numbers()
        return [int(token) for token in tokens], dict(zip(self._rows, map(_told, numbers), strict=True))


def draw(logits_LV: Tensor, drawings: Sequence[Drawing], ahead: int = 0) -> Drawn:
    """The next token of each row (L, V) fp32; a grammar's error is its row's alone. ``ahead``: tokens of each that are
    drawn and not yet noted."""
    errors = dict[int, Exception]()
    changed_LV = logits_LV.clone() if any(each.changes_logits for each in drawings) else logits_LV
    for row, drawing in enumerate(drawings):
        if not drawing.changes_logits:
            continue
        if drawing.request.constraint is not None and bool(torch.isnan(logits_LV[row]).any()):
            continue  # a grammar need not know such numbers, and there is nothing to draw
        try:
            drawing.change(changed_LV[row])
        except Exception as error:  # a grammar is foreign code: it ends its own text and no other
            errors[row] = error
    tokens_L = torch.full((len(drawings),), -1, dtype=torch.int64, device=logits_LV.device)
    for cut in (False, True):
        if rows := [row for row, drawing in enumerate(drawings) if _cuts(drawing.request.sampling) == cut]:
            if len(rows) == len(drawings):
                tokens_L = _sample(changed_LV, drawings, cut, ahead)
                break
            rows_L = on_device(rows, torch.int64, logits_LV.device)
            tokens_L[rows_L] = _sample(changed_LV[rows_L], [drawings[row] for row in rows], cut, ahead)
    wanted = {row: count for row, drawing in enumerate(drawings) if (count := drawing.request.logprobs) is not None}
    told = {row: _log_probabilities(logits_LV[row], tokens_L[row : row + 1], count) for row, count in wanted.items()}
    return Drawn(tokens_L, errors, told)


def tell(logits_LV: Tensor, tokens: Sequence[int], count: int) -> list[Told]:
    """Of each row (L, V) fp32 the log probability of its token, and the ``count`` likeliest."""
    pairs = zip(logits_LV, on_device(tokens, torch.int64, logits_LV.device).split(1), strict=True)
    return [_told(each) for each in _Coming([_log_probabilities(*pair, count) for pair in pairs]).numbers()]


def on_device(numbers: Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """The numbers as a tensor, without a wait for what the device has to do."""
    made = torch.tensor(numbers, dtype=dtype)
    return made.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else made


def why_no_token(logits_V: Tensor | None) -> VBError:
    """The error of a row of which nothing could be drawn; None: of one that nothing has changed."""
    if logits_V is not None and bool((logits_V < float("inf")).all()):
        return Unsupported("no token may follow: the grammar, or the biases, forbid every one; loosen them")
    return _not_finite()


def why_not_told(told: Iterable[Told]) -> VBError | None:
    """The error of a text with probabilities that are no numbers, of what `tell` gave; None where all are."""
    return _not_finite() if any(own is not None and math.isnan(own) for own, _ in told) else None


def _not_finite() -> VBError:
    return CorruptData("the model's logits are not finite: its weights are damaged or overflow in this type; try fp32")


def _log_probabilities(logits_V: Tensor, token_1: Tensor, count: int) -> Tensor:
    """(1 + 2 K) float64: the log probability of a token, the likeliest ones', and these tokens."""
    logprobs_V = torch.log_softmax(logits_V, dim=-1)
    top_K, tokens_K = logprobs_V.topk(min(count, len(logprobs_V)))
    return torch.cat([each.double() for each in (logprobs_V.gather(0, token_1.clamp(min=0)), top_K, tokens_K)])


class _Coming:
    """Tensors of one dimension on their way to the host, in one copy: float64 holds tokens and fp32 as they are."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._lengths = [*map(len, tensors)]
        self._arrival = Arrival(torch.cat([each.double() for each in tensors]))

    def numbers(self) -> list[list[float]]:
        return [part.tolist() for part in self._arrival.tensor().split(self._lengths)]


def _told(numbers: list[float]) -> Told:
    own, *rest = numbers
    half = len(rest) // 2
    return own, tuple((int(token), logprob) for logprob, token in zip(rest[:half], rest[half:], strict=True))


def _cuts(sampling: Sampling) -> bool:
    return (sampling.top_k, sampling.top_p, sampling.min_p) != (0, 1.0, 0.0)


def _sample(logits_LV: Tensor, drawings: Sequence[Drawing], cut: bool, ahead: int) -> Tensor:
    count, device = len(drawings), logits_LV.device
    if device.type == "cpu":  # the last numbers of a tensor are not computed as the others: those of one row more
        logits_LV, drawings = torch.cat((logits_LV, logits_LV[-1:])), [*drawings, drawings[-1]]
    settings = [drawing.request.sampling for drawing in drawings]
    options = {"temperature": on_device([each.temperature for each in settings], torch.float32, device)}
    if cut:
        options["top_k"] = on_device([min(each.top_k, (1 << 31) - 1) for each in settings], torch.int32, device)
        options["top_p"] = on_device([each.top_p for each in settings], torch.float32, device)
        options["min_p"] = on_device([each.min_p for each in settings], torch.float32, device)
    seeds_L = on_device([drawing.request.seed for drawing in drawings], torch.int64, device)
    positions_L = on_device([drawing.drawn + ahead for drawing in drawings], torch.int64, device)
    return sample_tokens(logits_LV, seeds_L, positions_L, **options)[:count]
