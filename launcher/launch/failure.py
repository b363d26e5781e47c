"""Which rank failed first, and what its exit says."""

import os
import re
import resource
import signal
import time
from collections.abc import Sequence

from launcher.launch.processes import Death, RankProcess

REPORT = re.compile(
    r"rank\s*: (?P<rank>\d+) \(local_rank: (?P<local_rank>\d+)\)\s+"
    r"exitcode\s*: (?P<exitcode>-?\d+) \(pid: (?P<pid>\d+)\)"
)
"""One entry of the table in torchelastic's ChildFailedError."""
CLOSING = re.compile(r"Sending process (\d+) closing signal")
"""What the agent says of a rank that it ends itself (torch/distributed/elastic/multiprocessing/api.py)."""
SIGNAL_HINTS = {
    signal.SIGTERM: "from outside",
    signal.SIGKILL: "probably out of memory: see `dmesg`, and the job's memory limit",
    signal.SIGXCPU: "its CPU time is used up: `ulimit -t`, limits.conf",
    signal.SIGBUS: "a bus error: often /dev/shm is full",
    signal.SIGSEGV: "a crash in native code: PYTHONFAULTHANDLER=1 shows where",
    signal.SIGABRT: "aborted: often a CUDA assertion, or a collective that ran into its timeout",
}
MISMATCH = re.compile(r"op\.preamble\.length <= op\.nbytes\. (\d+) vs (\d+)")
"""What gloo says of a message that is larger than the operation it is for (transport/tcp/pair.cc)."""
EXIT_HINTS = {
    os.EX_TEMPFAIL: "EX_TEMPFAIL: it asks for another start",
    126: "the program cannot be executed",
    127: "the program was not found",
}


def describe_exit(exitcode: int, memory: str = "") -> str:
    """Say in words how a process ended; `memory` is what the kernel has killed for memory on its node."""
    if exitcode >= 0:
        meaning = memory or EXIT_HINTS.get(exitcode) or explain_status(exitcode)
        return f"exited with code {exitcode}" + (f" ({meaning})" if meaning else "")
    try:
        number = signal.Signals(-exitcode)
    except ValueError:
        return f"was killed by signal {-exitcode}"
    hint = memory or SIGNAL_HINTS.get(number)
    seconds = resource.getrlimit(resource.RLIMIT_CPU)[1]
    if number == signal.SIGKILL and not memory and seconds != resource.RLIM_INFINITY:
        hint = f"after {seconds} s of CPU time (`ulimit -t`), or for want of memory: see `dmesg`"
    return f"was killed by {number.name} (signal {number:d})" + (f", {hint}" if hint else "")


def explain_lines(lines: Sequence[str]) -> str:
    """Return why a process ended as its last lines have it, if its exit alone would mislead; else nothing."""
    found = next((match for line in reversed(lines) if (match := MISMATCH.search(line))), None)
    if found is None:
        return ""
    sizes = f"another rank sent {found[1]} bytes where {found[2]} were due"
    return f"ranks have called different collectives as one, or one with different shapes: {sizes}"


def explain_status(code: int) -> str:
    """Say what a code above 128 means as a shell gives it, which the program may have passed on."""
    try:
        number = signal.Signals(code - 128)
    except ValueError:
        return ""
    hint = SIGNAL_HINTS.get(number, "")
    return f"128+{number:d}, as of a child killed by {number.name}" + (f", {hint}" if hint else "")


def find_failure(deaths: Sequence[Death], agent_log: str) -> Death | None:
    """Return the first end of a rank of the last attempt that was a failure; None if no rank failed.

    The kernel's order of deaths decides, since the agent polls and sees several at once. If the agent
    reaped a process before its exit code was read, the code is taken from the agent's report. Ranks that the
    agent itself has ended did not fail.
    """
    reported = {int(m["pid"]): m for m in REPORT.finditer(agent_log)}
    closed = {int(pid) for pid in CLOSING.findall(agent_log)}
    last = max((death.process.attempt for death in deaths), default=0)
    for death in select_last_start(deaths):
        process = death.process
        report = reported.get(process.pid)
        exitcode = death.exitcode if death.exitcode is not None else report and int(report["exitcode"])
        if exitcode and not (exitcode == -signal.SIGTERM and process.pid in closed):
            return Death(process, death.time, exitcode)
    for pid, report in reported.items():
        process = RankProcess(int(report["rank"]), int(report["local_rank"]), last, pid)
        return Death(process, time.time(), int(report["exitcode"]))
    return None


def select_last_start(deaths: Sequence[Death]) -> list[Death]:
    """Return the ends of the last start's ranks, in their order.

    When nodes join or leave, torchrun starts the ranks anew within an attempt: only the newest count.
    """
    last = max((death.process.attempt for death in deaths), default=0)
    newest = {death.process.local_rank: death.process.pid for death in deaths}
    return [d for d in deaths if d.process.attempt == last and newest[d.process.local_rank] == d.process.pid]


def list_clean_exits(deaths: Sequence[Death]) -> list[Death]:
    """Return those of the last start's ranks that ended with 0."""
    return [death for death in select_last_start(deaths) if death.exitcode == 0]
