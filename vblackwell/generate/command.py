"""``vb generate``: opens what the path means and writes the text to standard output as it comes; of many prompts a line
of JSON each."""

import json
import sys
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vblackwell.errors import ConfigurationError
from vblackwell.folders.chat_prompt import open_chat
from vblackwell.folders.checked import check_lengths, check_tokenizer, check_utf8, prompt_lines
from vblackwell.folders.folder import (
    ADAPTER_CONFIG,
    GENERATION,
    is_hub_id,
    read_config,
    read_json,
    read_tokenizer,
    stored_dtype,
    tensor_files,
)
from vblackwell.folders.weights import check_architecture
from vblackwell.generate.adapters import packed_in_words, trained_over
from vblackwell.generate.generate import Pace, check_chunk, generate_batch
from vblackwell.generate.load import ADAPTER, open_resident, open_streamed, resolve_model
from vblackwell.generate.quantized import Packing
from vblackwell.generate.sampling import Sampling
from vblackwell.machine.device import cap_process
from vblackwell.memory.cache.config import GPU_SHARE
from vblackwell.memory.cache.stack import create_vgpu_stack
from vblackwell.nn.convert.assignment import Assignment
from vblackwell.nn.decoder.config import not_supported_reasons
from vblackwell.nn.linear.packed_linear import rounding
from vblackwell.offload.api import offload_of
from vblackwell.units import parse_bytes


@dataclass(frozen=True)
class Places:
    """Where the weights may be (nothing said: on the device), and as what: sizes of levels, e.g. '8GiB', folder of the
    disk level; ``use_fp4`` packs linears while loading, with ``fp8_activations`` to mxfp4, which is w4a8, as
    ``fp4_activations`` is w4a4 (None: as an adapter's base was packed); folder of an ``adapter``, or of
    the run that wrote it; file of an ``assignment`` of precisions; ``format``: what is packed to, if that is another.
    """

    fast_memory: str | None = None
    host_memory: str | None = None
    disk_memory: str | None = None
    disk_path: str | None = None
    use_fp4: bool | None = None
    fp8_activations: bool = False
    fp4_activations: bool = False
    fp4_layers: str = "all"
    keep: str | None = None
    adapter: str | None = None
    assignment: str | None = None
    format: str | None = None

    def __post_init__(self) -> None:
        run = None if self.adapter is None else Path(self.adapter)
        if run is not None and (run / ADAPTER / ADAPTER_CONFIG).is_file() and not (run / ADAPTER_CONFIG).is_file():
            object.__setattr__(self, "adapter", str(run / ADAPTER))

    @property
    def packs_to(self) -> str:
        return self.format or ("mxfp4" if self.fp8_activations else "nvfp4")

    @property
    def streams(self) -> bool:
        sizes = (self.fast_memory, self.host_memory, self.disk_memory, self.disk_path, self.adapter)
        return bool(self.use_fp4) or any(size is not None for size in sizes)

    def as_trained(self) -> "Places":
        """With the base of the ``adapter`` packed as in its training, where no flag says how."""
        said = self.fp8_activations or self.fp4_activations or self.fp4_layers != Packing.layers or self.keep
        if self.adapter is None or self.use_fp4 is not None or said:
            return self
        _, how = trained_over(Path(self.adapter))
        if not how:
            return self
        print(f"vb: {self.adapter} was trained over its base {packed_in_words(how)}, as here", file=sys.stderr)
        rounds = {"fp8_activations": how.get("w4a8", False), "fp4_activations": how.get("w4a4", False)}
        which = {"fp4_layers": how.get("fp4_layers", Packing.layers), "keep": how.get("keep")}
        return replace(self, use_fp4="fp4" in how, format=how.get("fp4"), **rounds, **which)

    def _fits(self, folder: Path, device: torch.device | str) -> bool:
        """Whether FP4 alone is asked for, of a model that a ``Decoder`` computes and that fits the GPU unpacked."""
        if replace(self, use_fp4=False).streams or torch.device(device).type != "cuda":
            return False
        size = sum(path.stat().st_size for path in tensor_files(folder))
        return size < torch.cuda.mem_get_info(device)[0] * GPU_SHARE and not not_supported_reasons(read_config(folder))

    def open(
        self, folder: Path, device: torch.device | str, rows: int | None, tokens: int, cleanup: ExitStack
    ) -> nn.Module:
        """The model in ``folder`` on ``device``, or in a stack of these sizes, which lasts until ``cleanup``; there for
        several ``rows`` (None: one text), of whose filling transformers' models alone know."""
        rounds = {"w4a8": self.fp8_activations, "w4a4": self.fp4_activations}
        fp4 = self.packs_to if self.use_fp4 else None
        if rows is None and (not self.streams or self._fits(folder, device)):
            assignment = None if self.assignment is None else Assignment.load(self.assignment)
            packing = Packing(fp4, self.fp4_layers, self.keep) if fp4 else None
            return open_resident(folder, device, packing=packing, assignment=assignment, **rounds)
        disk = 0 if self.disk_memory is None and self.disk_path is None else self.disk_memory
        stack = create_vgpu_stack(
            self.fast_memory, self.host_memory, disk, self.disk_path, device=device, cap_process=False
        )
        cleanup.callback(stack.close)
        how: dict[str, Any] = {"fp4_layers": self.fp4_layers, "keep": self.keep, "adapter": self.adapter}
        how |= {"fp4": fp4} | rounds
        model = open_streamed(folder, stack, rows=rows or 1, tokens=tokens, **how)
        engine = offload_of(model)
        if engine is not None:
            cleanup.callback(engine.close)
        return model


