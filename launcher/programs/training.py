"""One run of training on one rank: join the other ranks, build the model, train, and end as it should."""

import contextlib
import gc
import json
import math
import multiprocessing
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

# Imported later, its default arguments would keep the process group (see the end of `run`).
import torch.distributed.nn.functional
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel

from launcher.fit.gpus import find_gpu
from launcher.programs.data import Schedule, Windows
from launcher.programs.options import Config, ModelConfig, OptionError, TrainConfig
from launcher.programs.transformer import Transformer, count_flops, initialise

EXIT_RESTART = os.EX_TEMPFAIL
"""Exit code of a program that was stopped, and goes on from its checkpoint when it is started again."""
NOTHING, CHECKPOINT, STOP = range(3)
"""What a rank asks for; all ranks do the largest of these."""
ACTIONS = {signal.SIGUSR2: CHECKPOINT, signal.SIGTERM: STOP}
MAX_KEPT = 2
"""Checkpoints kept; older ones are removed."""
COMPLETE = re.compile(r"step-(\d{8})")


@record
def run(config: Config) -> None:
    """Train, and end as it should: status 2 for a mistake of the user's, 75 to be started again."""
    status = 0
    try:
        status = Trainer(config).train()
    except OptionError as error:
        print(f"train: error: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
        status = 2
    finally:
        # DataLoader workers ignore SIGTERM, and exit would wait for them.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler would take it for a failure
        for child in multiprocessing.active_children():
            child.kill()
    # A thread of gloo's that releases a tensor while the interpreter ends aborts the process (torch 2.13):
    # nothing may refer to the group, so that its threads end here.
    gc.collect()
    if dist.is_initialized():
        dist.destroy_process_group()
    if status:
        # torchrun sends SIGTERM as soon as the first rank has ended, and Python's finalization takes
        # handlers away, but leaves what is ignored.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        sys.exit(status)


def join_ranks(wanted: str) -> torch.device:
    """Join the other ranks, as torchrun's variables say, and return this one's device; else it is 0 of 1.

    Gradients cross GPUs by NCCL, and what CPUs agree on goes by gloo. Raises OptionError for a device that
    cannot be.
    """
    visible = torch.cuda.device_count() if wanted != "cpu" else 0
    if wanted == "cuda" and not visible:
        raise OptionError("--device cuda, but torch sees no GPU: give --device cpu")
    backends = "cpu:gloo,cuda:nccl" if visible else "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backends)
    else:
        dist.init_process_group(backends, store=dist.HashStore(), rank=0, world_size=1)
    if not visible:
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", dist.get_rank())) % visible)
    torch.cuda.set_device(device)
    uuids: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(uuids, str(torch.cuda.get_device_properties(device).uuid))
    # A rank that sees all GPUs of its node has its own.
    if len(set(uuids)) < len(uuids) and visible < int(os.environ.get("LOCAL_WORLD_SIZE", "1")):
        raise OptionError("NCCL needs a GPU for each rank: start fewer, or give --device cpu")
    return device


def average(value: Tensor) -> float:
    """Average a scalar over the ranks."""
    total = value.detach().to("cpu", torch.float32, copy=True)
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def share_settings(train: TrainConfig, device: torch.device) -> TrainConfig:
    """Return rank 0's settings, with a type and as many micro-steps as come nearest to the global batch.

    Nodes of several kinds may each have been given others.
    """
    dtype, accumulation = train.dtype, train.grad_accumulation
    if dtype == "auto":
        # CPUs with bf16 instructions lose more in autocast's conversions than they gain on small models.
        bf16 = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
        dtype = "bf16" if bf16 else "fp32"
    if train.global_batch:
        accumulation = max(1, round(train.global_batch / (train.batch_size * dist.get_world_size())))
    found = [replace(train, dtype=dtype, grad_accumulation=accumulation)]
    dist.broadcast_object_list(found, src=0)
    return found[0]


def tell(text: str) -> None:
    """Print a line on rank 0."""
    if dist.get_rank() == 0:
        print(text, flush=True)


def shard_model(model: Transformer, device: torch.device, *, bf16: bool) -> None:
    """Shard each block and the rest over all ranks (FSDP2), computing in bf16 and reducing in fp32."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard  # noqa: PLC0415 - slow import

    # DTensor's caches keep the mesh to the end: with a group of its own, the default one can end before.
    mesh = DeviceMesh.from_group(dist.new_group(), device.type)
    # Inputs are not cast: the rotary angles stay fp32, and the embedding makes the rest bf16.
    policy = MixedPrecisionPolicy(torch.bfloat16 if bf16 else None, torch.float32, cast_forward_inputs=False)
    for block in (*model.blocks, model):
        fully_shard(block, mesh=mesh, mp_policy=policy)


def wrap_ddp(model: Transformer, device: torch.device) -> nn.Module:
    """Copy the model to all ranks (DDP)."""
    devices = [device] if device.type == "cuda" else None
    return DistributedDataParallel(model, device_ids=devices, gradient_as_bucket_view=True)


def make_optimizer(model: nn.Module, lr: float, weight_decay: float) -> torch.optim.AdamW:
    """Make a fused AdamW that decays matrices, not norms and biases; the betas are LLaMA's."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=True)


def compute_learning_rate(config: Config, step: int) -> float:
    """Return the rate of a step, counted from 1: linear warm-up, then a cosine down to `min_lr_ratio`."""
    train = config.train
    if step <= train.warmup_steps:
        return config.lr * step / train.warmup_steps
    progress = (step - train.warmup_steps) / max(1, train.steps - train.warmup_steps)
    cosine = (1 + math.cos(math.pi * min(1.0, progress))) / 2
    return config.lr * (train.min_lr_ratio + (1 - train.min_lr_ratio) * cosine)


@dataclass(slots=True)
class Progress:
    """How far training has come."""

    step: int = 0
    """Optimizer steps done."""
    consumed: int = 0
    """Sequences consumed by all ranks: where the data go on."""
    loss: float = math.nan
    """Loss of the last step that was logged or saved, averaged over the ranks."""


class Trainer:
    """One run of training, on one rank.

    The training draws no random numbers after the weights, so a checkpoint holds no generator's state.
    """

    def __init__(self, config: Config) -> None:
        """Find the data, join the other ranks, and build everything; raises OptionError.

        The model is made on the meta device first, so that one which fits no rank whole is only ever held in
        shards. `model` is the bare one, `module` is called in training.
        """
        self.windows = Windows(config.data.path, config.seq_len, config.data.val_fraction)
        self.device, self.world_size = join_ranks(config.train.device), dist.get_world_size()
        self.is_gpu = self.device.type == "cuda"
        self.config = config = replace(config, train=share_settings(config.train, self.device))
        train = config.train
        self.bf16 = train.dtype == "bf16"
        self.parallel = train.parallel if train.parallel == "fsdp" or self.world_size > 1 else "none"
        with torch.device("meta"):
            self.model = model = Transformer(config.model, recompute=train.activation_checkpointing)
        self.parameters = sum(parameter.numel() for parameter in model.parameters())
        self.flops = count_flops(model, config.seq_len)
        full = train.activation_checkpointing == "full"
        self.flops_done = count_flops(model, config.seq_len, recompute=full)
        """Of a token in the forward and backward pass, and with what is computed again."""
        for block in model.blocks if train.compile else ():
            block.compile()
        if self.parallel == "fsdp":
            shard_model(model, self.device, bf16=self.bf16)
        model.to_empty(device=self.device)
        # Shards differ between ranks, replicas must not.
        seed = train.seed * 1_000_003 + (dist.get_rank() if self.parallel == "fsdp" else 0)
        initialise(model, torch.Generator(self.device).manual_seed(seed))
        self.module = wrap_ddp(model, self.device) if self.parallel == "ddp" else model
        self.optimizer = make_optimizer(self.model, config.lr, train.weight_decay)
        self.progress = Progress()
        self.peak = train.peak_tflops
        """TFLOPS that MFU is measured against, None if unknown: a CPU has none, since training would exceed a
        product of small matrices."""
        if self.peak is None and self.is_gpu:
            gpu = find_gpu(torch.cuda.get_device_name(self.device))
            self.peak = gpu.bf16 if gpu else None
        self.sequences = train.batch_size * train.grad_accumulation * self.world_size
        """That all ranks consume in an optimizer step."""
        self.clock = 0, 0.0
        """A step and the time at its end, from which the speed is measured."""

    def train(self) -> int:
        """Train from the newest checkpoint to the last step; return the exit code.

        If a signal asked to stop, and a checkpoint has been written, it is the code for another start. A run
        without checkpoints ends by the signal.
        """
        train, begun = self.config.train, time.perf_counter()
        votes = SignalVotes() if train.checkpoint_dir else None
        self._describe(self._resume() if train.checkpoint_dir else None)
        progress, first = self.progress, self.progress.step + 1
        micro_steps = max(0, train.steps - progress.step) * train.grad_accumulation
        place = train.batch_size, dist.get_rank(), self.world_size
        schedule = Schedule(self.windows, train.seed, progress.consumed, micro_steps, *place)
        batches = iter(schedule.make_loader(self.config.workers, pin=self.is_gpu))
        self.clock = progress.step, time.perf_counter()
        for step in range(first, train.steps + 1):
            loss = self.take_step(step, batches)
            progress.step = step
            progress.consumed += self.sequences
            if step in (first, train.steps) or step % train.log_every == 0:
                self._log(step, loss)
            if votes is None:
                continue
            agreed = votes.exchange()
            due = step == train.steps or (train.checkpoint_every > 0 and step % train.checkpoint_every == 0)
            if agreed != NOTHING or due:
                self._save(loss, agreed)
            if agreed == STOP and step < train.steps:
                return EXIT_RESTART
        if votes:
            votes.finish()
        if self.is_gpu:
            # In use is also what is not torch's: CUDA's context, NCCL's buffers, other processes.
            free, total = torch.cuda.mem_get_info(self.device)
            allocated, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
            tell(
                f"memory  {allocated / 2**30:.2f} GiB allocated, {reserved / 2**30:.2f} reserved at most, "
                f"{(total - free) / 2**30:.2f} of {total / 2**30:.2f} in use"
            )
        validates = train.eval_batches and self.windows.validation
        validation = f" val_loss {self._validate():.4f}" if validates else ""
        tell(
            f"done step {progress.step}/{train.steps} loss {progress.loss:.4f}{validation} "
            f"sequences {progress.consumed} seconds {time.perf_counter() - begun:.1f}"
        )
        return 0

    def take_step(self, step: int, batches: Iterator[Tensor]) -> Tensor:
        """Take one optimizer step; return its loss, averaged over this rank's micro-steps."""
        train = self.config.train
        total = torch.zeros((), device=self.device)
        for micro_step in range(train.grad_accumulation):
            # DDP's gradients cross the ranks on the last micro-step alone. FSDP's are reduced on each: else
            # every rank would keep whole ones, 26 GiB for 7 billion parameters.
            hold = self.parallel == "ddp" and micro_step < train.grad_accumulation - 1
            with self.module.no_sync() if hold else contextlib.nullcontext():  # type: ignore[operator]
                loss = self._compute_loss(next(batches)) / train.grad_accumulation
                loss.backward()
            total += loss.detach()
        if train.clip_grad:
            nn.utils.clip_grad_norm_(self.module.parameters(), train.clip_grad)
        for group in self.optimizer.param_groups:
            group["lr"] = compute_learning_rate(self.config, step)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return total

    def _compute_loss(self, batch: Tensor) -> Tensor:
        """Return the mean cross-entropy, in nats a byte, of (batch, seq_len + 1) bytes."""
        # Bytes cross to the device, an eighth of what token numbers take.
        tokens = batch.to(self.device, non_blocking=True).long()
        # FSDP has its own policy.
        mixed = self.bf16 and self.parallel != "fsdp"
        with torch.autocast(self.device.type, torch.bfloat16, enabled=mixed):
            return self.module(tokens[:, :-1], tokens[:, 1:])

    @torch.no_grad()
    def _validate(self) -> float:
        """Return the loss on the held-out windows, averaged over batches and ranks."""
        train, windows = self.config.train, self.windows
        total = torch.zeros((), device=self.device)
        for number in range(train.eval_batches):
            start = (number * self.world_size + dist.get_rank()) * train.batch_size
            indices = [(start + index) % windows.validation for index in range(train.batch_size)]
            # Read here: a second loader with workers beside the first has hung programs.
            total += self._compute_loss(torch.stack([windows[windows.training + index] for index in indices]))
        return average(total / train.eval_batches)

    def _resume(self) -> Path | None:
        """Go on from the newest checkpoint, which any number of ranks may have saved, and return it.

        Raises OptionError on all ranks.
        """
        found: list[Any] = [None]
        if dist.get_rank() == 0:
            try:
                found = [prepare_directory(Path(self.config.train.checkpoint_dir or ""), self.config.model)]
            except OptionError as error:
                found = [error]
        dist.broadcast_object_list(found, src=0)
        path = found[0]
        if isinstance(path, OptionError):
            raise path
        if path:
            from torch.distributed.checkpoint.state_dict import set_state_dict  # noqa: PLC0415 - slow import
            from torch.distributed.checkpoint.state_dict_loader import load  # noqa: PLC0415

            state = self._collect_state()
            load(state, checkpoint_id=path)
            model, optimizer = state["model"], state["optimizer"]
            set_state_dict(self.model, self.optimizer, model_state_dict=model, optim_state_dict=optimizer)
            self.progress = Progress(**state["progress"])
        return path

    def _collect_state(self) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import get_state_dict  # noqa: PLC0415 - slow import

        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "progress": asdict(self.progress)}

    def _save(self, loss: Tensor, agreed: int) -> None:
        """Write a checkpoint beside the others, and rename it once it is whole; the oldest is removed.

        A kill meanwhile leaves the last one as it was.
        """
        from torch.distributed.checkpoint.state_dict_saver import save  # noqa: PLC0415 - slow import

        self.progress.loss = average(loss)
        begun = time.perf_counter()
        path = Path(self.config.train.checkpoint_dir or "", f"step-{self.progress.step:08}")
        part = path.with_suffix(".part")
        save(self._collect_state(), checkpoint_id=part)
        if dist.get_rank() == 0:
            (part / "model.json").write_text(json.dumps(asdict(self.config.model)))
            part.rename(path)
            for old in list_complete(path.parent)[:-MAX_KEPT]:
                shutil.rmtree(old)
        dist.barrier()  # the other ranks go on once the rename is done
        cause = ("", " on SIGUSR2", " on SIGTERM")[agreed]
        tell(f"checkpoint step {self.progress.step} {path} {time.perf_counter() - begun:.1f} s{cause}")
        self.clock = self.progress.step, time.perf_counter()

    def _log(self, step: int, loss: Tensor) -> None:
        """Print the line of a step; progress displays parse it."""
        # This waits for the device, so that the speed is that of work which is done.
        self.progress.loss = average(loss)
        (before, begun), self.clock = self.clock, (step, time.perf_counter())
        rate = (step - before) * self.sequences * self.config.seq_len / (self.clock[1] - begun)
        tera = rate / self.world_size / 1e12
        mfu = f" mfu {self.flops * tera / self.peak:.1%}" if self.peak else ""
        tell(
            f"step {step}/{self.config.train.steps} loss {self.progress.loss:.4f} "
            f"lr {compute_learning_rate(self.config, step):.2e} tokens/s {rate:.0f} "
            f"tflops {self.flops_done * tera:.4g}{mfu}"
        )

    def _describe(self, resumed: Path | None) -> None:
        """Print what is run, a line for each subject."""
        config, train, model, windows = self.config, self.config.train, self.config.model, self.windows
        over = "nccl" if self.is_gpu else "gloo"
        parallel = "" if self.parallel == "none" else f" {self.parallel} over {over},"
        threads = f"{torch.get_num_threads()} threads"
        name = torch.cuda.get_device_name(self.device) if self.is_gpu else threads
        tell(
            f"model   {model.name}: {self.parameters:,} parameters, {model.layers} layers, "
            f"hidden {model.hidden_size}, {model.heads} heads ({model.kv_heads} kv), "
            f"{model.vocab_size} tokens\n"
            f"data    {config.data.path or 'the standard library of Python'}: {windows.size:,} bytes, "
            f"{windows.training:,} sequences of {config.seq_len}, {windows.validation:,} more held out\n"
            f"device  {self.device} ({name}), {self.world_size} rank{'s' * (self.world_size > 1)},"
            f"{parallel} {train.dtype}, {config.workers} DataLoader workers a rank\n"
            f"batch   {self.sequences * config.seq_len:,} tokens per step: {train.batch_size} sequences x "
            f"{config.seq_len} x {self.world_size} ranks x {train.grad_accumulation} micro-steps"
        )
        if self.peak:
            again = "; tflops count recomputation, mfu does not" if self.flops_done > self.flops else ""
            tell(f"peak    {self.peak:.4g} TFLOPS a rank{again}")
        tell(f"start   at step {self.progress.step}" + (f", resumed from {resumed}" if resumed else ""))


