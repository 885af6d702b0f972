"""A command in a terminal of so many columns, as a person sees it."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import termios
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Screen:
    """What a command has left there: ``lines`` as they stand at its end, ``redrawn`` those that were written over."""

    lines: list[str]
    redrawn: list[str]
    code: int
    seconds: float

    @property
    def text(self) -> str:
        return "\n".join(self.lines)


def typed(
    words: Sequence[str], folder: Path, environment: Mapping[str, str], columns: int, lines: Sequence[str] = ()
) -> Screen:
    """Run ``words`` to their end; ``lines`` are typed as soon as it runs."""
    terminal, other = pty.openpty()
    fcntl.ioctl(other, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    began, parts = time.monotonic(), list[bytes]()
    where = {"stdin": other, "stdout": other, "stderr": other, "cwd": folder, "env": dict(environment)}
    with subprocess.Popen([*words], start_new_session=True, **where) as process:
        os.close(other)
        os.write(terminal, "".join(f"{line}\n" for line in lines).encode())
        while True:
            try:
                part = os.read(terminal, 1 << 16)
            except OSError:  # how Linux says that nobody has the other side any more
                break
            if not part:
                break
            parts.append(part)
        code = process.wait()
    os.close(terminal)
    kept, redrawn = list[str](), list[str]()
    for line in b"".join(parts).decode("utf-8").replace("\r\n", "\n").split("\n"):
        *over, last = [re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", each) for each in line.split("\r")]
        redrawn += filter(None, over)
        kept.append(last or (over[-1] if over else ""))
    return Screen(kept, redrawn, code, time.monotonic() - began)
