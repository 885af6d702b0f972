"""Models that read values of their tensors:
measured in two real steps, which must agree with a trace where there is one.
"""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from torch import nn

from vblackwell.errors import ConfigurationError, InsufficientMemory
from vblackwell.planner import model_spec as model_spec
from vblackwell.planner.estimate import measured as estimate_measured
from vblackwell.planner.estimate.command import estimate_command
from vblackwell.planner.estimate.measured import measure_run
from vblackwell.planner.memory_estimate import NOT_STATE, Run, estimate_trace, peak_of
from vblackwell.planner.model_spec import find_model
from vblackwell.trace.trace import Untraceable
from vblackwell.trace.workspace import CUBLAS_BYTES, CUBLASLT_BYTES

VOCAB, WIDTH = 500, 64
CUBLAS = {*CUBLAS_BYTES.values(), CUBLASLT_BYTES}
COUNT = 2 * VOCAB * WIDTH + WIDTH * WIDTH + WIDTH + VOCAB
SOURCE = f"""
import torch
from torch import nn

class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.inner, _ = nn.Embedding({VOCAB}, {WIDTH}), nn.Linear({WIDTH}, {WIDTH}), None
        self.head = nn.Linear({WIDTH}, {VOCAB})

    def forward(self, ids):
        hidden = torch.relu(self.inner(self.embed(ids)))
        return self.head(self.chosen(hidden))

    def chosen(self, hidden):
        return hidden

class Reading(Plain):
    def chosen(self, hidden):
        return hidden * 2 if hidden.sum().item() > 1e30 else hidden

READY = Plain()

def ready():
    return READY

class Valued(Plain):
    def __init__(self):
        super().__init__()
        self.rate = torch.full((3,), 0.25).sum().item()

class Uncopied(Valued):
    def __deepcopy__(self, memo):
        raise TypeError("there is one of me")

def missing():
    torch.zeros(1).item()
    raise KeyError("no such layer")

class Failing(Plain):
    def chosen(self, hidden):
        raise RuntimeError("not today" if hidden.sum().item() < 1e30 else "never")
"""


