"""One run of training on one rank: join the other ranks, build the model, train, and end as it should."""

import contextlib
import errno
import gc
import json
import math
import multiprocessing
import os
import platform
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
from torch._C._distributed_c10d import HashStore
from torch.distributed.elastic.multiprocessing.errors import record

from launcher.fit.gpus import find_gpu
from launcher.programs.data import Schedule, Windows, find_files
from launcher.programs.node_work import name_processor
from launcher.programs.options import RECOMPUTED, Config, ModelConfig, OptionError, TrainConfig
from launcher.programs.transformer import Transformer, count_flops, initialise

EXIT_RESTART = os.EX_TEMPFAIL
"""Exit code of a program that was stopped, and goes on from its checkpoint when it is started again."""
NOTHING, CHECKPOINT, STOP = 0, 1, 2
"""What a rank asks for; all ranks do the largest of these."""
ACTIONS = {signal.SIGUSR2: CHECKPOINT, signal.SIGTERM: STOP}
MAX_KEPT = 2
"""Checkpoints kept; older ones are removed."""
COMPLETE = re.compile(r"step-(\d{8})")


@record
def run(config: Config) -> None:
    """Train, and end as it should: status 2 for a mistake of the user's, 75 to be started again."""
    status, message = 0, ""
    try:
        status = Trainer(config).train()
    except OptionError as error:
        status, message = 2, str(error)
    except RuntimeError as error:
        if "gloo/transport" not in str(error):
            raise
        # The rank that failed first says why: no traceback, and no record, of this one.
        status, message = 1, f"lost the connection to another rank: {error}"
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
    if message:
        print(f"train: error: {' '.join(message.split())}", file=sys.stderr, flush=True)
    if status < 0:  # by a signal
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    if status:
        # torchrun sends SIGTERM as soon as the first rank has ended, and Python's finalization takes
        # handlers away, but leaves what is ignored.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        sys.exit(status)


class Ranks:
    """One rank among the others, as torchrun's variables say it; without them rank 0 of 1.

    The default process group is gloo, for what CPUs agree on; `group` is the one for gradients: NCCL if each
    rank has a GPU of its own, which NCCL demands.
    """

    def __init__(self, device: str) -> None:
        """Join the others; raises OptionError for variables or a device that cannot be."""
        visible = torch.cuda.device_count() if device != "cpu" and torch.cuda.is_available() else 0
        if device == "cuda" and not visible:
            raise OptionError("--device cuda, but torch sees no GPU: give --device cpu")
        try:
            if "RANK" in os.environ:
                dist.init_process_group("gloo")
            else:
                dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
            self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
            local_rank = int(os.environ.get("LOCAL_RANK", self.rank))
        except ValueError as error:
            raise OptionError(f"{error}: start by torchrun, or unset RANK") from None
        self.device = torch.device("cuda", local_rank % visible) if visible else torch.device("cpu")
        self.backend, self.group = "gloo", dist.group.WORLD
        if visible:
            torch.cuda.set_device(self.device)
            gpu = f"{platform.node()}/{torch.cuda.get_device_properties(self.device).uuid}"
            if len(set(self.gather(gpu))) == self.world_size:
                self.backend, self.group = "nccl", dist.new_group(backend="nccl")

    def gather(self, value: Any) -> list[Any]:  # noqa: ANN401 - anything that can be pickled
        """Return what each rank has."""
        found = [value] * self.world_size
        if self.world_size > 1:
            dist.all_gather_object(found, value)
        return found

    def average(self, value: Tensor) -> float:
        """Average a scalar over the ranks."""
        total = value.detach().to("cpu", torch.float32, copy=True)
        dist.all_reduce(total)
        return total.item() / self.world_size

    def agree(self, train: TrainConfig) -> TrainConfig:
        """Settle the type, and take of what all ranks must share the setting that needs least memory.

        Nodes of several kinds may each have been given what fits there, and nodes with other numbers of GPUs
        micro-steps for as many everywhere: those of the global batch are counted for all ranks.
        """
        dtype = train.dtype
        if dtype == "auto":
            # CPUs with bf16 instructions lose more in autocast's conversions than they gain on small models.
            bf16 = self.device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
            dtype = "bf16" if bf16 else "fp32"
        recomputed = RECOMPUTED.index(train.activation_checkpointing)
        found = self.gather((train.batch_size, train.grad_accumulation, recomputed, train.parallel, dtype))
        batch_size, grad_accumulation, *_ = min(found)
        if train.global_batch:
            grad_accumulation = max(1, round(train.global_batch / (batch_size * self.world_size)))
        settled: dict[str, Any] = {
            "batch_size": batch_size,
            "grad_accumulation": grad_accumulation,
            "activation_checkpointing": RECOMPUTED[max(one[2] for one in found)],
            "parallel": max(one[3] for one in found),
            "dtype": max(one[4] for one in found),  # each GPU computes in fp32
        }
        if self.rank == 0 and len(set(found)) > 1:
            options = " ".join(f"--{key.replace('_', '-')} {value}" for key, value in settled.items())
            print(f"train: ranks were started with different settings, all take {options}", flush=True)
        return replace(train, **settled)


