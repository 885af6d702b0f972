"""metrics.jsonl of a resumed run."""

from __future__ import annotations

from vblackwell.train.metrics import MetricsLog, StepRecord, cut_after, read_metrics


def record(step, **extra):
    values = {"loss": 1.0, "lr": 0.1, "grad_norm": 2.0, "tokens_per_second": 10.0, "stall_seconds": 0.0}
    return StepRecord(step=step, level_bytes={"arena": 5}, link_bytes={"arena>cpu": 7}, **(values | extra))


def test_metrics_are_cut_at_the_checkpoint(tmp_path):
    log = MetricsLog(tmp_path, 0, tensorboard=False)
    for step in range(1, 6):
        log.write(record(step, **({"val_loss": 3.0} if step == 2 else {}), **({"loss": None} if step == 4 else {})))
    log.close()
    path = tmp_path / "metrics.jsonl"
    path.write_text(path.read_text() + '{"step": 6, "lo')  # killed in the middle of a line
    lines = read_metrics(path)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5] and lines[3]["loss"] is None
    assert [("val_loss" in line) for line in lines] == [False, True, False, False, False]
    log = MetricsLog(tmp_path, 3, tensorboard=False)
    log.write(record(4))
    log.close()
    assert [line["step"] for line in read_metrics(path)] == [1, 2, 3, 4]
    cut_after(tmp_path / "gone.jsonl", 3)
