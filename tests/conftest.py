"""Where there is no GPU, Triton's kernels run in its interpreter: it must be on before anything (transformers, say) imports triton."""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
