"""The model that a run trains: a preset's decoder with random weights, or the causal model of a Hugging Face folder,
computed by our `Decoder` or by transformers. It is built on the meta device, and its folder checked whole, before the
data is read; weights are drawn or read into the stack one layer group after the other: there is no second copy.
"""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vblackwell.errors import ConfigurationError, CorruptData, Unsupported, nearest
from vblackwell.folders.checked import check_tokenizer
from vblackwell.folders.commit import MANIFEST, verify_folder
from vblackwell.folders.compressed_tensors import PackedLinears
from vblackwell.folders.folder import find_folder, read_config, read_tokenizer
from vblackwell.folders.weights import FolderWeights
from vblackwell.generate.adapters import adapt, adapted, put_adapters
from vblackwell.generate.causal_lm import config_json
from vblackwell.generate.load import model_on_meta
from vblackwell.generate.quantized import Packing, open_folder, packing_over
from vblackwell.kernels.fp4.w4a8 import MIN_ROWS, SUMMARY
from vblackwell.nn.attention.backends import packs_documents, use_dispatcher, why_not_dispatcher
from vblackwell.nn.attention.documents import runs_packed
from vblackwell.nn.convert import training
from vblackwell.nn.convert.assignment import BITS, Assignment, apply_assignment
from vblackwell.nn.convert.lora import Lora
from vblackwell.nn.convert.model import convert
from vblackwell.nn.decoder.config import DecoderConfig, find_preset
from vblackwell.nn.decoder.decoder import Decoder
from vblackwell.offload.storage.initialize import Initialize
from vblackwell.trace.trace import refuse_frozen
from vblackwell.train.config import TrainConfig


@dataclass(frozen=True)
class TrainableModel:
    """A model that is about to be put into a stack and trained. ``config``: its config.json; ``heads``: query heads,
    key and value heads, and the width of one; ``initialize`` fills it, from meta, if it has no weights yet; ``folder``:
    where it comes from, None for a preset; ``packing``: of the linears that are packed there.
    """

    model: nn.Module
    config: dict[str, Any]
    heads: tuple[int, int, int]
    initialize: Initialize | None = None
    folder: Path | None = None
    packing: PackedLinears | None = None


def preset_model(config: TrainConfig, vocab_size: int, eos_token_id: int | None = None) -> TrainableModel:
    """The preset's model in fp32, drawn from the run's seed as the stack loads it."""
    preset = find_preset(config.preset)
    longest = max(config.seq_length, preset.max_position)
    shape = replace(preset, vocab_size=vocab_size, max_position=longest, eos_token_id=eos_token_id)
    changed: dict[str, Any] = dict(config.architecture or {})
    known = [each.name for each in fields(DecoderConfig) if each.name not in ("vocab_size", "eos_token_id")]
    for name, value in changed.items():
        if name not in known:
            raise ConfigurationError(f"--architecture has no {name!r}, but {', '.join(known)}{nearest(name, known)}")
        wanted = float if name in ("rope_theta", "norm_eps", "initializer_range") else int
        if isinstance(value, bool) or not isinstance(value, (int, float)) or wanted(value) != value:
            kind = "a number" if wanted is float else "a whole number"
            raise ConfigurationError(f"--architecture {name} {value!r} is not {kind}")
    if "num_heads" in changed or "hidden_size" in changed:
        changed = {"head_dim": None, "num_kv_heads": None} | changed
    model = Decoder(replace(shape, **changed), device="meta", dtype=torch.float32)
    return replace(trainable(model), initialize=model.initial_weights(config.seed))


