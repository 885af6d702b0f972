"""The table, the ratios with their floors and aims, and the rows of the CSV."""

from __future__ import annotations

import csv
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.lib.offload.case import Case, Result

GB = 1e9


def table_lines(results: list[Result]) -> list[str]:
    """One line a system. GB are 1e9 bytes."""
    head = "system|tokens/s|drained|reserved|allocated|on GPU|level 0|host RSS|host used|pinned"
    head = f"{head}|1st step|clipped|loss 1|loss n".split("|")
    rows = [head] + [_cells(result) for result in results]
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    lines = ["GB of 1e9 bytes; seconds; drained: tokens/s between two standstills"]
    for row, result in zip(rows, [None, *results], strict=True):
        line = row[0].ljust(widths[0]) + "".join(
            cell.rjust(width + 2) for cell, width in zip(row[1:], widths[1:], strict=True)
        )
        if result is not None and result.status != "ok":
            line = (
                f"{row[0].ljust(widths[0])}  {result.status}: {result.error}"
                if result.error
                else f"{row[0]}  {result.status}"
            )
        lines.append(line)
    lines += ["", *(line for result in results for line in _detail(result))]
    return lines


def _cells(result: Result) -> list[str]:
    losses = [f"{result.losses[0]:.4f}", f"{result.losses[-1]:.4f}"] if result.losses else ["", ""]
    speeds = [_form(value, "{:,.0f}") for value in (result.tokens_per_second, result.drained_tokens_per_second)]
    sizes = [result.peak_reserved, result.peak_allocated, result.gpu_used, result.level0_peak]
    sizes += [result.host_rss, result.host_used, result.pinned]
    return [
        result.system,
        *speeds,
        *(_form(None if size is None else size / GB, "{:.2f}") for size in sizes),
        _form(result.first_step_seconds, "{:.1f}"),
        _form(result.clipped_share, "{:.0%}"),
        *losses,
    ]


def _form(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)


def _detail(result: Result) -> list[str]:
    """Losses, links and notes of a system."""
    if not result.losses:
        return []
    lines = [f"{result.system}: losses " + " ".join(f"{loss:.6f}" for loss in result.losses)]
    for name, num_bytes in result.link_bytes.items():
        busy = result.link_busy[name]
        rate = _link_rate(result, name)
        lines.append(
            f"{result.system}: {name} {num_bytes / GB:.2f} GB a step, busy {busy:.0%} of the time at "
            f"{_form(rate, '{:.1f}')} GB/s"
        )
    if result.stall_share is not None:
        lines.append(f"{result.system}: waited for bytes {result.stall_share:.1%} of the time")
    return lines + [f"{result.system}: {note}" for note in result.notes]


def _link_rate(result: Result, name: str) -> float | None:
    """GB/s while a copy runs: bytes a second of measured time over the busy share of it."""
    busy = result.link_busy[name]
    seconds = result.tokens / (result.drained_tokens_per_second or 1.0)  # of a step
    return result.link_bytes[name] / (busy * seconds) / GB if busy else None


# Name, systems, floor and aim, and the same where the run clips; None: nothing was asked for there. Clipping at every
# step leaves a streamed run the forward alone to update in: it is compared with plain PyTorch, not with resident.
RATIOS: list[tuple[str, str, str, tuple[float, float], tuple[float, float] | None]] = [
    ("streamed, tokens/s over plain", "streamed", "plain", (0.95, 1.15), (0.85, 1.013)),
    ("streamed, tokens/s over resident", "streamed", "resident", (0.85, 0.97), None),
    ("streamed, tokens/s over FSDP2 offload", "streamed", "fsdp2", (1.8, 2.2), (1.8, 2.2)),
    ("streamed, tokens/s over DeepSpeed ZeRO-3 offload", "streamed", "deepspeed", (1.8, 2.2), (1.8, 2.2)),
    ("resident, tokens/s over plain", "resident", "plain", (1.15, 1.4), (1.15, 1.4)),
    ("stack enabled, everything fits, over plain", "enabled", "plain", (0.99, 1.0), (0.99, 1.0)),
]
MEMORY_FLOOR, MEMORY_AIM = 6.8, 10.0


