"""Runs a program's first steps in a child process, on fake tensors, for `launch fit`."""

import contextlib
import json
import logging
import os
import re
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from launcher.codec import DecodeError, load
from launcher.errors import MachineError
from launcher.files import read_file
from launcher.fit.gpus import find_gpu
from launcher.fit.training import Device
from launcher.launch.job import render_shim
from launcher.launch.processes import prepare_agent
from launcher.launch.signals import STOPPING, catch_signals
from launcher.protocol import LAUNCH_BINDING, LAUNCH_FIT, LAUNCH_QUIET, LAUNCH_RUN_DIR
from launcher.text import strip_sequences

logger = logging.getLogger(__name__)

STEPS = 2
"""Optimizer steps: states appear in the first, and the second has them from its beginning."""
LARGEST_RESULT = 64 << 20
LAST_BYTES = 64 << 10
MOST_LINES = 20
"""Last lines of a failed program's output that are shown."""
TICK = 0.2
"""Seconds between two looks for signals."""
GRACE = 5.0
"""Seconds between SIGTERM and SIGKILL."""
CAPABILITIES = (
    (r"rtx pro|50[5-9]0", (12, 0)),
    (r"g?b[23]00|blackwell", (10, 0)),
    (r"gh200|h[128]00|h20|hopper", (9, 0)),
    (r"l40s?|l4|ada|40[5-9]0", (8, 9)),
    (r"a10g?|a16|a2|a40|a[456]000|30[5-9]0", (8, 6)),
    (r"t4g?|20[678]0|quadro rtx", (7, 5)),
    (r"v100s?|titan v", (7, 0)),
    (r"p100", (6, 0)),
)
"""Compute capabilities by words of names (developer.nvidia.com/cuda-gpus); 8.0, A100's, for others."""


@dataclass(frozen=True, slots=True)
class PretendedGpu:
    """The GPU that the program sees."""

    name: str
    memory: int
    capability: tuple[int, int]
    count: int


@dataclass(frozen=True, slots=True)
class RecordedPeak:
    """The peak as the program's interpreter has recorded it, in bytes."""

    total: int
    categories: dict[str, int]
    modules: dict[str, dict[str, int]]


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why the steps could not be run on fake tensors."""

    reason: str
    operator: str
    place: str
    line: str


@dataclass(frozen=True, slots=True)
class StepRecord:
    """What the program's interpreter has found."""

    device: str
    peak: RecordedPeak
    steps: int
    parameters: int
    optimizers: tuple[str, ...]
    notes: tuple[str, ...]
    seconds: float
    torch: str
    complete: bool = False
    refused: Refusal | None = None
    failed: Refusal | None = None
    """The exception that ended the program."""


def pretend_gpu(device: Device, count: int) -> PretendedGpu | None:
    """Return the GPU that a program is to see; None for CPUs.

    Its name is as the driver writes it, so that programs find it in their tables.
    """
    if device.kind != "gpu":
        return None
    capability = (8, 0)
    for words, number in CAPABILITIES:
        if re.search(rf"(?<![a-z0-9])(rtx ?)?({words})(?![0-9])", device.name.lower()):
            capability = number
            break
    found = find_gpu(device.name)
    name = f"NVIDIA {found.name.upper()}" if found and "NVIDIA" not in device.name else device.name
    return PretendedGpu(name, (device.memory_mib << 20) or 80 << 30, capability, count)


def run_steps(
    argv: Sequence[str],
    environ: Mapping[str, str],
    folder: Path,
    gpu: PretendedGpu | None,
    *,
    shape: tuple[int, int],
    timeout: float,
) -> StepRecord:
    """Run a program until its second step, and return what was found; raises MachineError.

    A signal that stops this process ends the program, too: raises SystemExit.
    `shape` are the ranks of a node and the nodes. `folder` is for the program's output and the result.
    """
    result, output, (local, nodes) = folder / "result.json", folder / "output", shape
    order = {"result": str(result), "gpu": asdict(gpu) if gpu else None, "steps": STEPS}
    variables = {
        **environ,
        # The first rank of the job, as torchrun has it.
        "RANK": "0",
        "LOCAL_RANK": "0",
        "GROUP_RANK": "0",
        "WORLD_SIZE": str(local * nodes),
        "LOCAL_WORLD_SIZE": str(local),
        "GROUP_WORLD_SIZE": str(nodes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
        "TORCHELASTIC_RUN_ID": "fit",
        # No real GPU is touched, and no service keeps the losses.
        "CUDA_VISIBLE_DEVICES": "",
        "WANDB_MODE": "disabled",
        "PYTHONUNBUFFERED": "1",
        LAUNCH_BINDING: "none",
        LAUNCH_QUIET: "1",
        LAUNCH_RUN_DIR: str(folder),
        LAUNCH_FIT: json.dumps(order),
    }
    parent = os.getpid()
    with output.open("wb") as stream, catch_signals() as inbox:
        try:
            process = subprocess.Popen(
                render_shim(argv),
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=lambda: prepare_agent(parent, ()),  # noqa: PLW1509 - no other thread forks here
            )
        except OSError as error:
            raise MachineError(f"the program could not be started ({error})") from None
        status, deadline = None, time.monotonic() + timeout
        try:
            while status is None and (left := deadline - time.monotonic()) > 0:
                for number in inbox.take():
                    if number in STOPPING:
                        raise SystemExit(128 + number)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    status = process.wait(min(TICK, left))
        finally:
            # What is left of it, and of what it has started.
            for number in (signal.SIGTERM, signal.SIGKILL):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, number)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(GRACE)
    return _judge_end(result, output, status, timeout)


def _judge_end(result: Path, output: Path, status: int | None, timeout: float) -> StepRecord:
    """Return the result; raises MachineError if there is none."""
    failed = None
    try:
        record = load(StepRecord, read_file(result, LARGEST_RESULT, own=True))
        if record.failed is None:
            return record
        failed = record.failed
    except FileNotFoundError:
        pass
    except (OSError, DecodeError) as error:
        raise MachineError(f"the program's result cannot be read ({error}): report it") from None
    _show_last_lines(output)
    pretended = (
        "it has fake tensors and no GPU here: if it runs without `launch fit`, this cannot be pretended;"
        " measure it in a run instead, which the next `launch fit` reads"
    )
    if failed is not None:
        code = f": {failed.line}" if failed.line else ""
        subject = (
            f"the operation {failed.operator} failed" if failed.operator else "an exception ended the program"
        )
        what = f"{subject} before the second step ({failed.place}{code}): {failed.reason}; {pretended}"
    elif status is None:
        what = f"the program took no second optimizer step within fit.timeout={timeout:g} s: give more time"
    elif status == 0:
        what = (
            "the program ended without a second step of a torch.optim optimizer: give it two steps, and see"
            " that it is a Python program that trains with torch"
        )
    elif status < 0:
        what = f"the program was ended by {signal.Signals(-status).name} before its second step"
    else:
        what = f"the program ended with exit code {status} before its second step; {pretended}"
    raise MachineError(what)


def _show_last_lines(output: Path) -> None:
    """Show the end of a program's output, a line of ours for each."""
    try:
        with output.open("rb") as stream:
            stream.seek(max(0, output.stat().st_size - LAST_BYTES))
            lines = stream.read(LAST_BYTES).decode("utf-8", "replace").splitlines()
    except OSError:
        return
    shown = [line for line in lines if line.strip()][-MOST_LINES:]
    if shown:
        logger.info("the end of the program's output:")
    for line in shown:
        logger.info(f"  | {strip_sequences(line)}")
