"""Generation under a cap: coarse parts resident with fine ones streamed, beside int8 streamed, coarse alone and everything resident.

``python benchmarks/bench_fine_stream.py`` takes a random `tiny` on the CPU; on a GPU ``--device cuda --preset small --load FILE`` with
the weights that ``bench_precision.py --save FILE`` kept (preset and ``--seq-length`` as there), or ``--preset xl`` with random ones,
whose loss says nothing. One token after another goes through the model, without a cache of keys, so that time is the linears'.
Every system may hold the coarse bytes and ``--room`` of the fine ones on level 0: int8 keeps as many of its layers there as fit and waits
for the others, asked for ``--ahead`` layers early. Held-out loss is taken while streaming, the same windows for all.
"""

from __future__ import annotations

import argparse
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor, nn
from torch.nn import functional

from vblackwell.data.corpus import Corpus, prepare_data
from vblackwell.data.dataset import PackedDataset, evaluation_batches
from vblackwell.memory.cache.stack import VGPUStack
from vblackwell.nn.convert.linears import replace_module
from vblackwell.nn.convert.optimize import enable_vb_optimization
from vblackwell.nn.decoder.decoder import Decoder
from vblackwell.nn.decoder.presets import find_preset
from vblackwell.nn.fine_stream import FineStream
from vblackwell.nn.linear.two_part_linear import VBOptimizedLinear
from vblackwell.numerics.packed import PackedTensor
from vblackwell.units import MiB


class Parts:
    """A layer's int8 parts as one value of a stack."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self._tensors = tensors

    def tensors(self) -> dict[str, Tensor]:
        return self._tensors

    def meta(self) -> None:
        return None

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor], meta: None) -> Parts:
        return cls(tensors)


class StreamedInt8(nn.Module):
    """A linear by rows of int8 whose parts are in a stack: waited for before it computes, the next ones asked for.

    Scales go behind the product, so that a weight is written out by one cast.
    """

    def __init__(self, layer: VBOptimizedLinear, stack: VGPUStack, name: str, later: list[str]) -> None:
        super().__init__()
        self.bias, self._stack, self._name, self._later = layer.bias, stack, name, later
        self._columns = layer.in_features

    def forward(self, x: Tensor) -> Tensor:
        self._stack.prefetch([other for other in self._later if self._stack.level_of(other) != 0])
        held = self._stack.access(self._name).tensors()
        y = (functional.linear(x, held["codes"][:, : self._columns].to(x.dtype)) * held["scales"]).to(x.dtype)
        return y if self.bias is None else y + self.bias


def stream_int8(model: nn.Module, layers: dict[str, VBOptimizedLinear], stack: VGPUStack, ahead: int) -> None:
    """Every layer's parts into the stack; as many as fit beside those that pass stay on level 0."""
    names, kept, level = list(layers), 0, stack.levels[0]
    held = {name: layer.packed for name, layer in layers.items()}
    largest = max(packed.nbytes for packed in held.values() if packed is not None)
    for place, (name, layer) in enumerate(layers.items()):
        packed = held.pop(name)
        assert isinstance(packed, PackedTensor) and float(packed.tensor_scale) == 1
        parts = Parts({"codes": packed.codes, "scales": packed.block_scales.view(1, -1)})
        size = sum(tensor.nbytes for tensor in parts.tensors().values()) + 4096
        stays = kept + size <= level.capacity_bytes - (ahead + 1) * (largest + 4096)
        kept += size if stays else 0
        stack.register(name, parts, priority=7 if stays else 4)
        later = [names[(place + step) % len(names)] for step in range(1, ahead + 1)]
        replace_module(model, name, layer, StreamedInt8(layer, stack, name, later))


