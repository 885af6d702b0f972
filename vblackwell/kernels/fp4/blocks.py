"""What blocks of the fused FP4 matmuls may take of a multiprocessor, and on which GPUs there are clusters of them."""

from __future__ import annotations

SHARED_BYTES = (
    227 * 1024
)  # most of a block on Hopper, whose multiprocessors have 228 KB: each block takes 1 KB more than it asks for
_ALONE_BYTES = 114 * 1024  # of which two blocks do not fit one


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def has_clusters(capability: tuple[int, int]) -> bool:
    """Clusters of blocks and 227 KB of shared memory a block: Hopper and data-centre Blackwell, not sm_120."""
    return capability[0] in (9, 10)


def launch_bytes(shared_bytes: int, blocks: int, processors: int) -> int:
    """Shared memory to ask for with clusters: where each of ``blocks`` can have one of ``processors``, so much that no two share one.

    Blocks of the next product begin while this one's run. Two of them would go to a multiprocessor that is idle, and that product take
    up to twice as long: 18.7 us, not 11.5, for 8 rows of 14336 x 4096 on an H200.
    """
    return max(shared_bytes, _ALONE_BYTES) if blocks <= processors else shared_bytes
