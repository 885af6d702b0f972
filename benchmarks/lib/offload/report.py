"""The table, the ratios with their floors and aims, and the rows of the CSV."""

from __future__ import annotations

import statistics
from dataclasses import asdict
from typing import Any

from benchmarks.lib.offload.case import PEAK, Case, Result
from benchmarks.lib.results import GB, goal_header, goal_line
from vblackwell.units import GiB

# Of the table: a column's head, the field of `Result` below it, what it is divided by, and its form.
COLUMNS = [
    ("tokens/s", "tokens_per_second", 1, "{:,.0f}"), ("drained", "drained_tokens_per_second", 1, "{:,.0f}"),
    ("reserved", "peak_reserved", GB, "{:.2f}"), ("allocated", "peak_allocated", GB, "{:.2f}"),
    ("on GPU", "gpu_used", GB, "{:.2f}"), ("level 0", "level0_peak", GB, "{:.2f}"),
    ("host RSS", "host_rss", GB, "{:.2f}"), ("host used", "host_used", GB, "{:.2f}"),
    ("pinned", "pinned", GB, "{:.2f}"), ("1st step", "first_step_seconds", 1, "{:.1f}"),
    ("clipped", "clipped_share", 1, "{:.0%}"),
]  # fmt: skip


def table_lines(results: list[Result]) -> list[str]:
    """One line a system. GB are 1e9 bytes."""
    lines = ["GB of 1e9 bytes; seconds; drained: tokens/s between two standstills; a number: the limit of the norm"]
    lines.append(f"{'system':12}" + "".join(f"{head:>11}" for head, *_ in COLUMNS) + f"{'loss 1':>9}{'loss n':>9}")
    for result in results:
        cells = [(getattr(result, name), unit, form) for _, name, unit, form in COLUMNS]
        text = "".join(f"{'' if value is None else form.format(value / unit):>11}" for value, unit, form in cells)
        losses = "".join(f"{loss:9.4f}" for loss in (result.losses[:1] + result.losses[-1:]))
        failed = f"  {result.status}: {result.error}".rstrip(": ")
        lines.append(f"{_named(result):12}" + (text + losses if result.status == "ok" else failed))
    return [*lines, "", *(line for result in results for line in _detail(result))]


def _named(result: Result) -> str:
    return result.system if result.max_grad_norm is None else f"{result.system} {result.max_grad_norm:g}"


def _detail(result: Result) -> list[str]:
    """Losses, links and notes of a system."""
    if not result.losses:
        return []
    system = _named(result)
    lines = [f"{system}: losses " + " ".join(f"{loss:.6f}" for loss in result.losses)]
    for name, num_bytes in result.link_bytes.items():
        busy = result.link_busy[name]
        seconds = result.tokens / (result.drained_tokens_per_second or 1.0)  # of a step
        rate = f"{num_bytes / (busy * seconds) / GB:.1f}" if busy else "?"  # while a copy runs
        lines.append(f"{system}: {name} {num_bytes / GB:.2f} GB a step, busy {busy:.0%} of the time at {rate} GB/s")
    if result.stall_share is not None:
        lines.append(f"{system}: waited for bytes {result.stall_share:.1%} of the time")
    return lines + [f"{system}: {note}" for note in result.notes]


