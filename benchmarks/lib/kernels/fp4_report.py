"""What bench_fp4.py writes and prints of its times."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

from benchmarks.lib.kernels.fp4_peers import PEERS

# What a system's ratio is to, where it is not cuBLAS bf16.
COMPARED = {
    "fp4_linear_dx nvfp4": "cuBLAS bf16 dX", "rms_norm, cublas bf16": "nothing",
    "rms_norm, fp4_linear nvfp4": "rms_norm, cublas bf16", "fp4_norm_linear nvfp4": "rms_norm, fp4_linear nvfp4",
}  # fmt: skip


def write_rows(path: Path, rows: list[dict[str, object]]) -> None:
    """Writes what there is so far: a run that is cut off leaves its finished shapes."""
    columns = [*rows[0], *(name for name in ("us", "ratio", "do_bench_us", "note") if name not in rows[0])]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(rows)


def print_table(rows: list[dict[str, object]], shapes: Sequence[tuple[int, int]]) -> None:
    """Ratios by system and shape; how long the best peer takes compared with ours where there is one."""
    for system in dict.fromkeys(str(row["system"]) for row in rows if not str(row["system"]).startswith("cublas")):
        print(f"{system}: ratio to {COMPARED.get(system, 'cuBLAS bf16')} (us; do_bench)")
        for n, k in shapes:
            cells = [row for row in rows if (row["n"], row["k"], row["system"]) == (n, k, system)]
            print(f"  {n}x{k}: " + "  ".join(_cell(row) for row in cells))
    names = {peer.name for peer in PEERS}
    if not any(row["system"] in names for row in rows):
        return
    print("best peer's time over ours, fp4_linear nvfp4")
    for n, k in shapes:
        here = [row for row in rows if (row["n"], row["k"]) == (n, k) and "us" in row]
        cells = []
        for ours in (row for row in here if row["system"] == "fp4_linear nvfp4"):
            others = [row for row in here if row["m"] == ours["m"] and row["system"] in names]
            best = min(others, key=lambda row: float(str(row["us"])), default=None)
            ratio = (
                "no peer"
                if best is None
                else f"{float(str(best['us'])) / float(str(ours['us'])):.2f} ({best['system']})"
            )
            cells.append(f"M={ours['m']}: {ratio}")
        print(f"  {n}x{k}: " + "  ".join(cells))


def _cell(row: dict[str, object]) -> str:
    if "us" not in row:
        return f"{'M=' + str(row['m']) + ': ' if row['m'] else ''}{row['note']}"
    other = f"; {row['do_bench_us']}" if "do_bench_us" in row else ""
    return f"M={row['m']}: {row.get('ratio')} ({row['us']}{other})"