def shard_model(model: Transformer, device: torch.device, backend: str, *, bf16: bool) -> None:
    """Shard each block and the rest over all ranks (FSDP2), computing in bf16 and reducing in fp32."""
    from torch.distributed.device_mesh import DeviceMesh  # noqa: PLC0415 - half a second, for FSDP alone
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard  # noqa: PLC0415

    # DTensor's caches keep the mesh to the end: with a group of its own, the others can end before.
    mesh = DeviceMesh.from_group(dist.new_group(backend=backend), device.type)
    # Inputs are not cast: the rotary angles stay fp32, and the embedding makes the rest bf16.
    policy = MixedPrecisionPolicy(torch.bfloat16 if bf16 else None, torch.float32, cast_forward_inputs=False)
    for block in (*model.blocks, model):
        fully_shard(block, mesh=mesh, mp_policy=policy)


def wrap_ddp(model: Transformer, device: torch.device, group: dist.ProcessGroup | None) -> nn.Module:
    """Copy the model to all ranks of the group (DDP)."""
    from torch.nn.parallel import DistributedDataParallel  # noqa: PLC0415

    devices = [device] if device.type == "cuda" else None
    return DistributedDataParallel(
        model, device_ids=devices, process_group=group, gradient_as_bucket_view=True
    )


