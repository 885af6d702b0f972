"""A Llama-style decoder that trains offloaded and is read by ``transformers`` without conversion.

Names of weights and the mathematics are Hugging Face's ``LlamaForCausalLM``: in fp32 on the CPU the logits are the same
bits. Initial weights are drawn on the CPU whatever the device, in order from one generator, so that a model that trains
offloaded begins with the bits of the resident one. With ``gradient_checkpointing``, on CUDA always, head and loss run
over ``loss_chunk_tokens`` tokens at a time (`HiddenWithTargets`): the logits of a batch would set the peak.

Legend: B batch, S sequence, T tokens (B * S), D model width, V vocabulary.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.types import Device

from vblackwell.errors import ConfigurationError, Unsupported
from vblackwell.kernels.pointwise.cross_entropy import linear_cross_entropy
from vblackwell.kernels.pointwise.rows import add_rms_norm
from vblackwell.kernels.runtime.registry import computes_at_once
from vblackwell.nn.attention.documents import Documents, document_starts_at, within_documents
from vblackwell.nn.attention.layer import rotary_tables, rotary_tables_at
from vblackwell.nn.decoder.block import DecoderLayer, KVCache, RMSNorm, SelfAttention, SteadyCache
from vblackwell.nn.decoder.checkpoint import checkpoint
from vblackwell.nn.decoder.config import DecoderConfig
from vblackwell.nn.linear.one_input import hooked

IGNORED_TARGET = -100


class HiddenWithTargets:
    """Hidden states (..., D) and targets (...) for a linear head, which answers with the cross entropy of its logits.

    ``nn.Linear`` passes them to ``functional.linear``, which hands the call to ``__torch_function__``: the head stays a
    plain ``nn.Linear`` whose hooks run and whose gradient arrives where it always does. ``options`` are
    `linear_cross_entropy`'s.
    """

    def __init__(self, hidden: Tensor, targets: Tensor, **options: Any) -> None:
        self.hidden = hidden
        self.targets = targets
        self.options = options

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Tensor:
        if func is not functional.linear or not isinstance(args[0], cls):
            what = f"{getattr(func, '__name__', func)} on hidden states with targets"
            remedy = "call it with the hidden states alone and compute the loss from its logits"
            raise Unsupported(f"{what}: only a linear head takes them; {remedy}")
        given, weight_VD, *bias_V = args
        bias = bias_V[0] if bias_V else (kwargs or {}).get("bias")
        return linear_cross_entropy(given.hidden, weight_VD, given.targets, bias, **given.options)


def takes_targets(head: nn.Module) -> bool:
    """Whether ``head`` may be called with `HiddenWithTargets`: it computes as ``nn.Linear`` does."""
    return isinstance(head, nn.Linear) and type(head).forward is nn.Linear.forward


def _twice(layer: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """``layer`` for a checkpoint, whose second pass throws the output away."""
    first = iter((layer,))
    return lambda *args: next(first, partial(layer, wanted=False))(*args)


class DecoderTrunk(nn.Module):
    """Everything but the head, under the names that the weights have in files."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config, layer) for layer in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)


