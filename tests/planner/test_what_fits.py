"""What a machine trains, adapts and runs, on models that are small enough to try all of them."""

from __future__ import annotations

import itertools
import json
import shlex
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from vblackwell.cli import main
from vblackwell.errors import ConfigurationError, Unsupported
from vblackwell.machine.facts import GPUFacts, MemoryFacts
from vblackwell.machine.gpus import find_gpu
from vblackwell.machine.limits import HOST_SHARE, HYPOTHETICAL_BYTES
from vblackwell.machine.rates import Rates, assumed_rates
from vblackwell.planner import model_spec, what_fits
from vblackwell.planner.forecast import Machine
from vblackwell.planner.known_models import KNOWN_MODELS
from vblackwell.planner.memory_estimate import Run
from vblackwell.planner.placement import Bounds, Lacking
from vblackwell.planner.what_fits import MIN_SPEED, Fit, WhatFits, row_of
from vblackwell.tools import what_fits as what_fits_command
from vblackwell.trace.causal_lm import build_causal_lm
from vblackwell.units import GiB, MiB

NAMES = (
    "tiny-a",
    "tiny-b",
    "tiny-c",
)  # widths 64, 128 and 256 of two blocks: half, one and a half, and four and a half M parameters


@pytest.fixture(autouse=True, scope="module")
def small_models() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, width in zip(NAMES, (64, 128, 256), strict=True):
            fields = {
                "model_type": "llama", "vocab_size": 4096, "hidden_size": width, "intermediate_size": 4 * width,
                "num_hidden_layers": 2, "num_attention_heads": 4, "tie_word_embeddings": False,
                "max_position_embeddings": 2048,
            }  # fmt: skip
            patch.setitem(KNOWN_MODELS, name, fields)
        patch.setattr(what_fits, "SEQ_LENGTH", 64)
        patch.setattr(what_fits, "BATCHES", ((2, 1), (1, 2)))
        yield


@pytest.fixture(scope="module")
def known(small_models: None) -> WhatFits:
    """Asked by several tests, so that a trace of the model is made once."""
    return WhatFits(("tiny-c",))


def rates(**more: float) -> Rates:
    return replace(assumed_rates(find_gpu("RTX 3060")), **more)


def place(gpu: float, host: float = 8 * GiB, disk: float = 0, **more: float) -> Machine:
    return Machine(Bounds(int(gpu), int(host), int(disk)), rates(**more), capability=(8, 6))


def test_the_largest_and_the_largest_that_stays():
    answers = WhatFits(NAMES[1:])
    roomy = answers.largest("train", place(8 * GiB))
    assert [(fit.model, fit.resident) for fit in roomy] == [("tiny-c", True)]
    # The activations of two short sequences are some 10 MiB; states are 18 bytes of half a million parameters and of
    # four and a half.
    tight = answers.largest("train", place(160 * MiB))
    assert [fit.model for fit in tight][0] == "tiny-c" and tight[-1].resident
    assert answers.largest("train", place(8 * GiB, matmul_half=1.0)) == []  # slower than it is worth


def test_running_is_bound_by_what_must_be_read(known):
    answers, wide = known, place(8 * GiB, issue_seconds=1e-12)
    slow = replace(wide, rates=replace(wide.rates, memory=wide.rates.memory / 1e3))
    fast_fit, slow_fit = (answers.fit("run", "tiny-c", each) for each in (wide, slow))
    assert fast_fit and slow_fit and fast_fit.resident and fast_fit.disk == 0
    packed = fast_fit.host  # all weights, which are stored there
    assert 0.5 * 3.4e6 < packed < 2 * 4.6e6  # blocks packed, embedding and head in bf16
    read = packed - 2 * 4096 * 256  # of the embedding one row
    assert slow_fit.tokens_per_second < slow.rates.memory / read
    streamed = answers.fit("run", "tiny-c", place(518 * MiB))
    assert streamed and not streamed.resident and "over the link" in streamed.how
    assert streamed.tokens_per_second < fast_fit.tokens_per_second
    assert answers.fit("run", "tiny-c", place(8 * GiB, host=2 * MiB)) is None
    disk = answers.fit("run", "tiny-c", place(518 * MiB, host=2 * MiB, disk=1 * GiB, disk_read=1e6))
    assert disk and disk.disk and disk.tokens_per_second < streamed.tokens_per_second


