"""The training loop."""

import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from launcher.programs.checkpoint import Checkpointer, Progress
from launcher.programs.compute_setup import Place
from launcher.programs.data import Schedule, Text, load
from launcher.programs.metrics import Meter, describe_memory
from launcher.programs.optim import learning_rate, set_learning_rate
from launcher.programs.parallel import autocast, hold_gradients
from launcher.programs.process_group import average
from launcher.programs.stop_signals import AGAIN, CHECKPOINT, NOTHING, STOP, Watch
from launcher.programs.training_config import Config


@dataclass(frozen=True, slots=True)
class State:
    """What training changes."""

    module: nn.Module
    """The model as it is called: wrapped in DDP, sharded, or bare."""
    optimizer: torch.optim.Optimizer
    checkpointer: Checkpointer | None


@dataclass(slots=True)
class Trainer:
    """One run of training, on one rank."""

    config: Config
    text: Text
    place: Place
    state: State
    progress: Progress = field(default_factory=Progress)

    def say(self, text: str) -> None:
        """Print on rank 0."""
        if self.place.ranks.rank == 0:
            print(text, flush=True)

    def resume(self) -> str:
        """Go on from the newest checkpoint, if there is one; say where."""
        checkpointer = self.state.checkpointer
        found = checkpointer.find() if checkpointer else None
        if found is None or checkpointer is None:
            return "at step 0"
        self.progress = checkpointer.load(found)
        return f"at step {self.progress.step}, resumed from {found}"

    def train(self) -> int:
        """Train to the last step, and give the exit code; -n for the signal n to die by.

        Where a signal asked to stop, and a checkpoint has been written, it is the code for another start.
        """
        watch, meter, begun = Watch(), self.make_meter(), time.perf_counter()
        batches = iter(self.load())
        first, last = self.progress.step + 1, self.config.train.steps
        for step in range(first, last + 1):
            loss = self.take_step(step, batches)
            meter.tokens += self.sequences * self.config.seq_len
            self.progress = Progress(step, self.progress.consumed + self.sequences)
            if step in (first, last) or step % self.config.train.log_every == 0:
                self.log(step, loss, meter)
            agreed = watch.settle()
            if agreed != NOTHING or self.is_due(step):
                self.save(loss, agreed)
                meter.restart()
            if agreed == STOP and step < last:
                return AGAIN if self.state.checkpointer else -signal.SIGTERM
        watch.finish()
        self.end(time.perf_counter() - begun)
        return 0

    @property
    def sequences(self) -> int:
        """Sequences that all ranks consume in an optimizer step."""
        train = self.config.train
        return train.batch_size * train.grad_accumulation * self.place.ranks.world_size

    def make_meter(self) -> Meter:
        """Make the meter of tokens/s, TFLOPS and MFU."""
        recompute = self.config.train.activation_checkpointing
        world_size = self.place.ranks.world_size
        return Meter(self.config.model, self.config.seq_len, recompute, world_size, self.place.peak)

    def load(self) -> DataLoader[Tensor]:
        """Make the loader of the batches that are left."""
        train, ranks = self.config.train, self.place.ranks
        left = max(0, train.steps - self.progress.step) * train.grad_accumulation
        schedule = Schedule(
            split=self.text.split,
            seed=train.seed,
            first=self.progress.consumed,
            micro_steps=left,
            batch_size=train.batch_size,
            rank=ranks.rank,
            world_size=ranks.world_size,
        )
        return load(self.text.windows, schedule, self.config.workers, pin=self.place.device.type == "cuda")

    def take_step(self, step: int, batches: Iterator[Tensor]) -> Tensor:
        """Take one optimizer step; give its loss, averaged over this rank's micro-steps."""
        train, module = self.config.train, self.state.module
        total = torch.zeros((), device=self.place.device)
        for micro_step in range(train.grad_accumulation):
            with hold_gradients(module, last=micro_step == train.grad_accumulation - 1):
                loss = self.compute_loss(next(batches)) / train.grad_accumulation
                loss.backward()  # type: ignore[no-untyped-call]  # torch's own
            total += loss.detach()
        if train.clip_grad:
            nn.utils.clip_grad_norm_(module.parameters(), train.clip_grad)
        set_learning_rate(self.state.optimizer, learning_rate(train, self.config.lr, step))
        self.state.optimizer.step()
        self.state.optimizer.zero_grad(set_to_none=True)
        return total

    def compute_loss(self, batch: Tensor) -> Tensor:
        """Give the mean cross-entropy, in nats a byte, of (batch, seq_len + 1) bytes."""
        # Bytes cross to the device, an eighth of what token numbers take.
        tokens = batch.to(self.place.device, non_blocking=True).long()
        with autocast(self.place.spread, self.place.device):
            logits = self.state.module(tokens[:, :-1])
        return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())

    def log(self, step: int, loss: Tensor, meter: Meter) -> None:
        """Print the line of a step; progress displays parse it."""
        # This waits for the device, so that the meter reads work that is done.
        self.progress.loss = average(loss)
        rate = learning_rate(self.config.train, self.config.lr, step)
        speed = meter.read()
        self.say(
            f"step {step}/{self.config.train.steps} loss {self.progress.loss:.4f} lr {rate:.2e} "
            f"tokens/s {speed.tokens:.0f} tflops {speed.tflops:.4g} mfu {speed.mfu:.1%}"
        )

    def is_due(self, step: int) -> bool:
        """Tell whether a checkpoint falls on this step."""
        train = self.config.train
        if self.state.checkpointer is None:
            return False
        return step == train.steps or (train.checkpoint_every > 0 and step % train.checkpoint_every == 0)

    def save(self, loss: Tensor, agreed: int) -> None:
        """Write a checkpoint, also where a signal asked for one."""
        cause = {NOTHING: "", CHECKPOINT: " on SIGUSR2", STOP: " on SIGTERM"}[agreed]
        if self.state.checkpointer is None:
            self.say(f"no checkpoint{cause}: there is no --checkpoint-dir")
            return
        self.progress.loss = average(loss)
        begun = time.perf_counter()
        path = self.state.checkpointer.save(self.progress)
        self.say(f"checkpoint step {self.progress.step} {path} {time.perf_counter() - begun:.1f} s{cause}")

    @torch.no_grad()
    def validate(self) -> float:
        """Give the loss on the held-out windows, averaged over batches and ranks."""
        ranks, split, size = self.place.ranks, self.text.split, self.config.train.batch_size
        total = torch.zeros((), device=self.place.device)
        for number in range(self.config.train.eval_batches):
            start = (number * ranks.world_size + ranks.rank) * size
            indices = [(start + index) % split.validation for index in range(size)]
            # Read here: a second loader with workers beside the first has hung programs.
            batch = torch.stack([self.text.windows[split.validation_window(index)] for index in indices])
            total += self.compute_loss(batch)
        return average(total / self.config.train.eval_batches)

    def end(self, seconds: float) -> None:
        """Print the last line, and before it what a GPU's memory was used for."""
        train = self.config.train
        if self.place.device.type == "cuda":
            self.say(describe_memory(self.place.device))
        held_out = train.eval_batches > 0 and self.text.split.validation > 0
        validation = f" val_loss {self.validate():.4f}" if held_out else ""
        done = f"done step {self.progress.step}/{train.steps} loss {self.progress.loss:.4f}"
        self.say(f"{done}{validation} sequences {self.progress.consumed} seconds {seconds:.1f}")
