"""Generate text with a Hugging Face folder (or hub id) that is larger than its fast memory.

Its weights stream ahead of the layers that need them.

    python examples/generate.py Qwen/Qwen3-0.6B "Once upon a time"

Without arguments a small random model and a tokenizer of bytes are written; what comes out is noise, the same each
time.
"""

import sys

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

import vblackwell as vb
from vblackwell.generate.generate import generate

source, prompt = sys.argv[1:] if len(sys.argv) == 3 else ("tiny-gpt", "Once")
if len(sys.argv) != 3:
    alphabet = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    plain = Tokenizer(models.BPE(alphabet, []))
    plain.pre_tokenizer, plain.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    transformers.PreTrainedTokenizerFast(tokenizer_object=plain).save_pretrained(source)
    torch.manual_seed(0)
    sizes = {"vocab_size": 256, "n_embd": 128, "n_layer": 8, "n_head": 4, "n_positions": 256}
    config = transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(source)

cuda = torch.cuda.is_available()
stack = vb.create_vgpu_stack(None if cuda or len(sys.argv) == 3 else "4MiB")
dtype = torch.bfloat16 if cuda else torch.float32
model = vb.load_causal_lm(source, stack, dtype=dtype, trainable=False, placement="streamed")
tokenizer = Tokenizer.from_file(transformers.utils.cached_file(source, "tokenizer.json"))
print(prompt, end="")
generate(model, tokenizer, prompt, 24, temperature=0.7, seed=1, on_token=lambda text: print(text, end="", flush=True))
print("\nfast memory held at most", stack.get_stats()["levels"][0]["peak_bytes"], "bytes")
