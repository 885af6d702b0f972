"""The report at the end of a run."""

from __future__ import annotations

import re

from vblackwell.errors import as_typed
from vblackwell.train.run import make_report, report_lines
from vblackwell.units import GiB, MiB


def test_report_says_what_was_counted():
    level = {"evictions": 0, "promotions": 0, "demotions": 0, "used_bytes": 0}
    stats = {
        "levels": [
            {"device": "arena", "capacity_bytes": 4 * MiB, "peak_bytes": 3 * MiB, "hits": 3, "misses": 1, **level},
            {"device": "cpu", "capacity_bytes": GiB, "peak_bytes": 9 * MiB, "hits": 0, "misses": 0, **level},
        ],
        "links": [
            {"source": "arena", "destination": "ssd", "bytes": 5 * MiB, "seconds": 2.0},
            {"source": "cpu", "destination": "arena", "bytes": MiB, "seconds": 0.5},
        ],
        "stall_seconds": 1.0,
        "host_updates": {"parameters": 1_500_000, "seconds": 2.5},
    }
    formats = {"states": "8bit", "masters": "exact"}
    summary = {"placement": "streamed", "groups": 5, "bytes_by_level": {}, "formats": formats}
    report = make_report(stats, summary, {"seconds": 4.0, "gpu_peak_bytes": None, "process_peak_bytes": GiB})
    assert report["ssd_written_bytes"] == 5 * MiB and report["stalled_share"] == 0.25
    assert [entry["hit_rate"] for entry in report["levels"]] == [0.75, None]
    text = "\n".join(report_lines(report))
    for part in (
        "75.0%",
        "3.00 MiB",
        "fast memory to disk",
        "25.0% of the run",
        "5 layer groups",
        "AdamW: 8bit states, exact masters; 1,500,000 parameters updated on the CPU in 2.5 s",
        "written to the SSD: 5.00 MiB",
    ):
        assert part in text
    assert not re.search("arena|level|cpu|ssd|hit", text)
    report["gpu_peak_bytes"] = {"allocated": GiB, "reserved": 2 * GiB}
    report |= {"graph_bytes": MiB, "host_share": "the CPU's share: 0.3 of the updates by 2.00 G/s"}
    text = "\n".join(report_lines(report))
    assert "1.00 GiB allocated, 2.00 GiB reserved, of which CUDA graphs of layers 1.00 MiB, in no plan" in text
    assert "\nthe CPU's share: 0.3 of the updates by 2.00 G/s\n" in text
    report["graph_bytes"] = 0
    assert "2.00 GiB reserved\n" in "\n".join(report_lines(report))
    # Of a resident run: one row, no column that is empty, nothing that did not happen.
    report |= {"placement": "resident", "links": [], "ssd_written_bytes": 0, "stall_seconds": 0.0, "stalled_share": 0.0}
    report["levels"][1]["peak_bytes"] = 0
    lines = report_lines(report)
    assert lines[:3] == ["memory       most used        of", "fast memory   3.00 MiB  4.00 MiB", ""]
    assert not any(re.search("waited|SSD|found there|RAM  ", line) for line in lines)


def test_the_library_s_words_become_flags():
    for said, typed in (
        ("level 0 (arena) has 1 B free: raise fast_memory (the capacity of level 0)", "--fast-memory"),
        ("raise host_memory or disk_memory (the capacities of the stack's lower levels)", "--disk-memory"),
        ("use placement='streamed' or update='host'", "use --placement streamed or --update host"),
        ("streaming needs a level below level 0: add a 'cpu' or 'ssd' level to the stack", "--host-memory or"),
        ("level 0 (cuda:0) is full", "GPU memory is full"),
    ):
        found = as_typed(said)
        assert typed in found and not re.search("level|_memory|capacit|=", found), found
    assert as_typed("--model x: no such folder") == "--model x: no such folder"
