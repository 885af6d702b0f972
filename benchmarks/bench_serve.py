"""Serving: how fast models wake and answer, next to the floors and aims of issue 30, in one run on one GPU.

    python benchmarks/bench_serve.py --nvfp4                        # 8B in bf16 and packed, one H200
    python benchmarks/bench_serve.py --only arrivals --shape 1B     # eight models under a budget of two
    python benchmarks/bench_serve.py --shape tiny --device cpu --dtype fp32 --scale 16 --arrivals

Writes a folder of random weights (in /dev/shm where it has room), opens it as `vb serve` does, and measures each number
several times; the median counts. No text ends before it has its length. 'throughput' runs transformers' continuous
batching over the same requests when our own memory is given back; a section that fails is a row that says why. Every
row is printed and appended to benchmarks/results/serve.csv as it comes; the table comes last.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import random
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch

from benchmarks.bench_generate import place_for
from benchmarks.bench_offload import names
from benchmarks.lib.child_process import run_child, until_stopped
from benchmarks.lib.results import RESULTS, append_csv, read_csv, seconds_since_start, tell, told_machine
from benchmarks.lib.serve import models
from benchmarks.lib.serve.asking import GREEDY, Late, Text, answers, decode_rate, step_medians, steps_of, submit, tokens
from benchmarks.lib.serve.peer import continuous_batching
from benchmarks.lib.serve.policy import Service, whole_models_from_disk, zipf_arrivals
from benchmarks.lib.serve.report import HEAD, Row
from vblackwell.errors import VBError
from vblackwell.machine.device import use_expandable_segments
from vblackwell.serve.engine import Engine
from vblackwell.serve.fleet import Fleet
from vblackwell.serve.paged_model import LEAST_POSITIONS
from vblackwell.serve.request import Request
from vblackwell.tools.quantize import quantize_folder
from vblackwell.units import parse_bytes

SECTIONS = ("swap", "first", "decode", "prefix", "http", "throughput", "arrivals")
LOADS = {("8B", "bf16"): "issue 30: <= 0.38 s", ("8B", "nvfp4"): "issue 30: <= 0.15 s"}
MODELS, PLACES, TURN_S = 8, 2, 2.0  # of the arrivals; the engine's own turn
CLIENTS = Path(__file__).parent / "lib/serve/clients.py"


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--only", type=names, default=None, help=f"of {', '.join(SECTIONS)}; by default all but the last")
    add("--arrivals", action="store_true", help="eight models under a budget of two in addition")
    add("--shape", choices=tuple(models.SHAPES), default="8B", help="of Llama 3's sizes")
    add("--dtype", choices=tuple(models.DTYPES), default="bf16")
    add("--nvfp4", action="store_true", help="swap, first and decode of the packed model too; arrivals of it alone")
    add("--device", choices=("cuda", "cpu"), default="cuda")
    add("--cache", type=parse_bytes, default=parse_bytes("16GiB"), help="level 0 for keys and values")
    add("--repeats", type=int, default=5, help="of each number; 3 at the most where one takes long")
    add("--scale", type=int, default=1, help="divides the lengths and numbers of texts, for a try")
    add("--interval", type=float, default=None, help="mean seconds between arrivals; default: one load from the disk")
    add("--disk", type=float, default=5.0, help="GB/s at which the simulated server loads")
    add("--seconds", type=float, default=560.0, help="for everything; what is late is left out, and said")
    add("--seed", type=int, default=0)
    add("--csv", type=Path, default=RESULTS / "serve.csv")
    args = parser.parse_args(argv)
    args.only = args.only or [*SECTIONS[:-1]]
    args.only += ["arrivals"] * (args.arrivals and "arrivals" not in args.only)
    for name in args.only:
        if name not in SECTIONS:
            parser.error(f"section {name!r} is none of {', '.join(SECTIONS)}")
    for name, value in (("repeats", args.repeats), ("scale", args.scale)):
        if value < 1:
            parser.error(f"--{name} {value}: give at least 1")
    return args


class Run:
    """A fleet of one model, or of it and the packed one, and what was found."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self.args, self.about, self.rows = args, told_machine(), list[Row]()
        use_expandable_segments()  # as `vb serve` does, before anything is on the GPU
        self.device = torch.device("cuda", 0) if args.device == "cuda" else torch.device("cpu")
        self.dtype = models.DTYPES[args.dtype]
        self.shape, self.chosen = models.SHAPES[args.shape], random.Random(args.seed)
        self.rates = models.rates(self.device)
        tell("rates", ", ".join(f"{name} {value / 1e9:.1f} GB/s" for name, value in self.rates.items()))
        self.folders = {args.dtype: folder / args.dtype}
        models.write_model(self.folders[args.dtype], self.shape, self.dtype, self.device, args.seed)
        if args.nvfp4:
            self.folders["nvfp4"] = folder / "nvfp4"
            quantize_folder(self.folders[args.dtype], self.folders["nvfp4"], device=self.device)
        self.clear()
        self.loads: dict[str, float] = {}
        self.decoded: dict[str, float] = {}
        self.runs, self.ours = list[list[Request]](), list[float]()  # of 'throughput'
        self.engine: Engine
        self.fleet: Fleet

    # -- what sections share -------------------------------------------------------------------------------------------

    @property
    def left_s(self) -> float:
        return self.args.seconds - seconds_since_start()

    def clear(self) -> None:
        """Give back what nobody holds any more."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def add(self, *rows: Row) -> None:
        self.rows += rows
        for row in rows:
            tell(row.line())
        append_csv(self.args.csv, [self.about | {"shape": self.args.shape} | row.cells() for row in rows])

    def attempt(self, section: str, model: str, act: Callable[[str], None]) -> None:
        """A section of a model; what it raises is a row."""
        try:
            if self.left_s < 1:
                raise Late("no time is left")
            act(model)
        except Exception as error:
            said = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            self.add(Row(section, model, section, None, note=said))

    def times(self, act: Callable[[], float], most: int = 100) -> float:
        """The median of several, after one that does not count."""
        act()
        return median(act() for _ in range(min(self.args.repeats, most)))

    def request(self, model: str, prompt: int, new: int, before: tuple[int, ...] = ()) -> Request:
        more = tokens(self.chosen, max(1, prompt), self.shape.vocab_size)
        return Request(model, before + more, new, GREEDY)

    def scaled(self, count: int, least: int = 1) -> int:
        return max(least, count // self.args.scale)

    def first_s(self, model: str, prompt: int, before: tuple[int, ...] = ()) -> float:
        return answers(self.engine, [self.request(model, prompt, 1, before)], self.left_s)[0].first_s

    def asleep(self, model: str) -> float:
        """Seconds that it takes to let a model sleep, after which nothing of it is on level 0."""
        began = time.perf_counter()
        self.engine.sleep(model).result(60)
        seconds = time.perf_counter() - began
        if self.fleet.models[model].level0_bytes:
            raise VBError(f"{model} sleeps, and level 0 still has bytes of it")
        return seconds

    def awake(self, model: str) -> float:
        """Seconds from asleep until all of a model has arrived."""
        self.asleep(model)
        began, served = time.perf_counter(), self.fleet.models[model]
        self.engine.wake(model).result(60)
        while served.progress < 1.0:
            if self.left_s < 0:
                raise Late(f"{model} has arrived to {served.progress:.0%}")
            time.sleep(0.0005)
        return time.perf_counter() - began

    @contextmanager
    def serving(self, sources: Sequence[str], places: float, cache: int) -> Iterator[None]:
        """A fleet with level 0 for so many of its models, as large as the first."""
        files = Path(sources[0].partition("=")[2]).glob("*.safetensors")
        budget = models.budget_for(int(places * sum(file.stat().st_size for file in files) * 1.03) + cache, self.device)
        with Fleet(sources, budget=budget, device=self.device) as self.fleet:
            self.engine = Engine(self.fleet, cache_bytes=cache, turn_s=TURN_S)
            try:
                yield
            finally:
                self.engine.close(grace_s=0)
        del self.engine, self.fleet
        self.clear()

    # -- sections ------------------------------------------------------------------------------------------------------

    def swap(self, model: str) -> None:
        num_bytes, link = self.fleet.models[model].weight_bytes, self.rates["link"]
        self.loads[model] = took = self.times(lambda: self.awake(model))
        floor, aim = (num_bytes / (share * link) + 0.05 for share in (0.90, 0.95))
        note = f"{num_bytes / 1e9:.2f} GB, link {link / 1e9:.1f} GB/s; {LOADS.get((self.args.shape, model), '')}"
        self.add(Row("swap", model, "swap-in from RAM", took, "s", floor, aim, note=note.rstrip("; ")))
        self.add(Row("swap", model, "swap-in, share of the link's rate", num_bytes / took / link, more=True))
        out = self.times(lambda: (self.awake(model), self.asleep(model))[1])
        self.add(Row("swap", model, "swap-out", out * 1e3, "ms", 20))

    def first(self, model: str) -> None:
        prompt = self.scaled(512)
        load = self.loads.get(model) or self.times(lambda: self.awake(model))
        took = self.times(lambda: (self.asleep(model), self.first_s(model, prompt))[1])
        what = f"first token of a sleeping model, {prompt} tokens, over its load"
        self.add(Row("first", model, what, took / load, "", 1.15, 1.05, note=f"{took:.3f} s / {load:.3f} s"))
        self.awake(model)
        took = self.times(lambda: self.first_s(model, prompt))
        self.add(Row("first", model, f"first token of an awake one, {prompt} tokens", took * 1e3, "ms"))

    def decode(self, model: str) -> None:
        embedding = self.shape.vocab_size * self.shape.hidden_size * self.dtype.itemsize
        read = self.fleet.models[model].weight_bytes - embedding
        prompt, new = self.scaled(64, 4), self.scaled(128, 12)
        for rows, floor, aim in ((1, 0.75, 0.85), (32, 0.60, 0.75)):
            asked = [[self.request(model, prompt, new) for _ in range(rows)] for _ in range(self.args.repeats + 1)]
            several = iter(asked)
            rate = self.times(lambda: decode_rate(answers(self.engine, next(several), self.left_s)))  # noqa: B023
            goals = (floor, aim) if model == "bf16" else (None, None)
            share, note = read * rate / rows / self.rates["memory"], f"{rate:.1f} tokens/s"
            what = f"decode of {rows} row{'s' * (rows > 1)}, bytes over memory rate"
            self.add(Row("decode", model, what, share, "", *goals, more=True, note=note))
            if rows == 1:
                self.decoded[model] = rate
        if model == "nvfp4" and self.args.dtype in self.decoded:
            over = self.decoded[model] / self.decoded[self.args.dtype]
            self.add(Row("decode", model, f"decode of 1 row over {self.args.dtype}'s", over, "", 2.2, more=True))

    def prefix(self, model: str) -> None:
        known, more = self.scaled(4096, 64), self.scaled(64, 4)
        several = [tokens(self.chosen, known, self.shape.vocab_size) for _ in range(self.args.repeats + 1)]
        self.awake(model)
        missed = self.times(lambda: self.first_s(model, known + more))
        what = f"first token, {known} known over not known"
        hit = self.times(lambda: self.first_s(model, more, several[0]))  # the first, left out, makes it known
        note = f"{hit * 1e3:.1f} ms / {missed * 1e3:.1f} ms"
        self.add(Row("prefix", model, what, hit / missed, "", 0.15, note=note))
        for before in several:
            self.first_s(model, more, before)
        # Level 0 is filled with others, so that these are in RAM; each is asked once, for it rises then.
        state, pages = self.engine.state(), (known + more) // LEAST_POSITIONS  # whole ones, which stay
        if state.pages_sunk_total < len(several) * pages:
            raise VBError(f"RAM for {state.pages_sunk_total} pages is less than {len(several)} prompts take")
        for _ in range(state.pages_total // pages + 1):
            self.first_s(model, known + more)
        asked = iter(several)
        risen = -self._risen_bytes()
        hit = self.times(lambda: self.first_s(model, more, next(asked)))
        risen = (risen + self._risen_bytes()) / len(several) / state.page_bytes
        if risen < known // LEAST_POSITIONS:
            raise VBError(f"of {known // LEAST_POSITIONS} pages that are known {risen:.1f} came from RAM")
        note = f"{hit * 1e3:.1f} ms / {missed * 1e3:.1f} ms; {risen * state.page_bytes / 1e6:.1f} MB"
        self.add(Row("prefix", model, f"{what}, from RAM", hit / missed, "", 0.35, note=note))

    def _risen_bytes(self) -> int:
        """Of pages, and of weights that are loaded, from RAM to level 0."""
        names = [level.name for level in self.fleet.stack.levels[1::-1]]
        links = self.fleet.stack.get_stats()["links"]
        return sum(each["bytes"] for each in links if [each["source"], each["destination"]] == names)

    def http(self, model: str) -> None:
        prompt, new, rows = self.scaled(64, 4), self.scaled(128, 12), 32
        self.awake(model)
        with steps_of(self.device) as alone:
            for _ in range(2):
                answers(self.engine, [self.request(model, prompt, new) for _ in range(rows)], self.left_s)
        step, inside = step_medians(alone, rows)
        what = f"outside the model, share of a step of {rows}"
        note = f"{(step - inside) * 1e3:.2f} of {step * 1e3:.2f} ms"
        self.add(Row("http", model, f"{what}, engine alone", (step - inside) / step, "", 0.05, note=note))
        with steps_of(self.device) as steps:
            self._over_http([self.request(model, prompt, new) for _ in range(rows)])
        step, _ = step_medians(steps, rows)  # where threads share Python the model's calls take longer as well
        note = f"{(step - inside) * 1e3:.2f} of {step * 1e3:.2f} ms"
        self.add(Row("http", model, f"{what}, HTTP", (step - inside) / step, "", 0.05, note=note))

    def _over_http(self, requests: Sequence[Request]) -> None:
        """Clients of another process read the streams of all at once."""
        from vblackwell.serve.command import Listener, listen
        from vblackwell.serve.http.server import Server

        socket, heard = listen("127.0.0.1", 0), list[dict]()
        listener = Listener(Server(self.engine, self.fleet, {}), socket)
        thread = threading.Thread(target=lambda: asyncio.run(listener.serve()), name="http")
        thread.start()
        try:
            asked = [(each.model, each.tokens, each.max_new_tokens) for each in requests]
            case = {"port": socket.getsockname()[1], "seconds": self.left_s, "asked": asked}
            run_child(CLIENTS, json.dumps(case), self.left_s, heard.append, lambda line: tell("clients", line))
        finally:
            listener.should_exit = True
            thread.join(30)
        if not heard or heard[-1].get("counts") != [each.max_new_tokens for each in requests]:
            raise VBError(f"the clients read {heard[-1:]}")

    def mixed(self, model: str, number: int) -> list[Request]:
        """Requests of mixed lengths, of which each run has its own."""
        chosen = random.Random(self.args.seed + 1000 + number)
        prompt, new = self.scaled(1024, 16), self.scaled(256, 16)
        lengths = [(chosen.randint(16, prompt), chosen.randint(16, new)) for _ in range(self.scaled(256))]
        return [Request(model, tokens(chosen, prompt, self.shape.vocab_size), new, GREEDY) for prompt, new in lengths]

    def throughput(self, model: str) -> None:
        self.runs = [self.mixed(model, number) for number in range(min(3, self.args.repeats))]
        answers(self.engine, self.mixed(model, -1)[: self.scaled(64)], self.left_s)
        for run in self.runs:
            began = time.perf_counter()
            answers(self.engine, run, self.left_s)
            self.ours.append(sum(each.max_new_tokens for each in run) / (time.perf_counter() - began))
        tell("throughput", f"{median(self.ours):.1f} tokens/s")

    def peer(self, model: str) -> None:
        ours = median(self.ours)
        what = f"{len(self.runs[0])} mixed texts over transformers'"
        try:
            options = self.folders[model], self.dtype, self.device, self.runs, self.left_s
            several, attention = continuous_batching(*options)
        except Exception as error:  # whatever it raises: it is not ours
            said = " ".join(f"transformers: {type(error).__name__}: {error}".split())[:300]
            self.add(Row("throughput", model, what, None, note=f"ours {ours:.1f} tokens/s; {said}"))
            return
        theirs = median(several)
        note = f"{ours:.1f} / {theirs:.1f} tokens/s, {attention}"
        self.add(Row("throughput", model, what, ours / theirs, "", 1.5, 3, more=True, note=note))

    def arrivals(self, model: str) -> None:
        """The fleet is one of `MODELS` folders, with level 0 for `PLACES`."""
        load = self.times(lambda: self.awake("m0"), 3)
        size = self.fleet.models["m0"].weight_bytes
        short, long = self.scaled(64, 8), self.scaled(512, 16)
        begins = [self.times(lambda n=n: self.first_s("m0", n), 3) for n in (short, long)]
        each = max(0.0, (begins[1] - begins[0]) / (long - short))
        several = answers(self.engine, [self.request("m0", short, self.scaled(64, 12))], self.left_s)
        service = Service(max(0.0, begins[0] - each * short), each, 1 / decode_rate(several))
        from_disk = size / (self.args.disk * 1e9)
        interval = from_disk if self.args.interval is None else self.args.interval
        coming = zipf_arrivals(
            self.scaled(96, 8), MODELS, interval, (short, long), (8, self.scaled(64, 12)), self.args.seed
        )
        for number in range(PLACES):  # the most popular are there, here and in the simulation
            self.awake(f"m{number}")
        texts, began = list[Text](), time.perf_counter()
        for arrival in coming:
            time.sleep(max(0.0, began + arrival.at_s - time.perf_counter()))
            asked = self.request(f"m{arrival.model}", arrival.prompt, arrival.new)
            texts.append(submit(self.engine, asked))
        # A load, a turn and the longest answer of every model: whose first token comes later was starved.
        longest = MODELS * (load + TURN_S + max(map(service.whole_s, coming)))
        for text in texts:
            text.ended.wait(max(0.0, min(self.left_s, began + len(coming) * longest - time.perf_counter())))
        lost = sum(not text.is_whole for text in texts)
        waits = [text.first_s if text.times else float("inf") for text in texts]
        late = sum(wait > longest for wait in waits)
        note = f"{lost} lost, {late} starved ({longest:.0f} s) of {len(coming)}, {interval:.2f} s apart"
        self.add(Row("arrivals", model, "requests lost or starved", lost + late, "", 0, note=note))
        theirs = whole_models_from_disk(coming, service, PLACES, from_disk, range(PLACES))
        for share in (0.50, 0.95):
            own, other = (float(np.quantile(values, share, method="higher")) for values in (waits, theirs))
            note = f"{own:.3f} s / {other:.3f} s, {size / 1e9:.2f} GB from a disk of {self.args.disk:g} GB/s"
            what = f"p{share * 100:.0f} to first token over Ollama's policy"
            self.add(Row("arrivals", model, what, own / other, note=note))


def measure(run: Run) -> None:
    args, plain = run.args, run.args.dtype
    sections = [name for name in SECTIONS[:-1] if name in args.only]
    if sections:
        with run.serving([f"{name}={path}" for name, path in run.folders.items()], len(run.folders), args.cache):
            for section in sections:
                both = section in ("swap", "first", "decode")
                for model in run.folders if both else [plain]:
                    run.attempt(section, model, getattr(run, section))
        if run.ours:
            run.attempt("throughput", plain, run.peer)
            run.clear()
    if "arrivals" in args.only:
        name, source = [*run.folders.items()][-1]
        copies = [models.same_again(source, source.with_name(f"m{number}")) for number in range(MODELS)]

        def arrive(model: str) -> None:
            with run.serving([f"{copy.name}={copy}" for copy in copies], PLACES, args.cache // 4):
                run.arrivals(model)

        run.attempt("arrivals", name, arrive)


def main(argv: list[str] | None = None) -> list[Row]:
    args = parse(argv)
    read_csv(args.csv)  # before minutes of measuring, whether rows can be added
    folder = place_for(models.SHAPES[args.shape].num_parameters * 4)
    rows = list[Row]()
    try:
        with until_stopped():
            run = Run(args, folder)
            rows = run.rows
            measure(run)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        print("\n".join(["", HEAD, *(row.line() for row in rows)]), flush=True)
        print(f"{args.shape}; rows appended to {args.csv}; {seconds_since_start():.0f} s in all", flush=True)
    return rows


if __name__ == "__main__":
    sys.exit(any(row.value is None for row in main()))
