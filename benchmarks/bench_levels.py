"""Compressed levels on trained tensors, and policies on recorded traces.

``python benchmarks/bench_levels.py`` trains a preset for some steps with torch's AdamW (from the weights of ``--load FILE``, which
``bench_precision.py --save FILE`` kept), then holds its weights as bf16, its fp32 weights and both moments in `CompressedVGPULevel` by
every codec: ratio, GB/s in and out, and whether that beats moving the bytes at 1.75 GB/s (the disk of docs/precision.md; ``--link`` for
another); with ``--checkpoint FOLDER``, of a run of `vb train`, those of that run and the checkpoint's bytes as a whole. ``--disk DIR``
measures instead of assuming: the disk levels of a stack in that folder, plain, compressing where that pays, and compressing every piece,
with each kind as one extent, and keyed levels there; the best of three rounds each. ``--disk-rate`` puts a disk of so many GB/s, made of
RAM, in its place (held_disk.py), for the stack's levels alone.
``--traces`` records which modules a training loop, a generation and a mixture of 64 experts ask for, with real tokens and a router that
was trained for a moment, and replays them under `lru`, `next_use`, the successor tables of `AccessPredictor` and Belady's optimum: hit
rate of demand alone, and time waited with prefetching, in transfers of one key. Then the same for more routers and seeds of noise, with
the hit rates that the frequency rule would have alone, and microseconds that a policy takes to hear of an access.
"""

from __future__ import annotations

import argparse
import math
import platform
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from held_disk import AlwaysCompressed, HeldDisk
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional

from vblackwell.data.corpus import Corpus, prepare_data
from vblackwell.data.dataset import BatchStream, PackedDataset
from vblackwell.memory.cache.compressed import CODECS, CompressedVGPULevel, worth
from vblackwell.memory.cache.duel import LAG, SHARE, Duel
from vblackwell.memory.cache.entry import Entry, Layout
from vblackwell.memory.cache.next_use import NextUse
from vblackwell.memory.cache.policy import LRU
from vblackwell.memory.cache.replay import POLICIES, replay
from vblackwell.memory.cache.single import VGPULevel
from vblackwell.memory.compressed_disk import CompressedDiskLevel
from vblackwell.memory.disk import DiskLevel
from vblackwell.memory.slab import map_slab
from vblackwell.nn.decoder.decoder import Decoder
from vblackwell.nn.decoder.presets import find_preset
from vblackwell.units import MiB, align_up

ROUNDS = 3


