"""``vb train`` from settings to exit code: look at the machine, prepare, train, export, report. Everything that can be
refused is refused before the run folder exists.
"""

import resource
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from vblackwell.data.chat import ChatDataset
from vblackwell.data.corpus import inspect_lines
from vblackwell.errors import ConfigurationError, DiskError, InsufficientMemory
from vblackwell.folders.commit import newest_complete, step_of
from vblackwell.folders.folder import trained_steps
from vblackwell.generate.adapters import adapted
from vblackwell.generate.generate import generate_batch, position_limit
from vblackwell.generate.sampling import Sampling
from vblackwell.machine.device import choose_device, make_deterministic, peak_gpu_bytes, refuse_distributed
from vblackwell.memory.level import level_in_words
from vblackwell.nn.decoder.decoder import Decoder
from vblackwell.offload.api import offload_of
from vblackwell.planner.placement import Plan
from vblackwell.planner.predictions import NUMBERS, keep_prediction
from vblackwell.train.checkpoint import (
    export_adapter,
    export_final,
    exported_step,
    is_finished,
    load_adapter,
    load_newest,
    merged_type,
    newest_intact,
    refuse_full_disk,
    write_checkpoint,
)
from vblackwell.train.config import TrainConfig, refuse_changes
from vblackwell.train.metrics import MetricsLog, StepRecord, level_labels
from vblackwell.train.prepare import Prepared, begin, decide, open_data, prepare, set_up
from vblackwell.train.profile import tracing
from vblackwell.train.progress import Progress, Stopped, StopRequest
from vblackwell.train.runfolder import REPORT, TRACE, RunFolder, default_out, read_stored_config
from vblackwell.train.trainer import Trainer, TrainerState
from vblackwell.units import columns, format_bytes, format_seconds


def train(config: TrainConfig) -> int:
    """Run ``vb train``; the process's exit code. Raises VBError: whatever was refused or failed, as one sentence."""
    refuse_distributed()
    progress = Progress(live=sys.stdout.isatty())
    with ExitStack() as cleanup:
        cleanup.callback(progress.close)
        if config.inspect_data:
            device = choose_device(config.device, progress.say)
            config, found, facts, _ = begin(config, device, cleanup)
            corpus, rows, _ = open_data(config, found, progress, facts)
            progress.say("\n".join(inspect_lines(rows, corpus.tokenizer)))
            return 0
        stop = cleanup.enter_context(StopRequest())
        try:
            if config.plan:
                return _plan(config, progress, stop, cleanup)
            return _train(config, progress, stop, cleanup)
        except torch.OutOfMemoryError as error:
            # torch's "CUDA out of memory. Tried to allocate 32.00 MiB", without the accounting and advice that follow
            said = str(error).split(". GPU ")[0].replace("memory. Tried", "memory: tried")
            said += "; lower --seq-length, add --gradient-checkpointing or --vgpu-auto, or raise --fast-memory"
            raise InsufficientMemory(said, needed_bytes=0, available_bytes=0) from error


def _plan(config: TrainConfig, progress: Progress, stop: StopRequest, cleanup: ExitStack) -> int:
    """Tell the plan alone, of a run that would begin."""
    folder = _folder_of(config)
    folder.refuse_in_use()
    config, _ = _as_begun(config, folder.path)
    if config.max_steps is not None:  # else the data says, which takes long to read
        _refuse_planned_end(folder, config, progress)
    device = choose_device(config.device, progress.say)
    try:
        decided = decide(config, device, progress, stop, cleanup)
    except Stopped:
        progress.say("stopped before the plan was made")
        return stop.exit_code
    if config.max_steps is None:
        _refuse_planned_end(folder, decided.config, progress)
    set_up(decided, device, cleanup)
    model = decided.found.model
    refuse_full_disk(folder.path, model, decided.config)
    if decided.packs and not isinstance(model, Decoder):
        name = type(model).__name__
        progress.say(
            f"not in the plan: whether {name} keeps a row's documents apart, which a run tries with its weights"
        )
    return 0


