"""Preflight: a job's nodes are checked before its program starts. What is asked, and what comes of it.

`python -P -m launcher.preflight REQUEST` is a node's program: REQUEST is JSON on its command line, since a
node whose filesystems are stuck can read no file. It prints an answer on stdout as soon as it has the facts,
and the last one when its work is done. Whoever started it collects the answers, and writes them below the run
directory (`RUN_DIR/preflight/ATTEMPT/`): the node's own program writes nothing.
"""

import contextlib
import os
import re
import selectors
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePath
from typing import Any

from launcher.codec import DecodeError, convert, dump, load, to_plain
from launcher.config.settings import Settings
from launcher.doctor.job import judge_nodes
from launcher.doctor.model import FAILING, Facts, Finding, PreflightReport, Wanted, found
from launcher.files import LARGEST, open_below, read_file, write_whole
from launcher.launch.processes import prepare_agent
from launcher.launch.signals import FORWARDED

SECONDS = {"light": 10.0, "deep": 60.0}
"""Seconds that a node's checks may take, from the start of its program, by their kind."""
START_MARGIN = 20.0
"""Seconds beside its checks' that a node's program has to start: srun, and Python from a slow filesystem."""
END_GRACE = 2.0
"""Seconds that the program has to end by itself once all answers are there, and again after SIGTERM."""
ANSWER = "launch-preflight: "
"""How a line of an answer begins: then come the host, the line's number and how many there are, and JSON."""
ANSWER_LINE = re.compile(rf"{ANSWER}(\S*) ([1-9]\d{{0,8}})/([1-9]\d{{0,8}}) ", re.ASCII)
ANSWER_WIDTH = 1000
"""Bytes of such a line: srun cuts longer ones than 1,024 bytes (MAX_MSG_LEN of SLURM's io_hdr.h) to pieces,
between which those of other nodes come."""
LONGEST_LINE = 1 << 20
"""Bytes of a line of any program, and of an answer: that of 16 GPUs with 16 XIDs each has 64 KiB at most."""
KEPT_LINES = 40
"""Lines of stderr that are kept."""
CHUNK = 1 << 16
FOLDER = "preflight"
REPORT = "report.json"
STORED = ("kind", "hosts", "silent", "seconds")
"""What of a report is read again; findings are made anew."""
SCHEMA = 1
"""Version of the files."""
MOST_FINDINGS = 200
"""That the manifest keeps: it is read for every `launch status`."""
PYTHON = re.compile(r"(python|pypy)[0-9.]*")


@dataclass(frozen=True, slots=True)
class PreflightRequest:
    """What every node of a job is asked, the same for all."""

    kind: str
    """`light` or `deep`."""
    hosts: tuple[str, ...]
    """The nodes, by their ranks; names as `protocol.name_host` has them."""
    seconds: float
    """A node's program ends within them, and says in `unchecked` what it had no time for."""
    asked: float
    """Of the asking process's clock: seconds since the epoch."""
    paths: tuple[tuple[str, str], ...] = ()
    """Paths that the job needs on every node, and for what: see `PathFacts.purpose`."""
    min_free_gib: float = 1.0
    tolerance: float = 0.93
    endpoint: str = ""
    """HOST:PORT of the first node; nodes meet in pairs on each other's ports from that one on, 48 of them.
    Empty if they are not to."""
    python: str = ""
    """The ranks' interpreter, which has torch; empty for the one that asks."""

    @property
    def command(self) -> tuple[str, ...]:
        """The node's program."""
        return (sys.executable, "-P", "-m", "launcher.preflight", dump(self))


def render_answer(facts: Facts) -> str:
    """Return the lines of a node's answer, with their ends; without `seconds`, more facts are to follow."""
    text, head = dump(facts), f"{ANSWER}{facts.host} "
    size = ANSWER_WIDTH - len(head) - len("999/999 ")
    parts = [text[at : at + size] for at in range(0, len(text), size)]
    return "".join(f"{head}{number}/{len(parts)} {part}\n" for number, part in enumerate(parts, 1))