def train(corpus: Corpus, args: argparse.Namespace) -> dict[str, list[Tensor]]:
    """A trained preset's tensors by kind, on the CPU."""
    model = Decoder(find_preset(args.preset).decoder_config(corpus.vocab_size, 128), seed=0, device="cpu")
    if args.load:
        model.load_state_dict(torch.load(args.load, weights_only=True, map_location="cpu"))
    model = model.to(args.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), fused=True)
    stream = BatchStream(PackedDataset(corpus, 128), 8)
    began, loss = time.perf_counter(), torch.zeros(())
    for _ in range(args.steps):
        inputs, targets = (tensor.to(args.device) for tensor in stream.next())
        loss = model(inputs, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    print(
        f"{args.preset}: {args.steps} steps, loss {float(loss.detach()):.3f}, {time.perf_counter() - began:.0f} s",
        flush=True,
    )
    parameters = list(model.parameters())
    kinds = {
        "bf16 weights": [p.detach().bfloat16() for p in parameters],
        "fp32 weights": [p.detach() for p in parameters],
    }
    for name, label in (("exp_avg", "first moments"), ("exp_avg_sq", "second moments")):
        kinds[label] = [optimizer.state[p][name] for p in parameters]
    return {kind: [tensor.cpu() for tensor in tensors] for kind, tensors in kinds.items()}


def read_checkpoint(folder: Path) -> dict[str, list[Tensor]]:
    """A run's tensors by kind, and all of them together, whose plain bytes are those of the files but for names and shapes."""
    weights = load_file(folder / "model.safetensors")
    states = load_file(folder / "optimizer.safetensors")
    kinds = {"bf16 weights": [w.bfloat16() for w in weights.values()], "fp32 weights": list(weights.values())}
    for name, label in (("exp_avg", "first moments"), ("exp_avg_sq", "second moments")):
        kinds[label] = [tensor for key, tensor in states.items() if key.endswith(f".{name}")]
    print(f"{folder}: {len(weights)} weights, {len(states)} states", flush=True)
    return kinds | {"checkpoint": [*weights.values(), *states.values()]}


def compression(kinds: dict[str, list[Tensor]], args: argparse.Namespace) -> None:
    device, where = ("ssd", args.disk) if args.disk and not args.disk_rate else ("cpu", None)
    print(f"\nheld in {where or 'RAM'}; {sum(t.nbytes for t in kinds['fp32 weights']) / MiB:.1f} MiB of fp32 weights")
    print(
        f"{'what':<15} {'codec':<9} {'ratio':>6} {'in GB/s':>8} {'out GB/s':>9}  worth it at {args.link:g} GB/s, or as measured"
    )
    for kind, tensors in kinds.items():
        size = sum(tensor.nbytes for tensor in tensors)
        capacity = 2 * size / MiB + 64
        times = plain_seconds(tensors, capacity, device, where)
        print(f"{kind:<15} {'none':<9} {1:>6.2f} {size / times[0] / 1e9:>8.2f} {size / times[1] / 1e9:>9.2f}")
        for codec in args.codecs.split(","):
            if codec != "lossless" and kind != "bf16 weights":
                continue
            level = CompressedVGPULevel(1, capacity, device, path=where, codec=codec)
            put, get, stats = math.inf, math.inf, []
            for _ in range(
                ROUNDS if codec == "lossless" else 1
            ):  # the first round also starts threads and faults memory in
                for number, tensor in enumerate(tensors):
                    level.put(str(number), tensor)
                    level.get(str(number))
                stats = list(level.stats().values())
                put = min(put, sum(s.put_seconds for s in stats))
                get = min(get, sum(s.get_seconds or 0.0 for s in stats))
            ratio = size / sum(s.held_bytes for s in stats)
            if where:
                verdict = f"{'yes' if put + get < sum(times) else 'no'}: {put + get:.2f} s beside {sum(times):.2f}"
            else:
                share = sum(s.num_bytes for s in stats if worth(s, args.link * 1e9)) / size
                verdict = f"{'yes' if share > 0.5 else 'no'}, for {100 * share:.0f} % of the bytes"
            print(
                f"{'':<15} {codec:<9} {ratio:>6.2f} {size / put / 1e9:>8.2f} {size / get / 1e9:>9.2f}  {verdict}",
                flush=True,
            )
            level.close()


def disks(kinds: dict[str, list[Tensor]], args: argparse.Namespace) -> None:
    """A stack's disk level beside the one that compresses its pieces: the same bytes as one extent, written and read in turns."""
    flats = {kind: torch.cat([t.flatten().view(torch.uint8) for t in tensors]) for kind, tensors in kinds.items()}
    size = max(flat.nbytes for flat in flats.values())
    capacity = align_up(size, MiB) + 64 * MiB
    calls = [HeldDisk(args.disk_rate * 1e9, capacity) if args.disk_rate else None for _ in range(3)]
    measuring = CompressedDiskLevel(args.disk, capacity, calls=calls[1])
    levels = [
        DiskLevel(args.disk, capacity, calls=calls[0]), measuring, AlwaysCompressed(args.disk, capacity, calls=calls[2])
    ]  # fmt: skip
    aligned, back = map_slab(size), map_slab(size)
    print(
        f"\ndisk levels {f'at {args.disk_rate:g} GB/s' if args.disk_rate else f'in {args.disk}'}: GB/s of the plain bytes, written / read: "
        "plain, compressed where that pays, all compressed; speed of both ways beside plain"
    )
    for kind, flat in flats.items():
        source, found = aligned[: flat.nbytes], back[: flat.nbytes]
        source.copy_(flat)
        extents, times = [level.allocate(flat.nbytes) for level in levels], [[math.inf, math.inf] for _ in levels]
        for _ in range(ROUNDS):
            for level, extent, best in zip(levels, extents, times, strict=True):
                began = time.perf_counter()
                level.write(extent, source).wait()
                middle = time.perf_counter()
                level.read(extent, found).wait()
                best[:] = min(best[0], middle - began), min(best[1], time.perf_counter() - middle)
                assert torch.equal(found, source)
        for level, extent in zip(levels, extents, strict=True):
            level.free(extent)
        cells = "   ".join(f"{flat.nbytes / put / 1e9:5.2f} / {flat.nbytes / get / 1e9:5.2f}" for put, get in times)
        gains = ", ".join(f"x {sum(times[0]) / sum(own):.3f}" for own in times[1:])
        print(f"{kind:<15} {flat.nbytes / MiB:8.1f} MiB   {cells}   {gains}", flush=True)
    found = measuring.savings
    print(
        f"ratio of compressed pieces {found.ratio:.2f}; compressing {'pays' if found.pays else 'does not pay'} by its own books"
    )
    for level in levels:
        level.close()


def plain_seconds(tensors: list[Tensor], capacity: float, device: str, path: str | None) -> tuple[float, float]:
    """To put them into a plain level, and to get them back."""
    level, put, get = VGPULevel(1, capacity, device, path=path), math.inf, math.inf
    for _ in range(ROUNDS):
        began = time.perf_counter()
        for number, tensor in enumerate(tensors):
            level.put(str(number), tensor)
        middle = time.perf_counter()
        for number in range(len(tensors)):
            level.get(str(number))
        put, get = min(put, middle - began), min(get, time.perf_counter() - middle)
    level.close()
    return put, get


class Experts(nn.Module):
    """A language model of two layers with 64 experts each, of which a token takes two."""

    def __init__(self, vocab_size: int, width: int = 64, experts: int = 64) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(vocab_size, width), nn.Linear(width, vocab_size, bias=False)
        self.routers = nn.ModuleList(nn.Linear(width, experts, bias=False) for _ in range(2))
        self.experts = nn.ParameterList(
            nn.Parameter(torch.randn(experts, width, width) * width**-0.5) for _ in range(2)
        )
        self.chosen: list[Tensor] = []

    def forward(self, ids_BS: Tensor) -> Tensor:
        x, self.chosen = self.embed(ids_BS), []
        x = x + functional.pad(x[:, :-1], (0, 0, 1, 0))  # the token before
        for router, weights in zip(self.routers, self.experts, strict=True):
            gate, index = router(x).softmax(-1).topk(2, dim=-1)
            self.chosen.append(index)
            out = torch.einsum("bsd,bskde->bske", x, weights[index])
            x = x + (functional.gelu(out) * gate.unsqueeze(-1)).sum(2)
        return self.head(functional.rms_norm(x, x.shape[-1:]))


def traces(corpus: Corpus, steps: int) -> Iterator[tuple[str, list[str]]]:
    """(what, keys in order)."""
    torch.manual_seed(0)
    model = Decoder(find_preset("tiny").decoder_config(corpus.vocab_size, 32), seed=0, device="cpu")
    heard: list[str] = []
    for number, layer in enumerate(model.layers):
        for register in (layer.register_forward_pre_hook, layer.register_full_backward_pre_hook):
            register(lambda *_, name=f"layer {number}": heard.append(name))
    stream = BatchStream(PackedDataset(corpus, 32), 1)
    for _ in range(120):
        inputs, targets = stream.next()
        (model(inputs, targets) / 2).backward()
    yield "training, 9 layers", list(heard)
    updates: list[str] = []
    for start in range(0, len(heard), 36):  # two micro-batches, then an update from the first layer on
        updates += heard[start : start + 36] + [f"layer {number}" for number in range(9)]
    yield "the same with updates", updates
    heard.clear()
    with torch.no_grad():
        ids = stream.next()[0]
        for _ in range(400):
            ids = torch.cat([ids, model(ids[:, -16:])[:, -1].argmax(-1, keepdim=True)], 1)
    yield "generation, 9 layers", list(heard)
    yield "experts, 2 x 64, top 2", routed(corpus, steps, seed=0, experts=64)
    yield "noise, 64 keys", noise(0, 4000)


def noise(seed: int, length: int) -> list[str]:
    chance = random.Random(seed)
    return [str(chance.randrange(64)) for _ in range(length)]


def routed(corpus: Corpus, steps: int, seed: int, experts: int, start: int = 0) -> list[str]:
    """The experts that 3,000 tokens of the corpus ask for, from number ``start`` on."""
    torch.manual_seed(seed)
    moe = Experts(corpus.vocab_size, experts=experts)
    optimizer = torch.optim.AdamW(moe.parameters(), lr=3e-3)
    batches = BatchStream(PackedDataset(corpus, 64), 4)
    loss = torch.zeros(())
    for _ in range(steps):
        inputs, targets = batches.next()
        logits = moe(inputs)
        loss = functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        (loss + balance(moe, inputs)).backward()
        optimizer.step()
        optimizer.zero_grad()
    print(f"{experts} experts, seed {seed}: {steps} steps, loss {float(loss.detach()):.3f}", flush=True)
    with torch.no_grad():
        moe(torch.from_numpy(corpus.tokens[start : start + 3000].astype("int64"))[None])
    keys = []
    for token in range(3000):
        for layer, index in enumerate(moe.chosen):
            keys += [f"{layer}.{int(expert)}" for expert in index[0, token]]
    return keys


def balance(moe: Experts, inputs: Tensor) -> Tensor:
    """The usual load balancing: mean probability of each expert times its share."""
    probabilities = moe.routers[0](moe.embed(inputs)).softmax(-1).flatten(0, 1).mean(0)
    experts = probabilities.shape[0]
    share = functional.one_hot(moe.chosen[0].flatten(), experts).float().mean(0)
    return experts * 0.01 * (probabilities * share).sum()


def policies(corpus: Corpus, args: argparse.Namespace) -> None:
    print(
        f"\n{'trace':<24} {'keys':>5} {'level':>6}  "
        + "  ".join(f"{policy:>18}" for policy in POLICIES)
        + "   (hit rate, waited); next use of Belady's hits"
    )
    for what, trace in traces(corpus, args.steps):
        distinct = len(set(trace))
        for capacity in (max(2, distinct // 3), max(3, 2 * distinct // 3)):
            found = [replay(trace, capacity, policy, compute=args.compute) for policy in POLICIES]
            cells = "  ".join(f"{100 * each.hit_rate:>7.2f} % {each.stall:>8.0f}" for each in found)
            by_policy = dict(zip(POLICIES, found, strict=True))
            share = by_policy["next_use"].hit_rate / by_policy["belady"].hit_rate
            print(f"{what:<24} {distinct:>5} {capacity:>6}  {cells}   {100 * share:.2f} %", flush=True)


ROUTERS = (
    (0, 64, 0),
    (1, 64, 0),
    (2, 64, 50_000),
    (3, 32, 0),
    (4, 128, 0),
    (5, 64, 20_000),
)  # seed, experts, first token


def rules(corpus: Corpus, args: argparse.Namespace) -> None:
    """Hit rates of demand alone, in percent, of policies and of the frequency rule on its own, and what policies waited."""
    print(
        f"\n{'trace':<24} {'keys':>5} {'level':>6}  {'frequency':>9}  {'sparing':>9}  "
        + "  ".join(f"{p:>16}" for p in POLICIES)
    )
    for seed, experts, start in ROUTERS:
        trace = routed(corpus, args.steps, seed, experts, start)
        distinct = len(set(trace))
        for capacity in (distinct // 6, distinct // 3, 2 * distinct // 3, 5 * distinct // 6):
            cells = [f"{100 * kept(trace, capacity, Duel(share)):>7.2f} %" for share in (LAG + 1, SHARE)]
            found = [replay(trace, capacity, policy, compute=args.compute) for policy in POLICIES]
            cells += [f"{100 * each.hit_rate:>7.2f} % {each.stall:>6.0f}" for each in found]
            print(
                f"{f'{experts} experts, seed {seed}':<24} {distinct:>5} {capacity:>6}  {'  '.join(cells)}", flush=True
            )
    gains = []
    for seed in range(12):
        trace = noise(seed, 6000)
        for capacity in (10, 21, 42, 58):
            ours, plain = (replay(trace, capacity, policy).hit_rate for policy in ("next_use", "lru"))
            gains.append(100 * (ours - plain))
    same = sum(gain == 0 for gain in gains)
    print(
        f"noise: next use {min(gains):+.2f} to {max(gains):+.2f} points beside LRU, {same} of {len(gains)} replays equal"
    )


def kept(trace: list[str], capacity: int, duel: Duel) -> float:
    """Hit rate of the frequency rule's directory."""
    hits = 0
    for key in trace:
        hits += duel.has(key)
        duel.hear(key, capacity)
    return hits / len(trace)


def costs(corpus: Corpus, args: argparse.Namespace) -> None:
    """Microseconds to hear of an access, the best of five rounds; all keys are on the level."""
    period = [f"layer {number}" for number in (*range(36), *reversed(range(36)))] * 150
    routing = routed(corpus, args.steps, 0, 64)
    print(f"\n{'microseconds an access':<24}  " + "  ".join(f"{name:>8}" for name in ("lru", "next_use")))
    for what, trace in (("with a period", period), ("experts", routing)):
        best = {LRU: math.inf, NextUse: math.inf}
        for _ in range(5):
            for kind in best:
                policy, entries = kind(), {key: Entry(key, None, 5, Layout((), 0, None, None)) for key in trace}
                for entry in entries.values():
                    policy.add(entry)
                began = time.perf_counter()
                for key in trace:
                    policy.touch(entries[key])
                best[kind] = min(best[kind], (time.perf_counter() - began) / len(trace))
        print(f"{what:<24}  " + "  ".join(f"{1e6 * seconds:>8.2f}" for seconds in best.values()), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="tiny")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--link", type=float, default=1.75, help="GB/s that bytes would move at")
    parser.add_argument("--disk", default=None, help="folder of a level on a disk")
    parser.add_argument("--disk-rate", type=float, default=None, help="GB/s of a disk made of RAM; with --disk")
    parser.add_argument("--checkpoint", type=Path, default=None, help="of vb train, instead of training here")
    parser.add_argument("--codecs", default=",".join(CODECS), help="lossy ones take a while on a CPU")
    parser.add_argument("--load", type=Path, default=None)
    parser.add_argument("--traces", action="store_true", help="the traces alone")
    parser.add_argument("--compute", type=float, default=1.0, help="time an access computes, in transfers of a key")
    args = parser.parse_args()
    if args.disk_rate and not args.disk:
        parser.error("--disk-rate is the speed of the levels that --disk measures: give --disk DIR as well")
    torch.manual_seed(0)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {platform.machine()}")
    if args.traces:
        corpus = prepare_data(None)
        policies(corpus, args)
        rules(corpus, args)
        costs(corpus, args)
    else:
        kinds = read_checkpoint(args.checkpoint) if args.checkpoint else train(prepare_data(None), args)
        if args.disk:
            disks(kinds, args)
        compression(kinds, args)


if __name__ == "__main__":
    main()
