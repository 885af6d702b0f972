"""Models in one stack: asleep, loading and awake, with the bits of each alone, and nothing left behind."""

from __future__ import annotations

import gc
import itertools
import random
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import psutil
import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests.offload.test_round_trip_models import CONFIGS
from vblackwell.errors import ConfigurationError, FolderMismatch, InsufficientMemory, UnknownKey, Unsupported, VBError
from vblackwell.generate.adapters import save_adapter
from vblackwell.generate.causal_lm import load_causal_lm
from vblackwell.memory.cache.stack import create_vgpu_stack
from vblackwell.memory.transfer import FutureTransfer
from vblackwell.nn.convert.lora import Lora
from vblackwell.serve import opened
from vblackwell.serve.fleet import Fleet
from vblackwell.tools.quantize import quantize_folder

KINDS = ["llama", "qwen2", "gpt2", "mistral", "gemma"]
IDS = torch.randint(3, 96, (1, 9), generator=torch.Generator().manual_seed(4))
KIB = 1 << 10


def made(kind: str, seed: int = 0, **more):
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[kind](**more))
    with torch.no_grad():
        for param in model.parameters():
            if param.dim() > 1:
                param.normal_(std=0.3)
    return model.eval()


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A folder a kind, and its logits."""
    parent = tmp_path_factory.mktemp("models")
    letters = ["<0>", "<1>", "<2>", *sorted(pre_tokenizers.ByteLevel.alphabet())[:90]]
    tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    for seed, kind in enumerate(KINDS):
        made(kind, seed).save_pretrained(parent / kind)
        transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(parent / kind)
    return parent


@pytest.fixture(scope="module")
def expected(folders):
    """The logits of each alone."""
    found = {}
    for kind in KINDS:
        model = transformers.AutoModelForCausalLM.from_pretrained(folders / kind)
        found[kind] = logits(model)
    return found


@torch.no_grad()
def logits(model, ids: torch.Tensor = IDS) -> torch.Tensor:
    return model(ids, use_cache=False).logits


def used(fleet: Fleet) -> list[int]:
    return [level["used_bytes"] for level in fleet.stack.get_stats()["levels"]]


def fleet_of(folders, kinds=KINDS, budget: int | str = "1MiB", **more) -> Fleet:
    return Fleet([folders / kind for kind in kinds], budget=budget, host_memory="32MiB", device="cpu", **more)


def check_random_swaps(folders, expected, count: int) -> None:
    """Bits are each model's own; level 0 holds no more than its budget, and when all sleep nothing; RSS is flat."""
    chosen, process, rss = random.Random(7), psutil.Process(), list[int]()
    with fleet_of(folders, budget="128KiB") as fleet:  # of some 480 KiB
        capacity, all_asleep = fleet.stack.levels[0].capacity_bytes, used(fleet)[1]
        for number in range(count):
            served = fleet.models[chosen.choice(KINDS)]
            served.touch()
            assert torch.equal(logits(served.module), expected[served.name]), (number, served.name)
            assert used(fleet)[0] <= capacity and used(fleet)[1] == all_asleep
            if chosen.random() < 0.1:
                served.sleep()
            if number % (count // 8) == 0:
                gc.collect()
                rss.append(process.memory_info().rss)
        for served in fleet.models.values():
            served.sleep()
        assert used(fleet) == [0, all_asleep]
    half = rss[len(rss) // 2 :]
    assert max(half) <= 1.01 * rss[len(rss) // 4], rss


def test_random_swaps_change_no_bit_and_leave_nothing(folders, expected):
    check_random_swaps(folders, expected, 100)


@pytest.mark.slow
def test_a_thousand_random_swaps(folders, expected):
    check_random_swaps(folders, expected, 1000)


def test_models_of_several_kinds_and_formats_at_once(folders, expected, tmp_path):
    packed = tmp_path / "packed"
    quantize_folder(str(folders / "llama"), str(packed), "nvfp4")
    kinds = [*KINDS, "packed"]
    sources = [folders / kind for kind in KINDS] + [packed]
    with Fleet(sources, budget="256KiB", host_memory="32MiB", device="cpu") as fleet:
        assert [*fleet.models] == kinds
        alone = Fleet([packed], budget="4MiB", host_memory="32MiB", device="cpu")
        expected = expected | {"packed": logits(alone.models["packed"].module)}
        alone.close()
        assert not torch.equal(expected["packed"], expected["llama"])
        for name in [*kinds, *reversed(kinds)]:
            served = fleet.models[name]
            served.touch()
            assert torch.equal(logits(served.module), expected[name]), name
        packed_bytes, plain_bytes = (fleet.models[name].weight_bytes for name in ("packed", "llama"))
        assert packed_bytes < 0.6 * plain_bytes  # embedding and head stay fp32
        llama = fleet.models["llama"]
        assert (llama.dtype, llama.device.type, llama.position_limit) == (torch.float32, "cpu", 64)
        assert llama.end_tokens == {2} and llama.tokenizer is not None and llama.config.hidden_size == 32


def test_a_model_larger_than_the_budget_is_served_streamed(folders, expected):
    with fleet_of(folders, ["llama"], budget="80KiB") as fleet:
        served = fleet.models["llama"]
        assert served.weight_bytes > fleet.stack.levels[0].capacity_bytes
        for _ in range(3):
            served.touch()
            assert torch.equal(logits(served.module), expected["llama"])
            assert served.state == "awake" and not served.weights.engine.bound
            assert used(fleet)[0] <= 80 * KIB
        served.sleep()
        assert served.state == "asleep" and used(fleet)[0] == 0


def test_asleep_loading_awake(folders, expected, monkeypatch):
    """Groups come in the order of use, and states tell how far they are."""
    with fleet_of(folders, ["llama"]) as fleet:
        served, loaded = fleet.models["llama"], list[str]()
        load = served.weights.engine.weights.load
        monkeypatch.setattr(
            served.weights.engine.weights, "load", lambda group: (loaded.append(group.name), load(group))
        )
        assert (served.state, served.progress, served.level0_bytes) == ("asleep", 0.0, 0)
        over = False
        done = FutureTransfer.done
        monkeypatch.setattr(
            "vblackwell.memory.transfer.hold_back", lambda kind: None
        )  # small copies take a thread, too
        monkeypatch.setattr(FutureTransfer, "done", lambda self: over and done(self))
        served.wake()
        assert (served.state, served.progress) == ("loading", 0.0) and served.level0_bytes == served.weight_bytes
        assert loaded == [group.name for group in served.weights.engine.groups]
        over = True
        deadline = time.monotonic() + 10
        while served.state != "awake":
            assert time.monotonic() < deadline, served.progress
        assert torch.equal(logits(served.module), expected["llama"])
        assert len(loaded) == len(served.weights.engine.groups)  # the forward has loaded nothing again
        served.sleep()
        assert (served.state, served.progress, served.level0_bytes) == ("asleep", 0.0, 0)


def test_the_first_forward_runs_while_later_groups_are_on_their_way(folders, expected, monkeypatch):
    """All copies but the first two wait until the first layer has run."""
    with fleet_of(folders, ["llama"]) as fleet:
        served, seen, begun, ran = fleet.models["llama"], list[float](), itertools.count(), threading.Event()

        def look(*_: object) -> None:
            seen.append(served.progress)
            ran.set()

        served.module.model.layers[0].register_forward_hook(look)
        monkeypatch.setattr("vblackwell.memory.transfer.hold_back", lambda kind: next(begun) < 2 or ran.wait(10))
        served.touch()
        assert torch.equal(logits(served.module), expected["llama"])
        assert 0 < seen[0] < 1


@pytest.mark.parametrize("kind", ["llama", "qwen2"])  # the second with its head tied to the embedding
def test_what_the_next_forward_needs_first_stays_longest(folders, kind):
    with fleet_of(folders, [kind]) as fleet:
        weights = fleet.models[kind].weights
        for _ in range(2):  # the first one loads as it runs, and is traced; the second is bound
            logits(fleet.models[kind].module)
        groups = [group.name for group in weights.engine.groups]
        for left in range(len(groups) - 1, -1, -1):
            assert weights.give_way()
            there = filter(weights.engine.weights.is_loaded, weights.engine.groups)
            assert [group.name for group in there] == groups[:left]
        assert not weights.give_way()


@pytest.mark.parametrize("budget", [pytest.param("700KiB", marks=pytest.mark.slow), "350KiB"])
def test_threads_may_run_models_at_once(folders, expected, budget):
    """Whatever sleeps or gives way meanwhile, no group leaves in use."""
    with fleet_of(folders, budget=budget) as fleet:

        def run(seed: int) -> None:
            chosen = random.Random(seed)
            for _ in range(12):
                served = fleet.models[chosen.choice(KINDS)]
                served.touch()
                assert torch.equal(logits(served.module), expected[served.name]), served.name
                if chosen.random() < 0.2:
                    served.weights.drop()

        with ThreadPoolExecutor(3) as pool:
            for future in [pool.submit(run, seed) for seed in range(3)]:
                future.result()
        assert all(served.weights.drop() for served in fleet.models.values()) and used(fleet)[0] == 0


def test_the_longest_unused_gives_way_as_far_as_needed(folders):
    with fleet_of(folders, budget="350KiB") as fleet:
        one, two, three = (fleet.models[kind] for kind in ("llama", "qwen2", "mistral"))
        held = [served.weights.held_bytes for served in (one, two, three)]
        assert held[0] + held[1] < 350 * KIB < sum(held)
        for served in (one, two, three):
            served.touch()
            logits(served.module)
        assert (one.state, two.state, three.state) == ("asleep", "awake", "awake")
        assert 0 < one.level0_bytes < one.weight_bytes  # what nobody needed
        one.touch()
        logits(one.module)
        assert (one.state, two.state, three.state) == ("awake", "asleep", "awake")


def test_pinned_models_are_loaded_at_once_and_stay(folders, expected):
    with fleet_of(folders, budget="208KiB", pin=["llama"]) as fleet:
        pinned = fleet.models["llama"]
        assert pinned.pinned and pinned.level0_bytes == pinned.weight_bytes
        for kind in [*KINDS, *KINDS]:
            fleet.models[kind].touch()
            assert torch.equal(logits(fleet.models[kind].module), expected[kind])
            assert pinned.level0_bytes == pinned.weight_bytes
        assert pinned.state == "awake" and pinned.weights.engine.bound
        with pytest.raises(ConfigurationError, match="'llama' is pinned"):
            pinned.sleep()


def test_preloaded_models_are_awake_at_once(folders):
    with fleet_of(folders, ["llama", "gpt2"], preload=["gpt2"]) as fleet:
        gpt2, llama = fleet.models["gpt2"], fleet.models["llama"]
        assert gpt2.level0_bytes == gpt2.weight_bytes and llama.state == "asleep"


def test_keep_alive_lets_idle_models_sleep(folders):
    with fleet_of(folders, ["llama", "gpt2", "qwen2"], keep_alive=60, pin=["qwen2"]) as fleet:
        llama, gpt2, pinned = (fleet.models[name] for name in ("llama", "gpt2", "qwen2"))
        assert fleet.sleep_idle() is None
        for served in (llama, gpt2):
            served.touch()
        assert 59 < fleet.sleep_idle() <= 60
        llama.weights.engine.budget.last_used -= 61
        pinned.weights.engine.budget.last_used -= 61
        assert 59 < fleet.sleep_idle() <= 60
        assert (llama.state, llama.level0_bytes) == ("asleep", 0) and gpt2.state == "awake" and pinned.state == "awake"
    with fleet_of(folders, ["llama"]) as fleet:
        fleet.models["llama"].touch()
        assert fleet.sleep_idle() is None


def test_pages_and_weights_share_the_budget(folders, expected):
    with fleet_of(folders, ["llama", "gpt2"], budget="400KiB") as fleet:
        llama, gpt2 = fleet.models["llama"], fleet.models["gpt2"]
        for served in (llama, gpt2):
            served.touch()
            logits(served.module)
        pages = fleet.reserve(200 * KIB)
        assert pages.dtype == torch.uint8 and pages.numel() == 200 * KIB and pages.fill_(255).sum() == 255 * 200 * KIB
        assert used(fleet)[0] <= 400 * KIB
        for served in (llama, gpt2, llama):
            served.touch()
            assert torch.equal(logits(served.module), expected[served.name])
            assert used(fleet)[0] <= 400 * KIB
        assert pages.sum() == 255 * 200 * KIB
        with pytest.raises(InsufficientMemory, match="largest layer group of model"):
            fleet.reserve(190 * KIB)
        fleet.release(pages)
        with pytest.raises(UnknownKey):
            fleet.release(pages)
        for served in (llama, gpt2):
            served.touch()
        assert llama.level0_bytes + gpt2.level0_bytes == llama.weight_bytes + gpt2.weight_bytes


def test_what_cannot_be_is_refused_beforehand_with_both_numbers(folders):
    def refused(error: type[VBError], *models, **more) -> str:
        with pytest.raises(error) as caught:
            Fleet(models, **{"budget": "1MiB", "host_memory": "32MiB", "device": "cpu"} | more)
        return str(caught.value)

    llama, gpt2 = folders / "llama", folders / "gpt2"
    said = refused(InsufficientMemory, llama, gpt2, host_memory="100KiB")
    assert "llama 1" in said and "100 KiB are there" in said and "host_memory" in said
    said = refused(InsufficientMemory, llama, gpt2, budget="150KiB", pin=["llama", "gpt2"])
    assert "pinned models need" in said and "150 KiB" in said
    assert "model 'llama'" in refused(InsufficientMemory, llama, budget="8KiB")
    said = refused(InsufficientMemory, llama, gpt2, budget="160KiB", pin=["llama"])
    assert "the largest layer group of model 'gpt2'" in said
    assert "two models are named 'llama'" in refused(ConfigurationError, llama, f"llama={gpt2}")
    for name in ("../up", "a b", "/root", "a/b/c", ""):
        assert "no name of a model" in refused(ConfigurationError, f"{name}={llama}")
    assert "did you mean 'llama'" in refused(ConfigurationError, llama, pin=["lama"])
    assert "preload 'gpt' is no model" in refused(ConfigurationError, llama, preload=["gpt"])
    assert "host_memory is 0" in refused(ConfigurationError, llama, host_memory=0)
    assert "model 'x': " in refused(ConfigurationError, "x=no/such/folder/there")
    assert "keep_alive -1" in refused(ConfigurationError, llama, keep_alive=-1)
    assert "give a folder" in refused(ConfigurationError)


def test_an_error_names_the_model_and_leaves_nothing(folders, tmp_path):
    broken = tmp_path / "broken"
    made("llama").save_pretrained(broken)
    for file in (folders / "llama").glob("tokenizer*"):
        (broken / file.name).write_bytes(file.read_bytes())
    config = (broken / "config.json").read_text()
    (broken / "config.json").write_text(config.replace('"num_hidden_layers": 4', '"num_hidden_layers": 5'))
    with pytest.raises(FolderMismatch, match="model 'broken': .* lacks"):
        fleet_of(tmp_path.parent, [folders / "llama", broken])


def test_names_are_folders_or_given(folders):
    with Fleet(
        [f"owner/chat={folders / 'llama'}", folders / "gpt2"], budget="1MiB", host_memory="32MiB", device="cpu"
    ) as fleet:
        assert [*fleet.models] == ["owner/chat", "gpt2"]


@pytest.fixture(scope="module")
def adapters(folders):
    """Two adapters over llama, of which one has other targets, and the logits with each."""
    base, found = folders / "llama", {}
    for number, lora in enumerate([Lora(2, alpha=8), Lora(4, targets=("q_proj", "down_proj"))]):
        name = f"adapter-{number}"
        with fresh_stack() as stack:
            model = load_causal_lm(base, stack, lora=lora, placement="streamed")
            with torch.no_grad():
                for param in model.parameters():
                    if param.requires_grad:
                        param.copy_(torch.randn(param.shape, generator=torch.Generator().manual_seed(number)))
            save_adapter(model, folders / name)
        with fresh_stack() as stack:
            options = {"trainable": False, "placement": "streamed"}
            found[name] = logits(load_causal_lm(base, stack, adapter=folders / name, **options).eval())
    return found


def fresh_stack():
    return create_vgpu_stack("4MiB", "32MiB", 0, device="cpu")


@pytest.mark.parametrize("budget", ["1MiB", "96KiB"])
def test_adapters_share_their_base(folders, expected, adapters, budget):
    names, expected = ["adapter-0", "llama", "adapter-1"], expected | adapters
    assert not torch.equal(expected["adapter-0"], expected["adapter-1"])
    with fleet_of(folders, [*names, "gpt2"], budget=budget) as fleet:
        assert [*fleet.models] == [*names, "gpt2"]
        assert fleet.models["adapter-0"].adapter == folders / "adapter-0" and fleet.models["llama"].adapter is None
        llama, one, two = (fleet.models[name] for name in ("llama", "adapter-0", "adapter-1"))
        alone = sum(param.nbytes for param in made("llama").parameters())
        assert llama.weights is one.weights is two.weights and alone < one.weight_bytes < 1.3 * alone
        assert used(fleet)[1] < 1.3 * alone + fleet.models["gpt2"].weight_bytes + 64 * KIB  # pages
        for name in [*names, "gpt2", *reversed(names), *names]:
            fleet.models[name].touch()
            assert torch.equal(logits(fleet.models[name].module), expected[name]), name
        assert one.weights.engine.bound if budget == "1MiB" else not one.weights.engine.bound
        assert {llama.state, one.state, two.state} == {"awake"}
        two.sleep()
        assert {llama.state, one.state, two.state} == {"asleep"} and one.level0_bytes == 0
    with fleet_of(folders, names, pin=["adapter-1"]) as fleet:
        assert all(served.pinned for served in fleet.models.values())


def test_a_run_that_wrote_an_adapter_is_served_under_its_own_name(folders, adapters, tmp_path):
    shutil.copytree(folders / "adapter-0", tmp_path / "run" / "adapter")
    with fleet_of(tmp_path, ["run"]) as fleet:
        assert torch.equal(logits(fleet.models["run"].module), adapters["adapter-0"])


def test_pages_get_ram_that_weights_leave(folders):
    """As many bytes as on level 0, at most half of what is there; none without RAM. It goes with the pages."""
    with fleet_of(folders, ["llama"], budget="1MiB") as fleet:
        pages, before = fleet.reserve(100 * KIB), used(fleet)[1]
        sunk = fleet.reserve_ram(pages, 4 * KIB)
        assert sunk is not None and sunk.total == 25 and sunk.is_ready(24) and used(fleet)[1] == before + 100 * KIB
        fleet.release(pages)
        assert used(fleet) == [0, before]
        fleet.stack.reserve("another's", fleet.stack.levels[1].free_bytes - 24 * KIB, 1)
        few = fleet.reserve_ram(fleet.reserve(100 * KIB), 4 * KIB)
        assert few is not None and few.total == 3
        assert fleet.reserve_ram(fleet.reserve(100 * KIB), 16 * KIB) is None
    with Fleet.of_modules({"m": made("llama", 0)}) as fleet:
        fleet.stack.levels[1:] = []
        assert fleet.reserve_ram(fleet.reserve(KIB), 256) is None


def test_close_gives_everything_back(folders):
    fleet = fleet_of(folders)
    for served in fleet.models.values():
        served.touch()
        logits(served.module)
    fleet.reserve_ram(fleet.reserve(KIB), 256)
    stack = fleet.stack
    fleet.close()
    fleet.close()
    assert all(level["used_bytes"] == 0 for level in stack.get_stats()["levels"])


def test_modules_in_memory_are_served_and_come_back(expected):
    plain = {kind: made(kind, seed) for seed, kind in enumerate(KINDS[:3])}
    state = {kind: {name: value.clone() for name, value in model.state_dict().items()} for kind, model in plain.items()}
    with Fleet.of_modules(plain, budget="128KiB", host_memory="32MiB", device="cpu") as fleet:
        for kind in [*plain, *plain]:
            fleet.models[kind].touch()
            assert torch.equal(logits(fleet.models[kind].module), expected[kind])
    for kind, model in plain.items():
        assert all(param.requires_grad and type(param) is torch.nn.Parameter for param in model.parameters())
        assert all(torch.equal(value, state[kind][name]) for name, value in model.state_dict().items())


def test_modules_without_a_budget_stay_where_they_are(expected):
    model = made("llama", 0)
    first = next(model.parameters())
    with Fleet.of_modules({"m": model}) as fleet:
        served = fleet.models["m"]
        served.touch()
        served.wake()
        assert (served.state, served.progress) == ("awake", 1.0)
        assert torch.equal(logits(served.module), expected["llama"]) and next(model.parameters()) is first
        with pytest.raises(Unsupported, match="'m' was given without a budget"):
            served.sleep()
        pages = fleet.reserve(KIB)
        fleet.release(pages)
        assert fleet.sleep_idle() is None
    with pytest.raises(ConfigurationError, match="give budget="):
        Fleet.of_modules({"m": model}, pin=["m"])


@pytest.mark.parametrize(
    ("sizes", "pinned", "expected"),
    [
        ([50], (), 46), ([90], (), 9), ([97], (), 25), ([60, 60], (), 25), ([80, 60], (), 18), ([85, 60], (85,), 14),
        ([30, 30], (), 37),
    ],
)  # fmt: skip
def test_pages_leave_room_for_weights_that_fit(sizes: list[int], pinned: tuple[int, ...], expected: int):
    """In hundredths of level 0: what weights do not take, and a quarter only where it costs no model its place."""
    level = SimpleNamespace(capacity_bytes=100 << 20)
    served = [SimpleNamespace(weights=object(), weight_bytes=size << 20, pinned=size in pinned) for size in sizes]
    stack = SimpleNamespace(levels=[level], level0_device=torch.device("cpu"))
    fleet = SimpleNamespace(stack=stack, models={str(number): each for number, each in enumerate(served)})
    assert opened.cache_bytes(fleet) >> 20 == expected  # type: ignore[arg-type]


def test_a_model_with_texts_does_not_fall_asleep(folders):
    with fleet_of(folders, KINDS[:2], keep_alive=0.0) as fleet:
        for served in fleet.models.values():
            served.touch()
            logits(served.module)
        fleet.sleep_idle({KINDS[0]})
        assert [fleet.models[kind].level0_bytes > 0 for kind in KINDS[:2]] == [True, False]
