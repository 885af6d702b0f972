"""Arrivals from a seed, and a server that keeps whole models and loads them from a disk, simulated over them.

The policy is that of Ollama's scheduler (server/sched.go) as it appears to a client: requests are looked at in the
order of arrival; one whose model is loaded begins at once; for another the model that was not used for longest and has
nothing to do is thrown out, which is waited for, and the new one is read from the disk, while all later ones wait. In
its favour texts of loaded models do not slow each other down, and throwing out takes no time.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Arrival:
    """A request: when, of which model (0 is the most popular), tokens of prompt and answer."""

    at_s: float
    model: int
    prompt: int
    new: int


@dataclass(frozen=True)
class Service:
    """Seconds that an awake model takes alone: to the first token, constant and a token of the prompt, then a token."""

    begin_s: float
    prompt_token_s: float
    token_s: float

    def first_s(self, arrival: Arrival) -> float:
        return self.begin_s + self.prompt_token_s * arrival.prompt

    def whole_s(self, arrival: Arrival) -> float:
        return self.first_s(arrival) + self.token_s * (arrival.new - 1)


def zipf_arrivals(
    count: int, models: int, interval_s: float, prompts: tuple[int, int], answers: tuple[int, int], seed: int
) -> list[Arrival]:
    """``count`` arrivals as of a Poisson process; the i-th model is asked 1/i times as often as the first."""
    chosen, now, found = random.Random(seed), 0.0, list[Arrival]()
    for model in chosen.choices(range(models), [1 / (1 + place) for place in range(models)], k=count):
        found.append(Arrival(now, model, chosen.randint(*prompts), chosen.randint(*answers)))
        now += chosen.expovariate(1 / interval_s)
    return found


def whole_models_from_disk(
    arrivals: Sequence[Arrival], service: Service, places: int, load_s: float, loaded: Sequence[int] = ()
) -> list[float]:
    """Seconds to the first token of each arrival, with room for ``places`` whole models; those in ``loaded`` are."""
    free_at = {model: 0.0 for model in loaded}  # when the last text of each loaded model ends
    used_at = {model: 0.0 for model in loaded}
    waits, now = list[float](), 0.0
    for arrival in arrivals:
        now = max(now, arrival.at_s)
        if arrival.model not in free_at:
            if len(free_at) >= places:
                now = max(now, min(free_at.values()))
                idle = [model for model, free in free_at.items() if free <= now]
                oldest = min(idle, key=lambda model: used_at[model])
                del free_at[oldest], used_at[oldest]
            now += load_s
            free_at[arrival.model] = now
        used_at[arrival.model] = now
        free_at[arrival.model] = max(free_at[arrival.model], now + service.whole_s(arrival))
        waits.append(now + service.first_s(arrival) - arrival.at_s)
    return waits
