"""Drives a worker process through cells, and survives plans that never end.

A kernel that waits for ever cannot be ended from within its process. So the process that measures says before every step what it is about
to do; who has not been heard of for ``stall`` seconds is killed, the plan at hand is named, its family is left out from then on, and
a worker that was waiting takes over the cell from its beginning. This side needs no GPU.
"""

from __future__ import annotations

import json
import queue
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from typing import IO

Cell = tuple[int, int, int]
Message = dict[str, object]
STARTUP_SECONDS = 60.0  # of a worker, until it says that it is ready


class Worker:
    """A process that reads a JSON object a line and answers with several; ``None`` in the queue: it has ended."""

    def __init__(self, command: Sequence[str]) -> None:
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.said: queue.Queue[Message | None] = queue.Queue()
        self.ready = False
        assert self.process.stdout is not None
        threading.Thread(target=self._listen, args=(self.process.stdout,), daemon=True).start()

    def _listen(self, lines: IO[str]) -> None:
        for line in lines:
            if line.startswith("{"):
                self.said.put(json.loads(line))
            else:
                print(line, end="")
        self.said.put(None)

    def ask(self, message: Message, stall: float) -> tuple[Message | None, Message]:
        """Sends ``message`` and follows the answers: (the one with 'rows', or None if it fell silent or ended; the last step)."""
        step: Message = {"phase": "start", "plan": None}
        try:
            if not self.ready and self.said.get(timeout=STARTUP_SECONDS) is None:
                return None, {"phase": "starting", "plan": None}
            self.ready = True
            assert self.process.stdin is not None
            self.process.stdin.write(json.dumps(message) + "\n")
            self.process.stdin.flush()
            while True:
                answer = self.said.get(timeout=stall)
                if answer is None or "rows" in answer:
                    return answer, step
                step = answer
        except (queue.Empty, BrokenPipeError):
            return None, step

    def stop(self) -> None:
        """Kills the process and waits for it: a kernel of a dead context no longer takes turns with others."""
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe:
                pipe.close()


def drive(
    cells: Sequence[Cell],
    command: Sequence[str],
    families: Callable[[Cell], list[str]],
    take: Callable[[Cell, Message], None],
    *,
    ready: Callable[[Cell], None] = lambda cell: None,
    seconds: float = 75.0,
    stall: float = 8.0,
) -> dict[str, tuple[Cell, int | None, str]]:
    """Measures ``cells`` in order by workers that ``command`` starts.

    Args:
        cells: (M, N, K).
        command: starts a worker.
        families: the family of each of a cell's plans, by the plan's place.
        take: gets each cell's answer as it comes.
        ready: returns when a cell may be measured.
        seconds: after which no further cell starts.
        stall: seconds without a word after which a worker is given up.

    Returns:
        What was given up: by family or, where no plan was at hand, by cell, (cell, place of the plan, phase).
    """
    began, lost = time.monotonic(), {}
    workers = [Worker(command), Worker(command)]
    try:
        for cell in cells:
            ready(cell)
            while True:
                if time.monotonic() - began > seconds:
                    print(f"{'x'.join(map(str, cell))}: not run, {seconds:g} s are over")
                    break
                answer, step = workers[0].ask({"cell": cell, "skip": list(lost)}, stall)
                if answer is not None:
                    take(cell, answer)
                    break
                workers.pop(0).stop()
                workers.append(Worker(command))
                place = step.get("plan")
                known = isinstance(place, int)
                name = families(cell)[place] if known else "x".join(map(str, cell))
                again = name in lost
                lost.setdefault(name, (cell, place if known else None, str(step.get("phase"))))
                print(f"GIVEN UP: {cell} {name} plan {place} in {step.get('phase')}", flush=True)
                if again or not known:
                    break
    finally:
        for worker in workers:
            worker.stop()
    return lost