def _refuse_planned_end(folder: RunFolder, config: TrainConfig, progress: Progress) -> None:
    """Raises what the run would raise at its end, or at checkpoints of which none is intact. A checkpoint that the end
    lets the run go on from is not read: if it is damaged, an older one will do."""
    assert config.max_steps is not None
    complete = newest_complete(folder.checkpoints)
    if not config.resume or (complete and step_of(complete[0]) <= config.max_steps):
        return
    if exported_step(folder.path) != config.max_steps:  # else it has nothing to do
        found = newest_intact(folder.checkpoints, progress.say)
        _refuse_end(folder.path, None if found is None else step_of(found), config)


def _folder_of(config: TrainConfig) -> RunFolder:
    return RunFolder(Path(config.out) if config.out else default_out(config.name), config.resume, config.model)


def _as_begun(config: TrainConfig, folder: Path) -> tuple[TrainConfig, dict[str, Any] | None]:
    """The settings with which a resumed run goes on, and those that it began with; a new run's, and None."""
    stored = read_stored_config(folder) if config.resume else None
    if stored is None:
        return config, None
    refuse_changes(config, stored)
    return replace(
        config, auto_batch_size=False, auto_seq_length=False
    ), stored  # it goes on with what was planned then


def _refuse_end(folder: Path, step: int | None, config: TrainConfig) -> None:
    """Raises ConfigurationError where a resumed run would end before its newest checkpoint, which is of ``step``, or
    has none (None) and has ended elsewhere."""
    assert config.max_steps is not None
    if step is not None and step > config.max_steps:
        raise ConfigurationError(
            f"the run ends at step {config.max_steps}, and its newest checkpoint is of step {step}: raise "
            "--max-steps, or start a new run with another --out"
        )
    if step is None and config.resume and (exported := exported_step(folder)) not in (None, config.max_steps):
        raise ConfigurationError(
            f"{folder} has finished its {exported} steps, and kept no checkpoint to go on from: train what it made "
            "with --model and another --out"
        )


def _train(config: TrainConfig, progress: Progress, stop: StopRequest, cleanup: ExitStack) -> int:
    folder = _folder_of(config)
    cleanup.callback(folder.release)
    if folder.path.is_dir():
        folder.lock()
    config, stored = _as_begun(config, folder.path)
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
    if config.resume and is_finished(folder.path, prepared):
        progress.say(f"{folder.path} has finished its {prepared.config.max_steps} steps already: nothing to do")
        return 0
    if config.resume and (state := load_adapter(folder.path, prepared, progress.say)) is not None:
        return _merge(prepared, folder, progress, stored, state)
    refuse_full_disk(folder.path, prepared.model, prepared.config)
    folder.create()
    settings = _moved(config, stored)
    if stored is None:
        planned = ("batch_size", "accumulation_steps", "gradient_checkpointing", "seq_length", "precision")
        planned += ("vgpu_auto", "auto_batch_size", "auto_seq_length")
        settings = asdict(config) | {name: getattr(prepared.config, name) for name in planned}
    return _run(prepared, folder, settings, progress, stop, cleanup)


def _moved(config: TrainConfig, stored: dict[str, Any] | None) -> dict[str, Any] | None:
    """The settings to be kept of a resumed run that is to end elsewhere than ``stored`` says; None where it is not."""
    ends = {name: getattr(config, name) for name in ("max_steps", "epochs", "merge")}
    if stored is None or all(
        stored.get(name, TrainConfig.__dataclass_fields__[name].default) == value for name, value in ends.items()
    ):
        return None
    return stored | ends


def _merge(
    prepared: Prepared, folder: RunFolder, progress: Progress, stored: dict[str, Any] | None, state: TrainerState
) -> int:
    """Export the finished run's adapter, which the model holds, merged, as ``--merge`` now says; train nothing."""
    export_final(folder.path, prepared, state)
    if stored is not None and stored.get("merge") != prepared.config.merge:  # a later --resume keeps what is there
        folder.write_settings(stored | {"merge": prepared.config.merge})
    progress.say(f"{folder.path} has finished its {state.step} steps already: nothing was trained")
    progress.say(f"model: {folder.final}{_merged_words(prepared)}")
    return 0


