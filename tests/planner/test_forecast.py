"""What each way of training is predicted to take: a small decoder on paper, with an H200's measured rates."""

from __future__ import annotations

import copy
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from vblackwell import VGPUAdamW, create_vgpu_stack, enable_vgpu_stack_optimization, offload_of
from vblackwell.errors import InsufficientMemory
from vblackwell.machine.limits import DISK_THREAD_BYTES
from vblackwell.machine.rates import Rates
from vblackwell.nn.decoder.config import DecoderConfig
from vblackwell.nn.decoder.decoder import Decoder
from vblackwell.offload.layout.forecast import forecast_step
from vblackwell.offload.layout.lanes import simulate
from vblackwell.offload.layout.placement import StreamingOptions
from vblackwell.planner.forecast import Forecast, Machine, Placed
from vblackwell.planner.memory_estimate import P99_BYTES, Run
from vblackwell.planner.model_spec import ModelSpec, of_decoder
from vblackwell.planner.placement import Bounds, Choice, Lacking, Space
from vblackwell.train import auto
from vblackwell.train.config import TrainConfig
from vblackwell.train.prepare import build_stack
from vblackwell.train.run import compare
from vblackwell.units import GiB, MiB

SHAPE = DecoderConfig(4096, 512, 1408, 8, 8, max_position=512)
H200 = Rates(779e12, 50e12, 4.27e12, 55e9, 55e9, 49.6e9, 49.6e9, 1.9e9)
SEQ = 512


@pytest.fixture(scope="module")
def small() -> Forecast:
    """A GPU of 192 MiB, in whose RAM there is plenty of room."""
    run = Run(of_decoder("decoder", SHAPE), SEQ, precision="bf16", capability=(9, 0))
    return Forecast(run, Machine(Bounds(320 * MiB, 8 * GiB), H200, undo=False, may_clip=False))


def on(forecast: Forecast, **changes) -> Forecast:
    """The same model on another machine; its traces are kept."""
    other = copy.copy(forecast)
    other.machine = replace(forecast.machine, **changes)
    return other


def choice(**changes) -> Choice:
    return replace(Choice("streamed", 4, 1, True, activations="host"), **changes)


def test_resident_takes_sixteen_bytes_a_parameter_and_what_a_step_needs(small):
    count = sum(p.numel() for p in small.model.parameters())
    found = on(small, bounds=Bounds(GiB, GiB)).predict(choice(placement="resident", activations="level0"))
    assert not isinstance(found, Lacking)
    sized, prediction = found
    # bf16 weight, remainder, two moments, and at the end of backward fp32 gradients, when the activations are gone.
    assert 16 * count < prediction.gpu < 16 * count + 128 * MiB and prediction.gpu_p99 > prediction.gpu
    assert sized.level0_bytes >= 18 * count and prediction.host == prediction.disk == 0
    lacking = small.predict(choice(placement="resident", activations="level0"))
    assert isinstance(lacking, Lacking) and lacking.num_bytes > 0


def test_checkpointing_and_checkpoints_in_ram_take_less_of_the_gpu(small):
    def step(which: Choice) -> int:
        return small.step_bytes(which, small.trace(which.checkpointing, which.batch_size))

    without, with_it, in_ram = (
        step(choice(checkpointing=False, activations="level0")),
        step(choice(activations="level0")),
        step(choice()),
    )
    assert without > with_it > in_ram
    inputs = 4 * SEQ * 512 * 2  # of a block: tokens, hidden size, bf16
    assert with_it - in_ram == (8 - 5) * inputs  # of eight blocks five stay
    space = Space(((4, 1),), checkpointing=(True,), updates=("device",), activations=("host",))
    plan = small.plan(space)
    assert auto.planned_sizes(plan)["activation_bytes"] == plan.prediction.waiting == 8 * inputs  # set aside in RAM


def test_streaming_fits_where_residing_does_not_and_never_beyond_its_bounds(small):
    for update in ("device", 0.3, "host"):
        found = small.predict(choice(update=update))
        assert not isinstance(found, Lacking)
        sized, prediction = found
        assert prediction.gpu_p99 <= 320 * MiB and sized.level0_bytes <= 320 * MiB
        assert sized.weight_bytes > 0 and prediction.host > 12 * 25e6  # weights, remainders, moments
        assert prediction.step_seconds > 0 and prediction.disk == 0
    tiny = on(small, bounds=Bounds(48 * MiB, 8 * GiB)).predict(choice())
    assert isinstance(tiny, Lacking)


