"""``vb train`` from settings to exit code: look at the machine, prepare, train, export, report.

The order is chosen so that everything that can be refused is refused before the run folder exists.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from vblackwell.data.chat_data import ChatDataset
from vblackwell.errors import ConfigurationError, DiskError, InsufficientMemory
from vblackwell.generate.generate import generate, position_limit
from vblackwell.machine.device import choose_device, make_deterministic, peak_gpu_bytes, refuse_distributed
from vblackwell.offload.api import offload_of
from vblackwell.train.checkpoint import Checkpoints, export_adapter, export_final, finished_step, refuse_full_disk
from vblackwell.train.config import TrainConfig, refuse_changes
from vblackwell.train.metrics import MetricsLog, StepRecord
from vblackwell.train.prepare import Prepared, inspect_data, prepare
from vblackwell.train.profile import tracing
from vblackwell.train.progress import Progress, open_progress
from vblackwell.train.report import compare, make_report, report_lines
from vblackwell.train.runfolder import REPORT, TRACE, RunFolder, default_out, read_stored_config, write_settings
from vblackwell.train.signals import Stopped, StopRequest
from vblackwell.train.trainer import Hooks, Trainer


def train(config: TrainConfig) -> int:
    """Run ``vb train``; the process's exit code.

    Raises:
        VBError: whatever was refused or failed, as one sentence.
    """
    refuse_distributed()
    progress = open_progress()
    with ExitStack() as cleanup:
        cleanup.callback(progress.close)
        if config.inspect_data:
            inspect_data(config, progress)
            return 0
        stop = cleanup.enter_context(StopRequest())
        try:
            return _train(config, progress, stop, cleanup)
        except torch.OutOfMemoryError as error:
            raise InsufficientMemory(
                f"{_first_sentences(error)}; lower --seq-length, add --gradient-checkpointing or --vgpu-auto, or raise "
                "--fast-memory",
                needed_bytes=0,
                available_bytes=0,
            ) from error


def _first_sentences(error: Exception) -> str:
    """torch's "CUDA out of memory. Tried to allocate 32.00 MiB", without the accounting and advice that follow."""
    return str(error).split(". GPU ")[0].replace("memory. Tried", "memory: tried")


def _train(config: TrainConfig, progress: Progress, stop: StopRequest, cleanup: ExitStack) -> int:
    folder = RunFolder(Path(config.out) if config.out else default_out(config.name), config.resume)
    cleanup.callback(folder.release)
    stored = read_stored_config(folder.path) if config.resume else None
    if stored is not None:
        refuse_changes(config, stored)
        config = replace(config, auto_batch_size=False)  # it goes on with what was planned then
    device = choose_device(config.device, progress.say)
    if config.deterministic:
        make_deterministic(device)
    try:
        prepared = prepare(config, device, progress, stop, cleanup)
    except Stopped:
        prepared = None
    if prepared is None or stop.wanted:
        progress.say("stopped before the first step: nothing was written")
        return stop.exit_code
    if config.resume and finished_step(folder.final) == prepared.config.max_steps:
        progress.say(f"{folder.path} has finished its {prepared.config.max_steps} steps already: nothing to do")
        return 0
    refuse_full_disk(folder.path, prepared.parts.model, prepared.config)
    folder.create()
    if stored is None:
        chosen = prepared.config
        planned = {
            name: getattr(chosen, name) for name in ("batch_size", "accumulation_steps", "gradient_checkpointing")
        }
        write_settings(folder, replace(config, **planned).to_dict())
    return _Run(prepared, folder, progress, stop, cleanup).to_the_end()


def printable(text: str) -> str:
    """``text`` without the control characters that a model may write and a terminal would obey."""
    return "".join(char if char.isprintable() or char in "\n\t" else "\ufffd" for char in text)