def test_adapters_need_less_than_training(known):
    full, adapters = (known.fit(task, "tiny-c", place(8 * GiB), only_resident=True) for task in ("train", "adapters"))
    assert full and adapters and adapters.gpu < full.gpu - 10 * 3 * 10**6
    assert row_of(adapters)[0] == "train adapters over FP4" and row_of(adapters)[6] == "-"


def test_what_is_fast_enough_is_not_taken_to_be_too_slow(monkeypatch):
    """By the bytes that each pass reads from a disk."""
    answers, here = WhatFits(("mixtral-8x7b",)), place(7.4 * GiB, host=24 * GiB, disk=500 * GiB)
    monkeypatch.setitem(MIN_SPEED, "adapters", 0.0)
    slow = answers.fit("adapters", "mixtral-8x7b", here)
    assert isinstance(slow, Fit) and slow.how.startswith("streamed, disk busiest")
    monkeypatch.setitem(MIN_SPEED, "adapters", slow.tokens_per_second)
    assert answers.fit("adapters", "mixtral-8x7b", here) == slow
    monkeypatch.setitem(MIN_SPEED, "adapters", 4 * slow.tokens_per_second)
    assert answers.fit("adapters", "mixtral-8x7b", here) is None


def test_the_answer_for_a_card(monkeypatch, capsys):
    def few(**more: Any) -> WhatFits:
        return WhatFits({"tiny-a": {**KNOWN_MODELS["tiny-a"], "num_hidden_layers": 1}}, **more)

    monkeypatch.setattr(what_fits, "WhatFits", few)
    assert what_fits_command.what_fits_command("rtx 3060", "16GiB", "100GiB", as_json=True) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["machine"] == "RTX 3060" and {fit["task"] for fit in found["fits"]} == set(MIN_SPEED)
    assert found["bounds"]["host"] == 12 * GiB and found["bounds"]["disk"] == 100 * GiB
    assert what_fits_command.what_fits_command(None, "16GiB", "100GiB", as_json=False) == 0
    out = capsys.readouterr()
    assert "tiny-a" in out.out and "tokens/s" in out.out and "trying to run in FP4: tiny-a" in out.err


def test_every_way_of_one_model(known):
    """All fits a roomy card, where the packed and the resident are the quicker; of a small one the rest says what it
    lacks, to the byte where no trace is needed."""
    answers = known
    roomy = answers.ways("tiny-c", place(8 * GiB))
    assert list(roomy) == list(what_fits.WAYS) and all(isinstance(fit, Fit) for fit in roomy.values())
    fits = {way: fit for way, fit in roomy.items() if isinstance(fit, Fit)}
    assert fits["run"].host < fits["run-bf16"].host and fits["adapters"].gpu < fits["adapters-bf16"].gpu
    assert fits["train-resident"].resident and not fits["train-streamed"].resident
    assert fits["run"].at_once == 2048 and fits["train-resident"].at_once == 2 * 64
    assert fits["plain"].gpu > 16 * fits["plain"].parameters  # fp32: weights, gradients, moments
    best = what_fits_command.best_of(roomy)
    assert len(best) == 3 and {way.partition("-")[0] for way in best} <= {"run", "adapters", "train", "plain"}
    assert all(
        fits[way].tokens_per_second
        == max(fit.tokens_per_second for fit in fits.values() if fit.task.partition("-")[0] == way.partition("-")[0])
        for way in best
    )
    parameters = answers.parameters("tiny-c")
    tight = answers.ways("tiny-c", place(20 * MiB, host=8 * MiB))
    for way, bytes_a_parameter, room in (("train-resident", 18, 20), ("train-streamed", 12, 28), ("plain", 16, None)):
        lacking = tight[way]
        assert isinstance(lacking, Lacking)
        assert room is None or lacking.num_bytes == bytes_a_parameter * parameters - room * MiB
    lines = what_fits_command.way_lines("tiny-c", answers, "a card", place(20 * MiB, host=8 * MiB), tight)
    assert any(line.split("  ")[-1].startswith("lacks ") and "GPU memory" in line for line in lines)


