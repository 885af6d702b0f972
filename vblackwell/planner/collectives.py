"""What collectives cost by the alpha-beta model: a message takes a latency and its bytes over the rate of a GPU's port.

One port a GPU, both ways at once; a step of a collective lasts as long as its busiest port. Rings after Patarasuk and
Yuan (Bandwidth optimal all-reduce, 2009); meshes, along rows and then columns, after Chan et al. (Collective
communication, 2007, "bucket" algorithms); direct exchange after the same and Thakur, Rabenseifner and Gropp (2005).
"""

from dataclasses import dataclass

from vblackwell.errors import ConfigurationError, nearest

TOPOLOGIES = ("ring", "mesh", "all_to_all")
OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")


@dataclass(frozen=True)
class Link:
    """A GPU's port to its peers, each way. By default as copies over an H200's link (64 KiB took 19 us, the bytes alone
    1.2), and PCIe 4.0 x16 at the share of its nominal rate that they reach.
    """

    latency_seconds: float = 10e-6
    bytes_per_second: float = 0.87 * 31.5e9

    def __post_init__(self) -> None:
        if not self.latency_seconds >= 0 or not self.bytes_per_second > 0:
            found = f"a link of {self.latency_seconds} s and {self.bytes_per_second} bytes/s"
            raise ConfigurationError(f"{found}: give a latency of at least 0, a rate above 0")


@dataclass(frozen=True)
class Cost:
    """Steps in a row, and the bytes that a port sends in all of them."""

    steps: int = 0
    num_bytes: float = 0.0

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(self.steps + other.steps, self.num_bytes + other.num_bytes)

    def seconds(self, link: Link) -> float:
        return self.steps * link.latency_seconds + self.num_bytes / link.bytes_per_second


def grid_of(num_gpus: int) -> tuple[int, int]:
    """(rows, columns) of the squarest mesh of ``num_gpus``; a prime number is one row."""
    rows = next(each for each in range(int(num_gpus**0.5), 0, -1) if num_gpus % each == 0)
    return rows, num_gpus // rows


def cost_of(operation: str, num_bytes: float, num_gpus: int, topology: str = "ring") -> Cost:
    """Steps and bytes of one collective of n bytes (all-reduce: on every GPU; all-gather: gathered; reduce-scatter:
    before; all-to-all: one GPU's) on p GPUs, a mesh of r rows and c columns:

    ============== ============================= ======================================= ==============================
    steps, bytes   ring                          mesh                                    all_to_all
    ============== ============================= ======================================= ==============================
    all_gather     p - 1, n (p - 1) / p          r + c - 2, n (p - 1) / p                1, n (p - 1) / p
    reduce_scatter the same                      the same                                the same
    all_reduce     the two above, one after the other
    all_to_all     p - 1, n (p - 1) / 2          r + c - 2, n (r + c - 2) / 2            1, n (p - 1) / p
    ============== ============================= ======================================= ==============================

    An all-to-all on a ring passes the pieces on: in its step k every GPU still has p - k of them to send. Raises
    ConfigurationError for an unknown operation or topology, fewer than one GPU, negative bytes.
    """
    for what, value, known in (("operation", operation, OPERATIONS), ("topology", topology, TOPOLOGIES)):
        if value not in known:
            raise ConfigurationError(f"{what} {value!r} is none of {', '.join(known)}{nearest(value, known)}")
    if isinstance(num_gpus, bool) or not isinstance(num_gpus, int) or num_gpus < 1:
        raise ConfigurationError(f"num_gpus is {num_gpus!r}: give a whole number of at least 1")
    if not num_bytes >= 0:
        raise ConfigurationError(f"num_bytes is {num_bytes}: give at least 0")
    if num_gpus == 1:
        return Cost()
    rows, columns = grid_of(num_gpus) if topology == "mesh" else (1, num_gpus)
    steps = 1 if topology == "all_to_all" else rows + columns - 2
    if operation == "all_to_all" and topology != "all_to_all":
        return Cost(steps, num_bytes * (rows + columns - 2) / 2)
    one = Cost(steps, num_bytes * (num_gpus - 1) / num_gpus)
    return one + one if operation == "all_reduce" else one


def communication_cost(
    num_bytes: float, num_gpus: int, topology: str = "ring", operation: str = "all_reduce", link: Link | None = None
) -> float:
    """Seconds of a collective of ``num_bytes``, those of the whole tensor, among ``num_gpus``, by `cost_of`'s formulas.

    Args:
        topology: 'ring', 'mesh' (rings along rows, then along columns) or 'all_to_all' (every GPU reaches every other).
        operation: 'all_reduce', 'all_gather', 'reduce_scatter' or 'all_to_all'.
        link: of each GPU; None: `Link`'s defaults. Errors are those of `cost_of`.
    """
    return cost_of(operation, num_bytes, num_gpus, topology).seconds(link or Link())