def generate_command(
    model: str | None = None,
    prompt: str | None = None,
    max_new_tokens: int = 128,
    temperature: float = 0.8,
    top_k: int = 50,
    top_p: float = 1.0,
    seed: int = 0,
    device: torch.device | str = "cpu",
    min_p: float = 0.0,
    *,
    prompts: str | None = None,
    batch_size: int = 8,
    prefill_chunk: int | None = None,
    chat: bool = False,
    **places: Any,
) -> int:
    """Prints what follows ``prompt``, or for the lines of a file ``prompts`` a line of JSON each, ``batch_size`` at a
    time; 0. Checkpoints passed over are named on standard error. ``model``: as for `resolve_model`, by default the base
    of ``adapter``; ``chat``: a prompt is a user's message, and the answer alone is printed; ``places``: of `Places`;
    the others as in ``generate_batch``. Raises VBError."""
    if (prompt is None) == (prompts is None):
        raise ConfigurationError("vb generate needs --prompt TEXT or --prompts FILE, and not both")
    if batch_size < 1:
        raise ConfigurationError(f"--batch-size {batch_size}: give at least 1")
    check_chunk(prefill_chunk)
    where = Places(**places).as_trained()
    for name in ("fast_memory", "host_memory", "disk_memory"):
        if (size := getattr(where, name)) is not None:
            parse_bytes(size, f"--{name.replace('_', '-')}")
    if model is None:
        model = base_of(where.adapter)
    if torch.device(device).type == "cuda" and where.fast_memory is not None:
        cap_process(torch.device(device), parse_bytes(where.fast_memory, "--fast-memory"))
    if not where.use_fp4 and (where.fp4_layers != "all" or where.keep is not None):
        raise ConfigurationError("--fp4-layers and --keep say what --use-fp4 is for: add it, or drop them")
    if where.assignment is not None and (where.streams or prompts is not None):
        raise ConfigurationError(
            "--assignment packs a model that is all on the device, for one --prompt: drop it, or --prompts, "
            "--use-fp4, --adapter and the memory flags"
        )
    if where.assignment is not None and where.fp8_activations:
        raise ConfigurationError("--assignment packs to nvfp4, and --fp8-activations is for mxfp4: drop one of them")
    if where.fp4_activations and (where.fp8_activations or where.assignment is not None):
        raise ConfigurationError("--fp4-activations goes with neither --fp8-activations nor --assignment: drop one")
    sampling = Sampling(temperature, top_k, top_p, min_p)
    check_utf8("--prompt", prompt or "")
    given, empty = ([("--prompt", prompt)], 0) if prompt is not None else prompt_lines(Path(prompts or ""))
    if empty:
        print(f"vb: --prompts {prompts}: {empty} of its lines are empty and left out", file=sys.stderr)
    folder, problems = resolve_model(model)
    for problem in problems:
        print(f"passed over: {problem}", file=sys.stderr)
    check_architecture(folder)
    if inputs := rounding(where.fp8_activations, where.fp4_activations):
        inputs.check_device(torch.device(device), inputs.FLAG, stored_dtype(folder))
    tokenizer = read_tokenizer(folder)
    check_tokenizer(folder, tokenizer)
    settings = folder / GENERATION
    stated = read_json(settings).get("eos_token_id") if settings.is_file() else None
    ends = {number for number in (stated if isinstance(stated, list) else [stated]) if isinstance(number, int)}
    texts = [text for _, text in given]
    if chat:
        talk = open_chat(folder, None if where.adapter is None else Path(where.adapter))
        texts, end = [talk.prompt(text) for text in texts], talk.turn_end(tokenizer)
        ends |= set() if end is None else {end}
    lengths = [len(tokenizer.encode(text, add_special_tokens=not chat).ids) for text in texts]
    check_lengths(folder, ((place, length) for (place, _), length in zip(given, lengths, strict=True)), max_new_tokens)
    pace = Pace()
    before = [] if chat else texts[:1]

    def show(text: str) -> None:
        print(*before, text, sep="", end="", flush=True)
        before.clear()  # the prompt comes with the first text: an error before it leaves standard output empty

    with ExitStack() as cleanup:
        alone = prompts is None
        rows = None if alone else min(batch_size, len(texts))
        opened = where.open(folder, device, rows, max(lengths) + max_new_tokens, cleanup)
        if inputs:
            packed = f"linears are packed to {where.packs_to}, and " if where.use_fp4 else ""
            print(f"vb: {inputs.FLAG}: {packed}{inputs.SUMMARY}", file=sys.stderr)
        options: dict[str, Any] = {"ends": ends, "special_tokens": not chat, "pace": pace}
        options["on_token"] = show if alone else None
        for start in range(0, len(texts), batch_size):
            part = slice(start, start + batch_size)
            new = generate_batch(
                opened, tokenizer, texts[part], max_new_tokens, sampling, seed, prefill_chunk, **options
            )
            if alone:
                print(*before, sep="")
                continue
            for (_, text), written in zip(given[part], new, strict=True):
                print(json.dumps({"prompt": text, "text": written}, ensure_ascii=False), flush=True)
        if sys.stderr.isatty():
            engine = offload_of(opened)
            print(pace.line(None if engine is None else engine.stack.levels[0].peak_bytes), file=sys.stderr)
    return 0


def base_of(adapter: str | None) -> str:
    """The model that the folder ``adapter`` says it is for; ConfigurationError where that is not known or not there."""
    if adapter is None:
        raise ConfigurationError("vb generate needs --model, or an --adapter, which names its base")
    named, _ = trained_over(Path(adapter))
    if named is None or not (Path(named).is_dir() or is_hub_id(named)):
        said = "names no base" if named is None else f"names the base {named}, which is not there"
        raise ConfigurationError(f"{Path(adapter) / ADAPTER_CONFIG} {said}: give the folder of its weights as --model")
    return named