def test_one_answer_builds_and_traces_nothing_twice(monkeypatch):
    """Seconds of a large model each: built frozen and in fp32; two forwards of one token; and a step by
    the weights that are there and by batch, of the steps of both placements and of both machines."""
    counts = Counter[Any]()

    def counted(owner: Any, name: str, key: Callable[..., Any] = lambda *args: args[-1]) -> None:
        plain = getattr(owner, name)

        def count(*args: Any, **options: Any) -> Any:
            counts[name, key(*args)] += 1
            return plain(*args, **options)

        monkeypatch.setattr(owner, name, count)

    for owner in (what_fits, model_spec):
        counted(owner, "build_causal_lm")
    counted(what_fits, "add_adapters", lambda *args: None)
    counted(what_fits, "trace_forward", lambda *args: None)
    counted(Run, "trace", lambda run, batch_size, *args: (run.spec.name.split()[-1], batch_size))
    answers = WhatFits(("tiny-c",))
    assert all(isinstance(fit, Fit) for fit in answers.ways("tiny-c", place(8 * GiB)).values())
    assert all(isinstance(fit, Fit) for fit in answers.ways("tiny-c", place(7 * GiB)).values())
    traced = [("plain", 1), *itertools.product(("adapters-bf16", "adapters", "train"), (1, 2))]
    expected = {("trace", key): 1 for key in traced} | {("trace_forward", None): 2, ("add_adapters", None): 2}
    built = {("build_causal_lm", torch.bfloat16): 1, ("build_causal_lm", torch.float32): 1}
    assert counts == expected | built


def test_the_ways_of_a_card(monkeypatch, capsys):
    fields = {**KNOWN_MODELS["tiny-a"], "num_hidden_layers": 1}
    assert what_fits_command.ways_command("tiny-a", fields, "rtx 3060", "16GiB", "1GiB", as_json=True) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found["ways"]) == set(what_fits.WAYS) and found["machine"] == "RTX 3060"
    assert set(found["best"]) <= set(found["commands"]) <= set(found["ways"])
    assert found["commands"]["adapters"].startswith("vb train --model FOLDER --lora 16 --use-fp4 --precision bf16")
    assert what_fits_command.ways_command("runs/mine", fields, "rtx 3060", "16GiB", "1GiB", as_json=False) == 0
    out = capsys.readouterr().out
    assert "  *  run in" in out and "vb generate --model runs/mine --use-fp4 --prompt ..." in out
    assert max(map(len, out.splitlines()[:16])) <= 120, "a screen is not wider"


def test_what_is_to_be_typed_is_understood(known, capsys):
    """All flags are known; what stops the commands is that there is no such folder."""
    folder = "no/such/folder"
    here = place(518 * MiB, host=2 * MiB, disk=1 * GiB)
    found = known.ways("tiny-c", here)
    commands = [what_fits_command._command(fit, folder, here) for fit in found.values() if isinstance(fit, Fit)]
    typed = [shlex.split(command)[1:] for command in commands if command.startswith("vb ")]
    assert len(typed) >= 4 and any("--disk-memory" in words for words in typed)
    for words in typed:
        assert main(words) == 2
        assert f"{folder}: no such folder" in capsys.readouterr().err.replace("'", "")


def test_what_is_not_packed_says_so(monkeypatch):
    monkeypatch.setattr(what_fits, "find_linears", lambda model, **options: {"a": "read without a call"})
    gpt2 = {"model_type": "gpt2", "vocab_size": 4096, "n_embd": 64, "n_layer": 1, "n_head": 4, "n_positions": 128}
    found = WhatFits({"mine": gpt2}).ways("mine", place(8 * GiB))
    assert {way for way, fit in found.items() if isinstance(fit, Lacking)} == {"run", "adapters"}
    assert str(found["run"]) == "has no linear that is packed"
    assert isinstance(found["run-bf16"], Fit) and found["run-bf16"].at_once == 128  # positions that it knows
    largest = WhatFits({"mine": gpt2}).largest("run", place(8 * GiB))  # in bf16, where nothing else is known
    assert [fit.model for fit in largest] == ["mine"]


def test_transposed_linears_are_packed_as_others():
    gpt2 = {"model_type": "gpt2", "vocab_size": 4096, "n_embd": 64, "n_layer": 1, "n_head": 4, "n_positions": 128}
    found = WhatFits({"mine": gpt2}).ways("mine", place(8 * GiB))
    assert isinstance(found["run"], Fit) and isinstance(found["adapters"], Fit)


