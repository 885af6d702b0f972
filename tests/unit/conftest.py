"""One thread a test process: tensors here are small, and threads that wait for each other on a busy machine cost more."""

import torch

torch.set_num_threads(1)
