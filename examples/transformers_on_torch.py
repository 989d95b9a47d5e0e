"""A model of transformers, on torch, whose attention is xsake: needs pip install 'xsake[torch]'."""

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import xsake.torch

xsake.torch.register()

config = LlamaConfig(vocab_size=256, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4)
model = AutoModelForCausalLM.from_config(config, attn_implementation="xsake")  # from_pretrained takes the same argument
tokens = torch.randint(3, 256, (1, 200))
logits = model(tokens).logits
logits.logsumexp(-1).sum().backward()
assert model.model.layers[0].self_attn.q_proj.weight.grad is not None

model.set_attn_implementation("sdpa")
torch.testing.assert_close(logits, model(tokens).logits, rtol=0, atol=1e-4)
