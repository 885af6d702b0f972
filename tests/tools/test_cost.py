"""What running costs: sums that can be worked out by hand, and measurements of work of known size."""

import gc
import warnings
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import vblackwell
from vblackwell.tools import cost
from vblackwell.tools.cost import WAITING, Call, bottleneck_of, kind_of, measure, own_times, peak_of, weight_bytes

CPU = torch.device("cpu")


def test_peak_of_changes_in_the_order_of_their_times():
    assert peak_of([]) == 0
    assert peak_of([(3, -100), (1, 100), (2, 50), (4, 20)]) == 150
    assert peak_of([(1, -70), (2, 30)]) == 0, "what was there before and is given back is no peak"


def test_own_times_leave_out_what_is_called_inside():
    calls = [
        Call(1, 0, 100, "a"),
        Call(1, 10, 40, "b"),
        Call(1, 20, 30, "c"),
        Call(1, 40, 60, "b"),
        Call(2, 5, 50, "a"),
    ]
    assert own_times(calls) == {"a": 50 + 45, "b": 20 + 20, "c": 10}
    assert own_times(reversed(calls)) == own_times(calls)
    assert own_times([Call(1, 0, 10, "a"), Call(1, 0, 4, "b"), Call(1, 10, 12, "c")]) == {"a": 6, "b": 4, "c": 2}


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("aten::addmm", "matrix products"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64", "matrix products"),
        ("nvjet_tst_256x128_64x4_1x2_h_bz_coopA_TNT", "matrix products"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", "attention"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7", "attention"),
        ("attend", "attention"),
        ("fp4_mma", "FP4 layers"),
        ("vblackwell::fp4_linear_dx", "FP4 layers"),
        ("aten::_fused_adamw_", "optimizer"),
        ("Memcpy HtoD (Pinned -> Device)", "copies"),
        ("aten::copy_", "copies"),
        ("autograd::engine::evaluate_function: MulBackward0", "autograd"),
        ("aten::mul", "elementwise and reductions"),
        ("void at::native::vectorized_elementwise_kernel<4>", "elementwise and reductions"),
        (WAITING, WAITING),
    ],
)
def test_kinds_of_work(name, kind):
    assert kind_of(name) == kind


def test_a_bottleneck_is_the_largest_kind_and_within_it_the_largest_name():
    found = bottleneck_of({"aten::mm": 3.0, "aten::addmm": 2.0, "aten::mul": 4.0, "aten::copy_": 1.0})
    assert found.shares == {"matrix products": 0.5, "elementwise and reductions": 0.4, "copies": 0.1}
    assert (found.kind, found.name, found.name_share) == ("matrix products", "aten::mm", 0.3)
    found = bottleneck_of({WAITING: 9.0, "aten::mm": 1.0})
    assert (found.kind, found.name) == (WAITING, "")
    assert bottleneck_of({}).kind == "nothing"


def test_weights_that_are_shared_count_once():
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False), nn.BatchNorm1d(8))
    model[1].weight = model[0].weight
    assert weight_bytes(model) == 64 * 4 + 4 * 8 * 4 + 8  # and a count of batches, int64


def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The clock that `measure` reads, in seconds: it stands still but for what a run adds to it."""
    now = [0.0]
    monkeypatch.setattr(cost, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    return now


def test_a_run_is_timed_and_its_allocations_counted(monkeypatch):
    calls, now = [], clock(monkeypatch)

    def run():
        calls.append(None)
        now[0] += 0.02
        a = torch.ones(1 << 20)
        b = a + 1  # 8 MiB at once
        del a
        return b.sum()

    found = measure(run, CPU, repeats=3, warmup=2)
    assert gc.isenabled() and len(calls) == 2 + 3 + 1
    assert found.milliseconds == pytest.approx(20)
    assert 8 << 20 <= found.peak_bytes < (8 << 20) + 4096  # and scalars
    assert sum(found.bottleneck.shares.values()) == pytest.approx(1)
    work = nn.Linear(700, 700)
    x = torch.ones(700, 700)
    assert measure(lambda: work(x), CPU, 1).bottleneck.kind == "matrix products"


def test_the_profiler_of_torch_2_11_has_nothing_to_warn_of(monkeypatch):
    class Profile211(torch.profiler.profile):
        """Warns where torch 2.11's does: as soon as it begins, unless events are kept over cycles."""

        def prepare_trace(self) -> None:
            super().prepare_trace()
            if not self.acc_events:
                warnings.warn("Profiler clears events at the end of each cycle.", stacklevel=2)

    monkeypatch.setattr(cost, "profile", Profile211)
    assert measure(lambda: torch.ones(100) + 1, CPU, 1).peak_bytes > 0


def test_compare_says_what_each_model_takes():
    torch.manual_seed(0)
    wide = nn.Sequential(nn.Linear(64, 4096), nn.Linear(4096, 64))
    narrow = nn.Sequential(nn.Linear(64, 64))
    x = torch.randn(100, 64)
    found = vblackwell.compare(wide, narrow, x, repeats=2)
    assert found.rms == pytest.approx((wide(x) - narrow(x)).square().mean().sqrt().item(), rel=1e-5)  # fp32 sums
    assert found.a.weight_bytes == 4 * (2 * 64 * 4096 + 4096 + 64) and found.b.weight_bytes == 4 * 65 * 64
    assert min(found.a.milliseconds, found.b.milliseconds) > 0
    assert found.a.peak_bytes >= 4 * 100 * 4096 > found.b.peak_bytes >= 4 * 100 * 64
    quick = vblackwell.compare(wide, narrow, x, repeats=0)
    assert quick.a is quick.b is None and quick.rms == found.rms


@pytest.mark.gpu
def test_on_a_gpu_kernels_and_waiting_share_the_time(monkeypatch):
    """By a clock of the host that says how long a run takes: next to other work nobody knows."""
    device, now = torch.device("cuda"), clock(monkeypatch)
    x = torch.ones(4096, 4096, device=device, dtype=torch.bfloat16)
    found = measure(lambda: x @ x, device, 5, 3)  # in no time
    assert found.bottleneck.kind == "matrix products" and found.bottleneck.shares["matrix products"] > 0.9
    assert found.peak_bytes == x.nbytes and found.bottleneck.shares[WAITING] == 0

    def slow():
        now[0] += 1e3
        return x + 1

    found = measure(slow, device, 3)
    assert found.milliseconds == pytest.approx(1e6)
    assert found.bottleneck.kind == WAITING and 0.9 < found.bottleneck.shares[WAITING] < 1
