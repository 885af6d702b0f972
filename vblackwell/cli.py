"""``vb``: from words on the command line to typed functions.

Every command imports what it needs when it runs, so that ``vb --help`` and a mistyped flag answer at once. A refusal is
one line on standard error and exit code 2; ``--debug`` shows where it came from.
"""

import argparse
import atexit
import fcntl
import gc
import inspect
import io
import os
import pkgutil
import re
import select
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from vblackwell.errors import ConfigurationError, VBError, as_typed, nearest

DEBUG = "--debug"
# torch's profiler and allocators write lines between ours; read when torch is imported.
QUIET = {"KINETO_LOG_LEVEL": "99", "TORCH_CPP_LOG_LEVEL": "ERROR"}
# Bars and notes of other libraries, which are for a terminal.
QUIET_IN_FILES = {
    "HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_VERBOSITY": "error", "TRANSFORMERS_VERBOSITY": "error",
}  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command in ``argv`` (default: the process's arguments); the exit code."""
    has_stdout = _open_closed_streams()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.encoding.lower() not in ("utf-8", "utf8"):
            stream.reconfigure(errors="backslashreplace")
    words = list(sys.argv[1:] if argv is None else argv)
    debug = DEBUG in words
    words = [word for word in words if word != DEBUG]
    if not debug:
        sys.excepthook = _brief
        warnings.formatwarning = _one_line
        for name, level in (QUIET | ({} if sys.stderr.isatty() else QUIET_IN_FILES)).items():
            os.environ.setdefault(name, level)
    try:
        try:
            if not has_stdout or _is_read_only(sys.stdout):
                how = "open for reading alone" if has_stdout else "closed"
                said = f"standard output is {how}, and what the command says would be lost"
                raise ConfigurationError(f"{said}: send it to a file, or to /dev/null")
            code = _dispatch(words)
        except SystemExit as leave:  # --help
            code = leave.code if isinstance(leave.code, int) else int(leave.code is not None)
            if isinstance(leave.code, str):
                _complain(leave.code)
        sys.stdout.flush()  # here, where a reader that has gone is no error, and not while Python ends
        return code
    except VBError as error:
        if debug:
            raise
        _complain(f"vb: error: {as_typed(' '.join(str(error).split()))}")
        return error.exit_code
    except KeyboardInterrupt as interrupt:
        if str(interrupt):  # what is left of what it was doing
            _complain(f"vb: interrupted: {interrupt}")
        return 130
    except BrokenPipeError:
        left = [stream for stream in (sys.stdout, sys.stderr) if _has_no_reader(stream)]
        if not left:
            raise
        for stream in left:
            _drop(stream)  # what read it has gone (`vb estimate ... | head`)
        return 141  # as of a program that SIGPIPE ends
    except OSError as error:
        if debug:
            raise
        if error.filename is not None:  # too long, not ours to read, on a disk that failed: the system says it best
            where, advice = os.fsdecode(error.filename), "check the path, its permissions and its disk"
            where = where if len(where) <= 200 else f"{where[:100]}...{where[-60:]}"
        elif _stdout_is_full():
            where, advice = "what the command says cannot be written", "make room where its output goes"
        else:
            raise
        _complain(f"vb: error: {' '.join(where.split())}: {error.strerror}; {advice}")
        return 2


def _open_closed_streams() -> bool:
    """Whether stdout is open. What is not (`vb ... 2>&-`) becomes the null device: else the next file to be opened
    would get its number, and what libraries print."""
    is_open = getattr(sys, "stdout", None) is not None
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name, None) is None:
            descriptor = os.open(os.devnull, os.O_RDWR)  # the lowest number that is free
            os.set_inheritable(descriptor, True)
            setattr(sys, name, os.fdopen(descriptor, mode))
    return is_open