def make_request(
    config: Settings,
    hosts: tuple[str, ...],
    *,
    directory: Path,
    run_path: Path | None = None,
    kind: str = "",
    words: Sequence[str] = ("-m",),
    environ: Mapping[str, str],
    endpoint: str = "",
) -> PreflightRequest:
    """Return what nodes are asked by the configuration; `words` are the program and its arguments.

    Each path is asked for once; the node adds its temporary directory. Without a run directory the working
    directory is the one that the job writes to. No path is looked up here.
    """
    paths = {str(run_path.absolute()): "run directory"} if run_path else {}
    paths.setdefault(str(directory), "working directory")
    for path in config.preflight.paths:
        joined = os.path.join(directory, os.path.expanduser(path))  # noqa: PTH111, PTH118 - as it is given
        paths.setdefault(joined, "data")
    kind = kind or config.preflight.kind
    return PreflightRequest(
        kind,
        hosts,
        SECONDS[kind],
        time.time(),
        tuple(paths.items()),
        config.preflight.min_free_gib,
        config.preflight.tolerance,
        endpoint,
        find_rank_python(words, environ, str(directory)),
    )


def find_rank_python(argv: Sequence[str], environ: Mapping[str, str], directory: str) -> str:
    """Return the interpreter of a program, by its name or absolute path; empty for the launcher's own.

    `python train.py` names it; `train.py` and `-m module` run under PYTHON_EXEC, as with torchrun. Another
    executable has one that is not known. No file is looked at: it may be on a filesystem that is stuck.
    """
    first = argv[0] if argv else ""
    if first == "-m" or first.endswith(".py"):
        first = environ.get("PYTHON_EXEC", "")
    elif not PYTHON.fullmatch(PurePath(first).name):
        return ""
    return os.path.join(directory, first) if "/" in first else first  # noqa: PTH118 - as it is given


def read_lines(
    process: "subprocess.Popen[bytes]", deadline: float, wakeup: int | None = None
) -> Iterator[tuple[str, str]]:
    """Give the lines of a process's stdout and stderr, which are pipes: `out` or `err`, and the line.

    `wakeup`, without a line, comes while that descriptor is readable, and `end` last, if the process has
    ended before the deadline (monotonic seconds). A child of the process that is stuck and keeps the pipes
    open does not matter. A line that is too long is cut.
    """
    rests = {"out": b"", "err": b""}
    end = os.pidfd_open(process.pid)
    try:
        with selectors.DefaultSelector() as selector:
            watched = {"out": process.stdout, "err": process.stderr, "end": end, "wakeup": wakeup}
            for name, file in watched.items():
                if file is not None:
                    selector.register(file, selectors.EVENT_READ, name)
            while (left := deadline - time.monotonic()) > 0:
                ready = {key.data: key for key, _ in selector.select(left)}
                is_idle = True
                for name in rests.keys() & ready.keys():
                    data = os.read(ready[name].fd, CHUNK)
                    if not data:
                        selector.unregister(ready[name].fileobj)
                    is_idle &= not data
                    *lines, rest = (rests[name] + data).split(b"\n")
                    rests[name] = rest[:LONGEST_LINE]
                    for line in lines if data else filter(None, [rest]):
                        yield name, line.decode(errors="replace")
                if "wakeup" in ready:
                    yield "wakeup", ""
                if "end" in ready and is_idle:
                    yield "end", ""
                    return
    finally:
        os.close(end)