def test_a_sequence_is_not_longer_than_the_model_knows(monkeypatch):
    monkeypatch.setattr(what_fits, "SEQ_LENGTH", 1024)
    fields = {**KNOWN_MODELS["tiny-a"], "num_hidden_layers": 1, "max_position_embeddings": 32}
    answers = WhatFits({"mine": fields})
    found = answers.ways("mine", place(8 * GiB))
    trained = found["train-resident"]
    assert isinstance(trained, Fit) and trained.batch == (32, 2, 1)
    command = what_fits_command._command(trained, "mine", place(8 * GiB))
    assert "--seq-length 32 --batch-size 2 --vgpu-auto" in command and "--placement resident" in command
    lines = what_fits_command.way_lines("mine", answers, "a card", place(8 * GiB), found)
    assert any("sequences of 32 tokens" in line and "one text of at most 32 tokens" in line for line in lines)
    longer = WhatFits({"mine": fields | {"max_position_embeddings": 2048}})._way("run", "mine", place(8 * GiB))
    keys = 2 * 64 * 2 * (2048 - 32)  # and values: of one layer, in bf16
    assert isinstance(found["run"], Fit) and isinstance(longer, Fit) and longer.gpu - found["run"].gpu == keys


def test_without_a_gpu_activations_are_outside_the_arena():
    """A forward is not left out for what it takes there."""
    there = Machine(Bounds(40 * MiB, GiB), rates(), has_gpu=False)
    fit = WhatFits(NAMES[:1]).fit("train", "tiny-a", there)
    assert fit is not None and fit.batch == (64, 2, 1)
    fit = WhatFits(NAMES[:1]).fit("run", "tiny-a", there)
    assert fit is not None and fit.resident and fit.gpu < 40 * MiB


def test_positions_and_words_are_asked_of_the_configuration():
    defaults = {"model_type": "gpt2", "vocab_size": 4096, "n_embd": 64, "n_layer": 2, "n_head": 4}
    assert WhatFits({"mine": defaults})._positions("mine") == 1024


def test_a_card_that_is_not_here_is_next_to_a_stated_machine(monkeypatch, capsys):
    """Nothing of this machine is in the answer, which says what it assumed and which flags change that."""
    here = GPUFacts(0, "NVIDIA GeForce RTX 3070", 8 * GiB, 8 * GiB, (8, 6), "0000:18:00.0", "580", (13, 0), None)
    facts = MemoryFacts(40 * GiB, 20 * GiB, "machine")
    monkeypatch.setattr("vblackwell.machine.limits.list_gpus", lambda: [here])
    monkeypatch.setattr(what_fits_command, "memory_facts", lambda: facts)
    monkeypatch.setattr(what_fits_command, "free_disk_bytes", lambda path: 7 * GiB)
    ram, disk = HYPOTHETICAL_BYTES
    _, place, said = what_fits_command.place_of("RTX 3060", None, None)
    assert (place.bounds.host, place.bounds.disk) == (int(ram * HOST_SHARE), disk)
    assert len(said) == 2 and "64.0 GiB of RAM" in said[0] and "--ram" in said[0]
    assert "500 GB" in said[1] and f"{place.rates.disk_read / 1e9:g} GB/s" in said[1] and "--disk" in said[1]
    _, place, said = what_fits_command.place_of("RTX 3060", "16GiB", None)
    assert (place.bounds.host, place.bounds.disk) == (12 * GiB, disk) and len(said) == 1 and "--disk" in said[0]
    _, place, said = what_fits_command.place_of("RTX 3060", None, "0")
    assert (place.bounds.host, place.bounds.disk) == (int(ram * HOST_SHARE), 0) and len(said) == 1
    _, place, said = what_fits_command.place_of("RTX 3070", None, None)  # which is here
    assert (place.bounds.host, place.bounds.disk, said) == (15 * GiB, 7 * GiB, [])
    monkeypatch.setattr(what_fits, "WhatFits", lambda **more: WhatFits(NAMES[:1], **more))
    assert what_fits_command.what_fits_command("RTX 3060", None, "1GiB", as_json=False) == 0
    assert "assumes 64.0 GiB of RAM next to a card" in capsys.readouterr().out


def test_refusals():
    with pytest.raises(ConfigurationError, match="the nearest: 'RTX 3090'"):
        what_fits_command.place_of("RTX 3091", None, None)
    with pytest.raises(ConfigurationError, match="--ram 'plenty'"):
        what_fits_command.place_of("RTX 3090", "plenty", None)


