"""Trains for some steps in the way that its argument says, and prints each loss to the bit."""

import os
import sys
import tempfile

import torch
import torch.distributed as dist
from torch import nn


class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 32

    def __getitem__(self, index):
        return {"x": torch.sin(torch.arange(8.0) + index), "labels": torch.tensor([float(index % 3)])}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 1))

    def forward(self, x, labels=None):
        found = self.layers(x)
        return {"loss": (found - labels).square().mean(), "logits": found}


def show(step, loss):
    print(
        "step",
        step,
        "rank",
        os.environ.get("RANK"),
        "loss",
        float(getattr(loss, "item", lambda: loss)()).hex(),
        flush=True,
    )


def make_loader(workers=0):
    sampler = (
        torch.utils.data.DistributedSampler(Data(), shuffle=True, seed=3) if dist.is_initialized() else None
    )
    return torch.utils.data.DataLoader(Data(), batch_size=4, sampler=sampler, num_workers=workers)


def train(model, parameters, workers=0):
    optimizer = torch.optim.AdamW(parameters, lr=1e-2)
    for step, batch in enumerate(make_loader(workers)):
        optimizer.zero_grad()
        loss = model(**batch)["loss"]
        loss.backward()
        optimizer.step()
        show(step, loss)


def train_ddp():
    dist.init_process_group("gloo")
    model = nn.parallel.DistributedDataParallel(Model())
    train(model, model.parameters(), workers=2)
    del model
    dist.destroy_process_group()


def train_hf():
    import transformers

    transformers.logging.set_verbosity_error()

    class Losses(transformers.TrainerCallback):
        def on_log(self, _words, state, _control, logs=None, **_):
            if "loss" in logs:
                show(state.global_step, logs["loss"])

    with tempfile.TemporaryDirectory() as folder:
        words = transformers.TrainingArguments(
            output_dir=folder,
            num_train_epochs=1,
            per_device_train_batch_size=4,
            learning_rate=1e-2,
            report_to=[],
            save_strategy="no",
            logging_steps=1,
            disable_tqdm=True,
            use_cpu=True,
            ddp_backend="gloo",
            seed=5,
        )
        trainer = transformers.Trainer(model=Model(), args=words, train_dataset=Data(), callbacks=[Losses()])
        print(float(trainer.train().training_loss).hex())
    if dist.is_initialized():
        dist.destroy_process_group()


def train_lightning():
    import logging

    import lightning

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = Model()

        def training_step(self, batch, index):
            loss = self.model(**batch)["loss"]
            show(index, loss)
            return loss

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    lightning.seed_everything(5, verbose=False)
    trainer = lightning.Trainer(
        max_epochs=1,
        accelerator="cpu",
        devices=int(os.environ["WORLD_SIZE"]),
        strategy="ddp",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(), torch.utils.data.DataLoader(Data(), batch_size=4))
    dist.destroy_process_group()


def train_accelerate():
    from accelerate import Accelerator
    from accelerate.utils import set_seed

    set_seed(5)
    accelerator = Accelerator(cpu=True)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = torch.utils.data.DataLoader(Data(), batch_size=4, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for step, batch in enumerate(loader):
        loss = model(**batch)["loss"]
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        show(step, loss)
    accelerator.end_training()


if __name__ == "__main__":
    torch.manual_seed(7)
    {
        "ddp": train_ddp,
        "hf": train_hf,
        "lightning": train_lightning,
        "accelerate": train_accelerate,
    }[sys.argv[1]]()
