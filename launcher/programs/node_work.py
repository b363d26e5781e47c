"""Short work on each device of this node, measured: `python -m launcher.programs.node_work --kind light`.

It prints lines of JSON: first what torch there is, then a line for each piece of work. What fails, hangs or
finds no time is a line too, with `problem` or `reason`. Each device has a process of its own, which ends with
this one: nothing stays on a GPU. With `--pair HOST:PORT --pair-rank 0|1` two nodes meet at HOST, on which
rank 0 runs, and measure what is between them.
"""

import argparse
import os
import sys
import time
import warnings
from collections.abc import Sequence
from typing import NoReturn, TextIO

import torch

from launcher.programs.cpu_parts import work_on_cpus
from launcher.programs.gpu_parts import find_gpus, work_on_gpus
from launcher.programs.pair_work import PairPlace, work_in_pair
from launcher.programs.work_processes import Measurement, describe_error
from launcher.programs.work_session import KINDS, WorkSession, choose_durations

SECONDS = {"light": 10.0, "deep": 60.0}


def main(words: Sequence[str] | None = None) -> NoReturn:
    """Do the work, and end at once, also if a process is stuck in a driver."""
    options = read_options(words)
    out = take_stdout()
    warnings.filterwarnings(
        "ignore", message="This process .* is multi-threaded", category=DeprecationWarning
    )
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    session = WorkSession(
        choose_durations(options.kind, options.seconds), options.begin + options.seconds, out
    )
    session.print_line({"torch": torch.__version__, "torch_cuda": torch.version.cuda or ""})
    try:
        run_node_work(session, options)
    except Exception as error:
        session.report(Measurement("matmul", "node", problem=describe_error(error)))
    finally:
        out.flush()
        os._exit(0)


def run_node_work(session: WorkSession, options: argparse.Namespace) -> None:
    """Work on GPUs if torch sees some, else on CPUs."""
    gpus = find_gpus(session) if torch.version.cuda or torch.version.hip else 0
    if gpus is None:
        return
    if options.pair:
        host, _, port = options.pair.rpartition(":")
        name = options.pair_name or options.pair
        work_in_pair(session, PairPlace(host, int(port), options.pair_rank, name), gpus)
    elif gpus:
        work_on_gpus(session, gpus)
    else:
        work_on_cpus(session)


def take_stdout() -> TextIO:
    """Return stdout for the results alone: what libraries print there goes to stderr."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    sys.stdout.flush()
    os.dup2(2, 1)
    return out


def read_options(words: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="node_work", description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--kind", choices=KINDS, default="light")
    parser.add_argument("--seconds", type=float, help="for all, torch's import included; 10 or 60")
    parser.add_argument(
        "--begin", type=float, help="monotonic time from which they count; else now, after torch's import"
    )
    parser.add_argument("--pair", metavar="HOST:PORT", help="measure between two nodes that meet there")
    parser.add_argument("--pair-rank", type=int, choices=(0, 1), default=0)
    parser.add_argument("--pair-name", default="", help="what the pair is called in the result: n1-n2")
    options = parser.parse_args(words)
    options.begin = time.monotonic() if options.begin is None else options.begin
    options.seconds = options.seconds or SECONDS[options.kind]
    return options


if __name__ == "__main__":
    main()
