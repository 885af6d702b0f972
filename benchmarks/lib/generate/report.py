"""The table of bench_generate.py, its ratios with floors and aims, and the rows of its CSV."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from benchmarks.lib.generate.case import Case, Loading, Point
from benchmarks.lib.results import GB, goal_header, goal_line

LINK = 55e9  # bytes a second, of the limit that the floors are shares of
LOADING = 1.1  # most host memory while loading, over the file


def line_of(point: Point) -> str:
    """One line of the table."""
    name = f"{point.system}{' (3 layers)' if point.through else ''}"
    if point.status != "ok":
        return f"{name:26}{point.rows:>5}  {point.status}"
    cells = [
        (point.new, "{}"), (point.first_cold, "{:.3f}"), (point.first_seconds, "{:.3f}"), (point.rate, "{:.2f}"),
        (point.drained_rate, "{:.2f}"), (point.step_seconds, "{:.4f}"), (point.must_bytes, "{:.2e}"),
        (point.moved_bytes, "{:.2e}"), (point.peak_reserved, "{:.2e}"),
    ]  # fmt: skip
    return f"{name:26}{point.rows:>5}" + "".join(
        f"{'' if value is None else form.format(value):>10}" for value, form in cells
    )


HEAD = f"{'system':26}{'rows':>5}" + "".join(
    f"{name:>10}"
    for name in ("new", "1st cold", "1st token", "tokens/s", "mean", "s/step", "must B", "moved B", "GPU B")
)


def loading_line(loading: Loading) -> str:
    """How a system opened the folder."""
    own, machine = loading.own_bytes / loading.file_bytes, loading.machine_bytes / loading.file_bytes
    return (
        f"{loading.system:26} opened in {loading.seconds:.1f} s; host memory meanwhile over the "
        f"{loading.file_bytes / GB:.2f} GB of files: "
        f"{own:.3f} its own, {machine:.3f} the machine's"
    )


def ratio_lines(points: list[Point], loadings: list[Loading], rates: dict[str, float]) -> list[str]:
    """Every ratio of which both sides were measured."""
    found = {(point.system, point.rows, point.through): point for point in points if point.rate}
    lines = [goal_header()]
    for (system, rows, through), point in found.items():
        if system.startswith("streamed") and point.must_bytes and point.rate:
            limit = rows * LINK / point.must_bytes
            what = f"{system}{', 3 layers' if through else ''}, {rows} rows, share of the link's limit"
            lines.append(goal_line(what, point.rate / limit, 0.75, 0.92))
    for rows in sorted({point.rows for point in points}):
        lines += _over(found, "over accelerate", ("streamed", rows, False), ("accelerate", rows, False), 3, 6)
        first = found.get(("streamed", rows, False)), found.get(("accelerate", rows, False))
        if all(one is not None and one.first_seconds for one in first):
            mine, theirs = (one.first_seconds or 0.0 for one in first if one is not None)
            lines.append(goal_line(f"first token, {rows} rows: accelerate over streamed", theirs / mine))
    lines += _over(found, "FP4 over bf16, 3 layers fit", ("streamed-fp4", 1, True), ("streamed", 1, True), 2.8, 3.4)
    for rows in sorted({point.rows for point in points}):
        lines += _over(
            found, "FP4 over bf16, same cap", ("streamed-fp4", rows, False), ("streamed", rows, False), None, None
        )
    lines += _over(found, "FP4 over bf16, resident", ("resident-fp4", 1, False), ("resident", 1, False), 1.7, 2.3)
    for system in ("resident", "resident-fp4"):
        for rows in (1, 8, 32):
            point = found.get((system, rows, False))
            if point is not None and rates.get("hbm_gbps") and point.read_bytes and point.step_seconds:
                share = point.read_bytes / point.step_seconds / rates["hbm_gbps"] / 1e9
                what = f"{system}, {rows} rows, share of the HBM's limit"
                graded = system == "resident" and rows == 1
                lines.append(goal_line(what, share, *((0.6, 0.8) if graded else ())))
    for loading in loadings:
        if loading.system.startswith("streamed"):
            share = loading.own_bytes / loading.file_bytes
            said = "met" if share <= LOADING else "MISSED"
            what = f"{loading.system}: host memory while loading over the file"
            lines.append(f"{goal_line(what, share)}{LOADING:>8}{'':8}  {said} (at most)")
    return lines + _equal_lines(found)


def _over(found: Any, what: str, over: Any, under: Any, floor: float | None, aim: float | None) -> list[str]:
    if over not in found or under not in found:
        return []
    value, name = found[over].rate / found[under].rate, f"{over[0]}, {over[1]} rows: {what}"
    return [goal_line(name, value, floor, aim)]


def _equal_lines(found: Any) -> list[str]:
    """Whether systems with the same weights begin the texts with the same tokens."""
    lines = []
    for (system, rows, through), point in found.items():
        other = found.get(("streamed", rows, False))
        if system in ("accelerate", "resident") and not through and other is not None:
            same = sum(a == b for a, b in zip(point.tokens, other.tokens, strict=True))
            why = "" if same == rows else "; logits of random weights nearly tie, and sums go in other orders"
            lines.append(f"first tokens, {rows} rows: {same} of {rows} of {system} are those of streamed{why}")
    return lines


def row_of(about: dict[str, Any], case: Case, rates: dict[str, float], item: Point | Loading) -> dict[str, Any]:
    """One flat row of the CSV."""
    asked = {name: value for name, value in asdict(case).items() if name not in ("system", "folder", "batches", "new")}
    answer = {(f"load_{name}" if isinstance(item, Loading) else name): value for name, value in asdict(item).items()}
    answer["system"] = case.system
    answer.pop("load_system", None)
    if "tokens" in answer:
        answer["tokens"] = " ".join(map(str, answer["tokens"]))
    return {**about, **rates, **asked, "parameters": case.sizes.num_parameters, **answer}
