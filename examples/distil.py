"""Distil a model: a frozen teacher and its student stream through one stack, whose fast memory holds neither.

python examples/distil.py Qwen/Qwen3-4B Qwen/Qwen3-0.6B "text"    # without arguments: two small random Llamas
"""

import sys

import torch
import transformers

import vblackwell as vb

teacher_from, student_from, text = sys.argv[1:] if len(sys.argv) == 4 else ("tiny-teacher", "tiny-student", "")
if text:
    tokens_BS = transformers.AutoTokenizer.from_pretrained(teacher_from)(text, return_tensors="pt").input_ids
else:
    sizes = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "initializer_range": 0.1}
    for folder, layers in ((teacher_from, 6), (student_from, 3)):
        config = transformers.LlamaConfig(**sizes, num_attention_heads=4, num_hidden_layers=layers)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokens_BS = torch.arange(192).view(8, 24) % 128
cuda = torch.cuda.is_available()
stack = vb.create_vgpu_stack(None if cuda or text else "0.5MiB")
teacher = vb.load_causal_lm(teacher_from, stack, "teacher", trainable=False, placement="streamed").eval()
student = vb.load_causal_lm(student_from, stack, "student", placement="streamed")
optimizer = vb.VGPUAdamW(student.parameters(), lr=5e-3, max_grad_norm=1.0, update_in_backward=True)
tokens_BS = tokens_BS.to(stack.level0_device)
for step in range(1, 19):
    with torch.no_grad():
        wanted_BSV = teacher(input_ids=tokens_BS, use_cache=False).logits.log_softmax(-1)
    said_BSV = student(input_ids=tokens_BS, use_cache=False).logits.log_softmax(-1)
    loss = (wanted_BSV.exp() * (wanted_BSV - said_BSV)).sum(-1).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step in (1, 18):
        print(f"step {step}: loss {loss.item():.3f}")
print("saved", vb.save_causal_lm(student, "distilled"))
print("fast memory held at most", stack.get_stats()["levels"][0]["peak_bytes"], "bytes")
