"""The settings of one training run: one frozen value, checked when it is made. A field's docstring is its help text.
Flags win over the YAML file, that over the resumed run's settings, those over the preset's recipe, that over the
defaults; text and typed values pass through `_checked`, so the same mistake gets the same sentence.
"""

import ast
import dataclasses
import inspect
import types
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from vblackwell.errors import ConfigurationError, nearest, nearest_path
from vblackwell.nn.convert.lora import Lora
from vblackwell.nn.decoder.config import PRESET_BATCHES, TOKENIZER_SIZE
from vblackwell.offload.layout.places import OLD_PLACES, PLACES
from vblackwell.train.runfolder import find_run, read_stored_config
from vblackwell.units import parse_bytes


@dataclass(frozen=True)
class TrainConfig:
    """Everything that `vb train` can be told; ``None``: chosen from the preset, the data or the machine.
    ConfigurationError for a value outside its range, or two that exclude each other.
    """

    preset: str = "tiny"
    """Decoder to train: tiny, small, medium, large, xl or 7b (`--config` on the command line)."""
    architecture: dict[str, Any] | None = None
    """Decoder sizes that differ from the preset's, e.g. '{num_layers: 4, hidden_size: 64}'."""
    model: str | None = None
    """Hugging Face folder to start from instead of a preset's random weights."""
    data: str | None = None
    """Text, or jsonl, json or parquet (text; or messages, sharegpt, alpaca, prompt and completion, told by the first
    record), or a folder of them; default: the Python standard library's sources."""
    packing: bool | None = None
    """Let several conversations share a row, positions beginning again with each; by default where the model keeps them
    apart; --no-packing: a separate row each."""
    inspect_data: bool = False
    """Print the first rows, token by token and which are learnt, and stop."""

    tokenizer: str | None = None
    """tokenizer.json, or a folder that has one; default: a byte-pair tokenizer trained on the data and cached."""
    vocab_size: int = TOKENIZER_SIZE
    """Tokens of the byte-pair tokenizer that is trained where none is given."""

    out: str | None = None
    """Run folder; default: runs/PRESET, or the next free runs/PRESET-N."""
    resume: bool = False
    """Go on from the newest complete checkpoint of --out, or of the newest run in ./runs."""
    max_steps: int | None = None
    """Optimizer steps in all."""
    epochs: float | None = None
    """Passes over the training data, instead of --max-steps."""

    batch_size: int = 8
    """Sequences in one forward; 'auto': the most that fit, see --auto-batch-size."""
    auto_batch_size: bool | None = None
    """Plan the sequences in one forward (--batch-size auto), as --vgpu-auto plans the rest: the fastest of the most
    that fit and its parts; with --accumulation-steps at the same sequences a step, the preset's --batch-size times the
    steps. Default: with --model on a GPU, for at least 100 steps an epoch, unless --batch-size or --deterministic."""
    accumulation_steps: int = 1
    """Forwards whose gradients make one optimizer step."""
    seq_length: int = 256
    """Tokens in one sequence; 'auto': see --auto-seq-length."""
    auto_seq_length: bool | None = None
    """With --model, the tokens that it learnt in a sequence (max_position_embeddings), at most those of the longest
    document, those that fit, and 256 without a GPU (--seq-length auto). Default: unless --seq-length."""

    learning_rate: float = 3e-4
    """Peak learning rate, after the warm-up; unless given, the preset's, with --model 2e-5, with --lora 2e-4."""
    min_learning_rate_ratio: float = 0.1
    """Where the cosine ends, as a fraction of the peak."""
    warmup_steps: int | None = None
    """Steps of linear warm-up; default: a twentieth of the run, at most 1000."""
    weight_decay: float = 0.1
    """Decoupled weight decay of matrices; norms and biases have none."""
    beta1: float = 0.9
    """AdamW's decay of the first moment."""
    beta2: float = 0.95
    """AdamW's decay of the second moment."""
    epsilon: float = 1e-8
    """AdamW's denominator term."""

    max_grad_norm: float = 1.0
    """Clip gradients to this norm; 0 turns clipping off."""
    max_skipped_steps: int = 10
    """Stop after this many steps in a row whose loss or gradients were not finite (they never reach the weights)."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute; auto: the GPU, if the machine has one."""
    seed: int = 0
    """Seed of the initial weights, the order of the data and dropout."""
    mixed_precision: bool = False
    """Compute in bf16 with fp32 masters; in fp16 with a loss scaler where the device lacks bf16."""
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Compute type; auto: of --model its own (bf16 on a GPU that has it), of presets fp32, or as --mixed-precision."""

    gradient_checkpointing: bool | None = None
    """Recompute each block in backward instead of keeping its activations; default: where the plan chooses it."""
    use_flash_attn: bool = False
    """Run the fastest fused attention that is known here, refuse to run without one, and say which it is."""

    use_fp4: bool = False
    """Train with nvfp4-rounded weights in the forward, gradients straight through; without --gradient-checkpointing
    the rounded copies are kept until backward."""
    fp4_layers: str = "all"
    """Linears that --use-fp4 is for: all, large (2^20 elements and more), or a regular expression searched for in
    names; never the output head and tied weights."""
    keep: str | None = None
    """Regular expression for names of linears that --use-fp4 leaves alone in addition."""
    assignment: str | None = None
    """File of an assignment of precisions (`vb docs numerics`): its linears train straight through nvfp4, or through
    two parts; for the same model alone, and instead of --use-fp4."""
    fp8_activations: bool = False
    """With --lora and --use-fp4: products of 897 rows and more with the base round their inputs to FP8, which is faster
    and changes numbers; gradients pass straight through. The base is packed to mxfp4."""
    merge: Literal["auto", "none", "bf16", "fp32"] = "auto"
    """With --lora: the type of the merged model that is written in addition to the adapter, or none; auto: the base's
    own, none if the base is a packed folder."""
    lora: str | None = None
    """Train low-rank adapters over the frozen --model: RANK[,alpha=A][,dropout=P][,targets=NAME+NAME], e.g. 16 or
    '16,alpha=32,targets=q_proj+v_proj'; with --use-fp4 the base is packed to nvfp4 (mxfp4 with
    --fp8-activations). Default: train all weights."""

    vgpu_auto: bool | None = None
    """Choose the fastest way that fits, by prediction: levels (a disk included), placement, recomputing, where AdamW
    runs. What is said with other flags bounds the plan. Where bytes live changes no bit; recomputing on a GPU uses
    other kernels, and may round otherwise. Default: on a GPU. --no-vgpu-auto chooses nothing: fp32, 8 sequences of 256
    tokens, nothing recomputed."""
    plan: bool = False
    """Print what --vgpu-auto would choose, with its bytes and speed, and stop; nothing is written."""
    deterministic: bool = False
    """torch's deterministic algorithms: slower on a GPU; on one machine the same run gives the same bits."""

    fast_memory: str | int | None = None
    """GPU memory that the whole process may take, e.g. 8GiB; without a GPU the RAM that stands for one. Default:
    four fifths of a free GPU, an eighth of the free RAM without one."""
    host_memory: str | int | None = None
    """RAM for what the GPU has no room for, e.g. 8GiB; default: 7/8 of what is free."""
    disk_memory: str | int | None = None
    """Disk space for what RAM has no room for, e.g. 64GiB; without it, --disk-path or --vgpu-auto no disk is used."""
    disk_path: str | None = None
    """Folder on a disk (not a tmpfs) for the unnamed file of what RAM has no room for."""

    placement: Literal["auto", "resident", "streamed"] = "auto"
    """Keep everything in GPU memory, stream through it, or decide by what fits."""
    update: str = "auto"
    """Where AdamW runs when streaming: 'device' (states come up to the weights), 'host' (the CPU), 'auto' (the device,
    if it is a GPU), or the share of the parameters that the CPU updates, e.g. 0.2. No bit depends on it."""
    activations: Literal["auto", "level0", "host"] = "auto"
    """Where --gradient-checkpointing's layer inputs wait for backward when streaming; 'auto': host memory on a GPU."""

    optimizer_states: Literal["fp32", "8bit"] = "fp32"
    """AdamW's moments: exact, or in 8 bits, a quarter of the bytes, which changes numbers (`vb docs numerics`)."""
    masters: Literal["exact", "stochastic"] = "exact"
    """Weights that AdamW updates: exact fp32, or bf16 rounded at random (with --optimizer-states 8bit and bf16)."""

    checkpoint_every: int = 100
    """Steps between checkpoints; 0 for none but the final export."""
    keep_checkpoints: int = 2
    """Checkpoints that are kept; older ones are removed once a newer one is safe on disk."""
    eval_every: int = 50
    """Steps between validation losses; 0 for one at the end only."""
    eval_sequences: int = 128
    """Held-out sequences in one validation loss, the same ones each time."""

    sample_prompt: str | None = None
    """What the sample at the end continues; unset, "def ", or in a run on conversations one that was held out."""
    sample_tokens: int = 96
    """Tokens of the sample at the end; 0 for none."""
    tensorboard: bool = True
    """Write TensorBoard events next to metrics.jsonl."""
    profile: bool = False
    """Write a trace of a few steps (trace.json; open it in Perfetto or chrome://tracing)."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            object.__setattr__(self, field.name, _checked(field.name, getattr(self, field.name)))
        share = 0.0 if self.update in PLACES else _read(float, self.update)
        if share is None or not 0 <= share <= 1:
            said = "is no place for updates: give auto, device, host, or a share between 0 and 1"
            raise ConfigurationError(f"--update {self.update!r} {said}")
        if self.lora is not None:
            Lora.parse(self.lora)  # which refuses what is none
        if self.max_steps is not None and self.epochs is not None:
            raise ConfigurationError("--max-steps and --epochs are both given: choose one")
        if self.mixed_precision and self.precision == "fp32":
            raise ConfigurationError("--mixed-precision contradicts --precision fp32: drop one of them")
        if self.masters == "stochastic" and self.optimizer_states != "8bit":
            raise ConfigurationError("--masters stochastic goes with --optimizer-states 8bit alone: give both or none")
        if not self.use_fp4 and (self.fp4_layers != "all" or self.keep is not None):
            raise ConfigurationError("--fp4-layers and --keep say what --use-fp4 is for: add it, or drop them")
        if self.assignment is not None and (self.use_fp4 or self.lora is not None):
            raise ConfigurationError("--assignment says how each linear trains: drop --use-fp4 and --lora")
        if self.fp8_activations and not (self.lora is not None and self.use_fp4):
            said = "rounds what a packed base is multiplied by: add --lora and --use-fp4, or drop it"
            raise ConfigurationError(f"--fp8-activations {said}")
        if self.lora is None and self.merge != "auto":
            raise ConfigurationError("--merge is of adapters and their base: add --lora 16, or drop it")
        if self.lora is not None and self.model is None:
            raise ConfigurationError("--lora trains adapters over a model that is there: give --model FOLDER")
        if self.model is not None and self.architecture:
            raise ConfigurationError("--architecture changes a preset, and --model has its config.json: drop one")
        if self.plan:
            object.__setattr__(self, "vgpu_auto", True)

    @property
    def name(self) -> str:
        """What the run trains, in a word."""
        return Path(self.model).resolve().name if self.model else self.preset

    @property
    def has_disk(self) -> bool:
        """Whether the run's stack has a disk level: only where asked for, for it wears an SSD out."""
        asked = self.vgpu_auto or self.disk_memory is not None or self.disk_path is not None
        return asked and self.disk_memory != 0

    @property
    def update_place(self) -> str | float:
        """``--update`` as `enable_vgpu_stack_optimization` takes it: a place by its name, or a share."""
        return self.update if self.update in PLACES else float(self.update)

    @property
    def tokens_per_step(self) -> int:
        return self.batch_size * self.accumulation_steps * self.seq_length


