"""The bundled program on one GPU: speed, and memory beside what a simple formula says."""

import re
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from omegaconf import OmegaConf

from launcher.programs.options import ModelConfig
from tests.gpu.context import NEEDED, Context
from tests.gpu.environment import ROOT
from tests.gpu.memory_formula import count_parameters, predict_memory
from tests.programs.start_program import STEP

MEMORY = re.compile(r"memory  ([\d.]+) GiB allocated, ([\d.]+) reserved at most, ([\d.]+) of ([\d.]+) in use")
GIB = 2**30


@dataclass(frozen=True, slots=True)
class Training:
    """A model, and how it is trained."""

    model: str
    batch_size: int
    seq_len: int
    steps: int


TRAININGS = (Training("gpt2", 16, 1024, 40), Training("llama1b", 4, 2048, 30))
"""What is trained on a GPU, of 80 GB or more."""
SMALL = (Training("tiny", 4, 64, 12),)
"""What is trained on the CPU."""


def run(context: Context) -> None:
    """Train each, one after the other: they would share the GPU."""
    for training in SMALL if context.cpu else TRAININGS:
        with context.record.part(training.model):
            train(context, training)


def train(context: Context, training: Training) -> None:
    """Train under `launch`, and record speed and memory."""
    settings = {
        "batch_size": training.batch_size,
        "seq_len": training.seq_len,
        "steps": training.steps,
        "log_every": 2,
        "eval_batches": 0,
        "checkpoint_dir": "null",
    }
    words = [f"+model={training.model}", *(f"program.{name}={value}" for name, value in settings.items())]
    ended = context.launch(training.model, "nproc_per_node=1", *words).demand()
    record(context, training, ended.read_rank())


def record(context: Context, training: Training, said: str) -> None:
    """Record what the program has printed."""
    name = training.model
    steps = [found for found in map(STEP.fullmatch, said.splitlines()) if found]
    # The first lines have the start in them: kernels are loaded, the allocator grows.
    late = [found for found in steps if int(found[1]) > training.steps // 2]
    rate, tflops = (statistics.median(float(found[at]) for found in late) for at in (5, 6))
    first, last = float(steps[0][3]), float(steps[-1][3])
    context.record.check(f"{name}: all steps are done", int(steps[-1][1]) == training.steps, steps[-1][0])
    context.record.check(f"{name}: the loss falls", last < first, f"{first} to {last}")
    model = load_model(training.model)
    memory = read_memory(said)
    if context.cpu:
        context.record.leave_out(f"{name}: memory is told", NEEDED)
    else:
        context.record.check(f"{name}: memory is told", bool(memory), said[-300:])
        mfu = statistics.median(float(found[7]) for found in late)
        context.record.check(f"{name}: MFU is a share", 0 < mfu < 100, f"{mfu}%")
    predicted = predict_memory(model, training.batch_size, training.seq_len)
    context.record.row(
        "Training, by the last half of the steps; memory in GiB, predicted by the proof's own formula",
        model=name,
        parameters=count_parameters(model),
        batch=f"{training.batch_size} x {training.seq_len}",
        tokens_per_s=rate,
        TFLOPS=tflops,
        MFU="" if context.cpu else f"{mfu}%",
        loss=f"{first} to {last}",
        predicted=predicted.total / GIB,
        **memory,
        predicted_of_allocated=predicted.total / GIB / memory["allocated"] if memory else None,
    )


def read_memory(said: str) -> Mapping[str, float]:
    """GiB that were allocated, reserved, and in use on the GPU at the end; empty where nothing is told."""
    found = MEMORY.search(said)
    names = ("allocated", "reserved", "in_use", "of_the_GPU")
    return dict(zip(names, map(float, found.groups()), strict=True)) if found else {}


def load_model(name: str) -> ModelConfig:
    """A shipped model's dimensions."""
    loaded = OmegaConf.load(Path(ROOT, "conf/model", f"{name}.yaml"))
    fields = OmegaConf.to_container(loaded)
    assert isinstance(fields, dict)
    return ModelConfig(**{str(key): value for key, value in fields.items() if key != "global_batch"})