def test_no_failure_to_pack_counts_as_a_model_that_is_not_packed(monkeypatch):
    fields = {"model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    model = build_causal_lm(fields | {"num_attention_heads": 2, "vocab_size": 64}, "a llama", torch.bfloat16)

    def refuse(*args, **options):
        raise Unsupported("no such layout")

    monkeypatch.setattr(what_fits, "store_linears", refuse)
    with pytest.raises(Unsupported, match="no such layout"):
        what_fits._pack(model)


def test_a_machine_without_a_gpu_trains_in_fp32(known):
    """As `vb train` there: an update follows each gradient, so states are 12 bytes; by the rate of fp32 products."""
    on_gpu = place(8 * GiB)
    here = replace(on_gpu, has_gpu=False)
    slow = replace(here, rates=replace(here.rates, matmul_half=here.rates.matmul_half / 1e9))
    answers, trained = known, {}
    found, slower = answers.ways("tiny-c", here), answers.ways("tiny-c", slow)
    assert [fit.model for fit in answers.largest("train", slow)] == ["tiny-c"]
    # States and gradients are 67 MB; the 18 bytes of bf16 with masters would be 75.
    few = replace(here, bounds=Bounds(70 * 10**6, 0, 0))
    assert [fit.model for fit in answers.largest("train", few)] == ["tiny-c"]
    card, other = answers.ways("tiny-c", on_gpu), WhatFits(("tiny-c",))
    for way in ("train-resident", "adapters"):  # asked in the other order: nothing is shared
        assert card[way] == other._way(way, "tiny-c", on_gpu) and found[way] == other._way(way, "tiny-c", here)
    for way in ("train-resident", "adapters-bf16", "adapters"):
        fit, same = found[way], slower[way]
        assert isinstance(fit, Fit) and isinstance(same, Fit) and fit.tokens_per_second == same.tokens_per_second
        assert card[way] != fit
        trained[way] = fit
    assert trained["train-resident"].gpu >= 12 * answers.parameters("tiny-c")
    lines = what_fits_command.way_lines("tiny-c", answers, "this machine", here, found)
    typed = [line for line in lines if "vb train" in line]
    assert len(typed) >= 3 and all("--precision fp32" in line for line in typed)
    said = "\n".join(lines)
    assert "train adapters over fp32" in said and "adapters over bf16" not in said and "step, fp32, check" in said


def test_a_machine_without_a_gpu_lacks_none_of_its_memory(known):
    here = replace(place(1 * MiB, host=0), has_gpu=False)
    answers = known
    found = answers.ways("tiny-c", here)
    assert all(isinstance(fit, Lacking) for fit in found.values())
    said = "\n".join(what_fits_command.way_lines("tiny-c", answers, "this machine", here, found))
    said += "\n".join(what_fits_command.lines("this machine", here, []))
    said = said.replace("RAM that stands for a GPU", "")
    assert "of fast memory" in said and "GPU" not in said.split("assumes speeds")[0] and "larger card" not in said


@pytest.mark.slow
@pytest.mark.parametrize("card", ["RTX 3060", "RTX 3090"])
def test_a_13b_is_nowhere_faster_than_an_8b(card: str):
    known = find_gpu(card)
    where = Machine(Bounds(int(known.total_bytes * 0.95), 48 * GiB, 500 * GiB), assumed_rates(known))
    answers = WhatFits(("llama-3-8b", "llama-13b"))
    small, large = (answers.ways(name, where) for name in ("llama-3-8b", "llama-13b"))
    pairs = [(small[way], fit) for way, fit in large.items() if isinstance(fit, Fit)]
    assert len(pairs) >= 4
    for less, more in pairs:
        assert isinstance(less, Fit) and more.tokens_per_second < less.tokens_per_second, more.task


def test_lines_are_broken_between_words_where_a_terminal_is_narrow(monkeypatch, capsys):
    """Paths, flags and commands are copied."""
    monkeypatch.setenv("COLUMNS", "24")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    path, command = "/a/folder/of/a/model/somewhere", "  run: vb generate --model /a/folder --prompt text"
    what_fits_command._show([f"  assumes {path} and checkpoint-free --host-memory", "", command])
    eight = " " * 8
    shown = ["  assumes", f"{eight}{path}", f"{eight}and", f"{eight}checkpoint-free", f"{eight}--host-memory"]
    assert capsys.readouterr().out.split("\n") == [*shown, "", command, ""]