def test_rollback_takes_ram_and_the_links_time(small):
    without = small.predict(choice())
    undo = on(small, undo=True, may_clip=True).predict(choice(), in_full=True)
    assert not isinstance(without, Lacking) and not isinstance(undo, Lacking)
    assert undo[1].host > 1.8 * without[1].host
    assert (
        undo[1].clipped_seconds is not None
        and undo[1].clipped_seconds > undo[1].step_seconds >= without[1].step_seconds
    )


@pytest.mark.parametrize("host", [8 * GiB, 420 * MiB, 300 * MiB])
def test_ways_back_leave_ram_to_the_inputs_of_checkpoints(small, host):
    """They take what is free, group by group, where RAM is short: with the inputs, which come and go, never more than
    there is.
    """
    found = on(small, bounds=Bounds(320 * MiB, host, 8 * GiB), undo=True).predict(choice())
    assert not isinstance(found, Lacking)
    assert found[1].host <= host
    assert host > GiB or found[1].host > host - 8 * MiB  # less than one block's


def test_states_that_ram_cannot_hold_go_to_the_disk(small):
    bounds = Bounds(320 * MiB, 300 * MiB, 8 * GiB)
    found = on(small, bounds=bounds).predict(choice(), in_full=True)
    assert not isinstance(found, Lacking)
    assert found[1].disk > 0 and found[1].disk_written > 0 and found[1].bottleneck == "disk"
    assert found[1].disk_hidden_from is None or found[1].disk_hidden_from > found[1].tokens
    without = on(small, bounds=Bounds(320 * MiB, 300 * MiB)).predict(choice())
    assert isinstance(without, Lacking) and "raise host_memory or disk_memory" in str(without)


@pytest.mark.parametrize(("precision", "micro_batches", "host"), [("fp32", 2, 8.0), ("bf16", 4, 7.0)])
def test_a_disk_is_told_the_bytes_that_a_real_run_moves(tmp_path, precision, micro_batches, host):
    """Where RAM, of so many bytes a parameter, is too short for gradients too:
    norms, sums of several and updates on the host need them.
    """
    shape = DecoderConfig(512, 64, 192, 4, 4, max_position=16)
    model = Decoder(shape, seed=0, device="cpu").train()
    count = sum(p.numel() for p in model.parameters())
    capacities = [12 * count, int(host * count), 60 * count]
    run = Run(of_decoder("decoder", shape), 16, precision=precision)
    dtype = torch.bfloat16 if precision == "bf16" else None
    forecast = Forecast(run, Machine(Bounds(*capacities), H200, has_gpu=False))
    found = forecast.predict(Choice("streamed", 2, micro_batches, False, level0_bytes=capacities[0], update="host"))
    assert not isinstance(found, Lacking)
    placed = forecast.place(found[0])
    assert isinstance(placed, Placed) and placed.step is not None
    told = [sum(getattr(group, way) for group in placed.step.lanes.groups) for way in ("disk_read", "disk_write")]

    with create_vgpu_stack(*capacities, device="cpu", disk_path=str(tmp_path)) as stack:
        enable_vgpu_stack_optimization(model, stack, placement="streamed", update="host", compute_dtype=dtype)
        optimizer = VGPUAdamW(
            model.parameters(), update_in_backward=True, max_grad_norm=1e9, accumulation_steps=micro_batches
        )
        tokens = torch.zeros(2, 16, dtype=torch.int64)

        def moved() -> list[int]:
            for _ in range(micro_batches):
                (model(tokens, tokens) / micro_batches).backward()
            optimizer.step()
            optimizer.zero_grad()
            engine = offload_of(model)
            assert engine is not None
            engine.finish()
            links = stack.get_stats()["links"]
            return [
                sum(link["bytes"] for link in links if link[end].startswith("ssd")) for end in ("source", "destination")
            ]

        before = moved()  # with the states' first bytes
        real = [now - then for now, then in zip(moved(), before, strict=True)]
        assert offload_of(model).storage.plan.bytes_by_level()["gradient"][2] > 0
    assert told == pytest.approx(real, rel=2e-3)  # a group's share is rounded, its ranges begin at multiples of 512
    assert found[1].disk_written == told[1]


