"""Other people's 4-bit linears, for bench_fp4.py: each made of the same bf16 weight, or the reason why it is not there.

Nothing here is required. A peer that is not installed, or that fails on this machine or shape, is a line of the table
with its reason: never a missing line, never a time of something else. Its result is compared with the bf16 product
before it is timed.
"""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

# Relative RMS of 4-bit weights on Gaussian values is 0.08 to 0.12 (18 to 22 dB); layouts read in a wrong order give
# 1.4.
LARGEST_ERROR = 0.2


@dataclass(frozen=True)
class Peer:
    """A system to compare with.

    Attributes:
        name: in the table.
        module: what is imported.
        build: from a bf16 weight (N, K) on the GPU to a callable of (M, K) bf16.
    """

    name: str
    module: str
    build: Callable[[Tensor], Callable[[Tensor], Tensor]]

    @property
    def installed(self) -> bool:
        return importlib.util.find_spec(self.module) is not None

    def layers(self, w_NK: Tensor, count: int) -> list[Callable[[Tensor], Tensor]]:
        """``count`` layers of the weight's values, each with separate memory.

        Raises:
            RuntimeError: its product is not that of the weight.
        """
        first = self.build(w_NK)
        x_MK = torch.randn(16, w_NK.shape[1], device=w_NK.device, dtype=w_NK.dtype)
        exact = x_MK.float() @ w_NK.float().t()
        error = float((first(x_MK).float() - exact).norm() / exact.norm())
        if not error <= LARGEST_ERROR:
            raise RuntimeError(f"relative error {error:.3f} of its product: the times would be of something else")
        return [first, *(copy.deepcopy(first) for _ in range(count - 1))]


def _plain(w_NK: Tensor) -> nn.Linear:
    n, k = w_NK.shape
    linear = nn.Linear(k, n, bias=False, device="meta")
    linear.weight = nn.Parameter(w_NK.clone(), requires_grad=False)
    return linear


def _humming(w_NK: Tensor, scale_dtype: str, group_size: int) -> Callable[[Tensor], Tensor]:
    from humming.layer import HummingLayer  # pyright: ignore[reportMissingImports]

    n, k = w_NK.shape
    config = {"dtype": "float4e2m1", "scale_dtype": scale_dtype, "group_size": group_size}
    layer = HummingLayer(shape_n=n, shape_k=k, weight_config=config, torch_dtype=w_NK.dtype).to(w_NK.device)
    layer.load_from_unquantized(w_NK)
    layer.transform()
    return layer


def _humming_mxfp4(w_NK: Tensor) -> Callable[[Tensor], Tensor]:
    return _humming(w_NK, "float8e8m0", 32)


def _humming_e4m3(w_NK: Tensor) -> Callable[[Tensor], Tensor]:
    return _humming(w_NK, "float8e4m3", 16)


def _torchao(w_NK: Tensor) -> Callable[[Tensor], Tensor]:
    from torchao.quantization import Int4WeightOnlyConfig, quantize_  # pyright: ignore[reportMissingImports]

    linear = _plain(w_NK)
    quantize_(linear, Int4WeightOnlyConfig(group_size=32, int4_packing_format="tile_packed_to_4d"))
    return linear


PEERS = (
    Peer("torchao int4 g32", "torchao", _torchao),
    Peer("humming mxfp4", "humming", _humming_mxfp4),
    Peer("humming e2m1 e4m3/16", "humming", _humming_e4m3),
)


def choose(names: str) -> tuple[Peer, ...]:
    """Peers whose name begins with one of the comma-separated words; 'none'."""
    chosen = tuple(peer for peer in PEERS if peer.name.startswith(tuple(names.split(","))))
    if not chosen and names != "none":
        raise SystemExit(f"--peers {names}: choose none, or of {', '.join(peer.name for peer in PEERS)}")
    return chosen
