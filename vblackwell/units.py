"""Bytes in and out of text: ``'8GiB'`` <-> 8589934592, and lengths of time.

Capacities are powers of 1024, also when written KB, MB, GB, TB; rates are decimal (GB/s), as vendors quote them.
"""

import math
import re
from collections.abc import Collection, Sequence

from vblackwell.errors import ConfigurationError

KiB = 1 << 10
MiB = 1 << 20
GiB = 1 << 30
TiB = 1 << 40


def parse_bytes(text: str | int | float, name: str = "size") -> int:
    """Bytes meant by ``text``: a number of bytes, or a number with a unit such as ``'16MiB'`` or ``'1.5GiB'``. Raises
    ConfigurationError for no size, a negative one, one that is not finite, and for text that is a number below 2^20
    without a unit, which nobody means as bytes."""
    if isinstance(text, (int, float)) and not isinstance(text, bool):
        if not math.isfinite(text) or text < 0:
            raise ConfigurationError(f"{name} {text!r} is not a size: give a number of bytes >= 0, or e.g. '8GiB'")
        return int(text)
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([kmgt]?)(i?b)?\s*", str(text), re.IGNORECASE)
    if not match:
        raise ConfigurationError(f"{name} {text!r} is not a size: write a number and a unit, e.g. '512MiB' or '8GiB'")
    if not match[2] and not match[3] and 0 < float(match[1]) < MiB:
        said = f"{name} {text} means {float(match[1]):g} bytes, for it has no unit"
        raise ConfigurationError(f"{said}: write {text}GiB, {text}MiB or, if you mean that, {text}B")
    return int(float(match[1]) * {"": 1, "k": KiB, "m": MiB, "g": GiB, "t": TiB}[match[2].lower()])


def format_bytes(num_bytes: float) -> str:
    """``num_bytes`` with a binary unit and three significant digits: ``'8.00 GiB'``."""
    for unit, factor in (("TiB", TiB), ("GiB", GiB), ("MiB", MiB), ("KiB", KiB)):
        if abs(num_bytes) >= factor:
            value = num_bytes / factor
            digits = 2 if abs(value) < 10 else 1 if abs(value) < 100 else 0
            return f"{value:.{digits}f} {unit}"
    return f"{int(num_bytes)} B"


def format_seconds(seconds: float) -> str:
    """``seconds`` as people read it: ``'840 ms'``, ``'12.3 s'``, ``'4:05'``, ``'2:03:07'``."""
    if seconds < 1:
        return f"{seconds * 1e3:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def columns(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> list[str]:
    """Rows of equal length as lines of aligned text; the columns ``right`` to the right, the others to the left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    table = [[f"{text:{'>' if at in right else '<'}{widths[at]}}" for at, text in enumerate(row)] for row in rows]
    return ["  ".join(row).rstrip() for row in table]


def align_up(num_bytes: int, alignment: int) -> int:
    """The smallest multiple of ``alignment`` that is >= ``num_bytes``."""
    return -(-num_bytes // alignment) * alignment
