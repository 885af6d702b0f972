"""A call of attention as backends see it: what of its tensors, options and surroundings decides which of them runs.

Legend: B batch, N query heads, K key heads, S queries, T keys, H head width.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.backends import cuda
from torch.nn.attention import SDPBackend

from vblackwell.kernels.runtime import registry

SDP = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
# Operations of a forward, by whether there is a mask, or bounds that PyTorch needs one for, and whether it is captured,
# under which launches decide: 100 us of the host, or 10 us of a graph's small kernels, are what the faster of two
# kernels saves at 580 TFLOP/s against 127 with masks, or against 500 without, on an H200 (docs/journal/attention.md).
SMALL = {(False, False): 1 << 36, (False, True): 0, (True, False): 1 << 34, (True, True): 1 << 30}


# By itself, because every call asks it; it is there where CUDA is.
_captures = getattr(torch._C, "_cuda_isCurrentStreamCapturing", torch.cuda.is_current_stream_capturing)


class Variant(NamedTuple):
    """What is attended, in addition to queries, keys and values; as in ``flash_attention``."""

    mask: Tensor | None = None
    causal: bool = False
    bottom_right: bool = False
    window: int | None = None
    scale: float | None = None
    softcap: float | None = None
    alibi_slopes_N: Tensor | None = None
    dropout: float = 0.0


PLAIN = Variant()


class AttentionRequest(NamedTuple):
    """What a backend may look at before it agrees; times of the CUDA device ``gpu`` count, None: of the current one.

    ``mask`` is 'none', 'boolean' or 'additive', of ``mask_planes`` (S, T); ``captured``: into a CUDA graph, where the
    host's time does not count; ``refused``: backends that PyTorch does not let run on these tensors, None: it was not
    asked, as in plans and traces, whose tensors are not those that run; ``chosen``: the one that its plain
    `scaled_dot_product_attention` would run, None where that computes something else, or has no kernel for it.
    """

    device: str
    capability: tuple[int, int]
    dtype: torch.dtype
    heads: int
    kv_heads: int
    queries: int
    keys: int
    head: int
    mask: str = "none"
    causal: bool = False
    bottom_right: bool = False
    window: int | None = None
    softcap: bool = False
    alibi: bool = False
    dropout: bool = False
    gradient: bool = False
    mask_gradient: bool = False
    deterministic: bool = False
    batch: int = 1
    mask_planes: int = 0
    gpu: int | None = None
    captured: bool = False
    refused: tuple[str, ...] | None = None
    chosen: str | None = None

    @property
    def bounded(self) -> bool:
        """Whether positions hide keys in a way that PyTorch would need a mask for, or one more."""
        is_square = not self.bottom_right or self.queries == self.keys
        return self.window is not None or (self.causal and (self.mask != "none" or not is_square))

    @property
    def operations(self) -> int:
        """Of a forward that skips nothing."""
        return 4 * self.batch * self.heads * self.queries * self.keys * self.head

    @property
    def small(self) -> bool:
        """Whether launches take longer than what the faster kernel saves; False where the tensors are not known."""
        masked = self.mask != "none" or self.bounded
        if self.refused is None or (self.captured and self.bounded):
            return False  # in a graph, what 'efficient' needs of bounds are more kernels
        return self.operations < SMALL[masked, self.captured]

    @property
    def kind(self) -> str:
        """What timings are kept by, in addition to type, head width and length."""
        flags = ("causal", "softcap", "alibi", "dropout", "gradient")
        parts = [self.mask, *(name for name in flags if getattr(self, name))]
        return "+".join(parts + ["window"] * (self.window is not None) + ["grouped"] * (self.heads != self.kv_heads))


def request_of(q_BNSH: Tensor, k_BKTH: Tensor, v_BKTH: Tensor, variant: Variant) -> AttentionRequest:
    """What backends are asked; PyTorch's own opinion is in it for tensors that no trace has made."""
    mask, device, learns = variant.mask, q_BNSH.device, torch.is_grad_enabled()
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
    sizes = (q_BNSH.shape[1], k_BKTH.shape[1], q_BNSH.shape[2], k_BKTH.shape[2], q_BNSH.shape[3])
    kind = "none" if mask is None else "boolean" if mask.dtype == torch.bool else "additive"
    bounds = (variant.causal, variant.bottom_right, variant.window)
    changes = (variant.softcap is not None, variant.alibi_slopes_N is not None, variant.dropout > 0)
    gradient = learns and (q_BNSH.requires_grad or k_BKTH.requires_grad or v_BKTH.requires_grad)
    gradients = (gradient, learns and mask is not None and mask.requires_grad)
    planes, deterministic = 0 if mask is None else mask.shape[:-2].numel(), torch.are_deterministic_algorithms_enabled()
    rest = (deterministic, q_BNSH.shape[0], planes, device.index)
    what = (*sizes, kind, *bounds, *changes, *gradients, *rest)
    request = AttentionRequest(device.type, capability, q_BNSH.dtype, *what)
    if not computes_at_once(q_BNSH, k_BKTH, v_BKTH):
        return request
    request = request._replace(captured=is_captured(q_BNSH), refused=_refused(q_BNSH, k_BKTH, v_BKTH, variant))
    return request._replace(chosen=_chosen(request, q_BNSH, k_BKTH, v_BKTH, variant))