@dataclass(slots=True)
class Answers:
    """What the nodes have answered."""

    request: PreflightRequest
    facts: dict[str, Facts] = field(default_factory=dict)
    """By host, the newest answer."""
    errors: deque[str] = field(default_factory=lambda: deque(maxlen=KEPT_LINES))
    """Last lines on stderr."""
    parts: dict[str, list[str]] = field(default_factory=dict)
    """The lines so far of answers that are not whole: those of nodes mix, but a node's own are in order."""
    ended: bool = False
    """The program that carries them has ended by itself."""
    exit_code: int | None = None
    seconds: float = 0.0

    @property
    def missing(self) -> tuple[str, ...]:
        """Hosts whose checks are not done."""
        done = {host for host, facts in self.facts.items() if facts.seconds}
        return tuple(host for host in self.request.hosts if host not in done)

    def take(self, name: str, line: str) -> None:
        """Take a line of the program that carries them."""
        if name == "err" and line.strip():
            self.errors.append(line.strip())
        found = self._take_part(line) if name == "out" else None
        if found and found.host in self.request.hosts:
            before = self.facts.get(found.host)  # a node's first answer says when its facts were here
            answered = before.answered if before else time.time()
            rank, asked = self.request.hosts.index(found.host), self.request.asked
            self.facts[found.host] = replace(found, node_rank=rank, asked=asked, answered=answered)

    def _take_part(self, line: str) -> Facts | None:
        """Return the answer that a line is the last one of."""
        if not (found := ANSWER_LINE.match(line)):
            return None
        host, number, count = found[1], int(found[2]), int(found[3])
        parts = self.parts.pop(host, []) if number > 1 else []
        if number != len(parts) + 1 or sum(map(len, parts)) > LONGEST_LINE:
            return None
        parts.append(line[found.end() :])
        if number < count:
            self.parts[host] = parts
            return None
        with contextlib.suppress(DecodeError):
            return load(Facts, "".join(parts))
        return None

    def judge(
        self,
        errors: Sequence[str],
        lost: Collection[str] = (),
        ends: Mapping[str, str] | None = None,
        gpus: int | None = None,
    ) -> PreflightReport | str:
        """Judge what the nodes answered; returns why nothing is known if no node's checks came to their end.

        `errors` are the lines on stderr that are the nodes' own, `lost` are nodes that are not there, and
        `ends` say how the program ended on a node; `gpus` are those that the job needs on each. Nodes that
        hold the checks up are told from those whose checks failed for a reason of their own.
        """
        hosts = self.request.hosts
        silent = tuple(host for host in self.missing if host in lost or not self.ended)
        failed = [host for host in self.missing if host not in silent]
        if len(failed) == len(hosts):
            return errors[-1] if errors else "its program printed no answer"
        nodes = tuple(self.facts[host] for host in hosts if host in self.facts)
        # What SLURM counts as GPUs is not NVIDIA's if no node has the driver: NVML cannot find them.
        has_driver = any(node.driver or node.gpus or node.lost_gpus for node in nodes)
        asked = self.request
        wanted = Wanted(gpus if has_driver else None, int(asked.min_free_gib * (1 << 20)), asked.tolerance)
        report = judge_report(PreflightReport(asked.kind, hosts, silent, self.seconds, nodes), wanted)
        reasons = {host: (ends or {}).get(host, "it printed no answer") for host in failed}
        problems = (
            found("checks.failed", "unknown", host, reason=f"its program ended: {reason}")
            for host, reason in reasons.items()
        )
        return replace(report, findings=(*report.findings, *problems))


def judge_report(report: PreflightReport, wanted: Wanted) -> PreflightReport:
    """Return a report with the findings on the nodes that answered, and on those that did not."""
    late = {"seconds": report.seconds, "limit": SECONDS.get(report.kind, 0.0)}
    hosts = report.hosts or tuple(node.host for node in report.nodes)
    silent = (found("checks.silent", "error", host, **late) for host in report.silent)
    return replace(report, hosts=hosts, findings=(*judge_nodes(report.nodes, wanted, hosts), *silent))


def run_checks(
    command: Sequence[str],
    request: PreflightRequest,
    environ: Mapping[str, str],
    *,
    wakeup: int | None = None,
    is_stopped: Callable[[], bool] = lambda: False,
) -> Answers:
    """Run a program that carries the nodes' answers: srun, or the node's own on this machine; raises OSError.

    It is ended when all nodes have answered, the time is over, or `is_stopped` says so, which is asked when
    the descriptor `wakeup` is readable.
    """
    began, answers = time.monotonic(), Answers(request)
    with start_child(command, environ) as process:
        try:
            for name, line in read_lines(process, began + START_MARGIN + request.seconds, wakeup):
                answers.ended = name == "end"
                answers.take(name, line)
                if not answers.missing or (name == "wakeup" and is_stopped()):
                    break
        finally:
            grace = END_GRACE if answers.ended or not answers.missing else 0.0
            for act, seconds in ((bool, grace), (process.terminate, END_GRACE), (process.kill, END_GRACE)):
                if process.poll() is None:
                    act()
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        process.wait(seconds)
    answers.exit_code, answers.seconds = process.returncode, time.monotonic() - began
    return answers


