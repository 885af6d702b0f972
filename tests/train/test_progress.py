"""What a run says while it runs."""

from __future__ import annotations

from vblackwell.train.metrics import StepRecord
from vblackwell.train.progress import Progress


def record(step, **extra):
    values = {"loss": 1.0, "lr": 0.1, "grad_norm": 2.0, "tokens_per_second": 10.0, "stall_seconds": 0.0}
    return StepRecord(step=step, level_bytes={"arena": 5}, link_bytes={"arena>cpu": 7}, **(values | extra))


def test_both_kinds_of_progress_show_the_numbers(monkeypatch, capsys):
    from vblackwell.train.progress import RichProgress

    monkeypatch.setenv("COLUMNS", "100")
    for progress in (Progress(), RichProgress()):
        progress.phase("counting", None)
        progress.say("hello [not markup]")
        progress.start(0, 3)
        for step in (1, 2, 3):
            progress.step(record(step, seconds=2.0, skipped=step == 2, **({"val_loss": 4.5} if step == 1 else {})))
        progress.close()
        progress.close()
        said = capsys.readouterr().out
        for part in (
            "counting",
            "hello [not markup]",
            "loss 1.0000",
            "val 4.5",
            "10 tokens/s",
            "arena 5 B",
            "SKIPPED",
            "left",
        ):
            assert part in said, (type(progress), part)
