"""Train low-rank adapters over a model that is packed to FP4 and larger than its fast memory.

    python examples/adapters_over_fp4.py Qwen/Qwen3-0.6B out "text to learn"

They are saved for peft, and merged. Without arguments a small random Llama is written and taught a few numbers.
"""

import sys

import torch
import transformers

import vblackwell as vb

source, out, text = sys.argv[1:] if len(sys.argv) == 4 else ("tiny-llama", "tiny-llama-adapted", "")
if text:
    tokens_BS = transformers.AutoTokenizer.from_pretrained(source)(text, return_tensors="pt").input_ids
else:
    sizes = {"vocab_size": 128, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=4, initializer_range=0.1)
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(source)
    tokens_BS = torch.arange(96).view(4, 24)

cuda = torch.cuda.is_available()
stack = vb.create_vgpu_stack(None if cuda or text else "0.25MiB")
lora = vb.Lora(rank=8, alpha=32)
model = vb.load_causal_lm(source, stack, lora=lora, fp4="nvfp4", compute_dtype=torch.bfloat16 if cuda else None)
adapters = [param for param in model.parameters() if param.requires_grad]
optimizer = vb.VGPUAdamW(adapters, lr=1e-2, max_grad_norm=1.0, update_in_backward=True)
tokens_BS = tokens_BS.to(stack.level0_device)

for step in range(1, 16):
    loss = model(input_ids=tokens_BS, labels=tokens_BS, use_cache=False).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step in (1, 15):
        print(f"step {step}: loss {loss.item():.3f}")
print("adapter", vb.save_adapter(model, out), "merged", vb.save_causal_lm(model, out + "-merged"))
