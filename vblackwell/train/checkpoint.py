"""Checkpoints of a run: what is in them, and which one a resumed run goes on from.

    model.safetensors ...      fp32 weights; with config.json and tokenizer a Hugging Face folder
    optimizer.safetensors ...  NAME.exp_avg, NAME.exp_avg_sq, NAME.step, as torch.optim.AdamW names them
    trainer.json               step, data position, generators, loss scale, schedule, settings, placement
    manifest.json              sizes and hashes (the commit protocol)

With adapters, peft's adapter_model.safetensors and adapter_config.json are in the place of the weights. Weights and
states are written one parameter at a time as they are read: there is no second copy of the model in memory.
"""

import dataclasses
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

from vblackwell.errors import CorruptData, DiskError, VBError
from vblackwell.folders import commit
from vblackwell.folders.chat_prompt import CHAT_TEMPLATE
from vblackwell.folders.folder import (
    GENERATION,
    TOKENS,
    copy_tokenizer,
    load_state,
    read_json,
    save_model,
    stored_dtype,
    tensor_files,
    trained_steps,
)
from vblackwell.folders.tensor_file import SafetensorsShards, TensorSpec
from vblackwell.generate.adapters import ADAPTER_FILE, adapted, export_order, save_adapter, whole_tensors, write_adapter
from vblackwell.generate.causal_lm import PublishedTensors
from vblackwell.nn.convert.lora import file_name, is_adapter
from vblackwell.offload.api import offload_of
from vblackwell.offload.state import MOMENTS, ParameterState, export_state, import_state
from vblackwell.train.config import TrainConfig, refuse_changes
from vblackwell.train.prepare import Prepared
from vblackwell.train.runfolder import ADAPTER, CHECKPOINTS, FINAL
from vblackwell.train.trainer import TrainerState, default_warmup_steps
from vblackwell.units import format_bytes

TRAINER = "trainer.json"
FORMAT = 2  # of trainer.json
_MERGED = {"none": None, "bf16": torch.bfloat16, "fp32": torch.float32}  # of --merge
METADATA_BYTES = 16 << 20  # tokenizer, tables and JSON, at most


def write_checkpoint(parent: Path, prepared: Prepared, say: Callable[[str], None], state: TrainerState) -> None:
    """Commit the run as it is now under ``parent``; then remove the oldest. Raises DiskError: earlier checkpoints
    are untouched."""
    needed = _checkpoint_bytes(prepared.model) + METADATA_BYTES
    with commit.CommitFolder(parent, f"step-{state.step:08d}", needed, own_parent=True) as folder:
        _write_checkpoint(folder, prepared)
        folder.add_json(TRAINER, _trainer_json(prepared, state))
    try:
        commit.prune(parent, prepared.config.keep_checkpoints)
    except DiskError as error:  # the new one is safe
        say(f"an older checkpoint could not be removed, which takes space on the disk: {error}")


def newest_intact(parent: Path, say: Callable[[str], None]) -> Path | None:
    """The newest intact checkpoint under ``parent``, all of whose bytes are read; None if there is none yet; damaged
    ones that are newer are told. Raises CorruptData: all are damaged."""
    # One without a manifest counts as damaged: folders get their names with it, so it was lost later.
    found, problems = commit.first_intact(commit.numbered(parent))
    for problem in problems:
        say(f"passed over a damaged checkpoint: {problem}")
    if found is None and problems:
        raise CorruptData(f"{parent}: no checkpoint is intact ({problems[0]}); start a new run with another --out")
    return found


def load_newest(parent: Path, prepared: Prepared, say: Callable[[str], None]) -> TrainerState | None:
    """Load the newest intact checkpoint under ``parent`` into the model; None, and a message, if there is none yet.
    Raises ConfigurationError: it was written under other settings; CorruptData: all are damaged, or of another run.
    """
    model, made = prepared.model, adapted(prepared.model)
    found = newest_intact(parent, say)
    if found is None:
        say("no checkpoint yet: starting over")
        return None
    stored = _read_trainer(found, prepared)
    state = TrainerState.from_json(stored["state"])
    with ExitStack() as opened:
        prefix, only = ("model", None) if made is None else (ADAPTER_FILE, is_adapter)
        import_state(model, prepared.optimizer, _open_states(found, prefix, opened), only=only)
    say(f"resumed from {found} after step {state.step}")
    before, arithmetic = stored.get("arithmetic", {}), _arithmetic(prepared).items()
    changed = [f"{name}: {now}, before {before[name]}" for name, now in arithmetic if before.get(name, now) != now]
    if changed:
        say(f"last bits of this run may differ from those it would have had ({'; '.join(changed)})")
    end = prepared.config.max_steps
    if stored["max_steps"] != end:
        say(f"the run now ends at step {end}, before at {stored['max_steps']}: the schedule is another")
    return state


