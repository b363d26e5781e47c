"""`manifest.json`: what was run, from which sources, where, when and by which process, and how it ended."""

import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from errno import EPERM
from pathlib import Path
from typing import Any

from launcher.codec import OPTIONAL, DecodeError, parse_json, salvage, take_list, to_plain
from launcher.files import ON_THE_WAY, open_directory, open_own, read_file, read_stat
from launcher.runs.run_directory import RunDir, write_json
from launcher.runs.secrets import mask_words

MOST_BYTES = 16 << 20
"""Of a manifest: one of hundreds of attempts has less, and what JSON makes of as much takes half a GiB."""
OPEN = ("submitted", "running", "requeued")
"""States of an outcome after which more is to come."""
CLOSED = ("succeeded", "failed", "stopped")
"""States after which no attempt follows."""
JOB = re.compile(r"\d+(?:_\d+)?")
"""A job of SLURM's: `12`, `12_3`."""
IF_ANY: Mapping[str, bool] = {OPTIONAL: True}
"""Metadata of a field that is in JSON if there is something in it."""


@dataclass(frozen=True, slots=True)
class ProcessId:
    """What tells a process from all others."""

    host: str
    pid: int
    start: int
    """In clock ticks since boot."""
    boot: str
    """The kernel's own name of that boot."""
    namespace: str
    """Whose PIDs these are: a container has its own."""


@dataclass(frozen=True, slots=True)
class SlurmJob:
    """The job that an attempt ran in."""

    job_id: str
    """`12`, `12_3` for an array's member."""
    restarts: int = 0
    """How often SLURM had requeued it when the attempt began."""


@dataclass(frozen=True, slots=True)
class FirstFailure:
    """The first rank of a job that failed."""

    rank: int
    local_rank: int = 0
    host: str = ""
    attempt: int = 0
    exit_code: int = 0
    """As a shell gives it: 128+n for signal n."""
    reason: str = ""
    """In words, `was killed by SIGKILL (signal 9), …`."""
    last_lines: tuple[str, ...] = ()
    """The end of its log."""


@dataclass(slots=True)
class Outcome:
    """How an attempt ended, or that it goes on."""

    state: str = ""
    """One of OPEN or CLOSED; empty if the manifest tells none."""
    cause: str | None = None
    """A class of ends of SLURM's jobs (`cluster.requeue`), `hang` or `sick_node`."""
    exit_code: int | None = None
    signal: str | None = None
    """The signal that asked for the end."""
    reason: str | None = None
    """For people."""
    events: list[str] = field(default_factory=list)
    """What came before any failure."""
    lost: list[str] = field(default_factory=list)
    """Nodes that were lost."""
    sick: list[str] = field(default_factory=list, metadata=IF_ANY)
    """Nodes that the next attempt is to do without."""
    first_failure: FirstFailure | None = None
    attempts: int | None = None
    """Starts of the ranks, those of earlier attempts among them."""
    step: int | None = None
    """The last one that rank 0 has printed."""
    checkpoint: float | None = None
    """When the newest of `progress.paths` was written, in seconds since the epoch."""
    advanced: bool | None = None
    """Whether it came further than those before it; None if that cannot be judged."""


@dataclass(slots=True)
class AttemptRecord:
    """One start of a run: by a command, or by SLURM's queue."""

    command: list[str] = field(default_factory=list)
    """The command line of `launch`; secrets masked."""
    started: str = ""
    """ISO 8601 with the zone, as all times of a manifest."""
    ended: str | None = None
    hosts: list[str] = field(default_factory=list)
    """In the order of their ranks."""
    attempt: int = 0
    """Number of its first start of the ranks."""
    slurm: SlurmJob | None = field(default=None, metadata=IF_ANY)
    outcome: Outcome = field(default_factory=Outcome)
    hangs: list[dict[str, Any]] = field(default_factory=list, metadata=IF_ANY)
    """`watch.model.Hang`."""
    stragglers: list[dict[str, Any]] = field(default_factory=list, metadata=IF_ANY)
    """`watch.model.Straggler`."""
    preflight: dict[str, Any] | None = field(default=None, metadata=IF_ANY)
    """What the checks before it found: `kind`, `seconds`, `sick`, `findings`, `action` and more."""
    node_order: dict[str, Any] | None = field(default=None, metadata=IF_ANY)
    """Why the nodes have their order: `source`, `why`, `hosts`."""
    spares: list[str] = field(default_factory=list, metadata=IF_ANY)
    """Nodes that wait to take the place of one that is lost."""
    replacements: list[dict[str, Any]] = field(default_factory=list, metadata=IF_ANY)
    """The `lost` node, the `spare` in its place, the `time`, the `evidence`, and its `silence` in seconds."""


@dataclass(slots=True)
class Run:
    """A run. In its manifest the last attempt stands at the top, and the others in `earlier`."""

    id: str = ""
    name: str = ""
    directory: str = ""
    """Where `launch` was called."""
    choices: dict[str, Any] = field(default_factory=dict)
    """Option chosen for each group of the configuration."""
    submitted: str = field(default="", metadata=IF_ANY)
    agent: str = field(default="", metadata=IF_ANY)
    training: dict[str, Any] | None = field(default=None, metadata=IF_ANY)
    """What was chosen of the bundled program."""
    process: ProcessId | None = field(default=None, metadata=IF_ANY)
    """The `launch` that the run hangs on, unless it is a SLURM job."""
    git: dict[str, Any] | None = field(default=None, metadata=IF_ANY)
    packages: dict[str, Any] | None = field(default=None, metadata=IF_ANY)
    attempts: list[AttemptRecord] = field(default_factory=lambda: [AttemptRecord()])
    """Oldest first; never empty."""
    schema: int = 1

    @property
    def last(self) -> AttemptRecord:
        """The newest attempt, or the one to come."""
        return self.attempts[-1]

    @property
    def job_id(self) -> str | None:
        """Number of the SLURM job of the last attempt; None if there is none."""
        job = self.last.slurm
        return job.job_id if job and JOB.fullmatch(job.job_id) else None

    def add_sources(self, found: Mapping[str, dict[str, Any]]) -> None:
        """Add what `describe_sources` has found."""
        self.git, self.packages = found["git"], found["packages"]