_COUNTS = {
    "vocab_size": 257, "max_steps": 1, "batch_size": 1, "accumulation_steps": 1, "seq_length": 2, "warmup_steps": 0,
    "max_skipped_steps": 1, "seed": 0, "checkpoint_every": 0, "keep_checkpoints": 1, "eval_every": 0,
    "eval_sequences": 1, "sample_tokens": 0,
}  # fmt: skip

# Low, high, an example. AdamW divides the learning rate by 1 - beta1, in fp32, and multiplies it by the weight decay.
_RANGES: dict[str, tuple[float, float, str]] = {
    "epochs": (1e-6, 1e6, "1"), "learning_rate": (0.0, 1e30, "3e-4"), "min_learning_rate_ratio": (0.0, 1.0, "0.1"),
    "weight_decay": (0.0, 1e6, "0.1"), "beta1": (0.0, 1.0 - 1e-9, "0.9"), "beta2": (0.0, 1.0 - 1e-9, "0.95"),
    "epsilon": (1e-30, 1.0, "1e-8"), "max_grad_norm": (0.0, 1e300, "1"),
}  # fmt: skip

_KINDS = {
    bool: "true or false: write one of them", float: "a number: give one", str: "text: put it in quotes",
    dict: "a mapping: write e.g. '{num_layers: 4}'",
}  # fmt: skip
_TRUE, _FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")


