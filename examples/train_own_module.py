"""Train a module of your own that is larger than its fast memory: a stack, one call, and an optimizer."""

import torch
from torch import nn

import vblackwell as vb


class Regressor(nn.Module):
    def __init__(self, width: int = 256, depth: int = 8) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(depth))
        self.head = nn.Linear(width, 1)

    def forward(self, x_BD: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x_BD = x_BD + block(x_BD)
        return self.head(x_BD)[:, 0]


torch.manual_seed(0)
# Weights, gradients and AdamW states take 8 MiB; fast memory may hold one (of a GPU, activations are outside).
stack = vb.create_vgpu_stack("1MiB", cap_process=False)
model = vb.enable_vgpu_stack_optimization(Regressor(), stack, placement="streamed")
optimizer = vb.VGPUAdamW(model.parameters(), lr=1e-3, max_grad_norm=1.0, update_in_backward=True)

for step in range(1, 31):
    x_BD = torch.randn(64, 256, device=stack.level0_device)
    loss = nn.functional.mse_loss(model(x_BD), x_BD[:, :8].sum(1))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step in (1, 30):
        print(f"step {step}: loss {loss.item():.3f}, gradient norm {optimizer.grad_norm:.2f}")
print("fast memory held at most", stack.get_stats()["levels"][0]["peak_bytes"], "bytes")
vb.release(model)  # a plain module again