class _Run:
    """A prepared run in its folder."""

    def __init__(
        self, prepared: Prepared, folder: RunFolder, progress: Progress, stop: StopRequest, cleanup: ExitStack
    ) -> None:
        self.prepared = prepared
        self.folder = folder
        self.progress = progress
        self.stop = stop
        self.cleanup = cleanup
        self.checkpoints = Checkpoints(folder.checkpoints, prepared, progress.say)
        self.losses: dict[str, float] = {}
        self.speeds: list[float] = []

    def to_the_end(self) -> int:
        """Resume if asked, train, export, report; the exit code."""
        config = self.prepared.config
        assert config.max_steps is not None
        state = self.checkpoints.load_newest() if config.resume else None
        if state is not None and state.step > config.max_steps:
            raise ConfigurationError(
                f"the run ends at step {config.max_steps}, and its newest checkpoint is of step {state.step}: raise "
                "--max-steps, or start a new run with another --out"
            )
        trainer = self._make_trainer(0 if state is None else state.step - (state.unrecorded is not None))
        if state is not None:
            trainer.restore(state)
        began = time.perf_counter()
        first_step = trainer.step
        try:
            trainer.run()
        except DiskError as error:
            raise DiskError(f"{error}. To go on: --resume --out {self.folder.path}") from error
        seconds = time.perf_counter() - began
        self.progress.close()
        if self.stop.wanted:
            assert self.stop.signal is not None
            self.progress.say(
                f"stopped by {self.stop.signal.name} after step {trainer.step}: go on with --resume --out "
                f"{self.folder.path}"
            )
            return self.stop.exit_code
        adapter = export_adapter(self.folder.path, self.prepared)
        if adapter is not None:
            self.progress.say(f"adapter: {adapter}")
        export_final(self.folder.path, self.prepared, trainer.state())
        self.progress.say(f"model: {self.folder.final}" + (" (the adapter merged)" if adapter is not None else ""))
        self._report(seconds, trainer.step - first_step)
        self._sample()
        return 0

    def _make_trainer(self, recorded_steps: int) -> Trainer:
        config, parts = self.prepared.config, self.prepared.parts
        metrics = MetricsLog(self.folder.path, recorded_steps, config.tensorboard)
        self.cleanup.callback(metrics.close)
        step_context: Callable[[], Any] = nullcontext
        if config.profile:
            step_context = self.cleanup.enter_context(
                tracing(self.folder.path / TRACE, parts.device, self.progress.say)
            )

        def record(line: StepRecord) -> None:
            metrics.write(line)
            self.speeds.append(line.tokens_per_second)
            for name in ("loss", "val_loss"):
                value = getattr(line, name)
                if value is not None:
                    self.losses.setdefault(f"first_{name}", value)
                    self.losses[f"last_{name}"] = value

        hooks = Hooks(record, self.checkpoints.write, step_context)
        return Trainer(config, parts, self.progress, self.stop, hooks)

    def _sample(self) -> None:
        """What the model writes now: after ``--sample-prompt``, or of conversations, in answer to one that was held
        out.
        """
        config, prepared = self.prepared.config, self.prepared
        tokenizer, held_out = prepared.corpus.tokenizer, prepared.parts.validation
        prompt, answer, talks = "def " if config.sample_prompt is None else config.sample_prompt, "", False
        if isinstance(held_out, ChatDataset) and config.sample_prompt is None:
            (asked, answered), talks = held_out.example(), True
            prompt, answer = tokenizer.decode(asked, skip_special_tokens=False), tokenizer.decode(answered)
        length = max(1, len(tokenizer.encode(prompt, add_special_tokens=not talks).ids))
        limit = position_limit(prepared.parts.model)
        count = config.sample_tokens if limit is None else min(config.sample_tokens, limit - length)
        if count < config.sample_tokens:
            self.progress.say(
                f"sample: {config.sample_tokens} tokens are asked for, the model has room for {max(count, 0)}"
            )
        if count <= 0:
            return
        end = prepared.turn_end
        text = generate(
            prepared.parts.model,
            tokenizer,
            prompt,
            count,
            seed=config.seed,
            ends=() if end is None else (end,),
            special_tokens=not talks,
        )
        what = "sample, in answer to a conversation that was held out" if talks else "sample"
        reference = f"\nthe data answers:\n{printable(answer)}" if talks else ""
        self.progress.say(f"{what}:\n{printable(prompt + text)}{reference}")

    def _report(self, seconds: float, steps: int) -> None:
        config, parts = self.prepared.config, self.prepared.parts
        stats = parts.stack.get_stats()
        engine = offload_of(parts.model)
        assert engine is not None
        run = {
            "steps": steps,
            "seconds": seconds,
            "tokens_per_second": steps * config.tokens_per_step / max(seconds, 1e-9),
            **self.losses,
        }
        report = make_report(
            stats,
            engine.summary(),
            run=run,
            gpu_peak_bytes=peak_gpu_bytes(parts.device),
            process_peak_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        )
        if self.prepared.plan is not None:
            report["plan"] = compare(self.prepared.plan, report, self.speeds)
        self.folder.write_json(REPORT, report)
        self.progress.say("\n".join(report_lines(report)))