def test_updates_on_the_cpu_slow_a_step_that_waits_for_the_host(small):
    def seconds(update: str, **rates) -> float:
        machine = replace(small.machine, rates=replace(H200, issue_seconds=1e-3, **rates))
        other = Forecast(small.run, machine, traces=small.traces)
        found = other.predict(choice(update=update))
        assert not isinstance(found, Lacking)
        return found[1].step_seconds

    assert seconds("device", busy_issues=2.0) == seconds("device")
    # The CPU updates all 33 M parameters in 94 ms at the rate below: for half of that the host stands still.
    slow = {"cpu_adamw": 5e8}
    parameters = sum(p.numel() for p in small.model.parameters())
    more = seconds("host", busy_issues=2.0, **slow) - seconds("host", **slow)
    assert more == pytest.approx(0.5 * parameters / 5e8, rel=0.1)


def test_eight_bit_states_take_a_quarter(small):
    exact, packed = small.predict(choice()), small.predict(choice(states="8bit"))
    assert not isinstance(exact, Lacking) and not isinstance(packed, Lacking)
    assert packed[1].host < 0.6 * exact[1].host and packed[1].step_seconds <= exact[1].step_seconds


def test_the_plan_is_the_fastest_of_what_is_predicted(small):
    space = Space(((4, 1),), updates=("device", 0.2, "host"))
    plan = small.plan(space)
    every = [found for each in space.choices() if not isinstance(found := small.predict(each), Lacking)]
    assert plan.prediction.step_seconds <= 1.006 * min(prediction.step_seconds for _, prediction in every)
    assert plan.prediction.gpu_p99 <= small.machine.bounds.gpu
    large = on(small, bounds=Bounds(4 * GiB, 8 * GiB))
    assert large.plan(space).choice.placement == "resident"
    with pytest.raises(InsufficientMemory, match="no plan fits"):
        none = on(small, bounds=Bounds(16 * MiB, 8 * GiB))
        none.plan(space)


def test_auto_is_the_share_of_a_run_and_where_a_disk_is_used_one_place_for_all_is_tried_too(small):
    space = Space(((4, 1),), (True,), ("streamed",), activations=("level0",))
    (undecided,) = small.choices(space)
    chosen, prediction = small.predict(undecided)
    assert undecided.update == "auto" and isinstance(chosen.update, float)
    assert small.predict(replace(undecided, update=chosen.update)) == (chosen, prediction)
    assert small.least_seconds(undecided) <= prediction.token_seconds
    for ram, tried in ((8 * GiB, ["auto"]), (300 * MiB, ["auto", "host", "device"])):
        with_disk = on(small, bounds=Bounds(320 * MiB, ram, 8 * GiB))
        assert [each.update for each in with_disk.choices(space)] == tried  # as a disk is used, or only there
    assert [each.update for each in on(small, has_gpu=False).choices(space)] == ["host", "device"]
    packed = on(small).choices(replace(space, states=("8bit",)))
    assert [small.predict(each)[0].update for each in packed] == ["device"]