def computes_at_once(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether the operators that are called here run here, on the types that they are given."""
    if not registry.computes_at_once() or registry.functions_are_seen() or registry.differentiating_forward():
        return False
    if not type(q) is type(k) is type(v) is Tensor or q.is_neg() or k.is_neg() or v.is_neg():
        return False
    device = "cuda" if q.is_cuda else "cpu"
    return not torch.is_autocast_enabled(device) or q.dtype == torch.get_autocast_dtype(device)


def is_captured(q: Tensor) -> bool:
    return q.is_cuda and _captures()


def _refused(q: Tensor, k: Tensor, v: Tensor, variant: Variant) -> tuple[str, ...]:
    """Backends that PyTorch refuses for what requests do not say: flags and contexts of the user, strides, versions."""
    if not q.is_cuda:
        dense = all(x.stride(-1) == 1 for x in (q, k, v))  # which that operator takes for granted
        return () if dense and cuda.flash_sdp_enabled() else ("flash",)

    def params(k: Tensor, v: Tensor) -> cuda.SDPAParams:
        return cuda.SDPAParams(q, k, v, None, variant.dropout, variant.causal, q.shape[1] != k.shape[1])

    with registry.on_device(q):
        given, repeated = params(k, v), params(*(x[:, :1].expand(-1, q.shape[1], -1, -1) for x in (k, v)))
        accepts = {
            "cudnn": cuda.can_use_cudnn_attention(given),
            "flash": cuda.can_use_flash_attention(given),
            "efficient": cuda.can_use_efficient_attention(repeated if q.shape[1] != k.shape[1] else given),
        }
    mask = variant.mask
    if mask is not None and mask.dtype not in (torch.bool, q.dtype):  # it would be rounded; the own kernel reads it
        accepts["cudnn"] = False
    return tuple(name for name, accepted in accepts.items() if not accepted)


def _chosen(r: AttentionRequest, q: Tensor, k: Tensor, v: Tensor, variant: Variant) -> str | None:
    """What PyTorch would choose, of what it computes as we do: a mask is added in the queries' type, key by key."""
    mask, choose = variant.mask, getattr(torch, "_fused_sdp_choice", None)
    if choose is None or r.bounded or r.softcap or r.alibi or r.mask == "boolean" or min(r.queries, r.keys) == 0:
        return None
    if mask is not None and (mask.dtype != q.dtype or mask.dim() not in (2, 4) or mask.requires_grad):
        return None
    if mask is not None and (mask.shape[-1] != r.keys or mask.stride(-1) != 1):
        return None
    how = {"scale": variant.scale, "enable_gqa": r.heads != r.kv_heads}
    number = choose(q, k, v, mask, variant.dropout, variant.causal, **how)
    return {backend.value: name for name, backend in SDP.items()}.get(number)
