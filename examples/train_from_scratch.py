"""Train a decoder on your own text from random weights, with an eighth of the fast memory that training takes.

    python examples/train_from_scratch.py my_texts/

Without arguments it learns the sources of Python's json package. `vb train` does this with a tokenizer, a schedule and
checkpoints; here every byte is a token.
"""

import json
import sys
from pathlib import Path

import torch
import transformers

import vblackwell as vb

folder = Path(sys.argv[1] if len(sys.argv) == 2 else json.__path__[0])
text = b"\n".join(path.read_bytes() for path in sorted(folder.rglob("*")) if path.suffix in (".py", ".txt", ".md"))
tokens_N = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
sizes = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 8}
config = transformers.LlamaConfig(**sizes, num_attention_heads=4, bos_token_id=None, eos_token_id=None)
model = transformers.AutoModelForCausalLM.from_config(config)

stack = vb.create_vgpu_stack("0.9MiB", cap_process=False)  # of a GPU weights and states alone: activations are outside
vb.enable_vgpu_stack_optimization(model, stack, placement="streamed")
optimizer = vb.VGPUAdamW(model.parameters(), lr=1e-2, max_grad_norm=1.0, update_in_backward=True)
for step in range(1, 19):
    starts_B = torch.randint(len(tokens_N) - 64, (8, 1))
    rows_BS = tokens_N[starts_B + torch.arange(64)].to(stack.level0_device)
    loss = model(input_ids=rows_BS, labels=rows_BS, use_cache=False).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step in (1, 18):
        print(f"step {step}: loss {loss.item():.3f}")
print("fast memory held at most", stack.get_stats()["levels"][0]["peak_bytes"], "bytes")
print("saved", vb.save_causal_lm(model, "from-scratch"))
