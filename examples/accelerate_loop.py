"""Accelerate over a model that is larger than fast memory, clipping and accumulation included: two lines are ours."""

import accelerate
import torch
import transformers

import vblackwell as vb

torch.manual_seed(0)
sizes = {"vocab_size": 256, "n_embd": 64, "n_layer": 6, "n_head": 4, "n_positions": 64}
config = transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)
model = transformers.AutoModelForCausalLM.from_config(config).train()

cuda = torch.cuda.is_available()
stack = vb.create_vgpu_stack(None if cuda else "0.6MiB")
vb.enable_vgpu_stack_optimization(model, stack)
optimizer = vb.VGPUAdamW(model.parameters(), lr=1e-2, weight_decay=0.1)

schedule = transformers.get_cosine_schedule_with_warmup(optimizer, num_warmup_steps=2, num_training_steps=16)
loader = torch.utils.data.DataLoader(list(torch.arange(96).view(4, 24)), batch_size=2)
accelerator = accelerate.Accelerator(gradient_accumulation_steps=2, cpu=not cuda)
model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)

for epoch in range(1, 9):
    for rows_BS in loader:
        with accelerator.accumulate(model):
            loss = model(input_ids=rows_BS, labels=rows_BS, use_cache=False).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    if epoch in (1, 8):
        print(f"epoch {epoch}: loss {loss.item():.3f}, gradient norm {norm.item():.2f}")
accelerator.save_state("tiny-gpt2-state")
print("fast memory held at most", stack.get_stats()["levels"][0]["peak_bytes"], "bytes")