def _checked(name: str, value: Any) -> Any:
    """``value``, typed or as text, as the field has it; text is read as the command line means it."""
    hint = TrainConfig.__dataclass_fields__[name].type
    options, flag = get_args(hint) if isinstance(hint, types.UnionType) else (hint,), flag_of(name)
    if options == (str, int, types.NoneType):
        return None if value is None else parse_bytes(value, flag)
    if value is None and types.NoneType in options:
        return None
    wanted, found = get_origin(options[0]) or options[0], value
    kind = _KINDS.get(wanted) or f"a whole number >= {_COUNTS.get(name)}: give one"
    if wanted is Literal:
        kind = f"one of {', '.join(get_args(hint))}: choose one"
        found = value if value in get_args(hint) else None
    elif isinstance(value, str):
        found = _read(wanted, OLD_PLACES.get(value, value) if name == "update" else value)
    elif type(value) is not wanted:
        found = float(value) if wanted is float and type(value) is int else None
    if wanted is int and found is not None and found < _COUNTS[name]:
        value, found = found, None
    if found is None:
        raise ConfigurationError(f"{flag} {value!r} is not {kind}")
    if wanted is float:
        low, high, example = _RANGES[name]
        if not low <= found <= high:
            wrong = f"{flag} {found!r} is outside {low:g} to {high:g}, or not finite"
            raise ConfigurationError(f"{wrong}: try {flag} {example}")
    return found


