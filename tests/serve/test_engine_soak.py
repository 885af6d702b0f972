"""A minute of random load: every answer whole, pages and memory flat."""

import gc
import random
import resource
import time
from pathlib import Path

import pytest

from tests.serve.models import Answer, Residents, tiny
from tests.serve.test_engine_bits import alone, block_of, requests, submit
from vblackwell.serve.engine import Engine
from vblackwell.serve.request import Busy

PAGE = resource.getpagesize()


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


@pytest.mark.slow
def test_a_minute_of_random_load_leaves_nothing_behind():
    rng = random.Random(11)
    models = {"Llama": tiny("Llama"), "Gemma2": tiny("Gemma2"), "GPT2": tiny("GPT2")}
    given = requests(rng, 40, [*models])
    expected = alone(models, given)
    fleet = Residents(models, sunk=12)
    engine = Engine(fleet, cache_bytes=16 * 16 * block_of(models), max_rows=48, max_waiting=20)
    flying: list[tuple[int, Answer, bool]] = []
    ended = 0
    sizes: list[int] = []
    try:
        end = time.monotonic() + 60
        while time.monotonic() < end:
            which, cancelled = rng.randrange(len(given)), rng.random() < 0.2
            try:
                answer = submit(engine, given[which])
            except Busy:
                time.sleep(0.02)
            else:
                flying.append((which, answer, cancelled))
                time.sleep(rng.random() * 0.03)
                if cancelled:
                    engine.cancel(answer.number)
            while len(flying) > 30:
                which, answer, cancelled = flying.pop(0)
                if not cancelled:
                    assert answer.told == expected[which]
                ended += answer.done.reason != "cancelled"
                if ended % 20 == 0:
                    gc.collect()
                    sizes.append(resident_bytes())
        for which, answer, cancelled in flying:
            assert cancelled or answer.told == expected[which]
        assert engine.state().pages_used == 0 and engine.state().pages_sunk > 0 and engine.state().alive
    finally:
        engine.close()
    assert ended > 100
    # The first half warms allocators up; after it what is held does not grow but for their pieces.
    half = len(sizes) // 2
    assert max(sizes[half:]) <= 1.01 * max(sizes[:half]), sizes