@pytest.fixture(autouse=True)
def factories(tmp_path, monkeypatch):
    (tmp_path / "reading_models.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(estimate_measured, "why_no_cuda", lambda gpus: "a test")


def run_of(name: str) -> Run:
    return Run(find_model(f"reading_models:{name}", {}, 32), 32, "adamw-for-loop")


def test_what_is_measured_is_what_a_trace_says_where_there_is_one():
    run = run_of("Plain")
    traced, measured = run.trace(4), measure_run(run, 4)
    assert measured.trace.num_parameters == measured.trace.trainable == COUNT and measured.step_seconds > 0
    told, found = estimate_trace(traced), estimate_trace(measured.trace)
    assert found.weights == told.weights == 4 * COUNT
    # Moments and gradients; counters of steps lie in RAM, which a trace knows and this does not tell apart: 4 bytes a
    # parameter tensor.
    assert peak_of(measured.trace, ("optimizer",)) == pytest.approx(8 * COUNT, abs=64)
    assert peak_of(measured.trace, ("gradients",)) == 4 * COUNT
    # In addition to states; a GPU's cuBLAS keeps workspaces that a CPU does not have, and the CPU's loss has a scalar
    # more or less.
    without_cublas = replace(traced, sizes=tuple(0 if each in CUBLAS else each for each in traced.sizes))
    of_step = [peak_of(each, NOT_STATE, outside="optimizer") for each in (measured.trace, without_cublas)]
    assert of_step[0] == pytest.approx(of_step[1], rel=0.02)


def test_weights_that_were_there_before_are_weights():
    found = estimate_trace(measure_run(run_of("ready"), 4).trace)
    assert found.weights == 4 * COUNT


def test_how_the_weights_came_to_their_type_does_not_count():
    run = replace(run_of("Plain"), optimizer="sgd", precision="bf16")
    found = estimate_trace(measure_run(run, 1).trace)
    assert found.weights == found.gradients == 2 * COUNT and found.allocated < 5 * COUNT


def test_a_model_that_reads_its_tensors_is_measured_and_the_report_says_so(capsys):
    with pytest.raises(Untraceable, match="cannot be traced on tensors without bytes, in phase"):
        run_of("Reading").trace(4)
    arguments = ("reading_models:Reading", None, "1GiB", 4, 32, "adamw", "fp32", False, False, None, None, True)
    assert estimate_command(*arguments) == 0
    out, err = capsys.readouterr()
    report = json.loads(out)
    assert "two real steps are measured instead" in err
    assert report["method"] == "measured on this machine's CPU" and report["parameters"] == COUNT
    assert report["fits"] is True and report["plan"]["largest_batch_size"] is None and report["advice"] == []
    assert "the model cannot be traced" in report["assumptions"][0]


def test_a_factory_that_needs_values_is_built_for_real_and_traced(capsys):
    spec = find_model("reading_models:Valued", {}, 32)
    assert spec.note is not None and "cannot be built on device 'meta' (RuntimeError: " in spec.note
    model = spec.build(torch.float32)
    assert all(param.is_meta for param in model.parameters()) and model.rate == 0.75
    assert replace(run_of("Valued").trace(4), work=()) == replace(run_of("Plain").trace(4), work=())
    arguments = ("reading_models:Valued", None, None, 4, 32, "adamw", "fp32", False, False, None, None, True)
    assert estimate_command(*arguments) == 0
    out, err = capsys.readouterr()
    report = json.loads(out)
    assert report["method"] == "traced" and spec.note == report["assumptions"][0] == err.strip()


def test_runs_of_one_factory_leave_each_other_alone():
    """`vb estimate` asks for its model in bf16 too, and with its layers computed again, before it asks once more."""
    run = run_of("Plain")
    before = run.trace(4)
    narrow = replace(run, precision="bf16")
    assert narrow.trace(4).total("weights") * 2 == before.total("weights") and narrow.model is not run.model
    assert run.trace(4) == before


def test_a_module_that_is_neither_built_nor_copied_on_meta_is_measured(capsys):
    arguments = ("reading_models:Uncopied", None, "1GiB", 4, 32, "adamw", "fp32", False, False, None, None, True)
    assert estimate_command(*arguments) == 0
    out, err = capsys.readouterr()
    report = json.loads(out)
    assert report["method"] == "measured on this machine's CPU" and report["bytes"]["weights"] == 4 * COUNT
    assert "built for real" in err and "there is one of me" in err and "built for real" in report["assumptions"][0]


def test_a_factory_that_cannot_be_built_at_all(monkeypatch):
    with pytest.raises(
        ConfigurationError, match="cannot be built: KeyError: 'no such layer'; on device 'meta': RuntimeError"
    ):
        find_model("reading_models:missing", {}, 32)
    few = replace(model_spec.memory_facts(), available_bytes=COUNT)
    monkeypatch.setattr(model_spec, "memory_facts", lambda: few)
    with pytest.raises(InsufficientMemory, match="for real it takes more than the .* of RAM that were free"):
        find_model("reading_models:Valued", {}, 32)


def test_what_cannot_be_measured_is_refused(monkeypatch):
    with pytest.raises(Untraceable, match="when it is measured, too: RuntimeError: not today"):
        measure_run(run_of("Failing"), 4)
    bare = run_of("Reading")
    with pytest.raises(Untraceable, match="has no factory"):
        measure_run(replace(bare, spec=replace(bare.spec, make=None)), 4)
    with pytest.raises(Untraceable, match="--gpus divides a traced step"):
        arguments = ("reading_models:Reading", "RTX 3090", None, 4, 32, "adamw", "fp32", False, False, None, None, True)
        estimate_command(*arguments, gpus=2)
    facts = estimate_measured.memory_facts()
    few = replace(facts, available_bytes=estimate_measured.RAM_A_PARAMETER * COUNT)
    with monkeypatch.context() as patch:
        patch.setattr(estimate_measured, "memory_facts", lambda: few)
        with pytest.raises(InsufficientMemory, match="smaller --batch-size"):
            measure_run(bare, 64)
    monkeypatch.setattr(estimate_measured, "RAM_A_PARAMETER", 1 << 40)
    with pytest.raises(InsufficientMemory, match="of RAM where"):
        measure_run(bare, 4)


MEASURED_ON_A_GPU = """
from dataclasses import replace
import torch
from tests.planner.estimate.test_measured import run_of_a_large_one
from vblackwell.planner.estimate.measured import measure_run
from vblackwell.planner.memory_estimate import estimate_trace

run = replace(run_of_a_large_one(), capability=torch.cuda.get_device_capability())
measured = measure_run(run, 8, torch.device("cuda", 0))
print(estimate_trace(measured.trace).allocated, torch.cuda.max_memory_allocated())
print(*(phase for _, _, phase in measured.trace.marks))
"""


@pytest.mark.gpu
def test_on_a_gpu_the_allocator_s_own_record_is_replayed(program):
    """In a separate process: what other tests left there would be freed meanwhile, and be missing from the peak."""
    numbers, phases = program(MEASURED_ON_A_GPU).splitlines()[-2:]
    replayed, peak = map(int, numbers.split())
    assert replayed == pytest.approx(peak, rel=0.01)
    assert phases.split() == ["setup", *(2 * ["forward", "backward", "optimizer"]), "setup"]


def run_of_a_large_one() -> Run:
    def make() -> nn.Module:
        return nn.Sequential(nn.Embedding(1000, 512), nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 1000))

    def build(dtype: torch.dtype) -> nn.Module:
        with torch.device("meta"):
            return make().to(dtype)

    def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return nn.functional.cross_entropy(model(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten())

    from vblackwell.planner.model_spec import ModelSpec

    return Run(ModelSpec("large", build, 1000, loss, make), 128)
