"""What other estimators say of the same case: bytes on one GPU.

accelerate  `accelerate estimate-memory`: training with Adam takes four times the model in its dtype; activations are not counted.
            Its own function where accelerate is installed.
deepspeed   `estimate_zero2_model_states_mem_needs` (deepspeed/runtime/zero/stage_1_and_2.py) on one GPU without offloading: 4 bytes a
            parameter for weights and gradients in half precision and 16 for fp32 weights, gradients and moments; model states alone.
memtracker  torch.distributed._tools.mem_tracker, which runs the steps on fake CUDA tensors; only where torch has CUDA.
"""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.lib.estimate.cases import Case
from benchmarks.lib.estimate.models import build
from vblackwell.planner.memory_estimate import optimizer_named


def formulas(parameters: int, case: Case) -> dict[str, int]:
    """accelerate's and DeepSpeed's."""
    bytes_each = 2 if case.precision == "bf16" else 4
    return {"accelerate": _accelerate(parameters * bytes_each), "deepspeed": 20 * parameters}


def _accelerate(model_bytes: int) -> int:
    try:
        from accelerate.commands.estimate import estimate_training_usage
    except ImportError:
        return 4 * model_bytes
    usage = estimate_training_usage(model_bytes, "float32")
    return int(max(value for value in usage.values() if value >= 0))


def memtracker(case: Case) -> int:
    """Peak bytes that MemTracker expects of two steps; needs a CUDA build of torch, uses no GPU memory to speak of.

    Raises:
        Exception: whatever the tracker raises on this model.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.mem_tracker import MemTracker

    from benchmarks.lib.estimate.models import materialise

    with FakeTensorMode():
        built = build(case)
        model = materialise(built.model, "cuda")
        optimizer = optimizer_named(case.optimizer)(model.parameters())
        tracker, make = MemTracker(), built.batch("cuda")
        tracker.track_external(model, optimizer)
        with tracker:
            for step in range(2):
                batch = make()
                with torch.autocast("cuda", torch.bfloat16, enabled=case.precision == "autocast"):
                    loss = built.loss(model, batch)
                loss.backward()
                del loss
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
                if step == 0:
                    tracker.reset_mod_stats()
    peak: dict[Any, Any] = tracker.get_tracker_snapshot("peak")
    return max(int(each["Total"]) for device, each in peak.items() if device.type == "cuda")
