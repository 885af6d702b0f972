"""The report at the end of a run."""

from __future__ import annotations

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
        "arena > ssd",
        "25.0% of the run",
        "5 layer groups",
        "AdamW: 8bit states, exact masters; 1,500,000 parameters updated on the CPU in 2.5 s",
        "written to the SSD: 5.00 MiB",
    ):
        assert part in text
    report["gpu_peak_bytes"] = {"allocated": GiB, "reserved": 2 * GiB}
    assert "1.00 GiB allocated, 2.00 GiB reserved" in "\n".join(report_lines(report))
