"""Under which keys measured times of attention backends are kept, and which of them say something about a request.

Times of a shape stand for its neighbours as well, up to the next power of two in length. Not FlexAttention's: it is compiled for seconds
for each shape that it meets, and for so many only, so every neighbour would pay anew for what was measured of one. It runs unasked for
the very shapes that were measured. Which backend runs is a function of the request and the tables, never of what the process ran before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vblackwell.nn.attention.backends import AttentionRequest


def entry_name(r: AttentionRequest) -> str:
    """The key of measured times: type, head width, length up to the next power of two, and kind."""
    bucket = 1 << max(0, max(r.queries, r.keys) - 1).bit_length()
    return f"backend|{str(r.dtype).removeprefix('torch.')}|{r.head}|{bucket}|{r.kind}"


def shape_name(r: AttentionRequest) -> str:
    """The key of times measured of this very shape."""
    shape = "x".join(str(size) for size in (r.batch, r.heads, r.kv_heads, r.queries, r.keys, r.head, r.mask_planes))
    bounds = f"{r.window}{'+bottom_right' * r.bottom_right}"
    return f"shape|{str(r.dtype).removeprefix('torch.')}|{shape}|{bounds}|{r.kind}"


def table_of(r: AttentionRequest, times: dict[str, int]) -> dict[str, dict[str, int]]:
    """What is kept of times (ns) measured for ``r``: all for its shape, FlexAttention's not for its neighbours."""
    return {shape_name(r): times, entry_name(r): {name: time for name, time in times.items() if name != "flex"}}


def known(r: AttentionRequest, entries: dict[str, dict[str, int]]) -> dict[str, int]:
    """Times by backend: of the very shape, else of its neighbours, among which FlexAttention would be compiled anew."""
    own = entries.get(shape_name(r))
    return own or {name: time for name, time in entries.get(entry_name(r), {}).items() if name != "flex"}