def test_what_cannot_be_counted_is_one_choice_less():
    """The inputs of a model's checkpoints, whose configuration has no hidden size: the other choices are left."""

    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(1000, 256), nn.Linear(256, 1000)
            self.layers = nn.ModuleList(nn.Linear(256, 256) for _ in range(6))

        def gradient_checkpointing_enable(self, **options: object) -> None:
            """As transformers' models have it; what is recomputed does not matter here."""

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = self.embed(tokens)
            for layer in self.layers:
                x = layer(x).relu()
            return self.head(x)

    def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return nn.functional.cross_entropy(model(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten())

    run = Run(ModelSpec("plain", lambda dtype: Plain().to("meta", dtype), 1000, loss), 64, precision="bf16")
    planned = Forecast(run, Machine(Bounds(2 * P99_BYTES + 10 * MiB, GiB), H200)).plan(
        Space(((4, 1),), (True,), ("streamed",))
    )
    assert planned.choice.activations == "level0"
    (said,) = [str(lacking) for choice, lacking in planned.rejected if choice.activations == "host"]
    assert "hidden size of the model is not known" in said


def test_batch_size_auto_keeps_the_sequences_of_a_step(small):
    config = TrainConfig(batch_size=3, accumulation_steps=4, seq_length=SEQ, auto_batch_size=True)
    space = Space(((3, 4),), checkpointing=(True,), updates=("device",), activations=("host",))
    assert auto.batches_of(config, space, small) == ((12, 1), (6, 2), (4, 3), (3, 4), (2, 6), (1, 12))
    one = replace(config, accumulation_steps=1)
    sizes = [size for size, _ in auto.batches_of(one, space, small)]
    assert sizes[1:] == [
        size for size in sorted({sizes[0] // 2, sizes[0] // 4}, reverse=True) if size and size != sizes[0]
    ]
    largest = choice(batch_size=sizes[0])
    assert not isinstance(small.predict(largest), Lacking)
    assert isinstance(small.predict(replace(largest, batch_size=sizes[0] + 1)), Lacking)
    little = on(small, bounds=Bounds(16 * MiB, 8 * GiB))
    each = [
        little.predict(found) for found in replace(space, batches=((1, 1),), activations=("host", "level0")).choices()
    ]
    least = min(lacking.num_bytes for lacking in each if isinstance(lacking, Lacking) and lacking.num_bytes)
    with pytest.raises(InsufficientMemory, match="not one sequence of 512 tokens fits") as caught:
        auto.batches_of(one, replace(space, activations=("host", "level0")), little)
    assert caught.value.needed_bytes == least


def test_a_plan_counts_the_multiprocessors_of_its_own_gpu(monkeypatch):
    """A kernel's workspace goes by them."""
    model, asked = Decoder(DecoderConfig(64, 32, 64, 1, 2, max_position=16), seed=0, device="cpu"), []

    class Asked(Exception):
        pass

    def forecast(run, *rest, **more):
        asked.append(run)
        raise Asked

    properties = SimpleNamespace(multi_processor_count=28)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: {"cuda:1": properties}[str(device)])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: {"cuda:1": (8, 6)}[str(device)])
    monkeypatch.setattr(auto, "_rates_of", lambda device, say: H200)
    monkeypatch.setattr(auto, "bounds_of", lambda config, device: Bounds(MiB, MiB, 0))
    monkeypatch.setattr(auto, "Forecast", forecast)
    with pytest.raises(Asked):
        auto.make_training_plan(TrainConfig(seq_length=16), model, torch.bfloat16, torch.device("cuda", 1), print)
    assert [(run.num_sms, run.capability) for run in asked] == [(28, (8, 6))]


def test_a_run_without_a_gpu_is_planned_and_compared(monkeypatch):
    """The plan's settings are the run's; the model and the generator of the run are left as they were."""
    shape = DecoderConfig(64, 32, 64, 3, 2, max_position=16)
    model = Decoder(shape, seed=0, device="cpu")
    monkeypatch.setattr(auto, "cpu_rates", lambda: replace(H200, matmul_fp32=1e11, memory=1e10, up=5e9, down=5e9))
    config = TrainConfig(vgpu_auto=True, seq_length=16, batch_size=2, fast_memory=256 << 10, host_memory=16 * MiB)
    before, weights = torch.get_rng_state(), [p.detach().clone() for p in model.parameters()]
    said: list[str] = []
    plan = auto.make_training_plan(config, model, None, torch.device("cpu"), said.append)
    assert torch.equal(before, torch.get_rng_state())
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), weights, strict=True))
    applied = auto.apply_plan(config, plan)
    assert (applied.placement, applied.batch_size, applied.activations) == ("streamed", 2, "level0")
    assert plan.bounds.gpu == 256 << 10 and auto.planned_sizes(plan)["weight_bytes"] > 0
    levels = [
        {"level": "arena", "peak_bytes": 60_000},
        {"level": "cpu", "peak_bytes": 400_000},
        {"level": "ssd", "peak_bytes": 7},
    ]
    report = {"gpu_peak_bytes": None, "levels": levels, "graph_bytes": 0, "reserved_before_graphs": 0}
    speeds = [1.0, 2.0, 50.0, 70.0, 60.0]
    found = compare(plan, report, [(speed, False) for speed in speeds])
    assert found["gpu_bytes"]["measured"] == 60_000 and found["host_bytes"]["measured"] == 400_000
    assert found["tokens_per_second"] == {"predicted": plan.prediction.tokens_per_second, "measured": 60.0}
    on_gpu = report | {"gpu_peak_bytes": {"reserved": 70_000}, "graph_bytes": 9_000}  # which are in no plan
    assert compare(plan, on_gpu, [])["gpu_bytes"]["measured"] == 61_000
    assert compare(plan, on_gpu | {"reserved_before_graphs": 65_000}, [])["gpu_bytes"]["measured"] == 65_000
    # One that may clip otherwise: the first two steps do not count, and of three the most decide.
    plan = replace(plan, prediction=replace(plan.prediction, clipped_seconds=2 * plan.prediction.step_seconds))
    usual = plan.prediction.tokens_per_second
    for clips, share, speed, other in (
        ((1, 1, 0, 1, 0), 1 / 3, usual, usual / 2),
        ((0, 0, 1, 1, 0), 2 / 3, usual / 2, usual),
    ):
        found = compare(plan, report, list(zip(speeds, map(bool, clips), strict=True)))
        assert found["clipped_share"] == share and found["otherwise_tokens_per_second"] == pytest.approx(other)
        assert found["tokens_per_second"]["predicted"] == pytest.approx(speed)


