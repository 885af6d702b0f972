"""Fine-tune a Hugging Face folder (or hub id) that is larger than its fast memory, and save it as a folder again.

    python examples/finetune_folder.py Qwen/Qwen3-0.6B out "text to learn"

Without arguments a small random Qwen3 is written, trained on a few numbers and saved in the working directory.
"""

import sys

import torch
import transformers

import vblackwell as vb

source, out, text = sys.argv[1:] if len(sys.argv) == 4 else ("tiny-qwen3", "tiny-qwen3-tuned", "")
if text:
    tokens_BS = transformers.AutoTokenizer.from_pretrained(source)(text, return_tensors="pt").input_ids
else:
    sizes = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 5, "head_dim": 16}
    config = transformers.Qwen3Config(**sizes, num_attention_heads=4, num_key_value_heads=2)
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(source)
    tokens_BS = torch.arange(96).view(4, 24)

cuda = torch.cuda.is_available()
# Sized by the machine; for the small model, whose weights alone take more, without a GPU half a MiB of RAM.
stack = vb.create_vgpu_stack(None if cuda or text else "0.5MiB")
model = vb.load_causal_lm(source, stack, compute_dtype=torch.bfloat16 if cuda else torch.float32)
optimizer = vb.VGPUAdamW(model.parameters(), lr=1e-3, max_grad_norm=1.0, update_in_backward=True)
tokens_BS = tokens_BS.to(stack.level0_device)

for step in range(1, 21):
    loss = model(input_ids=tokens_BS, labels=tokens_BS, use_cache=False).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step in (1, 20):
        print(f"step {step}: loss {loss.item():.3f}")
print("saved", vb.save_causal_lm(model, out, tokenizer=source if text else None))
