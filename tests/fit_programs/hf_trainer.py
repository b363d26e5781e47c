"""Hugging Face's Trainer on a small Llama: `… [checkpointing] [lora] [compile]`."""

import sys

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments


class Tokens(Dataset):
    def __len__(self) -> int:
        return 256

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(1000, (512,))
        return {"input_ids": tokens, "labels": tokens, "attention_mask": torch.ones_like(tokens)}


model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=1000, hidden_size=512, intermediate_size=1536, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=4, max_position_embeddings=512,
    )
)  # fmt: skip
if "lora" in sys.argv:
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(
        model, LoraConfig(r=16, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    )
    model.print_trainable_parameters()
    model.enable_input_require_grads()
Trainer(
    model,
    TrainingArguments(
        "out",
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        max_steps=4,
        bf16=True,
        logging_steps=1,
        report_to=[],
        gradient_checkpointing="checkpointing" in sys.argv,
        torch_compile="compile" in sys.argv,
        save_steps=1,
        eval_strategy="steps",
        eval_steps=10,
    ),
    train_dataset=Tokens(),
    eval_dataset=Tokens(),
).train()
