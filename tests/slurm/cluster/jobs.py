"""Jobs of the tests: submitted by `launch`, and read back from their run directories."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.programs.start_program import read_losses
from tests.seam import PATIENCE, find_processes, wait_for
from tests.slurm.cluster.conftest import ENDED, Sandbox

SHRUNK = (
    *("+model=llama7b", "model.vocab_size=256", "model.layers=1", "model.hidden_size=32", "model.heads=4"),
    *("model.kv_heads=4", "model.intermediate_size=64", "model.max_seq_len=32"),
    *("program.batch_size=4", "program.log_every=1", "program.eval_batches=2", "program.num_workers=0"),
    *("program.peak_tflops=0.1", "program.checkpoint_every=10"),
)
"""A llama7b that takes milliseconds a step."""


@dataclass(frozen=True, slots=True)
class Run:
    """A submitted job."""

    path: Path
    sandbox: Sandbox

    @property
    def manifest(self) -> dict[str, Any]:
        """What the run says of itself."""
        found: dict[str, Any] = json.loads((self.path / "manifest.json").read_text())
        return found

    @property
    def outcome(self) -> dict[str, Any]:
        """How it stands, or went."""
        found: dict[str, Any] = self.manifest["outcome"]
        return found

    @property
    def job_id(self) -> str:
        """SLURM's number."""
        return str(self.manifest["slurm"]["job_id"])

    @property
    def causes(self) -> list[str | None]:
        """Why each attempt ended, first to last."""
        manifest = self.manifest
        return [each["outcome"].get("cause") for each in (*manifest["earlier"], manifest)]

    def read_rank(self, rank: int = 0) -> str:
        """All that a rank printed, over all attempts."""
        files = sorted(self.path.glob(f"logs/*/rank-{rank}.out"), key=lambda path: int(path.parent.name))
        return "".join(path.read_text(errors="replace") for path in files)

    def find_rank(self, rank: int) -> psutil.Process:
        """The process of a rank that runs now."""
        record = json.loads((self.path / f"rank-{rank}.applied.json").read_text())
        return psutil.Process(int(record["pid"]))

    def read_console(self) -> str:
        """What the batch script printed, over all attempts."""
        return "".join(
            path.read_text(errors="replace") for path in sorted(self.path.glob("logs/slurm-*.out"))
        )

    def read_losses(self) -> dict[int, str]:
        """The loss of each step; of a step that was done twice, the last."""
        return read_losses(self.read_rank())

    def await_step(self, step: int) -> None:
        """Wait until rank 0 has printed a step."""
        self.wait_for(lambda: max(self.read_losses(), default=0) >= step, f"step {step}")

    def await_end(self, timeout: float = PATIENCE) -> str:
        """Wait until the run says that it is over and SLURM that the job is; return the run's state."""
        states = ("succeeded", "failed", "stopped")
        self.wait_for(lambda: self.outcome["state"] in states, "the end", timeout)
        self.sandbox.wait(self.job_id, *ENDED)
        return str(self.outcome["state"])

    def find_processes(self) -> dict[int, str]:
        """Processes of the job that are still there, on all nodes."""
        return find_processes(str(self.path))

    def wait_for(self, check: Callable[[], object], what: str, timeout: float = PATIENCE) -> None:
        """Wait until a condition holds; where it does not come to, the test fails with what is known."""
        wait_for(check, what, timeout, self.describe)

    def describe(self) -> str:
        """What is known of the run."""
        queue = self.sandbox.run("squeue", "--states=all", "--format=%i %T %r %N")
        return f"{json.dumps(self.manifest, indent=1)}\n{self.read_console()}\n{queue}"


def assert_same_losses(run: Run, other: Run) -> None:
    """Assert the same steps with the same losses, to one in the last of the four decimals.

    Between two runs that nothing befell, sums of floats differ in their last bit now and then (by where
    buffers lie in memory), which shows in a printed loss once in a thousand steps.
    """
    ours, theirs = run.read_losses(), other.read_losses()
    assert list(ours) == list(theirs)
    assert {step: float(loss) for step, loss in ours.items()} == pytest.approx(
        {step: float(loss) for step, loss in theirs.items()}, abs=1.5e-4, rel=0
    )


def submit(sandbox: Sandbox, cwd: Path, *words: str | bytes, env: Mapping[str, str] | None = None) -> Run:
    """Submit a job by `launch WORDS` in an empty folder, and return its run."""
    before = set(cwd.glob("runs/*/*"))
    done = sandbox.launch(*words, cwd=cwd, env=env)
    assert done.code == 0, done
    (path,) = set(cwd.glob("runs/*/*")) - before
    return Run(path, sandbox)
