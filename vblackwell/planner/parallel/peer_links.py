"""How fast GPUs of one kind reach each other, by data sheets: NVLink where the card has it, else its PCIe link."""

from __future__ import annotations

from vblackwell.machine.gpus import KnownGPU
from vblackwell.machine.rates import BOTH_SHARE
from vblackwell.planner.parallel.collectives import Link

# Bytes/s each way of all of a card's NVLinks together: so many links of 25 GB/s (V100, A100, H100, H200), 14.06 (RTX 3090, A40, A6000) or
# 50 (B200).
NVLINK = {
    "RTX 2080 Ti": 50e9, "V100 16GB": 150e9, "V100 32GB": 150e9, "A100 40GB": 300e9, "A100 80GB": 300e9, "RTX 3090": 56.25e9,
    "A40": 56.25e9, "A6000": 56.25e9, "H100": 450e9, "H200": 450e9, "B200": 900e9,
}  # fmt: skip


def peer_link(card: KnownGPU) -> tuple[Link, str]:
    """The port of ``card`` to its like, and what it is in words. The share of the nominal rate is that of an H200's PCIe link both ways."""
    nominal = NVLINK.get(card.name)
    kind = "NVLink" if nominal else "PCIe, through the host"
    rate = BOTH_SHARE * (nominal or card.link_bytes)
    return Link(bytes_per_second=rate), f"{kind}, {rate / 1e9:.0f} GB/s each way by the data sheet of {card.name}"
