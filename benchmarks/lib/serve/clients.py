"""The process of clients that read streams: each asks for one text over HTTP and counts what comes."""

from __future__ import annotations

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from benchmarks.lib.child_process import answer, say


def read(port: int, body: dict[str, Any], seconds: float) -> int:
    """New tokens of a text by its usage; raises RuntimeError where it is not whole, OSError where nothing comes."""
    connection = HTTPConnection("127.0.0.1", port, timeout=seconds)
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    if response.status != 200:
        raise RuntimeError(f"{response.status} {response.read(300)!r}")
    lines = [line[6:].strip() for line in response if line.startswith(b"data: ")]
    connection.close()
    if not lines or lines[-1] != b"[DONE]":
        raise RuntimeError(f"a stream ended with {lines[-1:]}")
    return json.loads(lines[-2])["usage"]["completion_tokens"]


def main(argument: str) -> None:
    case = json.loads(argument)
    more = {"stream": True, "stream_options": {"include_usage": True}, "temperature": 0}
    bodies = [{"model": model, "prompt": prompt, "max_tokens": new} | more for model, prompt, new in case["asked"]]
    with ThreadPoolExecutor(len(bodies)) as pool:
        counts = list(pool.map(lambda body: read(case["port"], body, case["seconds"]), bodies))
    say("read", counts=counts)


if __name__ == "__main__":
    answer(main)