class Decoder(nn.Module):
    """Token numbers in, logits or a loss out; on the device 'meta' no weights are drawn.

    ``gradient_checkpointing``: compute blocks again in backward instead of keeping their activations.
    ``loss_chunk_tokens``: tokens whose logits exist at a time on CUDA, elsewhere with ``gradient_checkpointing``.
    """

    def __init__(
        self, config: DecoderConfig, *, seed: int = 0, device: Device = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.config = config
        self.gradient_checkpointing = False
        self.loss_chunk_tokens = 2048
        device = torch.get_default_device() if device is None else torch.device(device)
        with torch.device("meta"):  # so that no layer draws weights which would be drawn again
            self.model = DecoderTrunk(config)
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        # `to_empty` would do but for fake tensors, whose storage it cannot swap.
        for module in self.modules():
            for name, parameter in module.named_parameters(recurse=False):
                empty = torch.empty(parameter.shape, dtype=dtype or parameter.dtype, device=device)
                setattr(module, name, nn.Parameter(empty))
        if device.type != "meta":
            fill = self.initial_weights(seed)
            for name, parameter in self.named_parameters():
                fill(name, parameter)

    @property
    def layers(self) -> nn.ModuleList:
        return self.model.layers

    def use_attention(self, backend: str | None) -> None:
        """Passes without a cache attend on this backend, or raise; None: on PyTorch's choice."""
        for module in self.modules():
            if isinstance(module, SelfAttention):
                module.backend = backend

    def initial_weights(self, seed: int) -> Callable[[str, Tensor], None]:
        """A function that fills a tensor with a parameter's initial value, also for a decoder on the meta device;
        called once with each, in the order of ``named_parameters()``, as all are drawn from one generator. Values are
        normal, in projections into the residual stream divided by sqrt(2 * layers) (GPT-2); norms are 1."""
        generator = torch.Generator().manual_seed(seed)
        spread, num_layers = self.config.initializer_range, self.config.num_layers
        coming = iter([name for name, _ in self.named_parameters()])

        @torch.no_grad()
        def fill(name: str, out: Tensor) -> None:
            expected = next(coming)
            assert name == expected, f"{name} is drawn where {expected} would be"
            if out.dim() == 1:
                out.fill_(1.0)
                return
            into_residual = name.endswith(("o_proj.weight", "down_proj.weight"))
            scale = spread / (2 * num_layers) ** 0.5 if into_residual else spread
            if out.device.type == "cpu" and out.dtype == torch.float32 and out.is_contiguous():
                out.normal_(0.0, scale, generator=generator)
            else:
                drawn = torch.empty(out.shape, dtype=torch.float32, device="cpu")
                out.copy_(drawn.normal_(0.0, scale, generator=generator))

        return fill

    def forward(
        self,
        input_ids_BS: Tensor,
        targets_BS: Tensor | None = None,
        positions_BS: Tensor | None = None,
        starts: Tensor | None = None,
        *,
        cache: KVCache | None = None,
    ) -> Tensor:
        """Logits (B, S, V); or, with targets, the mean cross entropy in fp32 over those that are not -100.

        Args:
            input_ids_BS: token numbers; with a cache, those that follow what it holds.
            targets_BS: for each position the token that follows.
            positions_BS: of rows of several documents: counted from 0 in each. No token attends to another document.
            starts: where these begin, `document_starts`; where it is not given a GPU is waited for.
            cache: keys and values of earlier positions; extended by this call.

        Raises ConfigurationError for more positions than ``config.max_position``, or positions with a cache;
        Unsupported for positions where `use_attention` has fixed a backend.
        """
        hidden_BSD = self.hidden(input_ids_BS, cache, positions_BS, starts)
        if targets_BS is None:
            return self.lm_head(hidden_BSD)
        return self._loss(hidden_BSD.flatten(0, 1), targets_BS.flatten())

    def hidden(
        self,
        input_ids_BS: Tensor,
        cache: KVCache | None = None,
        positions_BS: Tensor | None = None,
        starts: Tensor | None = None,
    ) -> Tensor:
        """The final norm's output (B, S, D), which the head turns into logits."""
        start, length = (0 if cache is None else cache.length), input_ids_BS.shape[1]
        if start + length > (limit := self.config.max_position):
            wrong = f"a sequence of {start + length} tokens: this model's limit is {limit}"
            raise ConfigurationError(f"{wrong}; shorten it")
        x_BSD = self.model.embed_tokens(input_ids_BS)
        documents, shape = None, (self.config.head_dim, self.config.rope_theta)
        if positions_BS is None:
            tables = rotary_tables(start, length, *shape, x_BSD.device)
        elif cache is not None:
            raise ConfigurationError("positions of packed documents, and a cache: give one document at a time")
        else:
            tables = rotary_tables_at(positions_BS, *shape)
            make_starts, on_gpu = partial(document_starts_at, positions_BS), x_BSD.is_cuda and computes_at_once()
            starts = make_starts() if starts is None and on_gpu else starts
            # Else one a row: causal, faster, other bits.
            if starts is None or not on_gpu or starts.shape[0] - 1 > x_BSD.shape[0]:
                documents = Documents(starts, partial(within_documents, positions_BS), make_starts=make_starts)
        recompute = self.gradient_checkpointing and torch.is_grad_enabled() and cache is None
        for layer in self.layers:
            if recompute:
                lean = _twice(partial(layer, documents=documents, lean=True))
                x_BSD = checkpoint(lean, x_BSD, *tables, modules=(layer,))
            else:
                x_BSD = layer(x_BSD, *tables, cache, documents=documents)
        if cache is not None:
            cache.length += length
        return self.model.norm(x_BSD)

    def next_logits(self, input_ids_B1: Tensor, cache: SteadyCache) -> Tensor:
        """Logits (B, V) after one more token a row, stored at the cache's position; it may be captured in a graph."""
        added_BSD, x_BSD = None, self.model.embed_tokens(input_ids_B1)
        for layer in self.layers:
            added_BSD, x_BSD = layer.step(added_BSD, x_BSD, cache)  # type: ignore[operator]
        assert added_BSD is not None, "there is a layer"
        return self.last_logits(added_BSD, x_BSD, cache)

    def last_logits(self, added_B1D: Tensor, x_B1D: Tensor, cache: SteadyCache) -> Tensor:
        """Logits (B, V) of what the last layer's `DecoderLayer.step` gave."""
        cache.position_1.add_(1)
        norm = self.model.norm
        if hooked(norm):
            normed_B1D = norm(x_B1D + added_B1D)
        else:
            normed_B1D, _ = add_rms_norm(added_B1D, x_B1D, norm.weight, norm.eps)
        return self.lm_head(normed_B1D[:, -1])

    def _loss(self, hidden_TD: Tensor, targets_T: Tensor) -> Tensor:
        chunk = self.loss_chunk_tokens
        if hidden_TD.is_cuda and takes_targets(self.lm_head):
            options = {"ignore_index": IGNORED_TARGET, "chunk_tokens": chunk}
            return self.lm_head(HiddenWithTargets(hidden_TD, targets_T, **options))
        counted = (targets_T != IGNORED_TARGET).sum()
        if not (self.gradient_checkpointing and torch.is_grad_enabled()):
            return self._loss_sum(hidden_TD, targets_T) / counted
        pieces = zip(hidden_TD.split(chunk), targets_T.split(chunk), strict=True)
        sums = [checkpoint(self._loss_sum, *piece, modules=(self.lm_head,)) for piece in pieces]
        return torch.stack(sums).sum() / counted

    def _loss_sum(self, hidden_TD: Tensor, targets_T: Tensor) -> Tensor:
        logits_TV = self.lm_head(hidden_TD).float()
        return functional.cross_entropy(logits_TV, targets_T, ignore_index=IGNORED_TARGET, reduction="sum")
