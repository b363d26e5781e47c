"""One run of the program, from the configuration to the exit."""

import gc
import sys
from pathlib import Path

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

from launcher.programs.checkpoint import Checkpointer
from launcher.programs.compute_setup import find_place
from launcher.programs.corpus import find_text
from launcher.programs.data import Text, Windows, split_windows
from launcher.programs.header import describe
from launcher.programs.optim import make_optimizer
from launcher.programs.parallel import build
from launcher.programs.stop_signals import die_by, end_with, end_workers
from launcher.programs.training_config import Config
from launcher.programs.training_loop import State, Trainer
from launcher.programs.user_error import OptionError


def make_trainer(config: Config) -> Trainer:
    """Find the data, join the other ranks, and build everything; raises OptionError."""
    windows = Windows(find_text(config.data.path), config.seq_len)
    text = Text(windows, split_windows(windows, config.data.val_fraction))
    place = find_place(config)
    model, module = build(config, place.spread, place.device, place.ranks.rank)
    optimizer = make_optimizer(model, config.lr, config.train.weight_decay)
    directory = config.train.checkpoint_dir
    checkpointer = Checkpointer(Path(directory), config.model, model, optimizer) if directory else None
    return Trainer(config, text, place, State(module, optimizer, checkpointer))


def work(config: Config) -> int:
    """Train from the newest checkpoint to the end; give the exit code, -n for the signal n to die by."""
    trainer = make_trainer(config)
    resumed = trainer.resume()
    trainer.say(describe(config, trainer.text, trainer.place, resumed))
    return trainer.train()


@record
def run(config: Config) -> None:
    """Run the program, and end as it should: status 2 for a mistake of the user's, 75 to be started again."""
    status, message = 0, ""
    try:
        status = work(config)
    except OptionError as error:
        status, message = 2, str(error)
    except RuntimeError as error:
        if "gloo/transport" not in str(error):
            raise
        # The rank that failed first says why: no traceback, and no record, of this one.
        status, message = 1, f"lost the connection to another rank: {error}"
    finally:
        end_workers()
    leave()
    if message:
        print(f"train: error: {' '.join(message.split())}", file=sys.stderr, flush=True)
    if status < 0:
        die_by(-status)
    if status:
        end_with(status)


def leave() -> None:
    """Leave the process group, with nothing left that refers to it, so that its threads end here.

    A thread of gloo's that lets go of a tensor while the interpreter ends aborts the process (torch 2.13).
    """
    gc.collect()
    if dist.is_initialized():
        dist.destroy_process_group()
