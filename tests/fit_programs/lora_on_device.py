"""peft's LoRA of a model that is made under `torch.device("cuda")`, in bf16."""

import torch
from peft import LoraConfig, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel

torch.manual_seed(0)
with torch.device("cuda"):
    model = GPT2LMHeadModel(GPT2Config(n_layer=4, n_embd=512, n_head=8, vocab_size=2000)).to(torch.bfloat16)
    model = get_peft_model(model, LoraConfig(r=8, target_modules=["c_attn"], lora_dropout=0.1))
trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
optimizer = torch.optim.AdamW(trained, 1e-4)
model.train()
for step in range(3):
    tokens = torch.randint(2000, (8, 512), device="cuda")
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(step, loss.item())
