"""Computes the cases in two processes, prints their hashes and compares them."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

import tests.bits
from tests.bits.run import cases, run_case

ROOT = Path(__file__).parents[2]


def differences(found: dict[str, str], expected: dict[str, str]) -> list[str]:
    """In words: what is other, missing, or new."""
    changed = [f"differs: {name}" for name in expected if name in found and found[name] != expected[name]]
    missing = [f"missing: {name}" for name in expected if name not in found]
    return changed + missing + [f"not there before: {name}" for name in found if name not in expected]


def read_hashes(path: Path) -> dict[str, str]:
    """What ``--write`` wrote."""
    pairs = (line.split() for line in path.read_text(encoding="utf-8").splitlines() if line.strip())
    return {name: value for name, value in pairs}


def main() -> int:
    about = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m tests.bits", description=tests.bits.__doc__, formatter_class=about)
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the lines there, too")
    parser.add_argument("--against", type=Path, metavar="FILE", help="compare with the lines of another start")
    parser.add_argument(
        "--package", type=Path, default=ROOT, metavar="FOLDER", help="checkout whose vblackwell is meant"
    )
    parser.add_argument("--only", default="", metavar="TEXT", help="cases whose name has this in it")
    parser.add_argument("--steps", type=int, default=12, help="of the run of `make train`")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--list", action="store_true", help="print the cases' names and stop")
    options = parser.parse_args()
    # Before torch is loaded. One thread: with more, a product is cut differently where threads are few.
    os.environ |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    os.environ["BITS_STEPS"] = str(options.steps)
    os.environ.pop("TRITON_INTERPRET", None)
    package = str(options.package.resolve())
    names = [name for name in cases(package) if options.only in name]
    if options.list:
        print("\n".join(names))
        return 0
    results: dict[str, dict[str, str]] = {}
    failed = False
    workers = ProcessPoolExecutor(options.processes, multiprocessing.get_context("spawn"))
    with tempfile.TemporaryDirectory(prefix="bits-") as parent, workers as pool:
        jobs = {pool.submit(run_case, name, parent, package): name for name in names}
        for job in as_completed(jobs):
            results[jobs[job]], error, seconds = job.result()
            print(f"{seconds:6.1f} s  {jobs[job]}", file=sys.stderr)
            if error is not None:
                failed = True
                print(f"failed: {jobs[job]}\n{error}", file=sys.stderr)
    found = {name: value for case_name in names for name, value in results[case_name].items()}
    lines = "".join(f"{name}  {value}\n" for name, value in found.items())
    print(lines, end="")
    if options.write is not None:
        options.write.write_text(lines, encoding="utf-8")
    if options.against is not None:
        expected = read_hashes(options.against)
        expected = {name: value for name, value in expected.items() if options.only in name.split("/")[0]}
        said = differences(found, expected)
        print("\n".join(said) or f"all {len(found)} equal")
        failed |= bool(said)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
