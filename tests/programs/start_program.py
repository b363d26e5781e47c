"""How the tests start the bundled program, and read it."""

import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.seam import PATIENCE

PROGRAM = ("-m", "launcher.programs.train")
SMALL = {
    "model.layers": "2",
    "model.hidden_size": "32",
    "model.intermediate_size": "64",
    "model.max_seq_len": "32",
    "batch-size": "4",
    "log-every": "1",
    "num-workers": "0",
    "eval-batches": "2",
    "peak-tflops": "0.1",
}
"""Options of a model that takes a few milliseconds a step."""
STEP = re.compile(
    r"step (\d+)/(\d+) loss (\d+\.\d{4}) lr (\d\.\d\de-\d\d) tokens/s (\d+) tflops (\S+)(?: mfu ([\d.]+)%)?"
)


@dataclass(frozen=True, slots=True)
class Start:
    """A way to start the program."""

    environ: dict[str, str]
    text: Path
    program: Sequence[str] = PROGRAM

    def command(self, ranks: int, **options: str | bool) -> list[str]:
        """Write the command line; `ranks` of 0 is a plain process."""
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        flags = SMALL | {"data.path": str(self.text)} | {k.replace("_", "-"): v for k, v in options.items()}
        shown = [f"--{key}" if value is True else f"--{key}={value}" for key, value in flags.items()]
        return [sys.executable, *(torchrun if ranks else []), *self.program, *shown]

    def popen(self, ranks: int, **options: str | bool) -> subprocess.Popen[str]:
        """Start it, its output in pipes."""
        command = self.command(ranks, **options)
        pipe = subprocess.PIPE
        return subprocess.Popen(command, env=self.environ, stdout=pipe, stderr=pipe, text=True)

    def run(self, ranks: int, **options: str | bool) -> str:
        """Run it to its end, which must be good; give its output."""
        with self.popen(ranks, **options) as process:
            output, errors = process.communicate(timeout=PATIENCE)
        assert process.returncode == 0, output + errors
        return output


def read_steps(output: str) -> list[re.Match[str]]:
    """Give the lines of steps."""
    return [found for found in map(STEP.fullmatch, output.splitlines()) if found]


def read_losses(output: str) -> dict[int, str]:
    """Give the loss of each step, as it was printed."""
    return {int(found[1]): found[3] for found in read_steps(output)}