def test_a_plan_has_a_disk_where_the_run_will_have_one(tmp_path):
    """A batch alone asks for none: it wears an SSD out."""
    here = torch.device("cpu")
    batch = TrainConfig(auto_batch_size=True, fast_memory=MiB, host_memory=MiB)
    assert auto.bounds_of(batch, here) == Bounds(MiB, MiB, 0)
    asked = ({"vgpu_auto": True}, {"disk_memory": 3 * MiB}, {"disk_path": str(tmp_path)})
    for config in (replace(batch, **each) for each in asked):
        bounds = auto.bounds_of(config, here)
        with build_stack(config, here) as stack:
            assert bounds.disk > 0 and len(stack.levels) == 3
        assert bounds.disk == (config.disk_memory or bounds.disk)


def test_the_turn_comes_before_more_weights(small):
    """Without rollback the first groups get their states onto level 0 before other weights stay,
    and steps that wait for the link are shorter for it.
    """
    links = {name: getattr(H200, name) / 2 for name in ("up", "down", "up_both", "down_both")}
    roomier = on(small, bounds=Bounds(340 * MiB, 8 * GiB), rates=replace(H200, **links))
    sized, kept = roomier.predict(choice(update=0.3))
    assert 0 < sized.resident_bytes < sized.level0_bytes
    assert sized.weight_bytes >= 6 * small.groups(sized)[1].num_bytes
    loaded = replace(sized, resident_bytes=0, weight_bytes=sized.weight_bytes + sized.resident_bytes)
    assert kept.step_seconds < roomier.predict(loaded)[1].step_seconds
    sized, _ = on(roomier, undo=True).predict(choice(update=0.3))
    assert sized.resident_bytes == 0


@pytest.mark.slow
def test_the_2_70b_shape_as_an_h200_ran_it():
    """docs/journal/offload.md, 2026-11-28 (the first one's bytes in the evening, when fewer gradients wait in RAM) and,
    where steps clip and resident, 2026-11-22; 16,384 tokens a step: bytes within 4 %, speed 5 to 8.
    """
    run = Run(
        of_decoder("decoder", DecoderConfig(32000, 2560, 6912, 32, 20, max_position=2048)),
        2048,
        precision="bf16",
        capability=(9, 0),
    )
    beside_copies = 0.7 * 2.02e9  # that was measured alone, and journal/estimate.md says how much of it copies left
    rates = replace(H200, up=55.2e9, up_both=50.4e9, down_both=50.4e9, cpu_adamw=beside_copies)
    forecast = Forecast(run, Machine(Bounds(8 * GiB, 110 * GiB), rates, undo=False, may_clip=False))
    streamed = Choice(
        "streamed", 8, 1, True, update=0.29, activations="host", level0_bytes=8 * GiB, weight_bytes=int(3.1 * GiB)
    )
    found = forecast.predict(streamed)
    assert not isinstance(found, Lacking)
    assert found[1].gpu == pytest.approx(7.51e9, rel=0.04) and found[1].host == pytest.approx(36.69e9, rel=0.01)
    assert found[1].tokens_per_second == pytest.approx(23_303, rel=0.05)
    kept = replace(streamed, weight_bytes=int(0.9 * GiB), resident_bytes=int(2.8 * GiB), update=0.36)
    found = forecast.predict(kept)
    assert not isinstance(found, Lacking)
    assert found[1].gpu == pytest.approx(8.10e9, rel=0.04) and found[1].host == pytest.approx(34.12e9, rel=0.01)
    assert found[1].tokens_per_second == pytest.approx(22_432, rel=0.05)
    clipping = on(forecast, undo=True, may_clip=True).predict(
        replace(streamed, weight_bytes=int(2.6 * GiB), update=0.3), in_full=True
    )
    assert not isinstance(clipping, Lacking) and clipping[1].clipped_seconds is not None
    assert clipping[1].tokens / clipping[1].clipped_seconds == pytest.approx(16_137, rel=0.05)
    resident = on(forecast, bounds=Bounds(80 * GiB, GiB)).predict(Choice("resident", 8, 1, True))
    assert not isinstance(resident, Lacking) and resident[1].gpu == pytest.approx(43.9e9, rel=0.02)
    assert resident[1].tokens_per_second == pytest.approx(25_679, rel=0.08)