@contextlib.contextmanager
def start_child(
    command: Sequence[str],
    environ: Mapping[str, str],
    ignored: Sequence[int] = FORWARDED,
    end: signal.Signals = signal.SIGTERM,
) -> Iterator["subprocess.Popen[bytes]"]:
    """Start a program of the checks, which gets the signal `end` if this process dies; raises OSError.

    It begins in `/`, since any other folder may be stuck, and in a session of its own: a terminal's Ctrl-C is
    for this process alone. The block ends it; one that the kernel keeps in a driver or a filesystem is left.
    """
    parent = os.getpid()
    process = subprocess.Popen(
        command,
        cwd="/",
        env=dict(environ),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        preexec_fn=lambda: prepare_agent(parent, ignored, end),  # noqa: PLW1509 - no other thread forks here
    )
    try:
        yield process
    finally:
        for pipe in (process.stdout, process.stderr):
            if pipe:
                pipe.close()


def write_preflight_report(run_path: Path, attempt: int, report: PreflightReport) -> None:
    """Write each node's answer and the report of all, each whole or not at all; raises OSError."""
    account = {name: getattr(report, name) for name in (*STORED, "sick")}
    account["findings"] = [{"host": one.host, **one.to_json()} for one in report.findings]
    files: dict[str, object] = {REPORT: account}
    for node in report.nodes:
        # The name came from the node.
        name = "".join(char if char.isalnum() or char in "-_." else "_" for char in node.host)[:200]
        files[f"node-{name}.json"] = node
    with open_below(run_path, FOLDER, str(attempt)) as at:
        for name, value in files.items():
            write_whole(at, name, dump({"schema": SCHEMA, **to_plain(value)}, indent=1).encode())


def judge_stored(run_path: Path, wanted: Wanted) -> PreflightReport | None:
    """Judge again what the nodes of a run's last attempt answered; None if there is no such report.

    Answers that cannot be read are left out, and a report that cannot, as of another version, counts for
    nothing: the answers are judged without it.
    """
    reports = [path for path in run_path.glob(f"{FOLDER}/*/{REPORT}") if path.parent.name.isdecimal()]
    for path in sorted(reports, key=lambda path: int(path.parent.name), reverse=True):
        report, nodes = PreflightReport(), list[Facts]()
        with contextlib.suppress(OSError, ValueError):
            stored = load(dict[str, Any], read_file(path, LARGEST))
            report = convert(PreflightReport, {name: stored[name] for name in STORED if name in stored})
        for answer in path.parent.glob("node-*.json"):
            with contextlib.suppress(OSError, ValueError):
                nodes.append(load(Facts, read_file(answer, LARGEST)))
        if report.hosts or nodes:
            nodes.sort(key=lambda node: (node.node_rank, node.host))
            return judge_report(replace(report, nodes=tuple(nodes)), wanted)
    return None


def describe_report(report: PreflightReport) -> dict[str, Any]:
    """Return the manifest's account: sick nodes, and the errors and warnings on all of them."""
    told: list[Finding] = [one for one in report.findings if one.level in FAILING]
    told.sort(key=lambda one: FAILING.index(one.level))
    names = ("host", "level", "subject", "what", "fix")
    return {
        "kind": report.kind,
        "seconds": round(report.seconds, 2),
        "nodes": len({node.host for node in report.nodes} | {*report.silent}),
        "sick": list(report.sick),
        "silent": list(report.silent),
        "findings": [{name: getattr(one, name) for name in names} for one in told[:MOST_FINDINGS]],
    }