def ratio_lines(results: list[Result], *, clipped: bool) -> list[str]:
    """Every ratio whose two systems ran."""
    ran = {result.system: result for result in results if result.status == "ok"}
    lines = [f"{'ratio':56}{'value':>8}{'floor':>8}{'aim':>8}"]
    for name, over, under, plain_bounds, clipped_bounds in RATIOS:
        if over in ran and under in ran:
            value = (ran[over].tokens_per_second or 0.0) / (ran[under].tokens_per_second or 1.0)
            bounds = clipped_bounds if clipped else plain_bounds
            lines.append(f"{name:56}{value:8.3f}" if bounds is None else _verdict(name, value, *bounds))
    lines += _memory_lines(ran) + _loss_lines(ran)
    return lines


def _verdict(name: str, value: float, floor: float, aim: float) -> str:
    said = "aim met" if value >= aim else "floor met" if value >= floor else "MISSED"
    return f"{name:56}{value:8.3f}{floor:8.3g}{aim:8.3g}  {said}"


def _memory_lines(ran: dict[str, Result]) -> list[str]:
    if "plain" not in ran or "streamed" not in ran:
        return []
    mine, theirs = ran["streamed"].peak_reserved, ran["plain"].peak_reserved
    if not mine or not theirs:
        return []
    return [_verdict("peak reserved GPU memory, plain over streamed", theirs / mine, MEMORY_FLOOR, MEMORY_AIM)]


def _loss_lines(ran: dict[str, Result]) -> list[str]:
    if "streamed" not in ran or "resident" not in ran:
        return []
    pairs = list(zip(ran["streamed"].losses, ran["resident"].losses, strict=False))
    worst = max(abs(mine - other) for mine, other in pairs)
    said = "bitwise equal" if worst == 0 else "not bitwise equal"
    return [f"{f'losses of {len(pairs)} steps, streamed against resident: largest difference':56} {worst:.3g}  {said}"]


# -- the CSV -----------------------------------------------------------------------------------------------------------


def row_of(about: dict[str, Any], case: Case, result: Result) -> dict[str, Any]:
    """One flat row: machine, case, result. Lists are joined by blanks."""
    asked = asdict(case)
    recipe = asked.pop("recipe")
    for name in ("betas", "eps", "disk_path"):
        asked.pop(name)
    asked["parameters"] = case.decoder.num_parameters
    asked["recipe"] = " ".join(f"{name}={value}" for name, value in recipe.items() if value is not None)
    answer = asdict(result)
    for name in ("link_bytes", "link_busy"):
        answer[name] = " ".join(f"{link}={value:.6g}" for link, value in answer[name].items())
    answer["step_seconds"] = " ".join(f"{value:.4f}" for value in answer["step_seconds"])
    answer["losses"] = " ".join(repr(value) for value in answer["losses"])
    answer["grad_norms"] = " ".join(f"{value:.6g}" for value in answer["grad_norms"])
    answer["notes"] = "; ".join(answer["notes"])
    return {**about, **asked, **answer}


def read_csv(path: Path) -> tuple[list[str], list[dict[str, Any]]]:
    """Columns and rows of ``path``; none if there is no such file.

    Raises:
        SystemExit: a row has more values than there are columns.
    """
    if not path.exists():
        return [], []
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        rows: list[dict[str, Any]] = []
        for row in reader:
            if None in row:
                raise SystemExit(
                    f"{path}, line {reader.line_num}: more values than the first line has names; mend it first"
                )
            rows.append(row)
        return list(reader.fieldnames or []), rows


def append_csv(path: Path, rows: list[dict[str, Any]]) -> None:
    """Add ``rows``; columns that the file does not have yet are added to it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    columns, held = read_csv(path)
    columns += [name for row in rows for name in row if name not in columns]
    columns = list(dict.fromkeys(columns))
    fresh = path.with_suffix(".csv.tmp")
    with fresh.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(held + rows)
    fresh.replace(path)