def list_complete(directory: Path) -> list[Path]:
    """List the complete checkpoints, oldest first."""
    return sorted(path for path in directory.iterdir() if COMPLETE.fullmatch(path.name))


def prepare_directory(directory: Path, model: ModelConfig) -> Path | None:
    """Make the directory, remove what a killed save left, and return the newest checkpoint.

    Raises OptionError if that cannot be done, or if the checkpoint is of a model of other dimensions.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for part in directory.glob("step-*.part"):
            shutil.rmtree(part)
        (directory / ".writable").touch()
        (directory / ".writable").unlink()
        path = max(list_complete(directory), default=None)
        saved = json.loads((path / "model.json").read_text()) if path else {}
    except (OSError, ValueError) as error:
        raise OptionError(f"--checkpoint-dir {directory}: {error}: give another one") from None
    here = asdict(model)
    other = [f"{key}={saved.get(key)}" for key in here if key != "name" and saved.get(key) != here[key]]
    if path and other:
        raise OptionError(
            f"{path} is of a model with {', '.join(other)}: give that, or another --checkpoint-dir"
        )
    return path


class SignalVotes:
    """Receives this rank's signals, and agrees with the other ranks on what to do at which step."""

    def __init__(self) -> None:
        self.asked = NOTHING
        self.vote: tuple[Any, Tensor] | None = None
        for number in ACTIONS:
            signal.signal(number, self._receive)
            signal.siginterrupt(number, False)  # system calls of libraries go on

    def _receive(self, number: int, _: FrameType | None) -> None:
        self.asked = max(self.asked, ACTIONS[signal.Signals(number)])

    def exchange(self) -> int:
        """Return what all ranks agreed on a step ago, and start the next agreement; once each step.

        One small all_reduce between CPUs runs beside the next step: no rank waits for its GPU, and all read
        the same answer at the same step, although a signal reaches them at different times.
        """
        agreed = self.finish()
        vote = torch.tensor(self.asked)
        # Nothing is lost to a signal in between: a smaller request was part of the larger one.
        self.asked = NOTHING if self.asked == int(vote) else self.asked
        self.vote = dist.all_reduce(vote, dist.ReduceOp.MAX, async_op=True), vote
        return agreed

    def finish(self) -> int:
        """Return the result of the agreement that was started last."""
        if self.vote is None:
            return NOTHING
        (work, vote), self.vote = self.vote, None
        work.wait()
        return int(vote)
