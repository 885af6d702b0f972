"""Scale search by squared error: for each block the scale whose rounded elements lie nearest to the weights.

nvfp4 has 126 positive E4M3 scales. Most cannot win (A is the block's largest magnitude):

- Too small: a scale with ``6 s < A`` errs by at least ``(A - 6s)^2``.
- Too large: the grid ``s * {0, .5, 1, 1.5, 2, 3}`` is part of the grid of ``s / 2``, so once ``A <= 3.5 s`` (nothing
  rounds to 4 or 6) the half scale is at least as good. It exists unless s is among the lowest 15 codes, which are tried
  up to ``4 A``, from where on every element is zero.

A window around A / 6 is tried on every block, the rest where it is still open: the optimum of the exhaustive search.
fp32 errors are good to about 1.3e-6; blocks in which two scales come within ``_CLOSE`` are searched again in fp64.
Every sum has one order (`_total`), so that all machines choose alike. ``B`` blocks, ``E`` elements a block.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from vblackwell.numerics.formats import E4M3_MAX_CODE, E8M0_MAX_CODE, Format
from vblackwell.numerics.rounding import e8m0_floor, max_scale, pow2

LANES = 64  # elements that are summed side by side: with more, a GPU's thread spills
_CLOSE = 4e-6
_WINDOW = range(-2, 6)  # codes around that of A / 6, tried on every block
_HALF_EXISTS = 16  # from this E4M3 code on, half the scale is a scale too
# Fractions of the `max` scale that are tried; half of them for nf4: its table look-up is slow, its optimum flat.
FRACTIONS, PARTS = 16, 50  # 1 - step / PARTS for steps up to FRACTIONS: the plain scale first


def _e2m1_error(a_EB: Tensor, s_B: Tensor, limit: float | None) -> Tensor:
    """Squared error of magnitudes ``a`` rounded to E2M1 times ``s``; inf where a decoded value would pass ``limit``."""
    u = (a_EB / s_B).clamp_max_(6.0)
    # Adding 2^(e + p - 2) to a float of p bits rounds u to multiples of 2^(e - 1), to even; e = max(0, floor(log2 u)).
    if u.dtype == torch.float32:
        shift = u.view(torch.int32).bitwise_and(0x7F800000).clamp_min_(127 << 23).add_(22 << 23).view(torch.float32)
    else:
        shift = u.view(torch.int64).bitwise_and(0x7FF << 52).clamp_min_(1023 << 52).add_(51 << 52).view(torch.float64)
    decoded = u.add_(shift).sub_(shift).mul_(s_B)
    overflows = None if limit is None else decoded.amax(0) > limit
    error_B = _total(decoded.sub_(a_EB).square_())
    return error_B if overflows is None else error_B.masked_fill_(overflows, torch.inf)


def _total(error_EB: Tensor) -> Tensor:
    """Sums over E, in place, in an order that depends on nothing but E: `LANES` at a time, one after the other; then
    the upper half, of the next power of two, onto the lower."""
    for start in range(LANES, error_EB.shape[0], LANES):
        lanes = error_EB[start : start + LANES]
        error_EB[: lanes.shape[0]].add_(lanes)
    error_EB = error_EB[:LANES]
    while (size := error_EB.shape[0]) > 1:
        half = 1 << ((size - 1).bit_length() - 1)
        error_EB[: size - half].add_(error_EB[half:])
        error_EB = error_EB[:half]
    return error_EB[0]


@dataclass
class _Best:
    code: Tensor
    error: Tensor
    contested: Tensor  # whether another code came as near

    @classmethod
    def empty(cls, a_EB: Tensor) -> "_Best":
        error = torch.full_like(a_EB[0], torch.inf)
        return cls(torch.zeros_like(error, dtype=torch.int64), error, torch.zeros_like(error, dtype=torch.bool))

    def offer(self, code: Tensor, error: Tensor) -> None:
        near = (error <= self.error * (1 + _CLOSE)) & (code != self.code)
        clear = error < self.error * (1 - _CLOSE)
        self.contested = (self.contested | near) & ~clear
        better = (error < self.error) | ((error == self.error) & (code < self.code))
        self.code = torch.where(better, code, self.code)
        self.error = torch.where(better, error, self.error)


def best_e4m3(a_EB: Tensor, limit: float | None = None) -> Tensor:
    """E4M3 codes 1..126 (uint8) of least squared error for blocks of magnitudes ``a`` in units of the tensor scale;
    among equals the smallest. ``limit``: the largest magnitude that may decode to, None where no code can pass it.
    """
    best = _search_e4m3(a_EB, limit)
    contested = (best.contested & (best.error > 0)).nonzero().squeeze(1)
    if a_EB.dtype == torch.float32 and contested.numel():
        best.code[contested] = _search_e4m3(a_EB[:, contested].to(torch.float64), limit).code
    return best.code.to(torch.uint8)


def _search_e4m3(a_EB: Tensor, limit: float | None) -> _Best:
    table = torch.arange(E4M3_MAX_CODE + 1, dtype=torch.uint8, device=a_EB.device)
    table = table.view(torch.float8_e4m3fn).to(a_EB.dtype)
    amax = a_EB.amax(0)
    start = torch.searchsorted(table, amax / 6).clamp_(1, E4M3_MAX_CODE)
    best = _Best.empty(a_EB)
    for offset in _WINDOW:
        code = (start + offset).clamp_(1, E4M3_MAX_CODE)
        best.offer(code, _e2m1_error(a_EB, table[code], limit))
    for step in (-1, 1):
        _walk(a_EB, amax, start + (_WINDOW[0] if step < 0 else _WINDOW[-1]), step, table, limit, best)
    return best


def _walk(a_EB: Tensor, amax: Tensor, code: Tensor, step: int, table: Tensor, limit: float | None, best: _Best) -> None:
    """Offers ``best`` the codes from ``code`` on, downward or upward, as long as they may win."""
    at = torch.arange(a_EB.shape[1], device=a_EB.device)
    while True:
        code = code + step
        s_B = table[code.clamp(1, E4M3_MAX_CODE)]
        if step < 0:
            open_ = (code >= 1) & ((amax - 6 * s_B).square() <= best.error[at] * (1 + 2 * _CLOSE))
        else:
            open_ = (code <= E4M3_MAX_CODE) & (s_B < 4 * amax) & ((amax > 3.5 * s_B) | (code < _HALF_EXISTS))
        keep = open_.nonzero().squeeze(1)
        if keep.numel() == 0:
            return
        if keep.numel() < at.numel():
            at, code, amax, a_EB, s_B = at[keep], code[keep], amax[keep], a_EB[:, keep], s_B[keep]
        mine = _Best(best.code[at], best.error[at], best.contested[at])
        mine.offer(code, _e2m1_error(a_EB, s_B, limit))
        best.code[at], best.error[at], best.contested[at] = mine.code, mine.error, mine.contested


def best_e8m0(a_EB: Tensor, limit: float | None = None) -> Tensor:
    """E8M0 codes (uint8) of least squared error among the specification's floor, one below and one above (fp64)."""
    floor, best = e8m0_floor(a_EB.amax(0)).to(torch.int64), _Best.empty(a_EB)
    for offset in (-1, 0, 1):
        code = (floor + offset).clamp_(0, E8M0_MAX_CODE)
        best.offer(code, _e2m1_error(a_EB, pow2(code - 127), limit))
    return best.code.to(torch.uint8)


