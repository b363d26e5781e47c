"""Peak memory of the bundled program by torch's MemTracker, on fake CUDA tensors: a process of its own.

`python -m tests.benchmarks.fit_truth LIBRARY`, cases as lines of JSON on stdin, bytes as lines on stdout.
The library (fake_cuda.cpp) is loaded before torch; `-` is none, for torch's CUDA build. It runs the program's
real modules and its real training step, and knows nothing of the estimates.
"""

import ctypes
import json
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

if __name__ == "__main__" and sys.argv[1] != "-":
    ctypes.CDLL(sys.argv[1])

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.cuda.amp import common
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel, distributed
from torch.testing._internal.distributed.fake_pg import FakeStore

from launcher.inprocess.launch_inprocess.fake_step import kernels, pretended_torch
from launcher.inprocess.launch_inprocess.fake_step.session import StepMemory
from launcher.programs.options import parse_config
from launcher.programs.training import Trainer, make_optimizer, shard_model, wrap_ddp
from launcher.programs.transformer import Transformer

DEVICE = torch.device("cuda", 0)
STEPS = {"adamw": 2}
"""The first step makes the optimizer's states; others than AdamW have new operators in the second one, and
DTensor makes whole tensors to learn an operator's shapes: three steps."""


def make_tracker() -> Any:
    """Make torch's tracker, without a peak for each module: with each operator it looks at all modules."""
    tracker: Any = MemTracker()
    update = tracker._update_peak_stats

    def update_total(state: object) -> None:
        modules, tracker.memory_tracking = tracker.memory_tracking, {}
        update(state)
        tracker.memory_tracking = modules

    tracker._update_peak_stats = update_total
    return tracker


class Reducer:
    """DDP's reducer, but it keeps its first buckets: rebuilding them sends real numbers."""

    def __init__(self, reducer: Any) -> None:
        self.reducer = reducer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.reducer, name)

    def _rebuild_buckets(self) -> bool:
        return False


def fake_device() -> None:
    """Make torch.cuda answer as with one GPU, and let DDP and the mesh do without real numbers."""
    gpu = {"name": "NVIDIA H100 80GB HBM3", "memory": 80 << 30, "capability": (9, 0), "count": 1}
    pretended_torch.pretend_cuda(gpu, StepMemory())
    kernels.replace_kernels()
    pretended_torch.answer_reducer(distributed)
    patches: tuple[tuple[Any, str, Any], ...] = (
        (common, "amp_definitely_not_available", lambda: False),
        (distributed, "_verify_param_shape_across_processes", lambda *_, **__: True),
        (DeviceMesh, "from_group", staticmethod(partial(make_real_mesh, DeviceMesh.from_group))),
    )
    for owner, name, value in patches:
        setattr(owner, name, value)


def make_real_mesh(make_mesh: Callable[..., DeviceMesh], *args: Any, **keywords: Any) -> DeviceMesh:
    """Make a mesh of ranks, which are numbers to read."""
    with unset_fake_temporarily():
        return make_mesh(*args, **keywords)


def wrap_fake_ddp(model: Transformer) -> nn.Module:
    """Wrap as the program does, without what needs real numbers."""
    module: Any = wrap_ddp(model, DEVICE)
    module.logger = SimpleNamespace(set_runtime_stats_and_log=lambda: None)
    module.reducer = Reducer(module.reducer)
    assert isinstance(module, DistributedDataParallel)
    return module


class TwoOptimizers:
    """Muon for the blocks' matrices, the program's AdamW for the rest, as Muon's authors advise."""

    def __init__(self, model: Any) -> None:
        matrices = [weights for weights in model.blocks.parameters() if weights.dim() == 2]
        known = {id(weights) for weights in matrices}
        rest = [weights for weights in model.parameters() if id(weights) not in known]
        muon: Any = torch.optim.Muon
        self.both = muon(matrices, 1e-3), torch.optim.AdamW(rest, 1e-4, fused=True)
        self.param_groups = [group for one in self.both for group in one.param_groups]

    def step(self) -> None:
        for one in self.both:
            one.step()

    def zero_grad(self, *, set_to_none: bool) -> None:
        for one in self.both:
            one.zero_grad(set_to_none=set_to_none)


def choose_optimizer(name: str, model: nn.Module) -> Any:
    """Make the program's AdamW, or another of torch's."""
    if name == "sgd":
        return torch.optim.SGD(model.parameters(), 1e-4, momentum=0.9)
    return TwoOptimizers(model) if name == "muon" else make_optimizer(model, 1e-4, 0.1)


def make_trainer(case: dict[str, Any]) -> Trainer:
    """Build the model, its wrapper and the optimizer, as launcher.programs.training does."""
    config = parse_config([])
    config = replace(config, model=replace(config.model, **case["model"]))
    with DEVICE:
        bare = Transformer(config.model, recompute=case["checkpointing"])
    if case["parallel"] == "fsdp":
        shard_model(bare, DEVICE, bf16=case["bf16"])
    train = replace(
        config.train,
        batch_size=case["batch"],
        seq_len=case["seq_len"],
        activation_checkpointing=case["checkpointing"],
        grad_accumulation=case["accumulation"],
    )
    trainer: Any = Trainer.__new__(Trainer)
    trainer.config = replace(config, train=train)
    trainer.device = DEVICE
    trainer.bf16, trainer.parallel = case["bf16"], case["parallel"]
    trainer.module = wrap_fake_ddp(bare) if case["parallel"] == "ddp" else bare
    trainer.optimizer = choose_optimizer(case["optimizer"], bare)
    return cast("Trainer", trainer)


def make_batches(case: dict[str, Any], tracker: Any) -> Iterator[torch.Tensor]:
    """Give the batches of a step, as the loader does: bytes on the CPU."""
    for _ in range(case["accumulation"]):
        # The tracker wants to be told of each forward pass.
        tracker.reset_mod_stats()
        yield torch.zeros((case["batch"], case["seq_len"] + 1), dtype=torch.uint8)


def track(case: dict[str, Any]) -> int:
    """Give the bytes that a GPU has allocated at the peak of the last step."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=case["world_size"])
    tracker = make_tracker()
    try:
        with FakeTensorMode():
            with tracker:
                trainer = make_trainer(case)
            tracker.track_external(trainer.module)
            for step in range(1, STEPS.get(case["optimizer"], 3) + 1):
                # A peak begins with each entry: the first step has tensors of DTensor's own propagation.
                with tracker:
                    trainer.take_step(step, make_batches(case, tracker))
        return int(tracker.get_tracker_snapshot("peak")[DEVICE]["Total"])
    finally:
        dist.destroy_process_group()


def main() -> None:
    """Answer a line for each case."""
    warnings.simplefilter("ignore")
    fake_device()
    for line in sys.stdin:
        print(track(json.loads(line)), flush=True)


if __name__ == "__main__":
    main()