def load_adapter(parent: Path, prepared: Prepared, say: Callable[[str], None]) -> TrainerState | None:
    """Load the adapter that the run in ``parent`` ended with into the model; None where there is none, intact and of
    the last step. Raises as `load_newest`."""
    found = parent / ADAPTER
    if adapted(prepared.model) is None or not found.exists():
        return None
    try:
        commit.verify_folder(found, "it is not merged")
        if not _is_of_last_step(found, prepared):
            return None
    except VBError as problem:
        say(f"passed over a damaged adapter: {problem}")
        return None
    state = TrainerState.from_json(_read_trainer(found, prepared)["state"])
    held = dict(load_state(found, ADAPTER_FILE))
    import_state(prepared.model, None, lambda name: {"weight": held[file_name(name)]}, only=is_adapter)
    return state


def export_adapter(parent: Path, prepared: Prepared, state: TrainerState) -> Path:
    """The trained adapters as the folder ``parent``/adapter, and when they were. Raises DiskError."""
    template = None if prepared.template is None else prepared.template.source
    more = {TRAINER: _trainer_json(prepared, state)}
    return save_adapter(prepared.model, parent / ADAPTER, chat_template=template, more=more)


def merged_type(model: nn.Module, config: TrainConfig) -> torch.dtype | None:
    """The type of the weights that `export_final` writes; None where there are adapters that are not merged."""
    if (made := adapted(model)) is None:
        return torch.float32
    return made.stored if config.merge == "auto" else _MERGED[config.merge]


def export_final(parent: Path, prepared: Prepared, state: TrainerState) -> None:
    """The trained model, adapters merged, as a Hugging Face folder ``parent``/final. Raises DiskError."""
    model, dtype = prepared.model, merged_type(prepared.model, prepared.config)
    with commit.CommitFolder(parent, FINAL, _final_bytes(model, dtype) + METADATA_BYTES) as folder:
        tokenizer = _add_tokenizer(folder, prepared)
        folder.add_json(GENERATION, generation_settings(prepared))
        made = PublishedTensors(
            model, None if adapted(model) is None else dtype
        )  # names and shapes as others expect them
        save_model(folder, prepared.model_config, made.specs, made.tensors(), tokenizer, generation=False)
        folder.add_json(TRAINER, _trainer_json(prepared, state))


def is_finished(parent: Path, prepared: Prepared) -> bool:
    """Whether what the run in ``parent`` exports is there, of its last step, intact, and merged in the type that
    ``--merge`` names; with auto in any."""
    dtype = merged_type(prepared.model, prepared.config)
    exported = parent / (ADAPTER if dtype is None else FINAL)
    try:
        commit.verify_folder(exported)
        named = dtype is not None and prepared.config.merge != "auto"
        return _is_of_last_step(exported, prepared) and (not named or stored_dtype(exported) == dtype)
    except VBError:
        return False


def exported_step(parent: Path) -> int | None:
    """The step of which the run in ``parent`` has exported an intact model or adapter; None: of none."""
    for exported in (parent / ADAPTER, parent / FINAL):  # what an earlier --merge made may be older
        try:
            commit.verify_folder(exported)
        except VBError:
            continue
        return trained_steps(exported)
    return None


def _is_of_last_step(exported: Path, prepared: Prepared) -> bool:
    return trained_steps(exported) == prepared.config.max_steps


