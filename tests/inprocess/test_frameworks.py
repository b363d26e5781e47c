"""Lightning, Accelerate and the HF Trainer, as their users run them: the steps are theirs."""

import re
import sys
from pathlib import Path

import pytest

from tests.inprocess.hooked import run_program

QUIETED = {
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONWARNINGS": "ignore",
    "OMP_NUM_THREADS": "1",
    "ACCELERATE_USE_CPU": "true",
}
DATA = """
import gc, json, sys, torch

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 48
    def __getitem__(self, index):
        return {"x": torch.full((4,), float(index)), "labels": torch.zeros(4)}
"""
LIGHTNING = """
import logging
import lightning as L
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)
    def training_step(self, batch, index):
        return self.layer(batch["x"]).square().mean()
    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-6)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 5)]

trainer = L.Trainer(
    max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False, accumulate_grad_batches=2,
    enable_progress_bar=False, enable_model_summary=False,
)
trainer.fit(Module(), torch.utils.data.DataLoader(Data(), batch_size=2))
print(trainer.global_step)
"""
ACCELERATE = """
from accelerate import Accelerator
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
loader = torch.utils.data.DataLoader(Data(), batch_size=2)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
steps = 0
for batch in loader:
    with accelerator.accumulate(model):
        accelerator.backward(model(batch["x"]).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    steps += accelerator.sync_gradients
print(steps)
"""
TRAINER = """
import transformers
transformers.logging.set_verbosity_error()

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)
    def forward(self, x, labels=None):
        found = self.layer(x)
        return {"loss": (found - labels).square().mean(), "logits": found}

words = transformers.TrainingArguments(
    output_dir=sys.argv[0] + ".out", num_train_epochs=1, per_device_train_batch_size=2,
    gradient_accumulation_steps=2, learning_rate=1e-6, report_to=[], save_strategy="no",
    logging_strategy="no", disable_tqdm=True, use_cpu=True, dataloader_num_workers=0,
)
trainer = transformers.Trainer(model=Model(), args=words, train_dataset=Data())
trainer.train()
print(trainer.state.global_step)
"""


@pytest.mark.parametrize(
    ("package", "code"),
    [
        pytest.param("lightning", LIGHTNING, marks=pytest.mark.slow),
        ("accelerate", ACCELERATE),
        pytest.param("transformers", TRAINER, marks=pytest.mark.slow),
    ],
)
def test_a_frameworks_steps_are_counted(package: str, code: str, tmp_path: Path) -> None:
    """48 samples, two in a batch, two batches in a step."""
    pytest.importorskip(package, reason=f"{package} is not installed")
    (tmp_path / "program.py").write_text(DATA + code)
    done = run_program(
        [sys.executable, "program.py"], tmp_path, "synchronized,warmup=3,every=5,log", **QUIETED
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1:] == ["12"], done.stdout
    assert re.findall(r"^launch: rank 0: step (\d+): ", done.stderr, re.MULTILINE) == ["3", "5", "10"]
