"""Let transformers.Trainer train a model that is larger than its fast memory: two lines of it are ours.

    python examples/trainer.py Qwen/Qwen3-0.6B out "text to learn"

Without arguments a small random Llama is taught a few numbers. The checkpoints are the Trainer's own.
"""

import sys

import torch
import transformers

import vblackwell as vb

source, out, text = sys.argv[1:] if len(sys.argv) == 4 else ("", "tiny-llama-trained", "")
if text:
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    rows = transformers.AutoTokenizer.from_pretrained(source)(text, return_tensors="pt").input_ids
else:
    sizes = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4}
    model = transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**sizes, num_attention_heads=4))
    rows = torch.arange(96).view(4, 24)

cuda = torch.cuda.is_available()
how = {"max_steps": 12, "save_steps": 12, "learning_rate": 1e-2, "lr_scheduler_type": "cosine", "warmup_steps": 2}
how |= {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "weight_decay": 0.1, "logging_steps": 1}
how |= {"max_grad_norm": 1.0, "use_cpu": not cuda, "dataloader_pin_memory": cuda, "report_to": "none"}
arguments = transformers.TrainingArguments(out, **how)
stack = vb.create_vgpu_stack(None if cuda or text else "0.5MiB")
trainer = transformers.Trainer(
    vb.enable_vgpu_stack_optimization(model, stack),
    arguments,
    train_dataset=[{"input_ids": row, "labels": row} for row in rows],
    optimizer_cls_and_kwargs=(vb.VGPUAdamW, {"lr": arguments.learning_rate}),
)
trainer.train()
