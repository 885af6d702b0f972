"""What a training run asks of its model: the loss, the heads, fused operators, and which attention backend runs.

The model is a `Decoder` or a causal model of transformers. With ``--use-flash-attn`` it runs the fused backend that the
dispatcher names for the run's real shapes, or the run is refused. Deterministic runs leave cuDNN and the
memory-efficient kernel out: neither has a deterministic backward.
"""

import inspect
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from vblackwell.errors import Unsupported
from vblackwell.nn.attention import backends as dispatcher
from vblackwell.nn.convert.causal_lm import Conversion, accelerate_causal_lm, has_fused_loss
from vblackwell.nn.decoder.decoder import IGNORED_TARGET, Decoder

FUSED = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]


def training_loss(model: nn.Module) -> Callable[..., Tensor]:
    """What computes the mean cross entropy of input_ids and targets, both (B, S) int64, and perhaps, of packed rows,
    positions and `document_starts`."""
    return model if isinstance(model, Decoder) else partial(_next_token_loss, model)


def attention_heads(model: nn.Module) -> tuple[int, int, int]:
    """Query heads, key and value heads, and the width of one; Unsupported for a model without attention."""
    if isinstance(model, Decoder):
        return model.config.num_heads, model.config.num_kv_heads, model.config.head_dim
    made: Any = model
    config = made.config.get_text_config()
    heads = getattr(config, "num_attention_heads", None)
    if not isinstance(heads, int):
        name = type(model).__name__
        raise Unsupported(f"{name} states no num_attention_heads: only models of attention are trained by this command")
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    return heads, kv_heads, getattr(config, "head_dim", None) or config.hidden_size // heads


def fuse(model: nn.Module) -> Conversion | None:
    """Run a causal model of transformers on fused operators, its loss in chunks; None of a `Decoder`, which is."""
    if isinstance(model, Decoder):
        return None
    parameters = inspect.signature(type(model).forward).parameters.values()
    takes_shifted = any(each.kind is each.VAR_KEYWORD or each.name == "shift_labels" for each in parameters)
    return accelerate_causal_lm(model, loss=takes_shifted)


def _next_token_loss(
    model: nn.Module, input_ids_BS: Tensor, targets_BS: Tensor, positions_BS: Tensor | None = None, *starts: Tensor
) -> Tensor:
    """The mean cross entropy, in fp32, of a causal model of transformers; targets of -100 do not count. After `fuse`,
    in training, the routers' loss is added where the model's configuration says so (``output_router_logits``).
    """
    given: dict[str, Any] = {} if positions_BS is None else {"position_ids": positions_BS}
    if has_fused_loss(model):
        given |= {"labels": targets_BS, "shift_labels": targets_BS}  # the first asks for a loss, the second counts
        if not model.training and "output_router_logits" in inspect.signature(type(model).forward).parameters:
            given["output_router_logits"] = False
        return model(input_ids=input_ids_BS, use_cache=False, **given).loss
    logits_BSV = model(input_ids=input_ids_BS, use_cache=False, **given).logits
    return functional.cross_entropy(logits_BSV.flatten(0, 1).float(), targets_BS.flatten(), ignore_index=IGNORED_TARGET)


def checkpoint_layers(model: nn.Module) -> None:
    """Recompute each layer in backward. Raises Unsupported where a model of transformers does not offer it."""
    if isinstance(model, Decoder):
        model.gradient_checkpointing = True
        return
    made: Any = model
    if not getattr(made, "supports_gradient_checkpointing", hasattr(made, "gradient_checkpointing_enable")):
        raise Unsupported(f"--gradient-checkpointing: {type(model).__name__} does not offer it; leave the flag out")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # it has another name in newer versions
        made.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


@contextmanager
def recomputing(model: nn.Module) -> Iterator[None]:
    """`checkpoint_layers` for a while; afterwards every module is as it was."""
    names = ("gradient_checkpointing", "_gradient_checkpointing_func")
    before = [
        (vars(each), {name: vars(each)[name] for name in names if name in vars(each)}) for each in model.modules()
    ]
    try:
        checkpoint_layers(model)
        yield
    finally:
        for now, then in before:
            for name in names:
                now.pop(name, None)
            now |= then


def attention_backends(*, use_flash_attn: bool, deterministic: bool) -> AbstractContextManager[object]:
    """A context in which scaled_dot_product_attention may only use what the flags allow."""
    if deterministic:
        return sdpa_kernel([SDPBackend.FLASH_ATTENTION] + ([] if use_flash_attn else [SDPBackend.MATH]))
    return sdpa_kernel(FUSED) if use_flash_attn else nullcontext()


def training_request(
    heads: tuple[int, int, int], seq_length: int, dtype: torch.dtype, device: torch.device, deterministic: bool = False
) -> dispatcher.AttentionRequest:
    """Causal training of this shape; ``heads`` as of `attention_heads`."""
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
    sizes: tuple[Any, ...] = (*heads[:2], seq_length, seq_length, heads[2])
    request = dispatcher.AttentionRequest(device.type, capability, dtype, *sizes)
    return request._replace(causal=True, gradient=True, deterministic=deterministic, gpu=device.index)


def fused_backend(request: dispatcher.AttentionRequest) -> str:
    """The dispatcher's choice among fused backends; Unsupported, with all reasons."""
    reasons = {name: why for name, why in dispatcher.attention_backends(request).items() if name != "math"}
    if accepted := [name for name, why in reasons.items() if not why]:
        return accepted[0]
    said = " | ".join(f"{name}: {'; '.join(why)}" for name, why in reasons.items())
    raise Unsupported(f"{_refused(request)}. {said}")


def chosen_backend(request: dispatcher.AttentionRequest) -> str:
    """What torch takes in this context: 'flash', 'cudnn', 'efficient' or 'math'; Unsupported where it takes none."""
    shapes = ((1, heads, request.queries, request.head) for heads in (request.heads, request.kv_heads))
    device = torch.device(request.device, request.gpu)  # type: ignore[arg-type]  # None: the current one
    query, key = (torch.empty(shape, dtype=request.dtype, device=device, requires_grad=True) for shape in shapes)
    given, grouped = (query, key, key, None, 0.0, True), request.heads != request.kv_heads
    try:
        choice = torch._fused_sdp_choice(*given, enable_gqa=grouped)  # pyright: ignore[reportPrivateImportUsage]
    except RuntimeError as error:  # "No viable backend": some devices raise, others answer with a number of no backend
        raise _refused(request) from error
    names = zip((*FUSED, SDPBackend.MATH), ("cudnn", "flash", "efficient", "math"), strict=True)
    if name := next((name for backend, name in names if backend.value == choice), None):
        return name
    raise _refused(request)


def _refused(request: dispatcher.AttentionRequest) -> Unsupported:
    device = torch.device(request.device, request.gpu)  # type: ignore[arg-type]
    what = f"{request.heads} heads of {request.head} in {request.dtype} on {device}"
    remedy = "leave the flag out, or add --mixed-precision"
    return Unsupported(f"--use-flash-attn: no fused attention takes {what}: {remedy}")
