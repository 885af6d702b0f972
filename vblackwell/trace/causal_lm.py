"""transformers' causal language models from a configuration, without weights, and answers to what they ask of a batch.

Three questions of transformers need values of tensors: whether positions restart inside a row (packed sequences),
whether tokens are padding, and which experts get which tokens. An ordinary batch is not packed and has no padding, and
grouped products take the same bytes either way.
"""

import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from vblackwell.errors import ConfigurationError, Unsupported, nearest
from vblackwell.trace.cuda_on_meta import answered

_SIZES = ("size", "layers", "layer", "heads", "embd", "head", "positions", "embeddings", "experts", "dim", "model")
_REQUIRED = (
    ("vocab_size",), ("hidden_size", "n_embd", "d_model"), ("num_hidden_layers", "n_layer", "num_layers"),
    ("num_attention_heads", "n_head", "num_heads"),
)  # fmt: skip
MAX_SIZE = 1 << 31


def build_causal_lm(fields: dict[str, Any], source: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    """The model of ``fields`` (a config.json), in training mode, on meta. Raises ConfigurationError."""
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind = fields.get("model_type")
    if kind is not None and kind not in CONFIG_MAPPING:
        unknown = f"model_type {kind!r} is unknown to transformers{nearest(str(kind), CONFIG_MAPPING)}"
        raise ConfigurationError(f"{source}: {unknown}")
    check_fields(fields, source)
    no_shapes = ("model_type", "dtype", "torch_dtype", "architectures", "quantization_config")
    rest = {name: value for name, value in fields.items() if name not in no_shapes}
    for name, value in rest.items():
        is_size = name.rsplit("_", 1)[-1] in _SIZES and isinstance(value, (int, float)) and not isinstance(value, bool)
        if is_size and not 0 < value < MAX_SIZE:
            raise ConfigurationError(f"{source}: {name} is {value}: give a number between 1 and {MAX_SIZE - 1}")
    moe = {"experts_implementation": "grouped_mm"} if any("expert" in name for name in rest) else {}
    try:
        config = CONFIG_MAPPING[fields["model_type"]](**rest)
        if config._attn_implementation == "flex_attention":
            config._attn_implementation = "sdpa"
        config.use_cache = False  # as in training: a cache would keep keys and values in addition to autograd's
        with torch.device("meta"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False, **moe)
    except Exception as error:  # transformers raises all sorts for a field of the wrong kind
        said = error.__cause__ or error  # what its checks of fields wrap says more
        text = " ".join(str(said).split())[:200]
        raise ConfigurationError(f"{source} does not describe a causal model: {type(said).__name__}: {text}") from error
    model.loss_type = "ForCausalLM"  # it does not recognise GPT-2's class by name, and says so on every run
    return model.train()


def check_fields(fields: dict[str, Any], source: str, required: Sequence[Sequence[str]] = _REQUIRED) -> None:
    """Raises ConfigurationError where ``fields`` lack the type of a model, or all names of one that is ``required``."""
    if fields.get("model_type") is None:
        raise ConfigurationError(f"{source} lacks the field 'model_type': it is no configuration of transformers")
    for names in required:
        if not any(name in fields for name in names):
            raise ConfigurationError(f"{source} lacks the field {names[0]!r}: the model's size is not known without it")


class GroupedOnMeta(torch.autograd.Function):
    """The bytes of a grouped product of (S, K) rows and (E, K, N) weights in fp32: torch's shape rule takes bf16 alone,
    and the way round it in transformers reads how many rows each expert has.
    """

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(rows, weights)
        return rows.new_empty(rows.shape[0], weights.shape[2])

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[torch.Tensor, torch.Tensor]:
        rows, weights = ctx.saved_tensors
        return torch.empty_like(rows), torch.empty_like(weights)


def _refuse_flex(*args: Any, **options: Any) -> Any:
    raise Unsupported("flex_attention is compiled, and cannot be traced: give attn_implementation='sdpa'")


@contextmanager
def plain_batches() -> Iterator[None]:
    """Answer what transformers asks about values, where transformers is in use at all, in this thread alone."""
    masks, experts, attention = (
        sys.modules.get(f"transformers.{name}")
        for name in ("masking_utils", "integrations.moe", "integrations.flex_attention")
    )
    models = getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", None)
    plain: Any = getattr(experts, "_grouped_mm", None)

    def grouped(input: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        if input.dtype == torch.bfloat16:
            return plain(input, weight, offs)
        rows = input.to(weight.dtype)
        # Checkpointing compares devices of what is saved: meta, as within operators.
        with torch._C.DisableTorchFunction():
            return GroupedOnMeta.apply(rows, weight)  # pyright: ignore[reportReturnType]

    answers: list[tuple[Any, str, Any]] = [
        (masks, "create_block_mask", _refuse_flex),
        (attention, "compile_friendly_flex_attention", _refuse_flex),
        (masks, "find_packed_sequence_indices", lambda position_ids: None),
        (models, "warn_if_padding_and_no_attention_mask", lambda model, input_ids, attention_mask: None),
        (experts, "_grouped_mm", grouped),
    ]
    with ExitStack() as stack:
        for owner, name, answer in answers:
            if hasattr(owner, name):
                stack.enter_context(answered(owner, name, answer))
        yield


def language_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    """The loss that the model computes itself."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return model(input_ids=batch["input_ids"], labels=batch["labels"]).loss


def language_batch(vocab_size: int, batch_size: int, seq_length: int) -> Callable[[], dict[str, torch.Tensor]]:
    """Makes token numbers (B, S) on 'cuda' that are their own targets."""
    sizes = vocab_size, batch_size, seq_length
    if min(sizes) < 1:
        raise ValueError(f"(vocabulary, batch, sequence) is {sizes}: each must be at least 1")

    def make() -> dict[str, torch.Tensor]:
        tokens = torch.zeros((batch_size, seq_length), dtype=torch.int64, device="cuda")
        return {"input_ids": tokens, "labels": tokens}

    return make
