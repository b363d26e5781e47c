"""The training loop, and AdamW with its learning rate."""

import math
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from launcher.programs.checkpoint import Checkpointer, TrainingProgress
from launcher.programs.compute_setup import ComputeSetup
from launcher.programs.data import Schedule, TrainingText, make_loader
from launcher.programs.metrics import SpeedMeter, describe_gpu_memory
from launcher.programs.parallel import autocast, hold_gradients
from launcher.programs.process_group import average_over_ranks
from launcher.programs.stop_signals import CHECKPOINT, EXIT_RESTART, NOTHING, STOP, SignalWatch
from launcher.programs.training_config import Config, TrainConfig


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
    text: TrainingText
    setup: ComputeSetup
    state: State
    progress: TrainingProgress = field(default_factory=TrainingProgress)

    def print(self, text: str) -> None:
        """Print on rank 0."""
        if self.setup.ranks.rank == 0:
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

        If a signal asked to stop, and a checkpoint has been written, it is the code for another start.
        """
        watch, meter, begun = SignalWatch(), self.make_meter(), time.perf_counter()
        batches = iter(self.make_batches())
        first, last = self.progress.step + 1, self.config.train.steps
        for step in range(first, last + 1):
            loss = self.take_step(step, batches)
            meter.tokens += self.sequences * self.config.seq_len
            self.progress = TrainingProgress(step, self.progress.consumed + self.sequences)
            if step in (first, last) or step % self.config.train.log_every == 0:
                self.log(step, loss, meter)
            agreed = watch.exchange()
            if agreed != NOTHING or self.is_checkpoint_due(step):
                self.save_checkpoint(loss, agreed)
                meter.restart()
            if agreed == STOP and step < last:
                return EXIT_RESTART if self.state.checkpointer else -signal.SIGTERM
        watch.finish_vote()
        self.print_end(time.perf_counter() - begun)
        return 0

    @property
    def sequences(self) -> int:
        """Sequences that all ranks consume in an optimizer step."""
        train = self.config.train
        return train.batch_size * train.grad_accumulation * self.setup.ranks.world_size

    def make_meter(self) -> SpeedMeter:
        """Make the meter of tokens/s, TFLOPS and MFU."""
        recompute = self.config.train.activation_checkpointing == "full"
        world_size = self.setup.ranks.world_size
        return SpeedMeter(self.config.model, self.config.seq_len, recompute, world_size, self.setup.peak)

    def make_batches(self) -> DataLoader[Tensor]:
        """Make the loader of the batches that are left."""
        train, ranks = self.config.train, self.setup.ranks
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
        return make_loader(
            self.text.windows, schedule, self.config.workers, pin=self.setup.device.type == "cuda"
        )

    def take_step(self, step: int, batches: Iterator[Tensor]) -> Tensor:
        """Take one optimizer step; give its loss, averaged over this rank's micro-steps."""
        train, module = self.config.train, self.state.module
        total = torch.zeros((), device=self.setup.device)
        for micro_step in range(train.grad_accumulation):
            with hold_gradients(module, last=micro_step == train.grad_accumulation - 1):
                loss = self.compute_loss(next(batches)) / train.grad_accumulation
                torch.autograd.backward(loss)
            total += loss.detach()
        if train.clip_grad:
            nn.utils.clip_grad_norm_(module.parameters(), train.clip_grad)
        set_learning_rate(self.state.optimizer, compute_learning_rate(train, self.config.lr, step))
        self.state.optimizer.step()
        self.state.optimizer.zero_grad(set_to_none=True)
        return total

    def compute_loss(self, batch: Tensor) -> Tensor:
        """Give the mean cross-entropy, in nats a byte, of (batch, seq_len + 1) bytes."""
        # Bytes cross to the device, an eighth of what token numbers take.
        tokens = batch.to(self.setup.device, non_blocking=True).long()
        with autocast(self.setup.parallelism, self.setup.device):
            loss: Tensor = self.state.module(tokens[:, :-1], tokens[:, 1:])
        return loss

    def log(self, step: int, loss: Tensor, meter: SpeedMeter) -> None:
        """Print the line of a step; progress displays parse it."""
        # This waits for the device, so that the meter reads work that is done.
        self.progress.loss = average_over_ranks(loss)
        rate = compute_learning_rate(self.config.train, self.config.lr, step)
        speed = meter.read_speed()
        mfu = f" mfu {speed.mfu:.1%}" if speed.mfu is not None else ""
        self.print(
            f"step {step}/{self.config.train.steps} loss {self.progress.loss:.4f} lr {rate:.2e} "
            f"tokens/s {speed.tokens:.0f} tflops {speed.tflops:.4g}{mfu}"
        )

    def is_checkpoint_due(self, step: int) -> bool:
        """Tell whether a checkpoint falls on this step."""
        train = self.config.train
        if self.state.checkpointer is None:
            return False
        return step == train.steps or (train.checkpoint_every > 0 and step % train.checkpoint_every == 0)

    def save_checkpoint(self, loss: Tensor, agreed: int) -> None:
        """Write a checkpoint, also if a signal asked for one."""
        cause = {NOTHING: "", CHECKPOINT: " on SIGUSR2", STOP: " on SIGTERM"}[agreed]
        if self.state.checkpointer is None:
            self.print(f"no checkpoint{cause}: there is no --checkpoint-dir")
            return
        self.progress.loss = average_over_ranks(loss)
        begun = time.perf_counter()
        path = self.state.checkpointer.save(self.progress)
        self.print(f"checkpoint step {self.progress.step} {path} {time.perf_counter() - begun:.1f} s{cause}")

    @torch.no_grad()
    def compute_validation_loss(self) -> float:
        """Give the loss on the held-out windows, averaged over batches and ranks."""
        ranks, split, size = self.setup.ranks, self.text.split, self.config.train.batch_size
        total = torch.zeros((), device=self.setup.device)
        for number in range(self.config.train.eval_batches):
            start = (number * ranks.world_size + ranks.rank) * size
            indices = [(start + index) % split.validation for index in range(size)]
            # Read here: a second loader with workers beside the first has hung programs.
            batch = torch.stack([self.text.windows[split.validation_window(index)] for index in indices])
            total += self.compute_loss(batch)
        return average_over_ranks(total / self.config.train.eval_batches)

    def print_end(self, seconds: float) -> None:
        """Print the last line, and before it what a GPU's memory was used for."""
        train = self.config.train
        if self.setup.device.type == "cuda":
            self.print(describe_gpu_memory(self.setup.device))
        held_out = train.eval_batches > 0 and self.text.split.validation > 0
        validation = f" val_loss {self.compute_validation_loss():.4f}" if held_out else ""
        done = f"done step {self.progress.step}/{train.steps} loss {self.progress.loss:.4f}"
        self.print(f"{done}{validation} sequences {self.progress.consumed} seconds {seconds:.1f}")


def make_optimizer(model: nn.Module, lr: float, weight_decay: float) -> torch.optim.AdamW:
    """Make a fused AdamW that decays matrices, not norms and biases; the betas are LLaMA's."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=True)


def compute_learning_rate(config: TrainConfig, peak: float, step: int) -> float:
    """Give the rate of a step, counted from 1: linear warm-up, then a cosine down to `min_lr_ratio`."""
    if step <= config.warmup_steps:
        return peak * step / config.warmup_steps
    progress = (step - config.warmup_steps) / max(1, config.steps - config.warmup_steps)
    cosine = (1 + math.cos(math.pi * min(1.0, progress))) / 2
    return peak * (config.min_lr_ratio + (1 - config.min_lr_ratio) * cosine)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the rate of all groups."""
    for group in optimizer.param_groups:
        group["lr"] = rate
