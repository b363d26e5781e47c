"""Lightning and Accelerate make loaders anew, torchdata has one of its own: the default is theirs too."""

from pathlib import Path

import pytest

from tests.inprocess.loader_runs import ALL, read_notes, run_program

PROGRAM = """
import logging
logging.disable(logging.CRITICAL)
warnings.simplefilter("ignore")
del os.environ["LOCAL_RANK"]  # one process alone: no rendezvous
from accelerate import Accelerator
from lightning.pytorch import LightningModule, Trainer

class Small(LightningModule):
    def __init__(self, **options):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.options = options
    def train_dataloader(self):
        return DataLoader(data, shuffle=True, **self.options)
    def training_step(self, batch, index):
        return self.layer(batch[0]).sum()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

def fit(loader, **options):
    "Train on a few batches, for which Lightning makes a loader that does not shuffle."
    quiet = {name: False for name in ("logger", "enable_checkpointing", "enable_progress_bar")}
    trainer = Trainer(max_epochs=1, overfit_batches=2, accelerator="cpu", devices=1,
                      enable_model_summary=False, **quiet)
    trainer.fit(Small(**options), loader)
    made = trainer.train_dataloader
    assert made is not loader and type(made.sampler).__name__ == "SequentialSampler"
    return made.num_workers

def prepare(**options):
    "Read all of a loader that Accelerate has made of another."
    made = Accelerator(cpu=True).prepare(DataLoader(data, **options))
    assert len(list(made)) == 8
    return made.num_workers

data = TensorDataset(torch.zeros(8, 1))
said = [{}, {"num_workers": 0}, {"num_workers": 1}]
note(hook=[fit(None, **options) for options in said],
     given=[fit(DataLoader(data, shuffle=True, **options)) for options in said],
     accelerate=[prepare(**options) for options in said])
"""


@pytest.mark.slow
def test_loaders_that_are_made_anew_keep_their_workers(tmp_path: Path) -> None:
    notes = read_notes(run_program(tmp_path, PROGRAM))
    assert notes == {"hook": [2, 0, 1], "given": [2, 0, 1], "accelerate": [2, 0, 1]}


STATEFUL = """
warnings.simplefilter("ignore")  # of a function of torch's that torchdata calls
from torchdata.stateful_dataloader import StatefulDataLoader

loader = StatefulDataLoader(Places(), collate_fn=keep)
rows = [row for batch in loader for row in batch]
note(counts=[StatefulDataLoader(data, **options).num_workers for data, options in
             [(Places(), {}), (Places(), {"num_workers": 0}), (Lines(), {})]],
     places=[row[2] for row in rows], workers=len({row[0] for row in rows}))
"""


def test_torchdatas_loader_has_them_on_their_cpus(tmp_path: Path) -> None:
    notes = read_notes(run_program(tmp_path, STATEFUL))
    assert notes == {"counts": [2, 0, 0], "places": [ALL] * 4, "workers": 2}
