"""Models that answer: opened, with their engine and their chat templates, for ``vb serve`` and ``vb chat``."""

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch

from vblackwell.errors import VBError
from vblackwell.folders.chat_prompt import stored_template
from vblackwell.offload.layout.generation import workspace_bytes
from vblackwell.serve.engine import CACHE_BYTES, Engine
from vblackwell.serve.fleet import Fleet
from vblackwell.serve.http.prepare import Chat
from vblackwell.units import format_bytes, format_seconds

CLOSING_SECONDS = 10  # in which texts that are being written may end


@dataclass(frozen=True)
class Opened:
    """Models that answer: their fleet, the engine, and how they are talked with."""

    fleet: Fleet
    engine: Engine
    chats: dict[str, Chat]


def cache_bytes(fleet: Fleet) -> int:
    """For keys and values: most of what level 0 has next to all weights, if that is a sixteenth of it; else a quarter
    of it, or as much less as lets the largest model stay whole, which would be streamed for every token. On a CPU,
    where more would take RAM from others and serve nobody faster, not more than the engine's own default."""
    level = fleet.stack.levels[0]
    on_gpu = fleet.stack.level0_device.type == "cuda"
    size = level.capacity_bytes - (workspace_bytes(level.capacity_bytes) if on_gpu else 0)
    weights = {id(served.weights): served for served in fleet.models.values()}.values()  # adapters share their base's
    pinned = sum(served.weight_bytes for served in weights if served.pinned)
    largest = max(served.weight_bytes for served in weights)
    left = [size - held for held in (sum(served.weight_bytes for served in weights), max(pinned, largest))]
    wanted = size // 4
    for place, free in enumerate(left):
        if free >= size // 16:
            wanted = free * 15 // 16 if place == 0 else min(wanted, free * 15 // 16)
            break
    return wanted if on_gpu else min(wanted, CACHE_BYTES)


@contextmanager
def opened(
    models: Sequence[str],
    budget: str | None,
    host_memory: str | None,
    device: torch.device | str,
    pin: Sequence[str] = (),
    keep_alive: float | None = None,
) -> Iterator[Opened]:
    """The models, told of on standard error while they are read; all is given back at the end."""
    begun = time.monotonic()

    def say(name: str) -> None:
        print(f"vb: opening {name} ...", file=sys.stderr)

    with ExitStack() as cleanup:
        try:
            fleet = Fleet(
                models,
                budget=budget,
                host_memory=host_memory,
                device=device,
                pin=pin,
                keep_alive=keep_alive,
                on_open=say,
            )
        except VBError as error:
            said = str(error).replace("fast_memory", "--budget").replace("level arena", "--budget")  # its flag here
            error.args = (said, *error.args[1:])
            raise
        cleanup.callback(fleet.close)
        chats = dict[str, Chat]()
        for name, served in fleet.models.items():
            template = None if served.folder is None else stored_template(served.folder, served.adapter)
            if template is not None and served.tokenizer is not None:
                chats[name] = Chat.of(template, served.tokenizer)
        engine = Engine(fleet, cache_bytes=cache_bytes(fleet))
        cleanup.callback(engine.close, CLOSING_SECONDS)
        for name, model in engine.state().models.items():
            size = format_bytes(fleet.models[name].weight_bytes)
            alone = "" if model.paged else f"; one text at a time, as {model.reason}"
            talks = "" if name in chats else "; no chat template: /v1/completions alone"
            print(f"vb: {name}: {size} of weights{talks}{alone}", file=sys.stderr)
        state = engine.state()
        if any(model.paged for model in state.models.values()):
            own, ram = (format_bytes(count * state.page_bytes) for count in (state.pages_total, state.pages_sunk_total))
            print(f"vb: keys and values: {own} of fast memory, up to {ram} of RAM", file=sys.stderr)
        engine.wake(next(iter(fleet.models)))
        print(f"vb: opened in {format_seconds(time.monotonic() - begun)}", file=sys.stderr)
        yield Opened(fleet, engine, chats)