def make_optimizer(model: nn.Module, lr: float, weight_decay: float) -> torch.optim.AdamW:
    """Make a fused AdamW that decays matrices, not norms and biases; the betas are LLaMA's."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=True)


def compute_learning_rate(config: TrainConfig, peak: float, step: int) -> float:
    """Return the rate of a step, counted from 1: linear warm-up, then a cosine down to `min_lr_ratio`."""
    if step <= config.warmup_steps:
        return peak * step / config.warmup_steps
    progress = (step - config.warmup_steps) / max(1, config.steps - config.warmup_steps)
    cosine = (1 + math.cos(math.pi * min(1.0, progress))) / 2
    return peak * (config.min_lr_ratio + (1 - config.min_lr_ratio) * cosine)


@dataclass(slots=True)
class Progress:
    """How far training has come."""

    step: int = 0
    """Optimizer steps done."""
    consumed: int = 0
    """Sequences consumed by all ranks: where the data go on."""
    loss: float = float("nan")
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
        self.windows = Windows(find_files(config.data.path), config.seq_len, config.data.val_fraction)
        self.ranks = ranks = Ranks(config.train.device)
        self.train_config = train = ranks.agree(config.train)
        self.config = config = replace(config, train=train)
        self.bf16 = train.dtype == "bf16"
        self.parallel = train.parallel if train.parallel == "fsdp" or ranks.world_size > 1 else "none"
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
            shard_model(model, ranks.device, ranks.backend, bf16=self.bf16)
        model.to_empty(device=ranks.device)
        # Shards differ between ranks, replicas must not.
        seed = train.seed * 1_000_003 + (ranks.rank if self.parallel == "fsdp" else 0)
        initialise(model, torch.Generator(ranks.device).manual_seed(seed))
        self.module = wrap_ddp(model, ranks.device, ranks.group) if self.parallel == "ddp" else model
        self.optimizer = make_optimizer(self.model, config.lr, train.weight_decay)
        self.progress = Progress()
        self.peak, self.peak_origin = train.peak_tflops, "given"
        """TFLOPS that MFU is measured against, None if unknown: a CPU has none, since training would exceed a
        product of small matrices."""
        if self.peak is None and ranks.device.type == "cuda":
            gpu = find_gpu(torch.cuda.get_device_name(ranks.device))
            self.peak, self.peak_origin = gpu.bf16 if gpu else None, "published dense bf16"
        self.tokens, self.clock = 0, time.perf_counter()
        """Tokens of all ranks since the clock's time, for the speed."""
        self.sequences = train.batch_size * train.grad_accumulation * ranks.world_size
        """That all ranks consume in an optimizer step."""

    def train(self) -> int:
        """Train from the newest checkpoint to the last step; return the exit code, -n for signal n to die by.

        If a signal asked to stop, and a checkpoint has been written, it is the code for another start.
        """
        train, votes, begun = self.train_config, SignalVotes(), time.perf_counter()
        resumed = self._resume()
        self._describe(f"at step {self.progress.step}" + (f", resumed from {resumed}" if resumed else ""))
        first = self.progress.step + 1
        schedule = Schedule(
            self.windows,
            train.seed,
            self.progress.consumed,
            max(0, train.steps - self.progress.step) * train.grad_accumulation,
            train.batch_size,
            self.ranks.rank,
            self.ranks.world_size,
        )
        batches = iter(schedule.make_loader(self.config.workers, pin=self.ranks.device.type == "cuda"))
        self.tokens, self.clock = 0, time.perf_counter()
        for step in range(first, train.steps + 1):
            loss = self.take_step(step, batches)
            self.progress = Progress(step, self.progress.consumed + self.sequences, self.progress.loss)
            self.tokens += self.sequences * self.config.seq_len
            if step in (first, train.steps) or step % train.log_every == 0:
                self._log(step, loss)
            agreed = votes.exchange()
            due = step == train.steps or (train.checkpoint_every > 0 and step % train.checkpoint_every == 0)
            if agreed != NOTHING or (due and train.checkpoint_dir):
                self._save(loss, agreed)
                self.tokens, self.clock = 0, time.perf_counter()
            if agreed == STOP and step < train.steps:
                return EXIT_RESTART if train.checkpoint_dir else -signal.SIGTERM
        votes.finish()
        if self.ranks.device.type == "cuda":
            # In use is also what is not torch's: CUDA's context, NCCL's buffers, other processes.
            free, total = torch.cuda.mem_get_info(self.ranks.device)
            allocated, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
            self._print(
                f"memory  {allocated / 2**30:.2f} GiB allocated, {reserved / 2**30:.2f} reserved at most, "
                f"{(total - free) / 2**30:.2f} of {total / 2**30:.2f} in use"
            )
        validation = ""
        if train.eval_batches and self.windows.validation:
            validation = f" val_loss {self._validate():.4f}"
        self._print(
            f"done step {self.progress.step}/{train.steps} loss {self.progress.loss:.4f}{validation} "
            f"sequences {self.progress.consumed} seconds {time.perf_counter() - begun:.1f}"
        )
        return 0

    def take_step(self, step: int, batches: Iterator[Tensor]) -> Tensor:
        """Take one optimizer step; return its loss, averaged over this rank's micro-steps."""
        train = self.train_config
        total = torch.zeros((), device=self.ranks.device)
        for micro_step in range(train.grad_accumulation):
            # DDP's gradients cross the ranks on the last micro-step alone. FSDP's are reduced on each: else
            # every rank would keep whole ones, 26 GiB for 7 billion parameters.
            hold = self.parallel == "ddp" and micro_step < train.grad_accumulation - 1
            with self.module.no_sync() if hold else contextlib.nullcontext():  # type: ignore[operator]
                loss = self._compute_loss(next(batches)) / train.grad_accumulation
                torch.autograd.backward(loss)
            total += loss.detach()
        if train.clip_grad:
            nn.utils.clip_grad_norm_(self.module.parameters(), train.clip_grad)
        for group in self.optimizer.param_groups:
            group["lr"] = compute_learning_rate(train, self.config.lr, step)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return total

    def _compute_loss(self, batch: Tensor) -> Tensor:
        """Return the mean cross-entropy, in nats a byte, of (batch, seq_len + 1) bytes."""
        # Bytes cross to the device, an eighth of what token numbers take.
        tokens = batch.to(self.ranks.device, non_blocking=True).long()
        # FSDP has its own policy.
        mixed = self.bf16 and self.parallel != "fsdp"
        with torch.autocast(self.ranks.device.type, torch.bfloat16, enabled=mixed):
            loss: Tensor = self.module(tokens[:, :-1], tokens[:, 1:])
        return loss

    @torch.no_grad()
    def _validate(self) -> float:
        """Return the loss on the held-out windows, averaged over batches and ranks."""
        train, ranks, windows = self.train_config, self.ranks, self.windows
        total = torch.zeros((), device=ranks.device)
        for number in range(train.eval_batches):
            start = (number * ranks.world_size + ranks.rank) * train.batch_size
            indices = [(start + index) % windows.validation for index in range(train.batch_size)]
            # Read here: a second loader with workers beside the first has hung programs.
            batch = torch.stack([windows[windows.training + index] for index in indices])
            total += self._compute_loss(batch)
        return ranks.average(total / train.eval_batches)

    def _resume(self) -> Path | None:
        """Go on from the newest checkpoint, which any number of ranks may have saved, and return it.

        Raises OptionError on all ranks.
        """
        if not self.train_config.checkpoint_dir:
            return None
        found: list[Path | OptionError | None] = [None]
        if self.ranks.rank == 0:
            try:
                found = [prepare_directory(Path(self.train_config.checkpoint_dir), self.config.model)]
            except OptionError as error:
                found = [error]
        dist.broadcast_object_list(found, src=0)
        path = found[0]
        if isinstance(path, OptionError):
            raise path
        if path is not None:
            from torch.distributed.checkpoint.state_dict import set_state_dict  # noqa: PLC0415 - slow import
            from torch.distributed.checkpoint.state_dict_loader import load  # noqa: PLC0415

            state = self._collect_state()
            load(state, checkpoint_id=path)
            states = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
            set_state_dict(self.model, self.optimizer, **states)
            self.progress = Progress(**state["progress"])
        return path

    def _collect_state(self) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import get_state_dict  # noqa: PLC0415 - slow import

        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "progress": asdict(self.progress)}

    def _save(self, loss: Tensor, agreed: int) -> None:
        """Write a checkpoint, also if a signal asked for one: beside the others, renamed once it is whole.

        A kill meanwhile leaves the last one as it was. The oldest is removed.
        """
        cause = {NOTHING: "", CHECKPOINT: " on SIGUSR2", STOP: " on SIGTERM"}[agreed]
        if not self.train_config.checkpoint_dir:
            self._print(f"no checkpoint{cause}: there is no --checkpoint-dir")
            return
        from torch.distributed.checkpoint.state_dict_saver import save  # noqa: PLC0415 - slow import

        self.progress.loss = self.ranks.average(loss)
        begun = time.perf_counter()
        path = Path(self.train_config.checkpoint_dir, f"step-{self.progress.step:08}")
        part = path.with_suffix(".part")
        save(self._collect_state(), checkpoint_id=part)
        if self.ranks.rank == 0:
            (part / "model.json").write_text(json.dumps(asdict(self.config.model)))
            part.rename(path)
            for old in list_complete(path.parent)[:-MAX_KEPT]:
                shutil.rmtree(old)
        dist.barrier()  # the other ranks go on once the rename is done
        self._print(f"checkpoint step {self.progress.step} {path} {time.perf_counter() - begun:.1f} s{cause}")

    def _log(self, step: int, loss: Tensor) -> None:
        """Print the line of a step; progress displays parse it."""
        # This waits for the device, so that the speed is that of work which is done.
        self.progress.loss = self.ranks.average(loss)
        rate = self.tokens / (time.perf_counter() - self.clock)
        self.tokens, self.clock = 0, time.perf_counter()
        tera = rate / self.ranks.world_size / 1e12
        mfu = f" mfu {self.flops * tera / self.peak:.1%}" if self.peak else ""
        lr = compute_learning_rate(self.train_config, self.config.lr, step)
        self._print(
            f"step {step}/{self.train_config.steps} loss {self.progress.loss:.4f} lr {lr:.2e} "
            f"tokens/s {rate:.0f} tflops {self.flops_done * tera:.4g}{mfu}"
        )

    def _describe(self, start: str) -> None:
        """Print what is run, a line for each subject."""
        config, train, model, ranks = self.config, self.train_config, self.config.model, self.ranks
        parallel = "" if self.parallel == "none" else f" {self.parallel} over {ranks.backend},"
        full = train.activation_checkpointing == "full"
        origin = config.data.path or "Python {}.{}'s standard library".format(*sys.version_info)
        tokens = self.sequences * config.seq_len
        name = f"{name_processor()}, {torch.get_num_threads()} threads"
        if ranks.device.type == "cuda":
            name = torch.cuda.get_device_name(ranks.device)
        self._print(
            f"model   {model.name}: {self.parameters:,} parameters, {model.layers} layers, "
            f"hidden {model.hidden_size}, {model.heads} heads ({model.kv_heads} kv), "
            f"{model.vocab_size} tokens\n"
            f"data    {origin}: {self.windows.size:,} bytes, {self.windows.training:,} sequences of "
            f"{config.seq_len}, {self.windows.validation:,} more held out\n"
            f"device  {ranks.device} ({name}), {ranks.world_size} rank{'s' * (ranks.world_size > 1)},"
            f"{parallel} {train.dtype}, {config.workers} DataLoader workers a rank\n"
            f"batch   {tokens:,} tokens per step: {train.batch_size} sequences x {config.seq_len} x "
            f"{ranks.world_size} ranks x {train.grad_accumulation} micro-steps"
        )
        if self.peak:
            again = "; tflops count recomputation, mfu does not" if full else ""
            self._print(f"peak    {self.peak:.4g} TFLOPS a rank, {self.peak_origin}{again}")
        self._print(f"start   {start}")

    def _print(self, text: str) -> None:
        if self.ranks.rank == 0:
            print(text, flush=True)


def list_complete(directory: Path) -> list[Path]:
    """List the complete checkpoints, oldest first."""
    # Not by glob(), which takes a directory that cannot be read for an empty one.
    return sorted(path for path in directory.iterdir() if COMPLETE.fullmatch(path.name))


def prepare_directory(directory: Path, model: ModelConfig) -> Path | None:
    """Make the directory, remove what a killed save left, and return the newest checkpoint.

    Raises OptionError if that cannot be done, or if the checkpoint is of a model of other dimensions.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for part in directory.glob("step-*.part"):
            shutil.rmtree(part)
        if not os.access(directory, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        complete = list_complete(directory)
    except OSError as error:
        raise OptionError(f"--checkpoint-dir {directory}: {error.strerror}: give one to write to") from None
    if not complete:
        return None
    path, here = complete[-1], asdict(model)
    try:
        saved = dict(json.loads((path / "model.json").read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise OptionError(f"{path} is no checkpoint of this program ({error}): remove it") from None
    other = [f"{key}={saved.get(key)}" for key in here if key != "name" and saved.get(key) != here[key]]
    if other:
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
        return int(vote.item())
