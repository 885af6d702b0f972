"""Predicted and measured: errors by case, medians and worst, with their floors and aims."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from typing import Any

from vblackwell.planner.memory_estimate import P99_BYTES, P99_PERCENT
from vblackwell.units import GiB

Row = dict[str, Any]


def claim_bytes(smallest_cap: int) -> int:
    """Bytes to reserve, from which on P99 says of a run that it fits."""
    return -(-smallest_cap * (100 + P99_PERCENT) // 100) + P99_BYTES


def rows_of(predicted: Mapping[str, Row], measured: Mapping[str, Row], context: int | None = None) -> list[Row]:
    """One row a case; ``context``: measured of other runs, for cases of which the driver told nothing."""
    found = []
    for key in dict.fromkeys([*predicted, *measured]):
        if key.startswith("boundary "):
            continue
        told, real = predicted.get(key, {"error": "not predicted"}), measured.get(key, {"error": "not measured"})
        error = "; ".join(
            f"{of}: {each['error']}" for of, each in (("predicted", told), ("measured", real)) if "error" in each
        )
        row: Row = {"case": key, "error": error}
        if not error and real.get("allocated"):
            device = real["reserved"] + (real["context"] or context or 0) if real["context"] or context else None
            for of in ("allocated", "reserved", "context"):
                row |= {f"predicted_{of}": told[of], of: real[of]}
            row |= {"predicted_peak": told["peak_p50"], "predicted_p99": told["peak_p99"], "device": device}
            row |= {"predicted_step_seconds": told.get("step_seconds")}
            row |= {of: real.get(of) for of in ("step_seconds", "issue_seconds")}
            row |= {of: told.get(of) for of in ("gpu_seconds", "host_seconds")}
        found.append(row)
    return found


def relative(row: Row, told: str, real: str) -> float | None:
    """(predicted - measured) / measured."""
    if not row.get(told) or not row.get(real):
        return None
    return (row[told] - row[real]) / row[real]


# What is compared, its columns, what was asked for, and (median, P90, worst) that may not be exceeded.
Floors = tuple[float | None, float | None, float | None]
TARGETS: tuple[tuple[str, str, str, str, Floors | None], ...] = (
    ("allocated", "predicted_allocated", "allocated", "floor 1.5 %, aim 0.5 % (median)", (0.015, None, None)),
    ("reserved", "predicted_reserved", "reserved", "", None),
    (
        "reserved + context", "predicted_peak", "device", "floor 4 % / 12 %, aim 2 % / 6 % (median / worst)",
        (0.04, None, 0.12),
    ),
    ("context", "predicted_context", "context", "", None),
    (
        "P99 over what was used", "predicted_p99", "device",
        "without a cap; floor 8 %, aim 4 % at the real boundary, below", None,
    ),
    (
        "step time", "predicted_step_seconds", "step_seconds",
        "floor 12 % / 30 %, aim 5 % / 12 % (median / P90)", (0.12, 0.30, None),
    ),
)  # fmt: skip


def spread(rows: list[Row], told: str, real: str) -> tuple[float, float, float, int] | None:
    """Median, 90th percentile, worst and number of the relative errors; None without any."""
    found = sorted(abs(value) for row in rows if (value := relative(row, told, real)) is not None)
    return (
        (statistics.median(found), found[min(len(found) - 1, int(0.9 * len(found)))], found[-1], len(found))
        if found
        else None
    )


def summary_lines(rows: list[Row]) -> list[str]:
    """Medians, 90th percentiles and worst of all cases, then medians by family."""
    lines = [f"{'relative error':<24}{'median':>8} {'P90':>8} {'worst':>8}"]
    for title, told, real, target, _ in TARGETS:
        found = spread(rows, told, real)
        said = f"{'none':>9}" if found is None else "{:>8.2%} {:>8.2%} {:>8.2%}  of {}".format(*found)
        lines.append(f"{title:<24}{said}  {target}".rstrip())
    short = [row for row in rows if row.get("device") and row["predicted_p99"] < row["device"]]
    lines.append(
        f"P99 below what was used: {len(short)} ({', '.join(row['case'].split()[0] for row in short) or 'none'})"
    )
    lines += ["", f"{'by':<12}{'cases':>6}{'allocated':>11}{'reserved':>10}{'worst':>8}"]
    for pick in (1, 3):  # family, precision
        lines += _grouped(rows, lambda row, pick=pick: row["case"].split()[pick])
    return lines


def verdict_lines(rows: list[Row]) -> list[str]:
    """How many cases have no answer, and which floors are met: one of which nothing was measured is not."""
    counts = {of: sum(f"{of}: " in row["error"] for row in rows) for of in ("predicted", "measured")}
    missing = sum(bool(row["error"]) for row in rows)
    lines = [
        f"cases: {len(rows)}, of these {counts['predicted']} could not be predicted and {counts['measured']} failed or "
        f"did not run"
        + (f": {missing} WITHOUT AN ANSWER, so the floors below are of the others alone" if missing else "")
    ]
    for title, told, real, _, floors in TARGETS:
        found = spread(rows, told, real)
        if floors is None:
            continue
        if found is None:
            lines.append(f"{title}: NOT MEASURED")
            continue
        missed = any(floor is not None and value > floor for value, floor in zip(found, floors, strict=False))
        lines.append(f"{title}: {'FLOOR MISSED' if missed else 'floor met'}, of {found[-1]} cases")
    return lines


def _grouped(rows: list[Row], key: Callable[[Row], str]) -> list[str]:
    lines = []
    for name in dict.fromkeys(key(row) for row in rows):
        mine = [row for row in rows if key(row) == name]
        allocated = spread(mine, "predicted_allocated", "allocated")
        reserved = spread(mine, "predicted_reserved", "reserved")
        if allocated and reserved:
            lines.append(f"{name:<12}{allocated[3]:>6}{allocated[0]:>11.2%}{reserved[0]:>10.2%}{reserved[2]:>8.2%}")
    return lines


def case_lines(rows: list[Row]) -> list[str]:
    """One line a case, in MB; errors last."""
    lines = [f"{'case':<58}{'allocated':>10}{'error':>8}{'reserved':>10}{'error':>8}{'context':>9}{'ms/step':>9}"]
    for row in (row for row in rows if row.get("allocated")):
        sizes = "".join(
            f"{row[of] / 1e6:>10.0f}{relative(row, f'predicted_{of}', of):>+8.2%}" for of in ("allocated", "reserved")
        )
        context = f"{row['context'] / 1e6:.0f}" if row["context"] else "?"
        step = f"{row['step_seconds'] * 1e3:.1f}" if row["step_seconds"] else ""
        lines.append(f"{row['case'][:57]:<58}{sizes}{context:>9}{step:>9}")
    return lines + [f"{row['case'][:57]:<58} {row['error']}" for row in rows if row["error"]]


def step_lines(rows: list[Row]) -> list[str]:
    """Step times in ms: measured, predicted, of that the GPU's and the host's alone, and us of an operator just
    then.
    """
    timed = [row for row in rows if row.get("step_seconds") and row.get("predicted_step_seconds")]
    if not timed:
        return []
    lines = [f"{'ms a step':<58}{'measured':>10}{'predicted':>10}{'error':>8}{'GPU':>8}{'host':>8}{'us':>7}"]
    for row in timed:
        parts = [row[name] * 1e3 for name in ("step_seconds", "predicted_step_seconds", "gpu_seconds", "host_seconds")]
        off = relative(row, "predicted_step_seconds", "step_seconds")
        lines.append(
            f"{row['case'][:57]:<58}{parts[0]:>10.1f}{parts[1]:>10.1f}{off:>+8.1%}{parts[2]:>8.1f}{parts[3]:>8.1f}"
            f"{1e6 * (row.get('issue_seconds') or 0.0):>7.1f}"
        )
    return [*lines, ""]


def boundary_lines(
    predicted: Mapping[str, Row], measured: Mapping[str, Row], context: int | None, wanted: int = 0
) -> list[str]:
    """Claims of P99 at the real boundaries; ``wanted``: how many were asked for."""
    lines, over, wrong = [], [], 0
    sizes: set[int] = set()
    for key, real in measured.items():
        if not key.startswith("boundary "):
            continue
        name, told = key.removeprefix("boundary "), predicted.get(key.removeprefix("boundary "), {})
        if "error" in real or not real.get("boundary"):
            lines.append(f"{name[:57]:<58} {real.get('error', 'no GPU')}")
            continue
        claimed = real["claim"] + told["context"]
        needed = real["boundary"] + (context or told["context"])
        bad = claimed < needed or not real["claim_runs"] or not real.get("card_runs", True)
        wrong, share = wrong + bad, claimed / needed - 1
        over.append(share)
        sizes.add(told.get("case", {}).get("card_bytes", 0))
        coarse = (real["boundary"] - real.get("fails", real["boundary"])) / real["boundary"]
        card = "" if "card" not in real else f"  batch of the card runs: {real['card_runs']}"
        lines.append(
            f"{name[:57]:<58}{needed / 1e6:>10.0f}{claimed / 1e6:>10.0f}{share:>+8.2%}  "
            f"{'FAILS' if bad else 'runs'}{card}"
            + (f"  left over {real['left_over']}" if real["left_over"] else "")
            + f"  searched to {coarse:.1%}"
        )
    if not lines:
        return []
    head = f"{'real boundary, MB, and from where P99 says fits':<58}{'needed':>10}{'claimed':>10}{'over':>8}"
    cards = ", ".join(f"{size // GiB}" for size in sorted(sizes - {0}))
    counted = f"{len(over)} boundaries compared, {wanted} asked for; cards of {cards or 'no'} GiB among them"
    counted += f"; {wanted - len(over)} TOO FEW" if len(over) < wanted else ""
    told = f"says fits where it fails: {wrong} (floor 0)"
    if over:
        told += f"; over-reservation, median {statistics.median(over):.2%} (floor 8 %, aim 4 %), worst {max(over):.2%}"
    return [head, *lines, counted, told]
