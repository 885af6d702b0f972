"""What a run used, at its end: measured, not promised. Printed as a table and kept as report.json."""

from __future__ import annotations

import statistics
from typing import Any

from vblackwell.planner.placement import Plan
from vblackwell.train.metrics import level_labels
from vblackwell.units import format_bytes, format_seconds


def make_report(
    stats: dict[str, Any],
    summary: dict[str, Any],
    *,
    run: dict[str, Any],
    gpu_peak_bytes: dict[str, int] | None,
    process_peak_bytes: int,
) -> dict[str, Any]:
    """The report as plain values.

    Args:
        stats: `VGPUStack.get_stats()`.
        summary: the offload engine's `summary()`.
        run: what the loop knows: steps, seconds, losses, tokens per second.
        gpu_peak_bytes: the most that torch allocated and reserved on the GPU; None on the CPU.
        process_peak_bytes: largest resident set of the process.
    """
    labels = level_labels(stats)
    seconds = max(run["seconds"], 1e-9)
    levels = [
        {
            "level": label,
            "capacity_bytes": level["capacity_bytes"],
            "peak_bytes": level["peak_bytes"],
            "hits": level["hits"],
            "misses": level["misses"],
            "hit_rate": _rate(level["hits"], level["hits"] + level["misses"]),
        }
        for label, level in zip(labels, stats["levels"], strict=True)
    ]
    written = sum(link["bytes"] for link in stats["links"] if link["destination"].startswith("ssd"))
    return {
        **run,
        "placement": summary["placement"],
        "formats": summary["formats"],
        "groups": summary["groups"],
        "bytes_by_kind_and_level": summary["bytes_by_level"],
        "levels": levels,
        "links": stats["links"],
        "stall_seconds": stats["stall_seconds"],
        "stalled_share": stats["stall_seconds"] / seconds,
        "ssd_written_bytes": written,
        "gpu_peak_bytes": gpu_peak_bytes,
        "process_peak_bytes": process_peak_bytes,
    }


UNSETTLED_STEPS = 2  # at the start of a run, slower than the others


def compare(plan: Plan, report: dict[str, Any], speeds: list[float]) -> dict[str, Any]:
    """The plan's choice, and what it predicted next to what ``report`` and the steps' ``speeds`` (tokens/s) have, by
    name.

    GPU: what torch reserved; without a GPU the arena. Host: what the stack's RAM level held.
    """
    said, peak = plan.prediction, report["gpu_peak_bytes"]
    settled = speeds[UNSETTLED_STEPS:] or speeds
    level0, *below = report["levels"]
    host = sum(level["peak_bytes"] for level in below if level["level"].startswith("cpu"))
    return {
        "choice": str(plan.choice),
        "gpu_bytes": {"predicted": said.gpu, "measured": level0["peak_bytes"] if peak is None else peak["reserved"]},
        "host_bytes": {"predicted": said.host, "measured": host},
        "tokens_per_second": {
            "predicted": said.tokens_per_second,
            "measured": statistics.median(settled) if settled else None,
        },
        "clipped_tokens_per_second": None if said.clipped_seconds is None else said.tokens / said.clipped_seconds,
    }


def _plan_lines(found: dict[str, Any]) -> list[str]:
    rows = [("plan", "predicted", "measured", "off by")]
    for name, text, show in (
        ("gpu_bytes", "GPU or arena", format_bytes), ("host_bytes", "RAM level", format_bytes),
        ("tokens_per_second", "tokens/s", lambda value: f"{value:,.0f}"),
    ):  # fmt: skip
        said, was = found[name]["predicted"], found[name]["measured"]
        off = "-" if not was else f"{said / was - 1:+.1%}"
        rows.append((text, show(said), "-" if was is None else show(was), off))
    lines = _columns(rows)
    clipped = found["clipped_tokens_per_second"]
    return lines if clipped is None else [*lines, f"predicted while steps clip: {clipped:,.0f} tokens/s"]


def _rate(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def report_lines(report: dict[str, Any]) -> list[str]:
    """The report as the lines of a table."""
    rows = [("level", "peak", "capacity", "hits", "misses", "hit rate")]
    for level in report["levels"]:
        rate = level["hit_rate"]
        rows.append(
            (
                level["level"],
                format_bytes(level["peak_bytes"]),
                format_bytes(level["capacity_bytes"]),
                str(level["hits"]),
                str(level["misses"]),
                "-" if rate is None else f"{rate:.1%}",
            )  # fmt: skip
        )
    lines = _columns(rows)
    links = [("link", "bytes", "busy")]
    links += [
        (f"{link['source']} > {link['destination']}", format_bytes(link["bytes"]), format_seconds(link["seconds"]))
        for link in report["links"]
    ]
    if len(links) > 1:
        lines += ["", *_columns(links)]
    lines += ["", f"placement: {report['placement']}, {report['groups']} layer groups"]
    formats = report["formats"]
    lines += [f"AdamW: {formats['states']} states, {formats['masters']} masters"]
    lines += [f"time stalled: {format_seconds(report['stall_seconds'])}, {report['stalled_share']:.1%} of the run"]
    lines += [f"written to the SSD: {format_bytes(report['ssd_written_bytes'])}"]
    peak = report["gpu_peak_bytes"]
    if peak is not None:
        lines += [
            f"GPU at the peak, activations included: {format_bytes(peak['allocated'])} allocated, "
            f"{format_bytes(peak['reserved'])} reserved"
        ]
    lines += [f"process memory (RAM): {format_bytes(report['process_peak_bytes'])} at the peak"]
    return [*lines, "", *_plan_lines(report["plan"])] if "plan" in report else lines


def _columns(rows: list[tuple[str, ...]]) -> list[str]:
    """Rows as aligned text: the first column to the left, numbers to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
