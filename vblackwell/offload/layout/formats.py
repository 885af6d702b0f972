"""What AdamW keeps of a parameter next to its compute weight, in which form, and where it may be cut.

Exact is the default: moments in fp32, and the fp32 master whole or split (`storage.masters`). Two stated choices give
up exactness for bytes. ``states='8bit'``: a moment is a code of 8 bits and, for each 256 elements, an fp32 scale
(`kernels.optimizer.adamw8`): 2.03 bytes for both instead of 8. ``masters='stochastic'``: a bf16 weight is its own
master, rounded at random: 2 bytes instead of 4. Random bits are a function of a seed, the parameter's name, its step
and the element's index, so a result does not depend on where, in what order or in what pieces it is computed.

A scale's block begins at a parameter's start, so that start is a multiple of 256 elements, and pieces are cut where the
kernel allows it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from vblackwell.errors import ConfigurationError
from vblackwell.kernels.optimizer.adamw import BLOCK
from vblackwell.kernels.optimizer.adamw8 import SCALE_BLOCK

STATES = ("fp32", "8bit")
MASTERS = ("exact", "stochastic")

# Kinds of range. ``weight``: compute weights; ``master``: the whole fp32 truth; ``remainder``: what a bf16 weight
# leaves out of it; ``accumulated``: the fp32 sum of narrower gradients.
MOMENTS = ("exp_avg", "exp_avg_sq")
CODES = ("exp_avg_codes", "exp_avg_sq_codes")
SCALES = ("exp_avg_scales", "exp_avg_sq_scales")
PACKED_MOMENTS = ("exp_avg_codes", "exp_avg_scales", "exp_avg_sq_codes", "exp_avg_sq_scales")
STATE_KINDS = ("remainder", *MOMENTS, *PACKED_MOMENTS)  # what an update on level 0 brings up next to the weight
PARAMETER_KINDS = ("weight", "master", *STATE_KINDS)  # what a group that lives on level 0 has there
GRADIENTS = ("gradient", "accumulated")
KINDS = (*PARAMETER_KINDS, *GRADIENTS)
NARROW_KINDS = ("weight", "remainder", "gradient")  # as wide as the compute weight

CUT = 256  # elements: 512 bytes of the narrowest range, and more than any vector has


@dataclass(frozen=True)
class Formats:
    """How a group's optimizer states are kept.

    Attributes:
        states: of the moments, one of `STATES`.
        masters: one of `MASTERS`.
        seed: the user's, of what is rounded at random.

    Raises:
        ConfigurationError: an unknown word, or 'stochastic' masters with fp32 states.
    """

    states: str = "fp32"
    masters: str = "exact"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.states not in STATES:
            raise ConfigurationError(f"states {self.states!r} is none of {', '.join(STATES)}")
        if self.masters not in MASTERS:
            raise ConfigurationError(f"masters {self.masters!r} is none of {', '.join(MASTERS)}")
        if self.masters == "stochastic" and not self.packed:
            raise ConfigurationError(
                "masters='stochastic' goes with states='8bit' alone: exact moments would be the larger part kept"
            )

    @property
    def packed(self) -> bool:
        """Whether moments are codes and scales."""
        return self.states == "8bit"

    @property
    def stochastic(self) -> bool:
        """Whether a bf16 weight is all there is of its parameter."""
        return self.masters == "stochastic"

    @property
    def moments(self) -> tuple[str, ...]:
        """The kinds of range that hold the moments, in the order of the kernel's arguments."""
        return PACKED_MOMENTS if self.packed else MOMENTS

    @property
    def block(self) -> int:
        """Parameters of a group start at multiples of so many elements."""
        return SCALE_BLOCK if self.packed else 1

    @property
    def cut(self) -> int:
        """Within a parameter, pieces start at multiples of so many elements."""
        return BLOCK if self.packed else CUT

    def seed_of(self, name: str) -> int:
        """64 bits for the parameter called ``name``."""
        return int.from_bytes(hashlib.blake2b(f"{self.seed} {name}".encode(), digest_size=8).digest(), "little")

    def summary(self) -> dict[str, str]:
        """For reports."""
        return {"states": self.states, "masters": self.masters}


EXACT = Formats()


def range_bytes(kind: str, num_elements: int, itemsize: int) -> int:
    """Bytes of ``num_elements`` in a range of ``kind``, from a block's start; ``itemsize`` is the compute weight's."""
    if kind in CODES:
        return num_elements
    if kind in SCALES:
        return -(-num_elements // SCALE_BLOCK) * 4
    return num_elements * (itemsize if kind in NARROW_KINDS else 4)


def element_type(kind: str, compute_dtype: torch.dtype) -> torch.dtype:
    """What a range of ``kind`` is made of."""
    if kind == "remainder":
        return torch.int16
    if kind in CODES:
        return torch.uint8
    return compute_dtype if kind in NARROW_KINDS else torch.float32


def supports(formats: Formats, dtypes: Iterable[torch.dtype]) -> bool:
    """Whether a group with compute weights of ``dtypes`` can be kept so."""
    able = {torch.bfloat16} if formats.stochastic else {torch.bfloat16, torch.float32}
    found = set(dtypes)
    return not formats.packed or (len(found) == 1 and found <= able)


def of_all(each: Iterable[Formats]) -> Formats:
    """What a model was told, from what its groups took of it (frozen groups that cannot be kept so stay exact)."""
    return next((formats for formats in each if formats.packed), EXACT)