def best_fraction(w_BE: Tensor, form: Format) -> Tensor:
    """Scales of least squared error among fractions from 0.7 to 1 of the `max` scale: for nf4, int4, int8 (fp64)."""
    amax, one = w_BE.abs().amax(1), torch.ones((), dtype=torch.float64, device=w_BE.device)
    best_scale, best_error = max_scale(amax, one, form), torch.full_like(amax, torch.inf)
    for step in range(0, FRACTIONS, 2 if form.name == "nf4" else 1):
        scale = max_scale(amax * (1 - step / PARTS), one, form)
        error = _fraction_error(w_BE, scale, form)  # whose temporaries are gone before the next ones are made
        better = error < best_error
        best_scale = torch.where(better, scale, best_scale)
        best_error = torch.where(better, error, best_error)
    return best_scale


def _fraction_error(w_BE: Tensor, scale_B: Tensor, form: Format) -> Tensor:
    """Squared error of elements rounded to the nearest value times ``scale``; on a tie both neighbours err the same."""
    scale_B1 = scale_B.to(torch.float64).unsqueeze(1)
    u = w_BE / torch.where(scale_B1 > 0, scale_B1, torch.inf)
    if form.name == "nf4":
        table = torch.tensor(form.values, dtype=torch.float64, device=w_BE.device)
        value = table[torch.bucketize(u, (table[1:] + table[:-1]) / 2, out_int32=True)]
    else:
        value = u.round_().clamp_(-form.max_value, form.max_value)
    return _total(value.mul_(scale_B1).sub_(w_BE).square_().t())
