"""The steps of the proof, in the order in which they run: cheap ones first, then by what they are worth."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Step:
    """A step, which is run in a process of its own."""

    name: str
    title: str
    limit: float
    """Seconds after which it is ended, and has failed."""
    cpu: str = ""
    """What it does without a GPU; empty where there is nothing to do."""
    without_gpu: bool = False
    """Is worth running if a GPU was expected, and torch sees none."""
    arguments: tuple[str, ...] = ()
    """What Python is started with; empty: the module of `tests.gpu.steps` that has the step's name."""

    @property
    def command(self) -> tuple[str, ...]:
        """Arguments of the interpreter."""
        return self.arguments or ("-m", "tests.gpu.step", self.name)


STEPS = (
    Step("machine", "topo, plan and doctor on this machine, kept", 60, "the same", without_gpu=True),
    Step("drivers", "NVML against the driver's files and torch", 40, without_gpu=True),
    Step(
        "devices",
        "CUDA's order, indices, UUIDs and MIG names as torch sees them; devices=all, own, spread",
        90,
        "runs of `launch` without a GPU",
    ),
    Step(
        "endings",
        "exit codes, CUDA errors, NCCL, the flight recorder and launch-rank, end to end",
        90,
        "gloo, and errors without CUDA",
    ),
    Step(
        "start",
        "ranks forked from a process with torch, against exec and torchrun: CUDA, the allocator, the loss",
        110,
        "the same on CPUs",
    ),
    Step(
        "training",
        "gpt2 and llama1b: tokens/s, TFLOPS, MFU, memory as predicted and measured",
        120,
        "the model tiny",
    ),
    Step(
        "allocator",
        "the allocator's settings: accepted or refused by this torch as our table says",
        90,
        "settings that a CPU build reads",
    ),
    Step(
        "garbage",
        "memory and step times under each collection policy, tensors in garbage",
        130,
        "a small program in main memory",
    ),
    Step("marked_tests", "tests marked `gpu`", 175, "collected, not run"),
    Step(
        "preflight",
        "preflight's measured work on each GPU, lightly and deeply; nothing stays on the GPUs",
        100,
        "lightly, on CPUs",
    ),
    Step(
        "fragmentation",
        "GPU memory with and without expandable segments, sequences of varying length",
        120,
        "one step, without figures",
    ),
    Step("loader", "launch tune dataloader with pinned memory", 125, "the same without pinned memory"),
)
