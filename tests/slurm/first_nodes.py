"""`python -m tests.slurm.first_nodes`: runs the program of a job's first node, as often as told, in forks.

Each line of stdin is a start as JSON: {"run": RUN_DIR, "environ": {…}, "folder": where stdout and stderr go}.
Each line of stdout is an exit code. Python and the launcher start once for all of them.
"""

import importlib
import json
import os
import runpy
import signal
import sys
import traceback

EAGER = {
    "launcher.slurm.first_node": {"RETRY": 0.0, "RECORD_TIMEOUT": 0.2, "CLOSE_TIMEOUT": 0.5},
    "launcher.slurm.commands": {"RETRY": 0.0, "SHORT_TIMEOUT": 1.5},
    "launcher.slurm.step": {"CLOSE_TIMEOUT": 0.5},
    "launcher.slurm.lost_nodes": {"ALIVE_PERIOD": 0.05, "RETRY": 0.05, "END_PATIENCE": 0.2},
    "launcher.watch.run_files": {},
    "psutil": {},
}
"""Pauses that nobody has to wait for here, in modules that are loaded once for all starts."""
LONGEST = 120
"""Seconds for a start, which needs less than one on an idle machine; then SIGALRM ends it."""


def start_first_node(start: dict[str, object]) -> int:
    """Run `python -m launcher.slurm RUN_DIR`, as the batch script does, and return its exit code."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    signal.alarm(LONGEST)
    os.chdir(str(start["folder"]))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    os.environ.clear()
    os.environ.update(start["environ"])  # type: ignore[call-overload]  # JSON
    sys.argv = ["launcher.slurm", str(start["run"])]
    code: object = None
    try:
        runpy.run_module("launcher.slurm", run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        code = ended.code
    except BaseException:
        traceback.print_exc()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 99)


def main() -> None:
    """Serve starts until stdin ends."""
    for name, values in EAGER.items():
        vars(importlib.import_module(name)).update(values)
    for line in sys.stdin:
        sys.stdout.write(f"{start_first_node(json.loads(line))}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
