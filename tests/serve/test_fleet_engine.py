"""The engine over a fleet whose models do not fit level 0 together: answers are those of each model alone."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from tests.serve.models import Residents, ask, tiny
from vblackwell.serve.engine import Engine
from vblackwell.serve.fleet import Fleet

KINDS = ["Llama", "Qwen3", "Mistral", "Gemma2", "GPT2"]
PAGES = 64 << 10


def prompts(count: int) -> list[tuple[str, list[int]]]:
    drawn = random.Random(3)
    return [
        (drawn.choice(KINDS), [drawn.randrange(3, 96) for _ in range(drawn.randrange(1, 20))]) for _ in range(count)
    ]


@pytest.fixture(scope="module")
def alone() -> list[list[int]]:
    """What models that stay in memory answer."""
    with_all = Engine(Residents({kind: tiny(kind, seed) for seed, kind in enumerate(KINDS)}), cache_bytes=PAGES)
    answers = [ask(with_all, tokens, model=kind).tokens for kind, tokens in prompts(12)]
    with_all.close()
    return answers


@pytest.mark.parametrize("budget", ["224KiB", "132KiB"])  # two models next to pages; less than the largest
def test_answers_are_those_of_each_model_alone(budget: str, alone):
    models = {kind: tiny(kind, seed) for seed, kind in enumerate(KINDS)}
    fleet = Fleet.of_modules(models, budget=budget, host_memory="32MiB", device="cpu")
    engine = Engine(fleet, cache_bytes=PAGES, turn_s=0.05)
    answers = [ask(engine, tokens, model=kind) for kind, tokens in prompts(12)]
    assert [answer.tokens for answer in answers] == alone
    assert all(line.paged for line in engine.state().models.values())
    for kind in KINDS:
        engine.sleep(kind).result(10)
        assert engine.state().models[kind].state == "asleep"
    stack = fleet.stack
    assert stack.levels[0].used_bytes <= PAGES
    engine.wake("Llama").result(10)
    assert engine.state().models["Llama"].state in ("loading", "awake")
    engine.close()
    assert 0 < stack.levels[0].used_bytes <= fleet.models["Llama"].weights.held_bytes  # the pages are back
    fleet.close()
    assert all(level["used_bytes"] == 0 for level in stack.get_stats()["levels"])


def test_the_engine_lets_idle_models_sleep():
    fleet = Fleet.of_modules({"m": tiny("Llama")}, budget="1MiB", host_memory="32MiB", device="cpu", keep_alive=0.2)
    engine = Engine(fleet, cache_bytes=PAGES)
    assert ask(engine, [5, 6, 7]).tokens
    deadline = time.monotonic() + 20
    while engine.state().models["m"].state != "asleep":
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert fleet.models["m"].level0_bytes == 0
    assert ask(engine, [5, 6, 7]).tokens
    engine.close()
    fleet.close()


@pytest.mark.slow
def test_eight_models_under_a_budget_of_two_lose_and_starve_no_request():
    """Arrivals by Zipf's law, 40 a second: more than a swap each allows."""
    names = [f"m{number}" for number in range(8)]
    drawn = random.Random(5)
    shares = [1 / (number + 1) for number in range(8)]
    asked = [(drawn.choices(names, shares)[0], [drawn.randrange(3, 96) for _ in range(8)]) for _ in range(200)]

    def models() -> dict:
        return {name: tiny("Llama", seed) for seed, name in enumerate(names)}

    plain = Engine(Residents(models()), cache_bytes=PAGES)
    expected = [answer.tokens for answer in [ask(plain, tokens, model=name) for name, tokens in asked]]
    plain.close()
    one = sum(param.nbytes for param in tiny("Llama").parameters())
    fleet = Fleet.of_modules(models(), budget=PAGES + int(2.1 * one), host_memory="32MiB", device="cpu")
    engine = Engine(fleet, cache_bytes=PAGES, turn_s=0.1)
    answers = []
    for name, tokens in asked:
        answers.append(ask(engine, tokens, model=name))
        time.sleep(drawn.expovariate(40))
    assert [answer.tokens for answer in answers] == expected  # within 60 s each, or `Answer` fails
    assert fleet.stack.levels[0].peak_bytes <= fleet.stack.levels[0].capacity_bytes
    engine.close()
    fleet.close()


_SERVING = """
    import sys, time
    from tests.serve.models import Engine, ask, tiny
    from vblackwell.serve.fleet import Fleet
    fleet = Fleet.of_modules({"m": tiny("Llama")}, budget="1MiB", host_memory="32MiB", device="cpu")
    engine = Engine(fleet, cache_bytes=1 << 16)
    ask(engine, [5, 6, 7], 200)
    print("serving", flush=True)
    time.sleep(60)
"""


@pytest.mark.slow
def test_kill_9_leaves_nothing_behind(tmp_path: Path):
    """No file where a process might leave some, and none in shared memory. (What it compiled stays in its cache.)"""
    where = {name: str(tmp_path) for name in ("TMPDIR", "VBLACKWELL_DISK_PATH")}
    shared = Path("/dev/shm")
    before = {path.name for path in shared.iterdir()} if shared.is_dir() else set()
    command = [sys.executable, "-c", textwrap.dedent(_SERVING)]
    root, environment = Path(__file__).parents[2], os.environ | where
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, cwd=root) as process:
        assert process.stdout is not None and process.stdout.readline() == b"serving\n"
        process.send_signal(signal.SIGKILL)
        assert process.wait(10) == -signal.SIGKILL
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
    after = {path.name for path in shared.iterdir()} if shared.is_dir() else set()
    assert not [name for name in after - before if "vblackwell" in name or "torch" in name]