def _read(wanted: type, text: str) -> Any:
    """``text`` as a ``wanted``; None where it is none."""
    if wanted is bool:
        return {word: word in _TRUE for word in _TRUE + _FALSE}.get(text.lower())
    if wanted is not dict:
        try:
            return wanted(text)
        except ValueError:
            return None
    import yaml

    try:
        found = yaml.safe_load(text)
    except Exception:  # its own, and what Python raises at a date or a number that is none
        return None
    return found if isinstance(found, dict) and all(map(_is_plain, (*found, *found.values()))) else None


def _is_plain(value: Any) -> bool:
    return not isinstance(value, (list, tuple, dict, set))


def flag_of(field: str) -> str:
    """The command-line flag that sets ``field``."""
    return "--config" if field == "preset" else "--" + field.replace("_", "-")


def field_help() -> dict[str, str]:
    """Each field's docstring, on one line."""
    (body,) = [node.body for node in ast.parse(inspect.getsource(TrainConfig)).body if isinstance(node, ast.ClassDef)]
    return {
        ast.unparse(declared.target): " ".join(str(ast.literal_eval(text.value)).split())
        for declared, text in pairwise(body)
        if isinstance(declared, ast.AnnAssign) and isinstance(text, ast.Expr)
    }


# What decides the numbers: a resumed run may change where bytes live and what is reported, never what is computed.
FIXED = (
    "preset", "architecture", "model", "data", "packing", "tokenizer", "vocab_size", "batch_size",
    "accumulation_steps", "seq_length", "learning_rate", "min_learning_rate_ratio", "warmup_steps", "weight_decay",
    "beta1", "beta2", "epsilon", "max_grad_norm", "seed", "mixed_precision", "precision", "use_fp4", "fp4_layers",
    "keep", "assignment", "fp8_activations", "lora", "optimizer_states", "masters",
)  # fmt: skip