# Name, systems, floor and aim, and the same where every step clips; None: nothing was asked for there. That leaves a
# streamed run the forward alone to update in: it is compared with plain PyTorch, not with resident.
RATIOS: list[tuple[str, str, str, tuple[float, float], tuple[float, float] | None]] = [
    ("streamed, tokens/s over plain", "streamed", "plain", (0.95, 1.15), (0.85, 1.013)),
    ("streamed, tokens/s over resident", "streamed", "resident", (0.85, 0.97), None),
    ("streamed, tokens/s over FSDP2 offload", "streamed", "fsdp2", (1.8, 2.2), (1.8, 2.2)),
    ("streamed, tokens/s over DeepSpeed ZeRO-3 offload", "streamed", "deepspeed", (1.8, 2.2), (1.8, 2.2)),
    ("resident, tokens/s over plain", "resident", "plain", (1.15, 1.4), (1.15, 1.4)),
    ("stack enabled, everything fits, over plain", "enabled", "plain", (0.99, 1.0), (0.99, 1.0)),
]
SOME = 0.2  # of the steps: where fewer clip, clipping is to cost next to nothing
PLENTY = 1 << 60
# Of the three lines, floor and aim: over plain by how many steps clip, over the same without clipping, and of 6.7B
# under 8 GiB over the same where all fits, by tokens a step, without a limit and with one that no step exceeds.
OVER_PLAIN = {"none": (1.25, 1.4), "some": (1.2, 1.35), "all": (0.95, 1.05)}
OVER_UNCLIPPED = 0.92, 0.98
OVER_HELD = {
    "none": {8192: (0.45, 0.55), 16384: (0.75, 0.85), 32768: (0.95, 1.0)},
    "some": {8192: (0.28, 0.40), 16384: (0.50, 0.65), 32768: (0.75, 0.90)},
}
MEMORY, HOST_BYTES, FIRST_STEP, PEAK_SHARE = (7.5, 10.0), (27.0, 25.0), (8.0, 4.0), (0.42, 0.52)


def ratio_lines(results: list[Result], case: Case) -> list[str]:
    """Every ratio whose two systems ran, and what else was asked of the three lines; ``case``: of any of them."""
    first: dict[str, Result] = {}
    for result in results:
        if result.status == "ok":
            first.setdefault(result.system, result)
    lines = [goal_header()]
    for name, over, under, usual, clipping in RATIOS:
        if over in first and under in first:
            bounds = clipping if _clipping(first[over]) == "all" else usual
            lines.append(goal_line(name, _over(first[over], first[under]), *(bounds or ())))
    theirs = first["plain"].peak_reserved if "plain" in first else None
    if theirs and "streamed" in first and (mine := first["streamed"].peak_reserved):
        lines.append(goal_line("peak reserved GPU memory, plain over streamed", theirs / mine, *MEMORY))
    ours = [result for result in results if result.status == "ok" and result.system == "lines"]
    unclipped = next((each for each in ours if each.max_grad_norm is None), None)
    for result in ours:
        lines += _of_three_lines(result, first, unclipped, case)
    return lines + _loss_lines(first)


def _over(mine: Result, other: Result) -> float:
    """Of their speeds: by median steps, or where of one some clip and others not by the mean steps of both."""
    if any(0 < (each.clipped_share or 0) < 1 for each in (mine, other)) and mine.step_seconds and other.step_seconds:
        speeds = [each.tokens / statistics.fmean(each.step_seconds) for each in (mine, other)]
        return speeds[0] / speeds[1]
    return (mine.tokens_per_second or 0.0) / (other.tokens_per_second or 1.0)


def _clipping(result: Result) -> str:
    """Of the measured steps: 'none' without a limit, 'some' below `SOME`, 'all', or '' for shares between."""
    share = result.clipped_share
    if share is None:
        return "none"
    return "some" if share < SOME else "all" if share == 1 else ""


