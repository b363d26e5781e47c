"""Estimated memory of the bundled program against torch's MemTracker: `python -m tests.benchmarks fit`."""

import json
import shutil
import statistics
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from launcher.fit.memory import estimate_memory
from launcher.fit.training import Training
from tests.benchmarks.jobs import print_head, print_row
from tests.fit.made_requests import ask

GIB = 2**30
MOST_ABOVE = 0.02
"""By how much the truth may be above the high end."""


@dataclass(frozen=True, slots=True)
class FitCase:
    """A setting of the bundled program whose memory is estimated and tracked."""

    model: str
    parallel: str
    """`none`, `ddp` or `fsdp`."""
    world_size: int
    batch: int
    seq_len: int
    bf16: bool = True
    checkpointing: str = "none"
    optimizer: str = "adamw"
    accumulation: int = 1

    @property
    def label(self) -> str:
        """The row's name in the table."""
        words = [
            self.model,
            self.parallel + (f" over {self.world_size}" if self.world_size > 1 else ""),
            f"{self.batch} x {self.seq_len}",
            "bf16" if self.bf16 else "fp32",
        ]
        words += [f"checkpointing {self.checkpointing}"] if self.checkpointing != "none" else []
        words += [self.optimizer] if self.optimizer != "adamw" else []
        words += [f"{self.accumulation} micro-steps"] if self.accumulation > 1 else []
        return ", ".join(words)

    @property
    def request(self) -> Training:
        """What is asked of the estimate."""
        sharded = self.parallel == "fsdp"
        settings = {
            "framework": "fsdp" if sharded else "ddp",
            "precision": "mixed" if self.bf16 else "fp32",
            "optimizer": self.optimizer,
            "checkpointing": self.checkpointing,
            "micro_batch": self.batch,
            "accumulation": self.accumulation,
            "seq_len": self.seq_len,
        }
        layout = {"dp": self.world_size, "zero": 3 if sharded else 0}
        kind = {"is_bundled": True, "may_autocast": True}
        return ask(TABLES["models"][self.model], layout=layout, settings=settings, **kind)

    @property
    def question(self) -> str:
        """The case as the tracking process reads it: the model by the options of the bundled program."""
        model = {"tied_embeddings": False, "name": self.model, **TABLES["models"][self.model]}
        model["head_dim"] = model.pop("head_width")
        return json.dumps({**asdict(self), "model": model})


TABLES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
GRID, FEW = (tuple(FitCase(**fields) for fields in TABLES[name]) for name in ("grid", "few"))
"""All of them, and a few that an ordinary test can afford."""


def find_missing() -> str:
    """Say what is missing to track memory on fake CUDA tensors; empty if nothing is."""
    return "" if is_cuda_build() or shutil.which("g++") else "a C++ compiler (g++)"


def is_cuda_build() -> bool:
    """Tell whether torch knows CUDA by itself."""
    return "+cpu" not in version("torch")


def track_cases(cases: Sequence[FitCase], folder: Path) -> Iterator[int]:
    """Give the tracked peak of each case, in bytes; raises RuntimeError if the tracking fails.

    What torch's CPU build lacks is compiled.
    """
    library = "-"
    if not is_cuda_build():
        spec = find_spec("torch")
        assert spec is not None and spec.origin is not None
        torch, library = Path(spec.origin).parent, str(folder / "fake_cuda.so")
        source = str(Path(__file__).with_name("fake_cuda.cpp"))
        paths = [f"-I{torch / 'include'}", f"-L{torch / 'lib'}", f"-Wl,-rpath,{torch / 'lib'}"]
        command = ["g++", "-std=c++20", "-shared", "-fPIC", "-o", library, source, *paths]
        subprocess.run([*command, "-lc10", "-ltorch_cpu"], check=True)
    command = [sys.executable, "-m", "tests.benchmarks.fit_truth", library]
    questions, errors = folder / "cases", folder / "errors"
    questions.write_text("".join(f"{case.question}\n" for case in cases))
    with (
        questions.open() as stdin,
        errors.open("w") as stderr,
        subprocess.Popen(command, stdin=stdin, stdout=subprocess.PIPE, stderr=stderr, text=True) as process,
    ):
        yield from (int(line) for line in process.stdout or ())
    if process.returncode:
        raise RuntimeError(f"exit code {process.returncode}: {errors.read_text()[-3000:]}")


def bench_fit(folder: Path, options: Mapping[str, str]) -> None:
    """Print a row for each case, and the two figures that count."""
    if missing := find_missing():
        print(f"\nfit: not run, there is no {missing}")
        return
    words = [word for word in options.get("only", "").split(",") if word]
    cases = [case for case in GRID if all(word in case.label for word in words)]
    print_head("Peaks", "GiB", "tracked", "low", "expected", "high", "error", "truth over high")
    errors, above = list[float](), list[float]()
    for case, truth in zip(cases, track_cases(cases, folder), strict=True):
        allocated = estimate_memory(case.request).allocated
        errors.append(allocated.expected / truth - 1)
        above.append(truth / allocated.high - 1)
        sizes = (truth, allocated.low, allocated.expected, allocated.high)
        shares = f"{errors[-1]:+.1%}", f"{above[-1]:+.1%}"
        print_row(case.label, *(f"{size / GIB:.2f}" for size in sizes), *shares)
    amounts = [abs(error) for error in errors]
    median, largest = statistics.median(amounts), max(amounts)
    print(f"\n{len(cases)} settings: median error {median:.1%}, largest {largest:.1%};")
    print(
        f"truth over the high end: at most {max(above):+.1%}, {sum(a > MOST_ABOVE for a in above)} over 2%."
    )