def refuse_changes(config: TrainConfig, stored: dict[str, Any], remedy: str = "drop the flag") -> None:
    """Raises ConfigurationError where a resumed run's settings differ in what decides the numbers."""
    for name in FIXED:
        now, then = getattr(config, name), stored.get(name)
        if name in stored and now != then:
            raise ConfigurationError(
                f"{flag_of(name)} is {now!r}, the run was started with {then!r}: a resumed run computes as it began; "
                f"{remedy}, or start a new run with another --out"
            )


# A preset's recipe. Rates fall with width as practice has it (GPT-3's table). `tiny` is meant to be watched: it learns
# the shape of Python from the standard library's sources in a few minutes on two CPU cores.
_RECIPES: dict[str, dict[str, Any]] = {
    "tiny": {"learning_rate": 3e-3, "beta2": 0.99, "max_steps": 600, "checkpoint_every": 200, "eval_every": 100},
    "small": {"learning_rate": 1e-3, "epochs": 1.0},
    "medium": {"learning_rate": 6e-4, "epochs": 1.0},
    "large": {"learning_rate": 4e-4, "epochs": 1.0},
    "xl": {"learning_rate": 2e-4, "epochs": 1.0, "checkpoint_every": 500},
    "7b": {"learning_rate": 1.5e-4, "epochs": 1.0, "checkpoint_every": 500},
}
RECIPES = {
    name: {"batch_size": PRESET_BATCHES[name][0], "seq_length": PRESET_BATCHES[name][1], **recipe}
    for name, recipe in _RECIPES.items()
}
EXCLUSIVE = ("max_steps", "epochs")


def resolve(flags: dict[str, Any]) -> TrainConfig:
    """The settings that ``flags`` (field to value as given; ``config`` for ``--config``, ``subject`` for what was given
    in place of that or of ``--model``) ask for; ConfigurationError for an unknown preset, file or key, a preset next to
    a model, or a value out of range.
    """
    flags = flags if "subject" not in flags else _with_subject(flags)
    file_values, named = dict[str, Any](), flags.get("config")
    if named in RECIPES:
        if flags.get("model") is not None:
            both = f"--config {named} is a preset's random weights, --model {flags['model']} those of a folder"
            raise ConfigurationError(f"{both}: drop one (a YAML file of settings may stand next to --model)")
        file_values = {"preset": named}
    elif named is not None:
        if Path(named).suffix not in (".yaml", ".yml") and not Path(named).is_file():
            known = f"neither a preset ({', '.join(RECIPES)}) nor a YAML file{nearest(named, RECIPES)}"
            raise ConfigurationError(f"--config {named!r} is {known}")
        file_values = read_yaml(Path(named))
        if file_values.get("preset") is not None and (flags.get("model") or file_values.get("model")) is not None:
            raise ConfigurationError(
                f"{named}: 'preset' is random weights of that shape, and a model is given: drop one of the two"
            )
    flags = {name: value for name, value in flags.items() if name != "config"}
    explicit, stored = file_values | flags, dict[str, Any]()
    if _checked("resume", explicit.get("resume", False)):
        given = {name: explicit[name] for name in ("preset", "model") if explicit.get(name) is not None}
        folder = find_run(_checked("out", explicit.get("out")), given)
        flags["out"] = str(folder)
        found = read_stored_config(folder) or {}  # nothing if it was removed
        stored = {name: value for name, value in found.items() if name in TrainConfig.__dataclass_fields__}
    preset = str(explicit.get("preset", stored.get("preset", TrainConfig.preset)))
    if preset not in RECIPES:
        raise ConfigurationError(f"preset {preset!r} is none of {', '.join(RECIPES)}{nearest(preset, RECIPES)}")
    recipe = RECIPES[preset]
    if explicit.get("model"):
        # It has been trained: a preset's rate would undo that. Adapters begin at zero and bear more.
        recipe = {"learning_rate": 2e-4 if explicit.get("lora") is not None else 2e-5}
    values: dict[str, Any] = {}
    for layer in (recipe, stored, file_values, flags):
        for size in ("batch_size", "seq_length"):
            if layer.get(size) == "auto":  # the switch that it stands for
                layer = {name: value for name, value in layer.items() if name != size} | {f"auto_{size}": True}
            elif layer.get(size) is not None:
                layer = {f"auto_{size}": False} | layer
        if any(layer.get(name) is not None for name in EXCLUSIVE):
            values = {name: value for name, value in values.items() if name not in EXCLUSIVE}
        values |= layer
    return TrainConfig(**values)