def _read_trainer(found: Path, prepared: Prepared) -> dict[str, Any]:
    """trainer.json of the checkpoint or adapter ``found``. Raises ConfigurationError and CorruptData, as `load_newest`,
    where it is not of this run."""
    stored, made = read_json(found / TRAINER), adapted(prepared.model)
    if stored.get("format") != FORMAT:
        raise CorruptData(
            f"{found / TRAINER} is of format {stored.get('format')} of another version, this one reads {FORMAT}: give "
            "the folder as --model to go on from its weights, with another --out"
        )
    if stored.get("fingerprint") != prepared.corpus.fingerprint:
        raise CorruptData(f"{found} was written with other data or tokenizer: give the same --data and --tokenizer")
    refuse_other_run(prepared.config, found, stored["config"])
    if made is not None and stored.get("base") != made.base:
        raise CorruptData(
            f"{found} holds an adapter for another base than --model {prepared.config.model}: give the folder that "
            "the run was started with"
        )
    return stored


def refuse_other_run(config: TrainConfig, checkpoint: Path, written: dict[str, Any]) -> None:
    """Raises ConfigurationError where settings that decide the numbers are not those of the checkpoint:
    ``settings.json`` may have been removed.
    """
    ends = (config.max_steps, written["max_steps"])
    defaults = [default_warmup_steps(steps) for steps in ends if steps is not None]
    if [config.warmup_steps, written["warmup_steps"]] == defaults:  # they move with the end of the run, which may move
        written = written | {"warmup_steps": config.warmup_steps}
    values = f"'config' in {checkpoint / TRAINER}"
    refuse_changes(config, written, f"give the values of {values} as flags, and remove settings.json if it is there")


def refuse_full_disk(out: Path, model: nn.Module, config: TrainConfig) -> None:
    """Raises DiskError unless the disk has the space that the rest of the run in ``out`` will take."""
    assert config.max_steps is not None
    parent, every, keep = out / CHECKPOINTS, config.checkpoint_every, config.keep_checkpoints
    found = commit.newest_complete(parent)
    step = commit.step_of(found[0]) if found else 0
    due = config.max_steps // every - step // every if every else 0
    if step < config.max_steps:
        due = max(due, 1)  # where somebody stops the run
    size, final = _checkpoint_bytes(model), _final_bytes(model, merged_type(model, config))
    final += 0 if adapted(model) is None else size // 3  # adapters are exported before the final model
    needed = METADATA_BYTES + bytes_to_come(len(found), due, keep, checkpoint=size, final=final)
    folder = next(each for each in (out.absolute(), *out.absolute().parents) if each.exists())
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise DiskError(
            f"--out {out} needs up to {format_bytes(needed)} more for checkpoints ({keep} are kept, {len(found)} are "
            f"there) and the final model, {format_bytes(free)} are free: make room for {format_bytes(needed - free)}, "
            "choose another --out, or lower --keep-checkpoints"
        )


def bytes_to_come(held: int, due: int, keep: int, *, checkpoint: int, final: int) -> int:
    """The most that a run will take beyond ``held`` checkpoints, with ``due`` to come and ``keep`` left after each: an
    older one goes only when the next is there. ``checkpoint``, ``final``: bytes of one, and of the export."""
    most = min(due, max(keep - held, 0) + 1)
    left = min(held + due, keep) if due else held
    return max(most * checkpoint, (left - held) * checkpoint + final)


def _weight_bytes(model: nn.Module) -> int:
    return _final_bytes(model, torch.float32)


def _final_bytes(model: nn.Module, dtype: torch.dtype | None) -> int:
    return 0 if dtype is None else sum(dtype.itemsize * shape.numel() for _, shape in whole_tensors(model)[0])


def _checkpoint_bytes(model: nn.Module) -> int:
    """Bytes of weights and both moments; of adapters alone, where there are some."""
    if adapted(model) is not None:
        return 3 * sum(4 * param.numel() for param in model.parameters() if param.requires_grad)
    return 3 * _weight_bytes(model)


def _add_tokenizer(folder: commit.CommitFolder, prepared: Prepared) -> Any:
    """Copy the trained folder's, with special tokens and chat template; or else return what is to be written."""
    tokenizer = prepared.corpus.tokenizer
    if prepared.tokenizer_folder is not None:
        copy_tokenizer(folder, prepared.tokenizer_folder)
        tokenizer = None
    if prepared.template is not None and prepared.template.is_default:  # or who opens the folder would not know it
        folder.add(CHAT_TEMPLATE, prepared.template.source.encode())
    return tokenizer