def find_model(config: TrainConfig, cleanup: ExitStack) -> TrainableModel | None:
    """What ``--model`` means, None for a preset; the folder's files stay open until ``cleanup``. Raises
    ConfigurationError: no folder, no tokenizer, or they and the flags disagree; FolderMismatch, CorruptData,
    Unsupported: of the folder.
    """
    if config.model is None:
        return None
    folder = find_folder(config.model)
    if (folder / MANIFEST).is_file():  # we wrote it, and know its bytes
        try:
            verify_folder(folder)
        except CorruptData as error:
            raise CorruptData(f"{error}, or remove {MANIFEST} if you changed the folder yourself") from error
    read_config(folder)  # says what the folder is, if it is none of a model
    if config.tokenizer is None and not (folder / "tokenizer.json").is_file():
        raise ConfigurationError(f"--model {folder} has no tokenizer.json: give that of its training as --tokenizer")
    found = trainable(model_on_meta(folder, torch.float32, quantized=config.lora is not None))
    weights = cleanup.enter_context(open_folder(found.model, folder))
    weights.load_buffers()
    path = folder if config.tokenizer is None else Path(config.tokenizer)
    check_tokenizer(folder, read_tokenizer(path), path, remedy=" as --tokenizer")
    return replace(found, initialize=weights, folder=folder, packing=weights.packing)


def check_rows(config: TrainConfig) -> None:
    """ConfigurationError where ``--fp8-activations`` would round nothing."""
    rows = config.batch_size * config.seq_length
    if config.fp8_activations and rows < MIN_ROWS and not config.auto_batch_size:
        said = f"a forward has {rows} tokens, and products of {MIN_ROWS} rows and more alone round their inputs"
        raise ConfigurationError(f"--fp8-activations: {said}: raise --batch-size or --seq-length, or drop it")


def check_length(config: TrainConfig, found: TrainableModel, where: object) -> None:
    """ConfigurationError where a sequence has more tokens than the model, described ``where``, has positions."""
    limit = found.config.get("max_position_embeddings")
    if limit is not None and config.seq_length > limit:
        most = f"the {limit} positions of {where}"
        raise ConfigurationError(f"--seq-length {config.seq_length} is beyond {most}: shorten it")


def trainable(model: nn.Module) -> TrainableModel:
    """A `Decoder` or a causal model of transformers with what training asks of it."""
    heads = training.attention_heads(model)
    if isinstance(model, Decoder):
        return TrainableModel(model, model.config.to_hf(), heads)
    made: Any = model
    text = made.config.get_text_config()
    names = {name: getattr(text, name, None) for name in ("vocab_size", "max_position_embeddings")}
    return TrainableModel(model, config_json(model) | names, heads)


def convert_linears(
    config: TrainConfig, found: TrainableModel, device: torch.device, say: Callable[[str], None]
) -> TrainableModel:
    """Linears as ``--lora``, ``--use-fp4`` or ``--assignment`` ask, and layers of transformers fused."""
    model = found.model
    if config.lora is not None:
        found = _adapt(config, found, device, say)
    elif config.use_fp4:
        done = convert(model, fp4_layers=config.fp4_layers, keep=config.keep, attention=None, fused=False)
        linears, layers = (len(done.replaced.get(kind, [])) for kind in ("linear", "experts"))
        experts = f"and the experts of {layers} layers " if layers else ""
        say(
            f"--use-fp4: {linears} linears {experts}compute with their weights rounded to nvfp4, gradients straight "
            f"through; masters stay fp32, and so do the saved weights (vb quantize packs them)\n{done}"
        )
    elif config.assignment is not None:
        assignment = Assignment.load(config.assignment)
        apply_assignment(model, assignment, "training")
        counts = ", ".join(f"{len(assignment.names(precision))} in {precision}" for precision in BITS)
        say(
            f"--assignment: {counts}, {assignment.bits:.2f} bits a weight of theirs; gradients straight through, "
            "masters stay fp32, and so do the saved weights"
        )
    refuse_frozen(model)
    fused = training.fuse(model)
    if fused is not None:
        say(f"{type(model).__name__} of transformers, fused where that is the same: {fused.summary()}")
    return found