def _of_three_lines(result: Result, first: dict[str, Result], unclipped: Result | None, case: Case) -> list[str]:
    """With floors and aims where the issue of the three lines names this shape, tokens a step and cap."""
    limit, clipping, shape = result.max_grad_norm, _clipping(result), case.decoder
    on_gpu, cap, whole = case.device == "cuda", case.cap_bytes or PLENTY, case.drawn is None
    of_27 = on_gpu and whole and case.shape == "2.70B" and result.tokens == 16384
    of_67 = on_gpu and whole and case.shape == "6.7B" and cap <= 8 * GiB
    of_14 = on_gpu and case.shape == "14B" and result.tokens == 65536 and cap <= 24 * GiB
    when = "no clipping" if limit is None else f"limit {limit:g}"
    if result.clipped_share is not None:
        when += f", which {result.clipped_share:.0%} of the steps exceed"
    lines = [f"three lines, {when}:"]

    def add(words: str, value: float, bounds: tuple[float, ...] = (), *, less: bool = False) -> None:
        lines.append(goal_line(f"  {words}", value, *bounds, less=less))

    if "plain" in first:
        add("over plain", _over(result, first["plain"]), OVER_PLAIN.get(clipping, ()) if of_27 else ())
    if unclipped is not None and unclipped is not result:
        bounds = OVER_UNCLIPPED if of_27 and clipping == "some" else ()
        add("over the same without clipping", _over(result, unclipped), bounds)
    if "held" in first:
        bounds = OVER_HELD.get(clipping, {}).get(result.tokens, ()) if of_67 else ()
        add("over the same where all fits", _over(result, first["held"]), bounds)
    if "plain" in first and (theirs := first["plain"].peak_reserved) and result.peak_reserved:
        add("reserved GPU memory, plain over it", theirs / result.peak_reserved, MEMORY if of_27 else ())
    if result.pinned:
        bounds = HOST_BYTES if of_27 and limit is not None else ()
        add("pinned host bytes a parameter", result.pinned / shape.num_parameters, bounds, less=True)
    if result.first_step_seconds is not None and on_gpu:
        words = "first step, seconds from the first line on (a machine's first: 20)"
        add(words, result.first_step_seconds, FIRST_STEP, less=True)
    if of_14:
        step = 6 * (result.tokens_per_second or 0.0) / PEAK
        table = shape.vocab_size * shape.hidden_size
        add(f"of {PEAK / 1e12:.0f} TFLOP/s, by all parameters", step * shape.num_parameters, PEAK_SHARE)
        add("... without the table that is looked up", step * (shape.num_parameters - table))
    return lines


def _loss_lines(ran: dict[str, Result]) -> list[str]:
    lines = list[str]()
    for mine, other in (("streamed", "resident"), ("lines", "held"), ("lines", "plain")):
        if mine in ran and other in ran and (losses := (ran[mine].losses, ran[other].losses)) and all(losses):
            pairs = list(zip(*losses, strict=False))
            worst = max(abs(one - two) for one, two in pairs)
            said = "bitwise equal" if worst == 0 else "not bitwise equal"
            said = "" if other == "plain" else f", {said}"  # fused operators round otherwise
            lines.append(f"losses of {len(pairs)} steps, {mine} against {other}: largest difference {worst:.3g}{said}")
    return lines


# -- the CSV -----------------------------------------------------------------------------------------------------------


def row_of(about: dict[str, Any], case: Case, result: Result) -> dict[str, Any]:
    """One flat row: machine, case, result. Lists are joined by blanks."""
    asked = asdict(case)
    recipe = asked.pop("recipe")
    for name in ("betas", "eps", "disk_path"):
        asked.pop(name)
    asked["parameters"] = case.decoder.num_parameters
    asked["recipe"] = " ".join(f"{name}={value}" for name, value in recipe.items() if value is not None)
    asked["drawn"] = " ".join(f"{name}={value}" for name, value in (asked["drawn"] or {}).items())
    answer = asdict(result)
    for name in ("link_bytes", "link_busy"):
        answer[name] = " ".join(f"{link}={value:.6g}" for link, value in answer[name].items())
    answer["step_seconds"] = " ".join(f"{value:.4f}" for value in answer["step_seconds"])
    answer["losses"] = " ".join(repr(value) for value in answer["losses"])
    answer["grad_norms"] = " ".join(f"{value:.6g}" for value in answer["grad_norms"])
    answer["notes"] = "; ".join(answer["notes"])
    return {**about, **asked, **answer}
