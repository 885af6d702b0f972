"""Where there is no GPU, Triton's kernels run in its interpreter: it must be on before anything (transformers, say) imports triton."""

import importlib.util
import os
import signal

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
    if os.environ["TRITON_INTERPRET"] == "1" and importlib.util.find_spec("triton"):
        from tests.interpreter import repair

        repair()

# A shell starts what it runs in the background with Ctrl-C ignored, and Python then leaves it so: tests that send it would wait in vain.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
