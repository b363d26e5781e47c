"""Estimated memory of the bundled program against torch's MemTracker: `python -m tests.benchmarks fit`."""

import json
import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from launcher.fit.memory import estimate_memory
from launcher.fit.training import ModelDimensions, Range
from tests.benchmarks.fit_cases import GRID, MODELS, FitCase, make_request
from tests.benchmarks.measure import print_head, print_row

GIB = 2**30
MOST_ABOVE = 0.02
"""By how much the truth may be above the high end."""


def find_missing() -> str:
    """Say what is missing to track memory on fake CUDA tensors; empty if nothing is."""
    return "" if is_cuda_build() or shutil.which("g++") else "a C++ compiler (g++)"


def is_cuda_build() -> bool:
    """Tell whether torch knows CUDA by itself."""
    return "+cpu" not in version("torch")


def compile_library(folder: Path) -> str:
    """Compile what torch's CPU build lacks; `-` if it is not needed."""
    if is_cuda_build():
        return "-"
    spec = find_spec("torch")
    assert spec is not None and spec.origin is not None
    torch, target = Path(spec.origin).parent, folder / "fake_cuda.so"
    source = Path(__file__).with_name("fake_cuda.cpp")
    paths = [f"-I{torch / 'include'}", f"-L{torch / 'lib'}", f"-Wl,-rpath,{torch / 'lib'}"]
    command = ["g++", "-std=c++20", "-shared", "-fPIC", "-o", str(target), str(source), *paths]
    subprocess.run([*command, "-lc10", "-ltorch_cpu"], check=True)
    return str(target)


def describe_case(case: FitCase) -> dict[str, object]:
    """Give a case as the tracking process reads it."""
    return {
        "model": describe_model(MODELS[case.model]),
        "parallel": case.parallel,
        "world_size": case.world_size,
        "batch": case.batch,
        "seq_len": case.seq_len,
        "bf16": case.bf16,
        "checkpointing": case.checkpointing,
        "optimizer": case.optimizer,
        "accumulation": case.accumulation,
    }


def describe_model(model: ModelDimensions) -> dict[str, object]:
    """Give the options of the bundled program that make a model."""
    same = ("vocab_size", "layers", "hidden_size", "heads", "kv_heads", "intermediate_size", "norm", "mlp")
    more = ("position", "bias", "tied_embeddings", "max_seq_len", "name")
    return {name: getattr(model, name) for name in (*same, *more)} | {"head_dim": model.head_width}


def track_cases(cases: Sequence[FitCase], folder: Path) -> Iterator[int]:
    """Give the tracked peak of each case, in bytes; raises RuntimeError if the tracking fails."""
    command = [sys.executable, "-m", "tests.benchmarks.fit_truth", compile_library(folder)]
    questions, errors = folder / "cases", folder / "errors"
    questions.write_text("".join(f"{json.dumps(describe_case(case))}\n" for case in cases))
    with (
        questions.open() as stdin,
        errors.open("w") as stderr,
        subprocess.Popen(command, stdin=stdin, stdout=subprocess.PIPE, stderr=stderr, text=True) as process,
    ):
        yield from (int(line) for line in process.stdout or ())
    if process.returncode:
        raise RuntimeError(f"exit code {process.returncode}: {errors.read_text()[-3000:]}")


def compute_error(allocated: Range, truth: int) -> float:
    """Give the error of what was expected, as a share of the truth."""
    return allocated.expected / truth - 1


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
        allocated = estimate_memory(make_request(case)).allocated
        errors.append(compute_error(allocated, truth))
        above.append(truth / allocated.high - 1)
        sizes = (truth, allocated.low, allocated.expected, allocated.high)
        print_row(
            case.label,
            *(f"{size / GIB:.2f}" for size in sizes),
            f"{errors[-1]:+.1%}",
            f"{above[-1]:+.1%}",
        )
    amounts = [abs(error) for error in errors]
    median, largest = statistics.median(amounts), max(amounts)
    print(f"\n{len(cases)} settings: median error {median:.1%}, largest {largest:.1%};")
    print(
        f"truth over the high end: at most {max(above):+.1%}, {sum(a > MOST_ABOVE for a in above)} over 2%."
    )
