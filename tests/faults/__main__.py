"""``python -m tests.faults``: the whole campaign, and docs/reliability.md."""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import time
from pathlib import Path

from tests.faults.campaign import run_campaign
from tests.faults.cases import CASES
from tests.faults.page import rewrite, write_page


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description="Real processes against real faults.")
    parser.add_argument("--seed", type=int, default=0, help="Of what is drawn: moments, bits, mutations.")
    parser.add_argument("--workers", type=int, default=2, help="Tries at the same time.")
    parser.add_argument("--tries", type=int, help="Only so many of each case, drawn.")
    parser.add_argument(
        "--only", default="", help="Cases whose names contain this, or one of these with commas between."
    )
    parser.add_argument("--write", type=Path, help="Write the table of all cases to this file.")
    options = parser.parse_args()
    cases = [case for case in CASES if any(part in case.name for part in options.only.split(","))]
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    # A shell's background job ignores SIGINT, and what it starts would, too.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="vb-faults-") as folder:
        outcomes = run_campaign(cases, Path(folder), options.seed, options.workers, options.tries)
    for outcome in outcomes:
        print(f"{outcome.case.name:28} {outcome.missing or f'{outcome.held} of {outcome.tries} held'}")
    seconds = time.monotonic() - began
    print(f"{seconds:.0f} s")
    if options.write is not None:
        rewrite(options.write, write_page(outcomes, options.seed, options.workers, seconds))
    return int(any(outcome.broken for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
