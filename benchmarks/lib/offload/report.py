"""The table, the ratios with their floors and aims, and the rows of the CSV."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from benchmarks.lib.offload.case import Case, Result
from benchmarks.lib.results import GB, goal_header, goal_line

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
    lines = ["GB of 1e9 bytes; seconds; drained: tokens/s between two standstills"]
    lines.append(f"{'system':10}" + "".join(f"{head:>11}" for head, *_ in COLUMNS) + f"{'loss 1':>9}{'loss n':>9}")
    for result in results:
        cells = [(getattr(result, name), unit, form) for _, name, unit, form in COLUMNS]
        text = "".join(f"{'' if value is None else form.format(value / unit):>11}" for value, unit, form in cells)
        losses = "".join(f"{loss:9.4f}" for loss in (result.losses[:1] + result.losses[-1:]))
        failed = f"  {result.status}: {result.error}".rstrip(": ")
        lines.append(f"{result.system:10}" + (text + losses if result.status == "ok" else failed))
    return [*lines, "", *(line for result in results for line in _detail(result))]


def _detail(result: Result) -> list[str]:
    """Losses, links and notes of a system."""
    if not result.losses:
        return []
    lines = [f"{result.system}: losses " + " ".join(f"{loss:.6f}" for loss in result.losses)]
    for name, num_bytes in result.link_bytes.items():
        busy = result.link_busy[name]
        seconds = result.tokens / (result.drained_tokens_per_second or 1.0)  # of a step
        rate = f"{num_bytes / (busy * seconds) / GB:.1f}" if busy else "?"  # while a copy runs
        lines.append(
            f"{result.system}: {name} {num_bytes / GB:.2f} GB a step, busy {busy:.0%} of the time at {rate} GB/s"
        )
    if result.stall_share is not None:
        lines.append(f"{result.system}: waited for bytes {result.stall_share:.1%} of the time")
    return lines + [f"{result.system}: {note}" for note in result.notes]


# Name, systems, floor and aim, and the same where the run clips; None: nothing was asked for there. Clipping at every
# step leaves a streamed run the forward alone to update in: it is compared with plain PyTorch, not with resident.
RATIOS: list[tuple[str, str, str, tuple[float, float], tuple[float, float] | None]] = [
    ("streamed, tokens/s over plain", "streamed", "plain", (0.95, 1.15), (0.85, 1.013)),
    ("streamed, tokens/s over resident", "streamed", "resident", (0.85, 0.97), None),
    ("streamed, tokens/s over FSDP2 offload", "streamed", "fsdp2", (1.8, 2.2), (1.8, 2.2)),
    ("streamed, tokens/s over DeepSpeed ZeRO-3 offload", "streamed", "deepspeed", (1.8, 2.2), (1.8, 2.2)),
    ("resident, tokens/s over plain", "resident", "plain", (1.15, 1.4), (1.15, 1.4)),
    ("three lines, tokens/s over plain", "lines", "plain", (1.2, 1.35), (0.95, 1.05)),
    ("stack enabled, everything fits, over plain", "enabled", "plain", (0.99, 1.0), (0.99, 1.0)),
]
# By shape and tokens a step, under 8 GiB and without a limit of the norm.
OVER_HELD = {("6.7B", 8192): (0.45, 0.55), ("6.7B", 16384): (0.75, 0.85), ("6.7B", 32768): (0.95, 1.0)}
MEMORY_FLOOR, MEMORY_AIM = 7.5, 10.0


def ratio_lines(
    results: list[Result], *, clipped: bool, shape: str | None = None, limit: float | None = None
) -> list[str]:
    """Every ratio whose two systems ran; ``limit``: of the gradients' norm, whether it bites or not."""
    ran = {result.system: result for result in results if result.status == "ok"}
    lines = [goal_header()]
    for name, over, under, plain_bounds, clipped_bounds in RATIOS:
        if over in ran and under in ran:
            value = (ran[over].tokens_per_second or 0.0) / (ran[under].tokens_per_second or 1.0)
            lines.append(goal_line(name, value, *((clipped_bounds if clipped else plain_bounds) or ())))
    if "lines" in ran and "held" in ran:
        value = (ran["lines"].tokens_per_second or 0.0) / (ran["held"].tokens_per_second or 1.0)
        bounds = OVER_HELD.get((shape, ran["lines"].tokens), ()) if limit is None else ()
        lines.append(goal_line("three lines, tokens/s over the same where all fits", value, *bounds))
    lines += _memory_lines(ran) + _loss_lines(ran)
    return lines


def _memory_lines(ran: dict[str, Result]) -> list[str]:
    theirs = ran["plain"].peak_reserved if "plain" in ran else None
    return [
        goal_line(f"peak reserved GPU memory, plain over {name}", theirs / mine, MEMORY_FLOOR, MEMORY_AIM)
        for name in ("streamed", "lines")
        if theirs and name in ran and (mine := ran[name].peak_reserved)
    ]


def _loss_lines(ran: dict[str, Result]) -> list[str]:
    lines = list[str]()
    for mine, other in (("streamed", "resident"), ("lines", "held")):
        if mine in ran and other in ran and (losses := (ran[mine].losses, ran[other].losses)) and all(losses):
            pairs = list(zip(*losses, strict=False))
            worst = max(abs(one - two) for one, two in pairs)
            said = "bitwise equal" if worst == 0 else "not bitwise equal"
            lines.append(
                f"losses of {len(pairs)} steps, {mine} against {other}: largest difference {worst:.3g}, {said}"
            )
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