def _is_read_only(stream: TextIO) -> bool:
    """Whether the shell opened it for reading alone (`vb ... 1< FILE`)."""
    try:
        return fcntl.fcntl(stream.fileno(), fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
    except io.UnsupportedOperation:  # a caller's, which has no descriptor
        return False


def _complain(line: str) -> None:
    """``line`` on stderr, where that takes it."""
    try:
        print(line, file=sys.stderr, flush=True)
    except OSError:
        _drop(sys.stderr)


def _has_no_reader(stream: TextIO) -> bool:
    poll = select.poll()
    poll.register(stream.fileno(), 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def _stdout_is_full() -> bool:
    """Whether stdout takes nothing (`vb estimate ... > FILE` on a full disk); what is left to write is then dropped."""
    try:
        sys.stdout.flush()
        os.write(sys.stdout.fileno(), b"\n")  # where nothing is buffered, nothing is left to fail
    except OSError:
        _drop(sys.stdout)
        return True
    return False


def _drop(stream: TextIO) -> None:
    """What is left to be written to ``stream`` goes nowhere: Python would fail with it while it ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _brief(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """What an error that nobody foresaw looks like; Python exits with 1 after it."""
    text, advice = " ".join(str(error).split()), "please report it with the output of the same command and --debug"
    print(f"vb: internal error: {kind.__name__}: {text}; {advice}", file=sys.stderr)


def _one_line(message: Warning | str, *where: object) -> str:
    """What a warning looks like."""
    return f"vb: warning: {' '.join(str(message).split())}\n"


def _dispatch(words: list[str]) -> int:
    first = words[0] if words else "help"
    if first in ("-h", "--help", "help"):
        lines = "\n".join(f"  {name:<9} {command.summary}" for name, command in COMMANDS.items())
        print(f"usage: vb COMMAND [--debug] ...\n\n{lines}\n\nvb COMMAND --help lists a command's flags.")
        return 0
    if first == "--version":
        from vblackwell import __version__
        from vblackwell.tools.docs import version

        print(version(__version__))
        return 0
    if first not in COMMANDS:
        choice = f"choose one of {', '.join(COMMANDS)}{nearest(first, ('--help', '--version', *COMMANDS))}"
        raise ConfigurationError(f"{first!r} is no command: {choice}")
    if not {"-h", "--help", "--help-all"}.isdisjoint(words):
        print("\n".join(_help(first, "--help-all" in words)))
        return 0
    return COMMANDS[first].run(_parse(make_parser(first), words[1:]))


@dataclass(frozen=True)
class Command:
    """A command of ``vb``; ``run`` is called with what was given, by field name, and returns the exit code. ``groups``
    of its help: a title, and the field that each begins with; ``shown``: fields that ``--help`` is about, if not all.
    """

    summary: str
    add_flags: Callable[[Any], None]
    run: Callable[[dict[str, Any]], int]
    groups: tuple[tuple[str, str], ...] = ()
    shown: tuple[str, ...] = ()


def _help(name: str, everything: bool) -> list[str]:
    """What ``vb NAME --help`` prints, or with ``everything`` ``--help-all``."""
    from vblackwell.tools.usage import usage_lines

    command, actions = COMMANDS[name], make_parser(name)._actions
    defaults = dict[str, str]()
    if name == "train":
        from vblackwell.train.config import RECIPES

        own = {field for recipe in RECIPES.values() for field in recipe}
        values = {action.dest: action.default for action in actions if action.dest in own}
        defaults = {each: "the preset's" + (f", else {of}" if of is not None else "") for each, of in values.items()}
    shown = () if everything else command.shown
    return usage_lines(f"vb {name}", command.summary, actions, command.groups, shown, defaults)


def make_parser(name: str) -> Any:
    """The parser of command ``name``."""
    from jsonargparse import ArgumentParser

    parser = ArgumentParser(
        prog=f"vb {name}",
        description=COMMANDS[name].summary,
        exit_on_error=False,
        allow_abbrev=False,
        formatter_class=argparse.HelpFormatter,
    )
    COMMANDS[name].add_flags(parser)
    return parser


def _parse(parser: Any, words: list[str]) -> dict[str, Any]:
    """The flags that were given, by field name. Raises ConfigurationError."""
    known = {flag for action in parser._actions for flag in action.option_strings}
    for flag in (word.partition("=")[0] for word in words):
        if flag.startswith("--") and flag not in ("--", *known):
            advice = f"see {parser.prog} --help{nearest(flag, known)}"
            raise ConfigurationError(f"{parser.prog} has no flag {flag}: {advice}")
    for flag, word in pairwise(words):
        if flag == "--resume" and not word.startswith("-"):
            from vblackwell.train.runfolder import refuse_folder_after_resume

            refuse_folder_after_resume(word)
    joined = list(words)
    for index in reversed(range(1, len(words))):  # `--flag -8GiB` as one word: a size is refused as a size, no flag
        if re.match(r"-\d", joined[index]) and re.fullmatch(r"--[^=]*", joined[index - 1]):
            joined[index - 1] += f"={joined.pop(index)}"
    try:
        given = parser.parse_args(joined, defaults=False).as_dict()
    except (argparse.ArgumentError, RecursionError) as error:
        nested = isinstance(error, RecursionError)
        said = "a value is nested too deep to be read" if nested else " ".join(str(error).split())
        # For a value of the wrong kind the parser names Python's type and its own key.
        wrong = re.search(r"Parser key \"(\w+)\": Expected an? <class '(int|float)'>\. Got value: (.*)", said)
        if wrong is not None:
            number = "whole number" if wrong[2] == "int" else "number"
            said = f"--{wrong[1].replace('_', '-')} {wrong[3]}: a {number} is needed"
        raise ConfigurationError(f"{parser.prog}: {said}; see {parser.prog} --help") from error
    return {name: value for name, value in given.items() if value is not None}


def _add_switch(parser: Any, flag: str, text: str, default: bool | None = False) -> None:
    from jsonargparse import ActionYesNo

    parser.add_argument(flag, action=ActionYesNo(yes_prefix="", no_prefix="no-"), default=default, help=text)


def _calling(where: str) -> Callable[[dict[str, Any]], int]:
    """What calls ``where``, a module and a function, with what was given and the device that is meant."""

    def run(given: dict[str, Any]) -> int:
        _refuse_out_of_reach(given)
        from vblackwell.machine.device import choose_device

        command = pkgutil.resolve_name(where)
        if "device" in inspect.signature(command).parameters:
            say = partial(print, "vb:", file=sys.stderr)  # stdout is for what other programs read
            given["device"] = choose_device(given.get("device", "auto"), say)
        return command(**given)

    return run


def _refuse_out_of_reach(given: dict[str, Any]) -> None:
    """Raises ConfigurationError for a hub id that is neither here nor to be fetched, before torch is imported."""
    models = [given.get("model"), *(name.partition("=")[2] or name for name in given.get("models", ()))]
    for model in models:
        if model is not None and "/" in model:
            from vblackwell.folders.hub import check_reachable

            check_reachable(model)


MODEL = "Run folder of vb train, Hugging Face folder, or hub id."
DEVICE = "auto, cpu or cuda."


def _train_flags(parser: Any, hidden: bool = False) -> None:
    """All of `TrainConfig`; ``hidden``: those that ``vb estimate MODEL`` takes for a plan, without help."""
    from vblackwell.train.config import TrainConfig, field_help, flag_of

    texts = dict.fromkeys(_of_training(), argparse.SUPPRESS) if hidden else field_help()
    presets = "Preset (tiny, small, medium, large, xl, 7b) or a YAML file of settings; default: tiny."
    if not hidden:
        what = "What to train, in place of --config or --model: a preset, a YAML file, a folder or a hub id."
        parser.add_argument("subject", type=str, nargs="?", metavar="MODEL", help=what)
    for field in fields(TrainConfig):
        if field.name not in texts:
            continue
        flag, text = flag_of(field.name), texts[field.name]
        others = ("--lr",) if field.name == "learning_rate" else ()  # by which everybody calls it
        if field.name == "preset":
            parser.add_argument(flag, type=str, help=presets)
        elif isinstance(field.default, bool) or field.type == (bool | None):
            _add_switch(parser, flag, text, getattr(TrainConfig, field.name))
        else:
            parser.add_argument(flag, *others, type=str, default=field.default, metavar="VALUE", help=text)


def _train(given: dict[str, Any]) -> int:
    from vblackwell.train.config import resolve

    config = resolve(given)
    if config.data is not None:
        from vblackwell.data.documents import check_path

        check_path(Path(config.data))
    _refuse_out_of_reach({"model": config.model})
    from vblackwell.train.run import train  # and torch, where the settings are good

    return train(config)


def _generate_flags(parser: Any) -> None:
    add = parser.add_argument
    add("--model", type=str, help=f"{MODEL} By default the base of --adapter.")
    add("--prompt", type=str, help="Text to continue.")
    add("--prompts", type=str, help="File with a prompt a line; each gets a line of JSON, an empty line none.")
    add("--batch-size", type=int, default=8, help="Prompts of --prompts that are written on at once.")
    add("--prefill-chunk", type=int, help="Tokens of a prompt read in one pass; default: all.")
    add("--max-new-tokens", type=int, default=128, help="Tokens to add.")
    add("--temperature", type=float, default=0.8, help="0 takes the likeliest token each time.")
    add("--top-k", type=int, default=50, help="Draw from this many of the likeliest tokens; 0 for all.")
    add("--top-p", type=float, default=1.0, help="Draw from the fewest tokens of this probability.")
    add("--min-p", type=float, default=0.0, help="Draw from tokens with this share of the likeliest's probability.")
    add("--seed", type=int, default=0, help="Seed of the draws.")
    add("--device", type=str, default="auto", help=DEVICE)
    add("--fast-memory", type=str, help="GPU memory to take, e.g. 8GiB: weights stream through it. Default: all.")
    add("--host-memory", type=str, help="RAM for weights that the GPU has no room for; default: 7/8 of what is free.")
    add("--disk-memory", type=str, help="Disk space for weights that RAM has no room for; default: none.")
    add("--disk-path", type=str, help="Folder on a disk for these.")
    add("--adapter", type=str, help="Folder of a LoRA adapter for the model, of vb train or of peft.")
    _add_switch(parser, "--use-fp4", "Pack linears to nvfp4 while loading. Default: as the base of --adapter was.")
    rounds = "Round what many rows (897 and more) of packed linears take to FP8: faster prompts, other numbers."
    _add_switch(parser, "--fp8-activations", f"{rounds} For mxfp4, to which --use-fp4 then packs.")
    rounds = "The same to FP4, on Blackwell's tensor cores: numbers farther off. For nvfp4 and mxfp4."
    _add_switch(parser, "--fp4-activations", rounds)
    add("--fp4-layers", type=str, default="all", help="all, large, or a regular expression of names.")
    add("--keep", type=str, help="Regular expression for names that --use-fp4 leaves alone in addition.")
    add("--assignment", type=str, help="File with a precision for each linear, as of vb quantize.")
    _add_switch(parser, "--chat", "A prompt is a user's message: the folder's chat template, and the answer alone.")


def _doctor_flags(parser: Any) -> None:
    _add_switch(parser, "--json", "Print the findings as JSON.")
    parser.add_argument("--disk-path", type=str, default=".", help="Folder whose disk is measured.")
    _add_switch(parser, "--predictions", "Print how far plans were from what runs here measured, and measure nothing.")


def _quantize_flags(parser: Any) -> None:
    add = parser.add_argument
    add("--model", type=str, required=True, help=MODEL)
    add("--out", type=str, required=True, help="Folder to make; one that this command made is replaced.")
    add("--format", type=str, default="nvfp4", help="nvfp4, mxfp4, nf4, int4 or int8.")
    add("--scale-search", type=str, default="mse", help="mse (least error) or max (plain scale).")
    add("--block-size", type=int, help="Elements a scale: 32 or 128 for int4; even for int8.")
    add("--pattern", type=str, default="all", help="all, large, or a regular expression of names.")
    add("--keep", type=str, help="Regular expression for names that are left alone, in addition to the head.")
    add("--device", type=str, default="auto", help="Where weights are packed: auto, cpu or cuda.")
    add("--assignment", type=str, help="File of an assignment: packs what is not bf16 there.")
    budget = "Measure which linears bear nvfp4 or two parts: the loss may rise by this, e.g. 0.004."
    add("--budget", type=float, help=budget)
    add("--max-bits", type=float, help="The same for at most this many bits a weight, between 4.5 and 16.")
    add("--calibration", type=str, help="Text to measure on; default: the standard library's sources.")
    _add_switch(parser, "--fp8-activations", "Measure the loss of mxfp4, and of vb generate --fp8-activations on it.")


def _estimate_flags(parser: Any) -> None:
    add = parser.add_argument
    kinds = "Preset, known name, Hugging Face folder, hub id, config.json, or package.module:factory."
    without = "Without one: the largest models for this machine. With --gpu and nothing else of a run, or of a packed "
    without += "folder: every way. With flags that only vb train has: the plan of that run."
    add("model", type=str, nargs="?", help=f"{kinds} {without}")
    add("--gpu-memory", type=str, help="Memory of the GPU, e.g. 8GiB.")
    add("--gpu", type=str, help="Name of a GPU, e.g. 'RTX 3090'; brings its memory.")
    add("--batch-size", type=int, help="Sequences in one forward; default: a preset's of vb train, else 8.")
    longest = "default: a preset's of vb train, else 1024, or what the model learnt if that is less."
    add("--seq-length", type=int, help=f"Tokens in one sequence; {longest}")
    optimizers = "adamw, adamw-fused, adamw-for-loop, sgd, sgd-momentum, adafactor."
    add("--optimizer", type=str, default="adamw", help=optimizers)
    add("--precision", type=str, default="fp32", help="fp32, bf16 or fp16 (weights too), or autocast (to bf16).")
    _add_switch(parser, "--gradient-checkpointing", "Recompute blocks in backward.")
    _add_switch(parser, "--expandable-segments", "As with PYTORCH_ALLOC_CONF=expandable_segments:True.")
    ram = "RAM for an offload stack, e.g. 32GiB; without a model, of the machine."
    add("--host-memory", "--ram", type=str, help=ram)
    add("--disk-memory", "--disk", type=str, help="Disk for an offload stack.")
    add("--gpus", type=int, help="Number of such GPUs: what dividing all states among them (FSDP) makes of it.")
    add("--topology", type=str, default="ring", help="How they are joined: ring, mesh or all_to_all.")
    add("--html", type=str, metavar="FILE", help="Write the estimate as a page as well.")
    _add_switch(parser, "--json", "Print the estimate as JSON.")
    _add_switch(parser, "--list", "Print the models and GPUs that are known by name.")
    _add_switch(parser, "--advice", "Say what would save memory or time; each line costs a trace of the model.", True)
    _train_flags(parser, hidden=True)


def _of_training() -> list[str]:
    """Settings of ``vb train`` that are not ``vb estimate``'s own: with one of them its answer is that run's plan."""
    from vblackwell.train.config import TrainConfig

    own = {"batch_size", "seq_length", "precision", "gradient_checkpointing", "host_memory", "disk_memory"}
    own |= {"preset", "model", "plan", "inspect_data"}
    return [field.name for field in fields(TrainConfig) if field.name not in own]


def _estimate(given: dict[str, Any]) -> int:
    from vblackwell.nn.decoder.config import PRESETS
    from vblackwell.planner.known_models import known_lines, known_name

    if given.pop("list", False):
        print("\n".join(known_lines(PRESETS)))
        return 0
    if "model" in given:
        given["model"] = known_name(given["model"], PRESETS) or given["model"]
    _refuse_out_of_reach(given)
    known = ("gpu", "host_memory", "disk_memory", "json")
    of_a_run = [name for name in given if name not in (*known, "model")]
    if "model" not in given and of_a_run:
        advice = "vb estimate MODEL ..., or only --gpu, --ram and --disk"
        raise ConfigurationError(f"--{of_a_run[0].replace('_', '-')} belongs to a MODEL: {advice}")
    # What is imported stays: looking for garbage among it takes a tenth of the time, and a second when Python ends.
    gc.disable()
    atexit.register(gc.freeze)
    try:
        if "model" not in given or not of_a_run:
            from vblackwell.planner.model_spec import fields_of
            from vblackwell.tools.what_fits import ways_command, what_fits_command

            *values, as_json = map(given.get, known)
            if "model" not in given:
                return what_fits_command(*values, as_json=bool(as_json))
            fields = None if given["model"] in PRESETS else fields_of(given["model"])
            if fields is not None and ("gpu" in given or "quantization_config" in fields):
                return ways_command(given["model"], fields, *values, as_json=bool(as_json))
        if not set(_of_training()).isdisjoint(given):
            from vblackwell.train.plan import plan_command

            return plan_command(given)
        from vblackwell.planner.estimate.command import estimate_command

        given["as_json"] = given.pop("json", False)
        return estimate_command(**given)
    finally:
        gc.enable()


def _bench_flags(parser: Any) -> None:
    add = parser.add_argument
    add("model", type=str, help="Preset, Hugging Face folder, hub id, or run folder of vb train.")
    add("--batch-size", type=int, help="Sequences in a step, and in a pass; default: a preset's of vb train, else 4.")
    add("--seq-length", type=int, help="Tokens in a sequence; default: a preset's of vb train, else 512, or its limit.")
    add("--steps", type=int, default=7, help="Training steps a rung; the first two are not timed.")
    rungs = "all, or some of fp32,bf16,fp4,flash,checkpointing; of a packed folder packed,flash."
    add("--rungs", type=str, default="all", help=rungs)
    add("--phases", type=str, default="all", help="all, training or inference; a packed folder has inference alone.")
    add("--vocab-size", type=int, default=4096, help="Tokens that a preset knows.")
    add("--learning-rate", type=float, default=3e-4, help="Of the training steps.")
    add("--seed", type=int, default=0, help="Of a preset's weights, and of the tokens.")
    add("--device", type=str, default="auto", help=DEVICE)
    add("--json", type=str, metavar="FILE", help="Write the numbers there as well; - prints only them.")


def _serve_flags(parser: Any) -> None:
    add = parser.add_argument
    add("models", type=str, nargs="+", metavar="MODEL", help=f"{MODEL} As name=folder under another name.")
    add("--host", type=str, default="127.0.0.1", help="Address to listen at; another than this machine's needs keys.")
    add("--port", type=int, default=8000, help="Port to listen at; 0 takes a free one.")
    add("--api-key-file", type=str, metavar="FILE", help="Keys, one a line, of which requests must have one.")
    add("--admin-key-file", type=str, metavar="FILE", help="Keys for loading and unloading models.")
    _memory_of_models(add)
    add("--pin", type=str, metavar="NAMES", help="Models, joined by commas, that never leave fast memory.")
    add(
        "--keep-alive", type=float, metavar="SECONDS", help="After which an unused model sleeps in RAM. Default: never."
    )


def _memory_of_models(add: Callable[..., Any]) -> None:
    add("--budget", type=str, help="GPU memory for weights and texts of all models, e.g. 12GiB. Default: what is free.")
    add("--host-memory", type=str, help="RAM for weights and what texts leave; default: 7/8 of what is free.")
    add("--device", type=str, default="auto", help=DEVICE)


def _chat_flags(parser: Any) -> None:
    add = parser.add_argument
    add("model", type=str, help=MODEL)
    add("--system", type=str, help="What the model is told before the conversation.")
    add("--temperature", type=float, default=0.7, help="0 takes the likeliest token each time.")
    add("--top-p", type=float, default=1.0, help="Draw from the fewest tokens of this probability.")
    add("--max-new-tokens", type=int, help="Tokens of an answer; default: as many as the model reads.")
    add("--seed", type=int, help="Seed of the draws; default: another each time.")
    _memory_of_models(add)


def _docs_flags(parser: Any) -> None:
    parser.add_argument("topic", type=str, nargs="?", help="Page to print, e.g. guide; without one: a list of them.")


def _docs(given: dict[str, Any]) -> int:
    from vblackwell.tools.docs import docs_command  # which starts no torch, as `_calling` does

    return docs_command(**given)


# Titles of what --help shows, and the field with which each group begins, in the order of the flags.
TRAIN_GROUPS = (
    ("Model and data", "subject"), ("The run", "out"), ("Batches", "batch_size"), ("Optimizer", "learning_rate"),
    ("Computing", "device"), ("FP4 and adapters", "use_fp4"), ("Memory", "vgpu_auto"),
    ("Checkpoints and reports", "checkpoint_every"),
)  # fmt: skip
TRAIN_SHOWN = (
    "subject", "data", "out", "resume", "max_steps", "batch_size", "seq_length", "learning_rate", "mixed_precision",
    "use_fp4", "lora", "vgpu_auto", "fast_memory", "host_memory",
)  # fmt: skip
GENERATE_GROUPS = (
    ("Model and text", "model"), ("Choice of tokens", "max_new_tokens"), ("Memory", "device"),
    ("Adapters, FP4 and chat", "adapter"),
)  # fmt: skip
GENERATE_SHOWN = (
    "model", "prompt", "prompts", "max_new_tokens", "temperature", "top_k", "seed", "device", "fast_memory",
    "host_memory", "adapter", "use_fp4", "chat",
)  # fmt: skip
SERVE_GROUPS = (("Models", "models"), ("HTTP", "host"), ("Memory", "budget"))
CHAT_GROUPS = (("Model", "model"), ("Answers", "system"), ("Memory", "budget"))
ESTIMATE_GROUPS = (
    ("Model and machine", "model"), ("The run", "batch_size"), ("Memory below the GPU", "host_memory"),
    ("Several GPUs", "gpus"), ("The answer", "html"),
)  # fmt: skip
ESTIMATE_SHOWN = (
    "model", "gpu", "gpu_memory", "batch_size", "seq_length", "precision", "host_memory", "disk_memory", "list", "json",
)  # fmt: skip


DOCTOR = "Look at this machine: what it has, how fast it is, what is missing for what."
BENCH = "Measure what bf16, FP4, fused attention and checkpointing bring a model on this machine."
GENERATE = _calling("vblackwell.generate.command:generate_command")
SERVE = _calling("vblackwell.serve.command:serve_command")
CHAT = _calling("vblackwell.serve.chat:chat_command")
QUANTIZE = _calling("vblackwell.tools.quantize:quantize_command")
COMMANDS = {
    "train": Command(
        "Train a model that may be larger than its fast memory.", _train_flags, _train, TRAIN_GROUPS, TRAIN_SHOWN
    ),
    "generate": Command(
        "Continue a prompt with a trained model.", _generate_flags, GENERATE, GENERATE_GROUPS, GENERATE_SHOWN
    ),
    "serve": Command("Serve models to OpenAI's clients, and to a page to chat.", _serve_flags, SERVE, SERVE_GROUPS),
    "chat": Command("Talk with a model in this terminal.", _chat_flags, CHAT, CHAT_GROUPS),
    "doctor": Command(DOCTOR, _doctor_flags, _calling("vblackwell.tools.doctor:doctor")),
    "estimate": Command(
        "Predict the GPU memory that training a model takes, before a run.",
        _estimate_flags,
        _estimate,
        ESTIMATE_GROUPS,
        ESTIMATE_SHOWN,
    ),
    "quantize": Command("Pack the linears of a Hugging Face folder into FP4 or int8.", _quantize_flags, QUANTIZE),
    "bench": Command(BENCH, _bench_flags, _calling("vblackwell.tools.bench:bench_command")),
    "docs": Command("Print a page of the documentation, which is installed with the package.", _docs_flags, _docs),
}
