"""`python -m launcher.slurm.rank_signal SIGNAL JOB RUN_ID`: signals the ranks that srun has started here.

srun's own way (of `scancel` too) is to send it to every process of a step: to DataLoader and compile workers,
which die of one that only the program itself expects.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import suppress

from launcher.files import read_stat
from launcher.launch.processes import catches
from launcher.launch.signals import STOPPING
from launcher.protocol import name_host


def main() -> int:
    """Send the signal, and print how many ranks were left out, since they have no handler for it."""
    number, job, run_id = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    spared = 0
    for pid in find_rank_pids(job, run_id):
        if number not in STOPPING and not catches(pid, number):
            spared += 1
            continue
        with suppress(ProcessLookupError):
            os.kill(pid, number)
    sys.stdout.write(f"{spared}\n")
    return 0


def find_rank_pids(job: str, run_id: str) -> list[int]:
    """Return the PIDs of a run's ranks: processes with its variables, whose parents do not have them."""
    # The node's name too: in a cluster of the sandbox's kind several nodes are one machine.
    variables = {"SLURM_JOB_ID": job, "TORCHELASTIC_RUN_ID": run_id, "SLURMD_NODENAME": name_host(os.environ)}
    wanted = {os.fsencode(f"{name}={value}") for name, value in variables.items()}
    parents = dict(list_processes(wanted))
    return [pid for pid, parent in parents.items() if parent not in parents]


def list_processes(wanted: set[bytes]) -> Iterator[tuple[int, int]]:
    """Give the PID and the parent's PID of this user's processes with these variables (proc(5))."""
    for name in os.listdir("/proc"):  # noqa: PTH208 - names are all that is wanted
        if not name.isdecimal():
            continue
        with suppress(OSError):
            with open(f"/proc/{name}/environ", "rb") as file:  # noqa: PTH123 - as elsewhere with procfs
                variables = set(file.read().split(b"\0"))
            if wanted <= variables:
                yield int(name), int(read_stat(name)[1][1])


if __name__ == "__main__":
    sys.exit(main())