def _with_subject(flags: dict[str, Any]) -> dict[str, Any]:
    """``flags`` with their ``subject`` as what it is: ``--config`` of a preset or a YAML file, else ``--model``."""
    subject, others = flags["subject"], {name: value for name, value in flags.items() if name != "subject"}
    is_config = subject in RECIPES or Path(subject).suffix in (".yaml", ".yml")
    name = "config" if is_config else "model"
    if others.get(name) is not None:
        raise ConfigurationError(
            f"vb train {subject} means --{name} {subject}, and {others[name]!r} is given too: drop one"
        )
    if not is_config and "/" not in subject and not Path(subject).exists():
        near = nearest(subject, RECIPES) or nearest_path(Path(subject))
        known = f"neither a preset ({', '.join(RECIPES)}) nor a folder{near}"
        advice = "to train a published model, give the folder or hub id of its weights"
        raise ConfigurationError(f"vb train {subject}: {subject!r} is {known}; {advice}")
    return others | {name: subject}


def read_yaml(path: Path) -> dict[str, Any]:
    """Settings of a YAML file, keys as the flags with '-' or '_'. Raises ConfigurationError."""
    import yaml

    def refused(why: str) -> ConfigurationError:
        return ConfigurationError(f"--config {path}{why}")

    if path.exists() and not (path.is_file() or path.is_fifo()):  # a device may never end
        raise refused(" is no file; give a YAML file")
    try:
        loaded = yaml.safe_load(path.read_text(encoding="utf-8"))
    except Exception as error:  # yaml's, and what Python raises at a file, or a date or a number that is none
        reason = error.strerror if isinstance(error, OSError) else f"not YAML in UTF-8: {' '.join(str(error).split())}"
        raise refused(f": {reason}; give an existing YAML file") from error
    if not isinstance(loaded, (dict, type(None))):
        raise refused(f" holds {type(loaded).__name__}, not keys and values, e.g. 'max_steps: 200'")
    known = [field.name for field in dataclasses.fields(TrainConfig)]
    values = {}
    for key, value in (loaded or {}).items():
        # Not printed before it is known to be plain: a few nested aliases are a text of any length.
        if not all(map(_is_plain, value.values() if isinstance(value, dict) else (value,))):
            raise refused(f": key {key!r} holds a list, or lists or mappings in one: write one value")
        name = str(key).replace("-", "_")
        if name not in known:
            raise refused(f": key {key!r} is no setting: remove or rename it{nearest(name, known)}")
        # As on the command line: a size without a unit.
        values[name] = str(value) if name.endswith("_memory") and type(value) is int else value
    return values