def build(args: argparse.Namespace, corpus: Corpus, **switches: bool) -> tuple[nn.Module, dict[str, VBOptimizedLinear]]:
    shape = find_preset(args.preset).decoder_config(corpus.vocab_size, args.seq_length)
    dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
    model = Decoder(shape, device="meta", dtype=dtype).to_empty(device=args.device).requires_grad_(False)
    if args.load:
        model.load_state_dict(torch.load(args.load, weights_only=True, map_location=args.device))
    else:  # on its device: a CPU takes half a minute for a billion weights
        torch.manual_seed(0)
        for parameter in model.parameters():
            parameter.fill_(1.0) if parameter.dim() == 1 else parameter.normal_(0.0, 0.02)
    enable_vb_optimization(model, "inference", **switches)
    layers = {name: m for name, m in model.named_modules() if isinstance(m, VBOptimizedLinear)}
    for layer in layers.values():
        layer.quantize()
    return model, layers


@torch.no_grad()
def measure(model: nn.Module, args: argparse.Namespace, corpus: Corpus) -> tuple[float, float]:
    """(tokens a second, held-out loss)."""
    ids = torch.zeros(1, 1, dtype=torch.int64, device=args.device)
    for _ in range(3):
        model(ids)
    synchronize(args.device)
    began = time.perf_counter()
    for _ in range(args.tokens):
        ids = model(ids)[:, -1].argmax(-1, keepdim=True)
    synchronize(args.device)
    rate = args.tokens / (time.perf_counter() - began)
    total, count = 0.0, 0
    for inputs, targets in evaluation_batches(
        PackedDataset(corpus, args.seq_length, "validation"), 4, args.sequences // 4
    ):
        total += float(model(inputs.to(args.device), targets.to(args.device))) * len(inputs)
        count += len(inputs)
    return rate, total / count


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def stack_of(args: argparse.Namespace, num_bytes: float) -> VGPUStack:
    device = "cuda:0" if args.device == "cuda" else "arena"
    return VGPUStack({"levels": [
        {"device": device, "capacity_mb": num_bytes / MiB}, {"device": "cpu", "capacity_mb": 4 * num_bytes / MiB + 1024},
    ]})  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="tiny")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--load", type=Path, default=None)
    parser.add_argument("--room", type=float, default=0.3, help="share of the fine bytes that level 0 has room for")
    parser.add_argument("--ahead", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--seq-length", type=int, default=128)
    parser.add_argument("--sequences", type=int, default=32)
    args = parser.parse_args()
    corpus = prepare_data(None)
    machine = torch.cuda.get_device_name() if args.device == "cuda" else platform.machine()
    print(
        f"torch {torch.__version__}, {machine}, {args.preset}, room for {100 * args.room:g} % of the fine parts",
        flush=True,
    )
    model, layers = build(args, corpus)
    fine = sum(layer.weight_fine.nbytes for layer in layers.values() if layer.weight_fine is not None)
    coarse = sum(layer.stats()["weight_bytes"] for layer in layers.values()) - fine
    rows: list[tuple[str, float, float, str]] = []

    def add(name: str, model: nn.Module, said: Callable[[], str] = lambda: "") -> None:
        rows.append((name, *measure(model, args, corpus), said()))
        print(rows[-1], flush=True)

    add("both parts resident", model)
    parts = {name: layer.drop_fine() for name, layer in layers.items()}
    add("coarse alone", model)
    for name, layer in layers.items():
        layer.attach_fine(parts.pop(name))
    with stack_of(args, args.room * fine) as stack:
        stream = FineStream(model, stack, ahead=args.ahead)
        stream.wait()
        add(
            "coarse resident, fine streamed",
            model,
            lambda: f"{100 * stream.served.share:.0f} % of the calls had both parts",
        )
        stream.close()
    del model, layers
    model, layers = build(args, corpus, enable_fp4=False)
    with stack_of(args, coarse + args.room * fine) as stack:
        stream_int8(model, layers, stack, args.ahead)
        layers.clear()
        add("int8 streamed", model)
    print(f"\n{'':<32} {'tokens/s':>9} {'val loss':>9}   coarse {coarse / MiB:.1f} MiB, fine {fine / MiB:.1f} MiB")
    for name, rate, loss, said in rows:
        print(f"{name:<32} {rate:>9.1f} {loss:>9.4f}   {said}")


if __name__ == "__main__":
    main()