def _write_checkpoint(folder: commit.CommitFolder, prepared: Prepared) -> None:
    """Weights, or adapters, and AdamW's states, in one pass over the model."""
    model, optimizer = prepared.model, prepared.optimizer
    named, only = export_order(model), None if adapted(model) is None else is_adapter
    tokenizer = _add_tokenizer(folder, prepared)
    states: dict[str, list[TensorSpec]] = {}
    for name, param in named:
        if param.requires_grad:
            shapes = dict.fromkeys(MOMENTS, tuple(param.shape)) | {"step": ()}
            states[name] = [TensorSpec(f"{name}.{key}", shape, torch.float32) for key, shape in shapes.items()]

    def exported() -> Iterator[tuple[str, ParameterState]]:  # the weights, while their states are written
        for name, state in export_state(model, optimizer, only=only):
            for spec in states.get(name, ()):
                found = state.get(spec.name.rpartition(".")[2])  # None: never stepped, and AdamW begins with zeros
                shards.write(spec.name, torch.zeros(spec.shape) if found is None else found.to(spec.dtype))
            yield name, state

    with SafetensorsShards(folder, "optimizer", [spec for specs in states.values() for spec in specs]) as shards:
        values = exported()
        if only is not None:
            write_adapter(folder, model, values)
        else:
            weights = [TensorSpec(name, tuple(param.shape), torch.float32) for name, param in named]
            named_weights = ((name, state["weight"]) for name, state in values)
            save_model(folder, prepared.model_config, weights, named_weights, tokenizer)
        assert next(values, None) is None, "export_state gave more than the model has"


def generation_settings(prepared: Prepared) -> dict[str, Any]:
    """The generation_config.json: the trained folder's, or of the configuration's tokens; a learnt turn's end ends."""
    config, source, end = prepared.model_config, prepared.tokenizer_folder, prepared.turn_end
    if source is not None and (source / GENERATION).is_file():
        made = read_json(source / GENERATION)
    else:
        made = {"_from_model_config": True} | {key: config[key] for key in TOKENS if config.get(key) is not None}
    stated = made.get("eos_token_id")
    ends = stated if isinstance(stated, list) else [] if stated is None else [stated]
    if end is not None and end not in ends:
        made = made | {"eos_token_id": [end, *ends] if ends else end}
        made.pop("_from_model_config", None)  # transformers would derive it from config.json again
    return made


def _trainer_json(prepared: Prepared, state: TrainerState) -> dict[str, Any]:
    engine, made = offload_of(prepared.model), adapted(prepared.model)
    return {
        "format": FORMAT,
        "state": dataclasses.asdict(state),
        "max_steps": prepared.config.max_steps,
        "schedule": dataclasses.asdict(prepared.schedule),
        "config": dataclasses.asdict(prepared.config),
        "fingerprint": prepared.corpus.fingerprint,
        "base": None if made is None else made.base,
        "plan": None if engine is None else engine.summary(),
        "arithmetic": _arithmetic(prepared),
    }


def _arithmetic(prepared: Prepared) -> dict[str, Any]:
    """What a resumed run may change, and what orders or rounds sums otherwise, by name for people."""
    config, device = prepared.config, prepared.device
    return {
        "CPU threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "attention": prepared.attention,
        "--gradient-checkpointing": bool(config.gradient_checkpointing),
        "--deterministic": config.deterministic,
    }


def _open_states(folder: Path, prefix: str, opened: ExitStack) -> Callable[[str], ParameterState]:
    """What `import_state` reads parameters with: a checkpoint's weight files (``prefix``) and optimizer files."""
    files: dict[str, dict[str, Any]] = {prefix: {}, "optimizer": {}}
    for kind, tensors in files.items():
        for path in tensor_files(folder, kind):
            file = opened.enter_context(safe_open(path, framework="pt", device="cpu"))
            tensors |= dict.fromkeys(file.keys(), file)

    def read(name: str) -> ParameterState:
        stored = {"weight": (prefix, name if prefix == "model" else file_name(name))}
        stored |= {key: ("optimizer", f"{name}.{key}") for key in (*MOMENTS, "step")}
        return {key: files[kind][full].get_tensor(full) for key, (kind, full) in stored.items() if full in files[kind]}

    return read
