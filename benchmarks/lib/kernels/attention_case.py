"""One case of attention: its tensors, whether ours is right, and the times of ours and of PyTorch's."""

from __future__ import annotations

import functools
import multiprocessing
import os
import random
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, wait

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.lib.kernels.attention_draw import Attention, Times
from benchmarks.lib.kernels.graph_timing import eager_us, graph_of, turns_us
from benchmarks.lib.results import tell
from vblackwell.kernels.attention.op import flash_attention_varlen
from vblackwell.kernels.attention.reference import attention_reference
from vblackwell.nn.attention.backends import attention, choose_attention
from vblackwell.nn.attention.request import AttentionRequest, Variant, request_of

Run = Callable[[], Tensor]
TORCH = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
MAX_MATH_SCORES = 1 << 24  # above them PyTorch's own 'math' is best nowhere, but where it alone runs
CHECKED_QUERIES = 64
# No error over 1.5 times PyTorch's own, or over one rounding to bf16 (2^-8) of the output; a gradient's inner values,
# probabilities and their gradients, are rounded too, ours and theirs at other places.
MAX_OVER_THEIRS, MAX_ERROR, MAX_GRADIENT_ERROR = 1.5, 2**-8, 2**-7


class Case:
    """The tensors of a case, and the calls that compute it: ours, and PyTorch's with the mask that it needs."""

    def __init__(self, case: Attention, device: str = "cuda") -> None:
        self.case, self.device = case, device
        sizes = ((case.heads, case.queries), (case.kv_heads, case.keys), (case.kv_heads, case.keys))
        self.leaves = [  # (B, N, S, H), as projections give them
            torch.randn(case.batch, length, heads, case.head, device=device, dtype=torch.bfloat16).transpose(1, 2)
            for heads, length in sizes
        ]
        for leaf in self.leaves:
            leaf.requires_grad_(case.gradient)
        self.inputs = self.leaves  # of ours; packed documents are (S, N, H)
        if case.ends:
            self.inputs = [leaf.detach()[0].transpose(0, 1).requires_grad_(case.gradient) for leaf in self.leaves]
            self.starts = torch.tensor((0, *case.ends), device=device, dtype=torch.int32)
        self.given = None if case.mask is None else self.drawn_mask(case.mask)

    def drawn_mask(self, shape: tuple[int, ...]) -> Tensor:
        """What the user gives: values to add, lengths of padded rows, or coins; every query sees the first key."""
        if self.case.kind == "additive":
            return torch.randn(shape, device=self.device, dtype=torch.bfloat16)
        if shape[2] == 1:
            lengths = torch.randint(1, shape[3] + 1, (shape[0], 1, 1, 1), device=self.device)
            return torch.arange(shape[3], device=self.device) < lengths
        mask = torch.empty(shape, device=self.device, dtype=torch.bool).bernoulli_(0.5)
        mask[..., 0] = True
        return mask

    @functools.cached_property
    def mask(self) -> Tensor | None:
        """The mask that PyTorch needs: of a window and of documents, which it does not know, too."""
        length = self.case.keys
        if self.case.window is not None:
            seen = torch.ones(length, length, device=self.device, dtype=torch.bool)
            return seen.tril_().triu_(1 - self.case.window)
        if self.case.ends:
            ends = torch.tensor(self.case.ends, device=self.device)
            place = torch.bucketize(torch.arange(length, device=self.device), ends, right=True)
            return (place[:, None] == place[None]).tril_()
        return self.given

    @property
    def variant(self) -> Variant:
        return Variant(self.given, self.case.kind in ("causal", "window"), window=self.case.window)

    @property
    def request(self) -> AttentionRequest:
        return request_of(*self.leaves, self.variant)

    def ours(self, backend: str = "auto") -> Tensor:
        if not self.case.ends:
            return attention(*self.leaves, self.variant, backend)[0]
        return flash_attention_varlen(*self.inputs, self.starts, self.starts, causal=True)

    def theirs(self) -> Tensor:
        case = self.case
        causal, grouped = case.kind == "causal", case.heads > case.kv_heads
        return functional.scaled_dot_product_attention(*self.leaves, self.mask, is_causal=causal, enable_gqa=grouped)

    def by(self, backend: SDPBackend) -> Tensor:
        with sdpa_kernel(backend):
            return self.theirs()

    def step(self, run: Run, inputs: list[Tensor]) -> Callable[[], object]:
        """What is timed."""
        if not self.case.gradient:
            return run
        dout = torch.randn_like(inputs[0])
        return lambda: torch.autograd.grad(run(), inputs, dout)

    def error_over_bound(self) -> float:
        """Largest error of what comes of some queries of the last key head, relative, over what is allowed; infinite
        where ours has numbers that are not finite. Gradients are those of these queries' outputs alone.
        """
        case, group = self.case, self.case.heads // self.case.kv_heads
        picked = random.Random(0).sample(range(case.queries), min(CHECKED_QUERIES, case.queries))
        rows = torch.tensor(sorted({*picked, 0, case.queries - 1}), device=self.device)
        places = [(slice(-1, None), slice(-group, None), rows), *2 * [(slice(-1, None), slice(-1, None))]]
        dout = torch.zeros_like(self.leaves[0])
        dout[places[0]] = torch.randn(1, group, len(rows), case.head, device=self.device, dtype=dout.dtype)
        mask = self.mask
        if mask is not None:
            mask = mask[(None,) * (4 - mask.dim())].expand(case.batch, case.heads, case.queries, case.keys)[places[0]]
            mask = mask if mask.dtype == torch.bool else mask.double()
        elif case.kind == "causal":
            mask = torch.arange(case.keys, device=self.device) <= rows[:, None]
        parts = [leaf.detach()[place].double() for leaf, place in zip(self.leaves, places, strict=True)]
        exact = results(
            lambda *qkv: attention_reference(*qkv, mask=mask), parts, case.gradient, dout[places[0]].double()
        )
        found = []
        for run, inputs in ((self.ours, self.inputs), (self.theirs, self.leaves)):
            packed = inputs[0].dim() == 3
            given = dout[0].transpose(0, 1) if packed else dout
            whole = results(lambda *_, run=run: run(), inputs, case.gradient, given)
            whole = [each.transpose(0, 1)[None] for each in whole] if packed else whole
            if run == self.ours and not all(bool(each.isfinite().all()) for each in whole):
                return float("inf")
            found.append([each[place] for each, place in zip(whole, [places[0], *places], strict=False)])
        worst = 0.0
        for number, (mine, other, right) in enumerate(zip(*found, exact, strict=True)):
            least = MAX_GRADIENT_ERROR if number else MAX_ERROR
            worst = max(worst, relative(mine, right) / max(least, MAX_OVER_THEIRS * relative(other, right)))
        return worst

    def measure(self, own: bool) -> Times:
        """Graphed are ours, PyTorch's backends and, with ``own``, the own kernel whatever the dispatcher chooses."""
        ours = self.step(self.ours, self.inputs)
        eager = eager_us([ours, self.step(self.theirs, self.leaves)])
        torch.cuda.empty_cache()
        steps = {"ours": ours, **self.torch_backends()}
        if own:
            steps["triton"] = self.step(functools.partial(self.ours, "triton"), self.inputs)
        repeats = max(1, min(16, int(1e10 / self.case.flops)))
        graphs = [graph_of([step] * repeats) for step in steps.values()]
        return Times(*eager, {name: us / repeats for name, us in zip(steps, turns_us(graphs, 6), strict=True)})

    def torch_backends(self) -> dict[str, Callable[[], object]]:
        """What is timed of those of PyTorch's backends that compute the case."""
        found: dict[str, Callable[[], object]] = {}
        for name, backend in TORCH.items():
            if name == "math" and found and self.case.scores > MAX_MATH_SCORES:
                continue
            step = self.step(functools.partial(self.by, backend), self.leaves)
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # it warns of each reason against a backend
                    step()
            except RuntimeError as error:
                if not any(refusal in str(error) for refusal in ("No available kernel", "No viable backend")):
                    tell(f"{self.case}: {name} failed: {error!r:.200}")
                continue
            found[name] = step
        return found


def results(run: Callable[..., Tensor], inputs: Sequence[Tensor], gradient: bool, dout: Tensor) -> list[Tensor]:
    """The output of ``run``, and the gradients of ``inputs``."""
    if not gradient:
        with torch.no_grad():
            return [run(*inputs)]
    leaves = [x if x.requires_grad else x.requires_grad_() for x in inputs]
    out = run(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def relative(got: Tensor, exact: Tensor) -> float:
    """Relative error; absolute where all that is right is zero."""
    return (got.double() - exact).norm().item() / (exact.norm().item() or 1.0)


def compile_ahead(cases: Sequence[Attention]) -> None:
    """Compile what ours runs, in processes, because Triton holds Python's lock while it compiles. What fails here fails
    again, and is told, where the case is measured.
    """
    workers = max(1, min(12, (os.cpu_count() or 4) - 2, len(cases)))
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        wait([pool.submit(run_once, case) for case in cases])


def run_once(case: Attention) -> None:
    """Ours, where that is not one of PyTorch's backends."""
    made = Case(case)
    if case.ends or choose_attention(made.request) not in TORCH:
        made.step(made.ours, made.inputs)()
        torch.cuda.synchronize()