def _adapt(
    config: TrainConfig, found: TrainableModel, device: torch.device, say: Callable[[str], None]
) -> TrainableModel:
    assert config.lora is not None and config.model is not None
    model, given, form = found.model, Path(config.model), "mxfp4" if config.fp8_activations else "nvfp4"
    lora = Lora.parse(config.lora)
    asked = Packing(form, config.fp4_layers, config.keep) if config.use_fp4 else None
    packing = packing_over(config.model, found.packing, asked)
    if found.initialize is None:  # nothing fills it: it is planned for
        put_adapters(model, lora, packing, config.model, on_gpu=device.type == "cuda", w4a8=config.fp8_activations)
        return found
    assert isinstance(found.initialize, FolderWeights)
    fill = adapt(
        model,
        found.initialize,
        lora,
        packing,
        device,
        name=str(given.resolve()) if given.is_dir() else config.model,
        seed=config.seed,
        w4a8=config.fp8_activations,
    )
    made, base = adapted(model), "as it is"
    assert made is not None
    trained = [param.numel() for param in model.parameters() if param.requires_grad]
    if made.packed:
        left = [f"{name} ({reason})" for name, reason in made.packed.items() if reason and ".lora_" not in name]
        packed, held = list(made.packed.values()).count(None), found.packing
        form, whose = (form, "") if held is None else (held.form.name, ", as the folder has them")
        base = f"packed to {form} in {packed} linears{whose} (left: {', '.join(left[:3]) or 'none'})"
    say(
        f"--lora: rank {made.lora.rank}, scale {made.lora.scale:g}, around {len(trained) // 2} linears "
        f"({', '.join(made.config['target_modules'])}): {sum(trained) / 1e6:.2f} M parameters are trained; the base is "
        f"frozen, {base}"
    )
    if config.fp8_activations:
        say(f"--fp8-activations: of the packed base, {SUMMARY}; gradients are not, and pass straight through")
    return replace(found, initialize=fill)


def choose_attention(
    config: TrainConfig,
    found: TrainableModel,
    compute_dtype: torch.dtype | None,
    device: torch.device,
    cleanup: ExitStack,
    packs: bool,
) -> str:
    """Allow what the flags allow until ``cleanup``; the backend that runs in this model."""
    if packs and config.use_flash_attn:
        raise Unsupported(
            "--use-flash-attn fixes a backend for rows of one document, and conversations share rows: add --no-packing"
        )
    dtype = compute_dtype or torch.float32
    allowed = training.attention_backends(use_flash_attn=config.use_flash_attn, deterministic=config.deterministic)
    cleanup.enter_context(allowed)
    model: Any = found.model
    kind, foreign = getattr(model.config, "_attn_implementation", "sdpa"), not isinstance(model, Decoder)
    if config.use_flash_attn and foreign:
        reason, window = why_not_dispatcher(model), getattr(model.config.get_text_config(), "sliding_window", None)
        if reason is None and window is not None and window < config.seq_length:
            reason = f"its sliding window of {window} is shorter than --seq-length {config.seq_length} and needs a mask"
        if reason is not None:
            raise Unsupported(f"--use-flash-attn: {type(model).__name__}: {reason}; leave the flag out")
    elif kind != "sdpa":
        return kind
    elif packs and device.type == "cuda" and (not foreign or why_not_dispatcher(model) is None):
        # SDPA's fastest with a mask is nine times slower (docs/journal/attention.md).
        if foreign:
            cleanup.callback(use_dispatcher(model))
        no_mask = runs_packed(device, dtype, found.heads[2]) and (not foreign or packs_documents(model))
        return f"the dispatcher's, {'every document of a row apart' if no_mask else 'with a mask of documents'}"
    request = training.training_request(found.heads, config.seq_length, dtype, device, config.deterministic)
    if not config.use_flash_attn:
        return training.chosen_backend(request)
    name = training.fused_backend(request)
    if foreign:
        cleanup.callback(use_dispatcher(model, name, cached="auto"))  # the sample at the end writes with a cache
    else:
        model.use_attention(name)
    return f"{name}, as --use-flash-attn asks"
