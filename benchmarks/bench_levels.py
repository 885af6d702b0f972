"""Compressed levels on trained tensors.

``python benchmarks/bench_levels.py`` trains a preset for some steps with torch's AdamW (from the weights of ``--load
FILE``, which ``bench_precision.py --save FILE`` kept), then holds its weights as bf16, its fp32 weights and both
moments in `CompressedVGPULevel` by every codec: ratio, GB/s in and out, and whether that beats moving the bytes at 1.75
GB/s (the disk of docs/numerics.md; ``--link`` for another). With ``--checkpoint FOLDER``, of a run of `vb train`, it
holds those of that run and the checkpoint's bytes as a whole. ``--disk DIR`` holds them in a level in that folder and
measures the plain one.
"""

from __future__ import annotations

import argparse
import math
import platform
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from safetensors.torch import load_file
from torch import Tensor

from vblackwell.data.corpus import prepare_data
from vblackwell.data.dataset import BatchStream, Corpus, PackedDataset
from vblackwell.memory.cache.compressed import CODECS, CompressedVGPULevel, worth
from vblackwell.memory.cache.single import VGPULevel
from vblackwell.nn.decoder.decoder import Decoder
from vblackwell.nn.decoder.presets import find_preset
from vblackwell.units import MiB

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
    """A run's tensors by kind, and all of them together: the bytes of the files but for names and shapes."""
    weights = load_file(folder / "model.safetensors")
    states = load_file(folder / "optimizer.safetensors")
    kinds = {"bf16 weights": [w.bfloat16() for w in weights.values()], "fp32 weights": list(weights.values())}
    for name, label in (("exp_avg", "first moments"), ("exp_avg_sq", "second moments")):
        kinds[label] = [tensor for key, tensor in states.items() if key.endswith(f".{name}")]
    print(f"{folder}: {len(weights)} weights, {len(states)} states", flush=True)
    return kinds | {"checkpoint": [*weights.values(), *states.values()]}


def compression(kinds: dict[str, list[Tensor]], args: argparse.Namespace) -> None:
    device, where = ("ssd", args.disk) if args.disk else ("cpu", None)
    print(f"\nheld in {where or 'RAM'}; {sum(t.nbytes for t in kinds['fp32 weights']) / MiB:.1f} MiB of fp32 weights")
    print(
        f"{'what':<15} {'codec':<9} {'ratio':>6} {'in GB/s':>8} {'out GB/s':>9}  "
        f"worth it at {args.link:g} GB/s, or as measured"
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="tiny")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--link", type=float, default=1.75, help="GB/s that bytes would move at")
    parser.add_argument("--disk", default=None, help="folder of a level on a disk")
    parser.add_argument("--checkpoint", type=Path, default=None, help="of vb train, instead of training here")
    parser.add_argument("--codecs", default=",".join(CODECS), help="lossy ones take a while on a CPU")
    parser.add_argument("--load", type=Path, default=None)
    args = parser.parse_args()
    torch.manual_seed(0)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {platform.machine()}")
    kinds = read_checkpoint(args.checkpoint) if args.checkpoint else train(prepare_data(None), args)
    compression(kinds, args)


if __name__ == "__main__":
    main()