def _merged_words(prepared: Prepared) -> str:
    dtype = merged_type(prepared.model, prepared.config)
    return f" (the adapter merged, {str(dtype).removeprefix('torch.')})"


def printable(text: str) -> str:
    """``text`` without the control characters that a model may write and a terminal would obey."""
    return "".join(char if char.isprintable() or char in "\n\t" else "\ufffd" for char in text)


def _run(
    prepared: Prepared,
    folder: RunFolder,
    settings: dict[str, Any] | None,
    progress: Progress,
    stop: StopRequest,
    cleanup: ExitStack,
) -> int:
    """Train to the end; ``settings``: to be kept, from the moment on at which the run is sure to go on."""
    config = prepared.config
    assert config.max_steps is not None
    checkpoints = (folder.checkpoints, prepared, progress.say)
    state = load_newest(*checkpoints) if config.resume else None
    _refuse_end(folder.path, None if state is None else state.step, config)
    if settings is not None:
        folder.write_settings(settings)
    recorded_steps = 0 if state is None else state.step - (state.unrecorded is not None)
    metrics = MetricsLog(folder.path, recorded_steps, config.tensorboard)
    cleanup.callback(metrics.close)
    step_context: Callable[[], Any] = nullcontext
    if config.profile:
        step_context = cleanup.enter_context(tracing(folder.path / TRACE, prepared.device, progress.say))
    losses: dict[str, float] = {}
    steps_seen: list[tuple[float, bool]] = []  # tokens/s, and whether it clipped

    def record(line: StepRecord) -> None:
        metrics.write(line)
        clips = line.grad_norm is not None and 0 < config.max_grad_norm < line.grad_norm
        steps_seen.append((line.tokens_per_second, clips))
        for name, value in (("loss", line.loss), ("val_loss", line.val_loss)):
            if value is not None:
                losses.setdefault(f"first_{name}", value)
                losses[f"last_{name}"] = value

    trainer = Trainer(config, prepared, progress, stop, record, partial(write_checkpoint, *checkpoints), step_context)
    if state is not None:
        trainer.restore(state)
    began, first_step = time.perf_counter(), trainer.now.step
    try:
        trainer.run()
    except DiskError as error:
        raise DiskError(f"{error}. To go on: --resume --out {folder.path}") from error
    seconds, steps = time.perf_counter() - began, trainer.now.step - first_step
    progress.close()
    go_on = f"--resume --out {folder.path}"
    if stop.signal is not None:
        progress.say(f"stopped by {stop.signal.name} after step {trainer.now.step}: go on with {go_on}")
        return stop.exit_code
    merged, adapter, dtype = "", None, merged_type(prepared.model, config)
    if adapted(prepared.model) is not None:
        adapter = export_adapter(folder.path, prepared, trainer.state())
        progress.say(f"adapter: {adapter}")
        merged = _merged_words(prepared)
    if dtype is None:
        later = f"vb train --resume --out {folder.path} --merge bf16"
        progress.say(f"model: not merged; to write with it: vb generate --adapter {adapter}; to merge it: {later}")
        if (step := trained_steps(folder.final)) not in (None, trainer.now.step):
            progress.say(f"{folder.final} is what an earlier --merge made, of step {step}")
    else:
        export_final(folder.path, prepared, trainer.state())
        progress.say(f"model: {folder.final}{merged}")
    engine = offload_of(prepared.model)
    assert engine is not None
    speed = steps * config.tokens_per_step / max(seconds, 1e-9)
    run: dict[str, Any] = {"steps": steps, "seconds": seconds, "tokens_per_second": speed, **losses}
    run["gpu_peak_bytes"] = peak_gpu_bytes(prepared.device)
    run["process_peak_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    report = make_report(prepared.stack.get_stats(), engine.summary(), run)
    if prepared.plan is not None:
        report["plan"] = compare(prepared.plan, report, steps_seen)
        on_gpu = prepared.device.type == "cuda"
        where = torch.cuda.get_device_name(prepared.device) if on_gpu else "CPU"
        keep_prediction(where, prepared.plan.rates, report["plan"])
    folder.write_json(REPORT, report)
    progress.say("\n".join(report_lines(report)))
    _sample(prepared, progress)
    return 0


def _sample(prepared: Prepared, progress: Progress) -> None:
    """What the model writes now: after ``--sample-prompt``, or in answer to a conversation that was held out."""
    config, model = prepared.config, prepared.model
    tokenizer, held_out = prepared.corpus.tokenizer, prepared.validation
    prompt, what, reference, talks = config.sample_prompt, "sample", "", False
    if prompt is None and isinstance(held_out, ChatDataset):
        talks, what = True, "sample, in answer to a conversation that was held out"
        asked, answered = held_out.example()
        prompt = tokenizer.decode(asked, skip_special_tokens=False)
        reference = f"\nthe data answers:\n{printable(tokenizer.decode(answered))}"
    prompt = "def " if prompt is None else prompt
    length = max(1, len(tokenizer.encode(prompt, add_special_tokens=not talks).ids))
    limit = position_limit(model)
    count = config.sample_tokens if limit is None else min(config.sample_tokens, limit - length)
    if count < config.sample_tokens:
        progress.say(f"sample: {config.sample_tokens} tokens are asked for, the model has room for {max(count, 0)}")
    if count > 0:
        ends = () if prepared.turn_end is None else (prepared.turn_end,)
        how: dict[str, Any] = {"seed": config.seed, "ends": ends, "special_tokens": not talks}
        (text,) = generate_batch(model, tokenizer, [prompt], count, Sampling(), **how)
        progress.say(f"{what}:\n{printable(prompt + text)}{reference}")


def make_report(stats: dict[str, Any], summary: dict[str, Any], run: dict[str, Any]) -> dict[str, Any]:
    """The report as plain values, of `VGPUStack.get_stats()`, the engine's `summary()` and what the ``run`` knows."""
    levels = []
    for label, level in zip(level_labels(stats), stats["levels"], strict=True):
        asked = level["hits"] + level["misses"]
        kept = {name: level[name] for name in ("capacity_bytes", "peak_bytes", "hits", "misses")}
        levels.append({"level": label} | kept | {"hit_rate": level["hits"] / asked if asked else None})
    return {
        **run,
        **{name: summary[name] for name in ("placement", "formats", "groups")},
        "bytes_by_kind_and_level": summary["bytes_by_level"],
        "levels": levels,
        "links": stats["links"],
        "host_updates": stats["host_updates"],
        "host_share": summary.get("host_share", ""),
        **{name: summary.get(name, 0) for name in ("graph_bytes", "reserved_before_graphs")},
        "stall_seconds": stats["stall_seconds"],
        "stalled_share": stats["stall_seconds"] / max(run["seconds"], 1e-9),
        "ssd_written_bytes": sum(link["bytes"] for link in stats["links"] if link["destination"].startswith("ssd")),
    }


def compare(plan: Plan, report: dict[str, Any], steps: list[tuple[float, bool]]) -> dict[str, Any]:
    """The plan's choice, and what it predicted next to what ``report`` and the ``steps`` have (tokens/s, and whether
    each clipped): of the GPU what torch reserved, without what graphs of layers hold, or of the arena; of the stack's
    RAM level what it held; the speed of steps that clip where most of them did.
    """
    said, peak = plan.prediction, report["gpu_peak_bytes"]
    steady = steps[2:] or steps  # a run's first steps are slower than the others
    clipped = sum(clips for _, clips in steady) / max(1, len(steady))
    level0, *below = report["levels"]
    reserved = 0 if peak is None else peak["reserved"] - report["graph_bytes"]
    without_graphs = max(reserved, report["reserved_before_graphs"])  # where they found room below an earlier peak
    measured = {
        "gpu_bytes": level0["peak_bytes"] if peak is None else without_graphs,
        "host_bytes": sum(level["peak_bytes"] for level in below if level["level"].startswith("cpu")),
        "tokens_per_second": statistics.median(speed for speed, _ in steady) if steady else None,
    }
    either = said.tokens_per_second, None if said.clipped_seconds is None else said.tokens / said.clipped_seconds
    speed, other = either[::-1] if clipped > 0.5 and either[1] is not None else either
    predicted = zip(measured, (said.gpu, said.host, speed), strict=True)
    return {
        "choice": plan.choice.words(plan.has_gpu),
        **{name: {"predicted": value, "measured": measured[name]} for name, value in predicted},
        "clipped_share": clipped,
        "otherwise_tokens_per_second": other,  # predicted of the other kind of step
    }


_PLACEMENTS = {
    "resident": "weights, gradients and AdamW's states stay there",
    "streamed": "layers pass through it while others wait below",
}


def report_lines(report: dict[str, Any]) -> list[str]:
    """The report as the lines of a table, without what says nothing of this run."""
    streamed = report["placement"] != "resident"
    rows = [("memory", "most used", "of", *(["weights found there"] if streamed else []))]
    for level in report["levels"]:
        if not level["peak_bytes"]:
            continue
        rate = level["hit_rate"]
        sizes = (format_bytes(level["peak_bytes"]), format_bytes(level["capacity_bytes"]))
        share = [] if not streamed else ["" if rate is None or len(rows) > 1 else f"{rate:.1%}"]
        rows.append((level_in_words(level["level"]), *sizes, *share))
    links = [("moved", "bytes", "in")]
    for link in report["links"]:
        name = f"{level_in_words(link['source'])} to {level_in_words(link['destination'])}"
        links.append((name, format_bytes(link["bytes"]), format_seconds(link["seconds"])))
    formats, peak, updates = report["formats"], report["gpu_peak_bytes"], report["host_updates"]
    count, took = updates["parameters"], format_seconds(updates["seconds"])
    on_cpu = f"; {count:,} parameters updated on the CPU in {took}" if count else ""
    lines = [
        *columns(rows, right=range(1, 4)),
        *(["", *columns(links, right=(1, 2))] if report["links"] else []),
        "",
        f"placement: {report['placement']} ({_PLACEMENTS[report['placement']]}), {report['groups']} layer groups",
        f"AdamW: {formats['states']} states, {formats['masters']} masters{on_cpu}",
        *filter(None, [report["host_share"]]),
    ]
    if streamed:
        waited, share = format_seconds(report["stall_seconds"]), report["stalled_share"]
        lines.append(f"time waited for weights, gradients and states to move: {waited}, {share:.1%} of the run")
    if report["ssd_written_bytes"]:
        lines.append(f"written to the SSD: {format_bytes(report['ssd_written_bytes'])}")
    if peak is not None:
        allocated, reserved = format_bytes(peak["allocated"]), format_bytes(peak["reserved"])
        graphs = format_bytes(report["graph_bytes"])
        beside = f", of which CUDA graphs of layers {graphs}, in no plan" if report["graph_bytes"] else ""
        lines.append(f"GPU at the peak, activations included: {allocated} allocated, {reserved} reserved{beside}")
    lines.append(f"process memory (RAM): {format_bytes(report['process_peak_bytes'])} at the peak")
    if "plan" not in report:
        return lines
    found, rows = report["plan"], [("plan", "predicted", "measured", "off by")]
    for name, text in NUMBERS.items():
        said, was = found[name]["predicted"], found[name]["measured"]
        if not said and not was:
            continue
        show = format_bytes if name.endswith("bytes") else "{:,.0f}".format
        rows.append((text, show(said), "-" if was is None else show(was), f"{said / was - 1:+.1%}" if was else "-"))
    lines += ["", *columns(rows, right=(1, 2, 3))]
    other, share = found["otherwise_tokens_per_second"], found["clipped_share"]
    when = "none clips" if share > 0.5 else "steps clip"
    said = [] if other is None else [f"{share:.0%} of the steps clipped; predicted while {when}: {other:,.0f} tokens/s"]
    return lines + said
