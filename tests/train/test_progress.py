"""What a run says while it runs."""

from __future__ import annotations

from dataclasses import replace

from vblackwell.train.metrics import StepRecord
from vblackwell.train.progress import Progress, describe


def record(step, **extra):
    values = {"loss": 1.0, "lr": 0.1, "grad_norm": 2.0, "tokens_per_second": 10.0, "stall_seconds": 0.0}
    return StepRecord(step=step, level_bytes={"arena": 5}, link_bytes={"arena>cpu": 7}, **(values | extra))


def test_both_kinds_of_progress_show_the_numbers(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "100")
    for progress in (Progress(), Progress(live=True)):
        progress.phase("counting", None)
        progress.say("hello [not markup]")
        for step in (1, 2, 3):
            progress.step(record(step, seconds=2.0, skipped=step == 2, **({"val_loss": 4.5} if step == 1 else {})), 3)
        progress.close()
        progress.close()
        said = capsys.readouterr().out
        for part in (
            "counting",
            "hello [not markup]",
            "loss 1.0000",
            "val 4.5",
            "10 tokens/s",
            "fast memory 5 B",
            "SKIPPED",
            "left",
        ):
            assert part in said, (progress._live, part)


def test_a_terminal_s_line_is_redrawn_until_one_stays(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "20")
    monkeypatch.setattr("vblackwell.train.progress.LIVE_SECONDS", 0.0)
    progress = Progress(live=True)
    progress.step(record(1, val_loss=4.5), 3)
    progress.step(record(2), 3)
    assert capsys.readouterr().out.splitlines()[-1] == "step 2/3  loss 1.00"
    progress.say("a line that stays")
    assert capsys.readouterr().out == "\r\x1b[2Ka line that stays\n"
    progress.step(record(2), 3)
    progress.close()
    assert capsys.readouterr().out.endswith("\r\x1b[2K")


def test_a_step_says_nothing_of_what_did_not_happen():
    """A resident run has one place, and nothing moves or waits."""
    held = {"cuda:0": 5, "cpu": 0, "ssd": 0}
    quiet = replace(record(1, seconds=1.0), level_bytes=held, link_bytes={"cpu>cuda:0": 0})
    assert describe(quiet) == "loss 1.0000  10 tokens/s  GPU 5 B"
    moved = {"level_bytes": held | {"cpu": 7, "ssd": 9}, "link_bytes": {"cpu>cuda:0": 2 * 10**9}}
    said = describe(replace(quiet, **moved, stall_seconds=0.5))
    assert said == "loss 1.0000  10 tokens/s  GPU 5 B, RAM 7 B, disk 9 B  moved at 2.00 GB/s  waited 0.50 s for it"