def begin_run(run: RunDir, command: Sequence[str], choices: Mapping[str, str]) -> Run:
    """Return the manifest of a run that begins, or is resumed; secrets in the command are masked."""
    found = read_manifest(run.path, run.manifest_path.name)
    attempt = AttemptRecord(mask_words(command), stamp_time(), outcome=Outcome("running"))
    attempts = [*(found.attempts if found.id else ()), attempt]
    return Run(run.id, run.path.parent.name, str(Path.cwd()), dict(choices), attempts=attempts)


def stamp_time() -> str:
    """Return the time now in ISO 8601, with the zone."""
    return datetime.now().astimezone().isoformat(timespec="milliseconds")


def read_time(text: object) -> float | None:
    """Return a time of a manifest or of SLURM in seconds since the epoch; None if the text is no time."""
    try:
        return datetime.fromisoformat(str(text)).timestamp()
    except ValueError:
        return None


def read_manifest(path: Path, name: str = "manifest.json") -> Run:
    """Read the manifest of a run directory; empty if it cannot be read. What is damaged in it is left out."""
    try:
        return parse_manifest(read_file(path / name, MOST_BYTES))
    except OSError:
        return Run()


def read_own_manifest(path: Path) -> Run:
    """Read the manifest of a run directory, to act upon: what it names is signalled, or cancelled.

    Raises PermissionError if the directory or the manifest is another user's, or a link of such a one on
    the way from `runs_dir` leads there.
    """
    try:
        with open_directory(path.parent, flags=ON_THE_WAY) as above, open_own(path.name, at=above) as at:
            return parse_manifest(read_file("manifest.json", MOST_BYTES, at=at, own=True))
    except PermissionError:
        raise
    except OSError:
        return Run()


def parse_manifest(data: bytes) -> Run:
    """Return the run of a manifest's JSON; an empty one for what is none."""
    try:
        found = parse_json(data)
    except DecodeError:
        return Run()
    if not isinstance(found, dict):
        return Run()
    run: Run = salvage(Run, {**found, "attempts": [*take_list(found, "earlier"), found]})
    return run


def write_manifest(run: RunDir, manifest: Run) -> None:
    """Write the manifest; raises OSError."""
    plain = to_plain(manifest)
    *earlier, last = plain.pop("attempts")
    write_json(run.manifest_path, {**plain, **last, "earlier": earlier})


START_FIELD = 22
"""Field of /proc/PID/stat with the start in clock ticks since boot (proc(5))."""
BOOT = Path("/proc/sys/kernel/random/boot_id")
NAMESPACE = Path("/proc/self/ns/pid")


def identify_process(pid: int) -> ProcessId | None:
    """Return what tells a process of this host from all others; None without /proc."""
    try:
        return ProcessId(os.uname().nodename, pid, read_start(pid), *identify_place())
    except OSError:
        return None


def identify_place() -> tuple[str, str]:
    """Return which boot of the kernel this is, and whose PIDs are seen here; raises OSError."""
    return BOOT.read_text(encoding="ascii").strip(), str(NAMESPACE.readlink())


def read_start(pid: int) -> int:
    """Return when a process started; raises OSError if there is none, or if it is a zombie."""
    _, fields = read_stat(pid)
    if fields[0] in "ZX":
        raise ProcessLookupError(f"process {pid} has ended")
    return int(fields[START_FIELD - 3])


def check_process(process: ProcessId) -> bool | None:
    """Tell whether a process is alive; None if that cannot be seen here."""
    try:
        boot, namespace = identify_place()
        if process.host != os.uname().nodename:
            return None
        if process.boot != boot:
            return False  # none of the processes before a boot is left
        return read_start(process.pid) == process.start if process.namespace == namespace else None
    except OSError:
        return False


def open_process(process: ProcessId, path: Path) -> int:
    """Return a pidfd of the `launch` of a run, whose manifest identifies it so.

    Raises ProcessLookupError if it is gone, and PermissionError for a process that is another user's, or
    is not this run's: the record alone could name any process. The checks come after the opening: from then
    on, the descriptor stands for this very process.
    """
    pid = process.pid
    try:
        descriptor = os.pidfd_open(pid)
    except OSError as error:
        raise ProcessLookupError(f"process {pid}: {error.strerror}") from None
    try:
        if not check_process(process):
            raise ProcessLookupError(f"process {pid} is another one, or has ended")
        if Path(f"/proc/{pid}").stat().st_uid != os.geteuid():
            raise PermissionError(EPERM, f"process {pid} is another user's")
        if not _holds_directory(pid, path):
            raise PermissionError(EPERM, f"process {pid} is not the launch of this run")
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _holds_directory(pid: int, path: Path) -> bool:
    """Tell whether a process has a directory open, as a `launch` has that of its run; raises OSError."""
    try:
        entries = [*Path(f"/proc/{pid}/fd").iterdir()]
    except FileNotFoundError:
        raise ProcessLookupError(f"process {pid} has ended") from None
    for entry in entries:
        with suppress(OSError):  # closed meanwhile
            if entry.samefile(path):
                return True
    return False
