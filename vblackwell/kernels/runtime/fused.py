"""Whether a fused row-wise op runs as its Triton kernel or as plain torch, and why.

Two backends for each of rms_norm, swiglu, rotary and cross_entropy: ``triton`` on CUDA, ``torch`` everywhere else, where it is the plain
expression with autograd's own backward, so that a model on the CPU keeps its bits. ``use_backend(op, 'triton')`` on CPU tensors works
where Triton's interpreter is on (TRITON_INTERPRET=1 before triton is imported): so the kernels are tested without a GPU.

Under ``torch.compile`` the device and dtype alone decide, because the choice is made while tracing, where context variables
cannot be read.
"""

from __future__ import annotations

import importlib.util
import os
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from vblackwell.kernels.runtime.dispatch import Backend, Request, capability, choose

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# A row is held in registers by one block of threads: 2^16 fp32 values are a quarter of what a multiprocessor has.
LONGEST_ROW = 1 << 16


def triton_reasons(request: Request) -> list[str]:
    reasons = []
    if request.device.type != "cuda" and not (request.device.type == "cpu" and interpreting()):
        reasons.append(f"the tensors are on {request.device}: it needs a CUDA GPU, or TRITON_INTERPRET=1")
    if request.device.type == "cuda" and request.capability < (8, 0):
        reasons.append(f"compute capability {request.capability[0]}.{request.capability[1]} is below 8.0")
    if importlib.util.find_spec("triton") is None:
        reasons.append("triton is not installed")
    if request.dtype not in DTYPES:
        reasons.append(f"the tensors are {request.dtype}: it takes bfloat16, float16 and float32")
    if request.n > LONGEST_ROW:
        reasons.append(f"rows of {request.n} elements: it takes {LONGEST_ROW}")
    return reasons


def _never(request: Request) -> list[str]:
    return []


_TRITON = Backend("triton", triton_reasons, lambda: True)
_TORCH = Backend("torch", _never, lambda: False, forward_mode=True)
# By device, because on the CPU the kernels run for tests alone, one element after the other.
_TABLES = {"cuda": (_TRITON, _TORCH), "cpu": (_TORCH, _TRITON)}


def interpreting() -> bool:
    """Whether Triton's kernels run on the CPU in its interpreter."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def on_device(x: Tensor) -> AbstractContextManager[object]:
    """Inside, launches go to the GPU that holds ``x``: Triton takes the current one, whatever its arguments are on."""
    return torch.cuda.device(x.device) if x.device.type == "cuda" else nullcontext()


def runs_triton(op: str, x: Tensor, row: int) -> bool:
    """Whether ``op`` on ``x``, which holds ``row`` elements of a row at once (0: any number), runs as a Triton kernel.

    Raises:
        Unsupported: ``use_backend`` asked for one that refuses; the message has its reasons.
    """
    if torch.compiler.is_compiling():
        return x.device.type == "cuda" and x.dtype in DTYPES and row <= LONGEST_ROW
    request = Request(x.device, capability(x.device), x.dtype, op, x.numel() // max(row, 1), row, row)
    return choose(op, _TABLES.get(x.device.type, (_TORCH,)), request).run()
