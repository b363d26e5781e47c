"""One run of the program, from the configuration to the exit."""

import gc
import sys
from pathlib import Path

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

from launcher.programs.checkpoint import Checkpointer
from launcher.programs.compute_setup import describe_training, set_up
from launcher.programs.corpus import find_text
from launcher.programs.data import TrainingText, Windows, split_windows
from launcher.programs.options import OptionError
from launcher.programs.parallel import build_model
from launcher.programs.stop_signals import die_by_signal, exit_with, kill_workers
from launcher.programs.training_config import Config
from launcher.programs.training_loop import State, Trainer, make_optimizer


def make_trainer(config: Config) -> Trainer:
    """Find the data, join the other ranks, and build everything; raises OptionError."""
    windows = Windows(find_text(config.data.path), config.seq_len)
    text = TrainingText(windows, split_windows(windows, config.data.val_fraction))
    config, setup = set_up(config)
    model, module = build_model(config, setup.parallelism, setup.device, setup.ranks.rank)
    optimizer = make_optimizer(model, config.lr, config.train.weight_decay)
    directory = config.train.checkpoint_dir
    checkpointer = Checkpointer(Path(directory), config.model, model, optimizer) if directory else None
    return Trainer(config, text, setup, State(module, optimizer, checkpointer))


def run_training(config: Config) -> int:
    """Train from the newest checkpoint to the end; give the exit code, -n for the signal n to die by."""
    trainer = make_trainer(config)
    resumed = trainer.resume()
    trainer.print(describe_training(trainer.config, trainer.text, trainer.setup, resumed))
    return trainer.train()


@record
def run(config: Config) -> None:
    """Run the program, and end as it should: status 2 for a mistake of the user's, 75 to be started again."""
    status, message = 0, ""
    try:
        status = run_training(config)
    except OptionError as error:
        status, message = 2, str(error)
    except RuntimeError as error:
        if "gloo/transport" not in str(error):
            raise
        # The rank that failed first says why: no traceback, and no record, of this one.
        status, message = 1, f"lost the connection to another rank: {error}"
    finally:
        kill_workers()
    leave_process_group()
    if message:
        print(f"train: error: {' '.join(message.split())}", file=sys.stderr, flush=True)
    if status < 0:
        die_by_signal(-status)
    if status:
        exit_with(status)


def leave_process_group() -> None:
    """Leave the process group, with nothing left that refers to it, so that its threads end here.

    A thread of gloo's that lets go of a tensor while the interpreter ends aborts the process (torch 2.13).
    """
    gc.collect()
    if dist.is_initialized():
        dist.destroy_process_group()