def test_the_disk_of_the_largest_model_as_it_was_measured():
    """docs/journal/offload.md: 22 blocks of the 70B shape, 108 GiB of RAM, 52 GB of disk:
    50 GB read and 48 GB written a step.
    """
    config = DecoderConfig(32000, 8192, 28672, 22, 64, 8)
    options = StreamingOptions(
        compute_dtype=torch.bfloat16,
        update="device",
        resident_bytes=95_552_303_923,
        activation_bytes=3_623_878_656,
        weight_bytes=12 * 855_654_400,
    )
    capacities = [int(0.95 * 143_771 * MiB), 108 * GiB, int(52e9)]
    model = Decoder(config, device="meta", dtype=torch.bfloat16)
    lanes = forecast_step(model, capacities, options, {"forward": 0.3, "backward": 0.9}).lanes
    assert sum(group.disk_read for group in lanes.groups) == pytest.approx(50e9, rel=0.06)
    assert sum(group.disk_write for group in lanes.groups) == pytest.approx(48e9, rel=0.03)
    times = simulate(lanes, replace(H200, disk_read=1.75e9, disk_write=1.8e9))
    # Steps of 68 and 90 s, while another run used the same disk, which alone reads and writes at these rates.
    assert max(times.busy, key=times.busy.__getitem__) == "disk" and 50 < times.step_seconds < 68


def test_a_choice_with_a_disk_goes_by_the_measured_disk(small):
    """A GPU whose RAM is short: the disk is asked once it is used, and a slow one sets the step's time."""

    def predicted(gbps: float):
        short = on(small, bounds=Bounds(320 * MiB, 224 * MiB, 8 * GiB), disk=lambda: (gbps * 1e9, gbps * 1e9))
        found = short.predict(choice(update="device"), in_full=True)
        assert not isinstance(found, Lacking), found
        return found[1]

    slow, fast = predicted(0.2), predicted(20.0)
    assert slow.bottleneck == "disk" and slow.step_seconds > 1.5 * fast.step_seconds
    assert slow.disk_written == fast.disk_written > 0 and slow.disk == fast.disk
    assert slow.disk_hidden_from > fast.disk_hidden_from
    assert slow.threads == fast.threads == DISK_THREAD_BYTES > 0
    roomy = on(small, bounds=Bounds(320 * MiB, 8 * GiB, 8 * GiB), disk=lambda: pytest.fail("no disk is used"))
    assert not isinstance(roomy.predict(choice(update="device")), Lacking)


def test_updates_are_not_simulated_for_a_batch_whose_step_does_not_fit(small, monkeypatch: pytest.MonkeyPatch):
    """Which takes seconds on a large model: most of the time of ``vb estimate llama-3-70b --gpu``."""
    forecast = on(small, bounds=Bounds(MiB, 8 * GiB))
    monkeypatch.setattr(forecast, "_updates", lambda *asked: pytest.fail("asked where updates run"))
    found = forecast.place(choice(update="auto", activations="level0"))
    assert isinstance(found, Lacking) and "activations" in str(found)
