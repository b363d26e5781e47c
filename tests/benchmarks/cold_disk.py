"""Starts from a disk that answers slowly: from the command line to the line after `import torch`.

The environment is seen through a FUSE file system that answers each request after some milliseconds, as a
network file system does. It is mounted anew for each start, so that nothing of it is cached.
"""

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from tests.benchmarks.measure import Sample, print_table
from tests.conftest import clean_environ

SOURCE = Path(__file__).with_name("slow_disk.c")
PROGRAM = """
import os, time
import torch
open(f"first-{os.environ['RANK']}", "w").write(repr(time.time()))
"""


@contextlib.contextmanager
def mount_slow_disk(server: Path, place: Path, latency: float, speed: float) -> Iterator[None]:
    """Show this interpreter's environment at a place, as a disk with a latency (ms) and a speed (MiB/s)."""
    place.mkdir(exist_ok=True)
    words = (str(server), sys.prefix, str(place), str(latency), str(speed))
    with subprocess.Popen(words, stdout=subprocess.PIPE) as process:
        if process.stdout is None or not process.stdout.readline():
            raise RuntimeError("the slow disk cannot be mounted: this needs root and /dev/fuse")
        try:
            yield
        finally:
            subprocess.run(["umount", "--lazy", str(place)], check=True)
            process.wait(30)


def list_starts(place: Path, ranks: int) -> dict[str, list[str]]:
    """The commands that are compared."""
    python, program = str(place / "bin" / Path(sys.executable).name), "train.py"
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", program]
    launch = [python, "-m", "launcher", f"nproc_per_node={ranks}", "name=x"]
    rest = ["--", program]
    return {
        "torchrun": [python, *torchrun],
        "launch, start.read_ahead=off": [*launch, "start.read_ahead=off", *rest],
        "launch, the first start of a program": [*launch, *rest],
        "launch, a later start": [*launch, *rest],
    }


def time_start(command: list[str], folder: Path, ranks: int, environ: Mapping[str, str]) -> float:
    """Milliseconds from a command's start to the line after the import on the last rank."""
    for mark in folder.glob("first-*"):
        mark.unlink()
    begin = time.time()
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.returncode}\n{done.stderr[-2000:]}")
    return 1e3 * (max(float((folder / f"first-{rank}").read_text()) for rank in range(ranks)) - begin)


def bench_cold_disk(folder: Path, options: Mapping[str, str]) -> None:
    """Each way to start, in turn; settings are ranks, latency (ms), speed (MiB/s) and rounds."""
    ranks, rounds = int(options.get("ranks", "2")), int(options.get("rounds", "3"))
    latency, speed = float(options.get("latency", "2")), float(options.get("speed", "100"))
    server, place, cache = folder / "slow_disk", folder / "env", folder / "cache"
    subprocess.run(["cc", "-O1", "-pthread", "-o", str(server), str(SOURCE)], check=True)
    (folder / "train.py").write_text(PROGRAM)
    environ = {**clean_environ(), "LAUNCH_CACHE": str(cache), "PYTHONDONTWRITEBYTECODE": "1"}
    starts = list_starts(place, ranks)
    times: dict[str, list[float]] = {name: [] for name in starts}
    for number in range(rounds + 1):
        for name, command in starts.items():
            if "first start" in name:
                shutil.rmtree(cache, ignore_errors=True)
            with mount_slow_disk(server, place, latency, speed):
                taken = time_start(command, folder, ranks, environ)
            if number:  # the first round makes the record
                times[name].append(taken)
    load = f"{latency:g} ms for each request, {speed:g} MiB/s, load {os.getloadavg()[0]:.1f}"
    title = f"From the command line to `import torch` done on {ranks} ranks, nothing cached ({load})"
    print_table(title, [Sample(name, tuple(values)) for name, values in times.items()])
    for path in sorted(folder.glob("runs/x/*/read-ahead-*.json"))[-1:]:
        print(f"\nThe last read-ahead: {' '.join(path.read_text().split())}")
