"""`job.json`: all that a job's processes on the cluster need to know, frozen at submission."""

import contextlib
import fcntl
import functools
import json
import operator
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher.codec import convert
from launcher.config.settings import Settings
from launcher.errors import MachineError
from launcher.files import LARGEST, read_file
from launcher.fit.training import ModelDimensions
from launcher.protocol import LAUNCH_SECRETS
from launcher.runs.run_directory import write_json
from launcher.runs.secrets import mask_tree, mask_words

if TYPE_CHECKING:
    from launcher.launch.job import JobSpec

REQUEST_FILE = "job.json"


@dataclass(frozen=True, slots=True)
class JobRequest:
    """A job as it was submitted, the same for every attempt."""

    config: Settings
    """With the run directory resolved in it."""
    choices: Mapping[str, str]
    """Option chosen for each group of the configuration."""
    words: tuple[str, ...] | None
    """The program as given after `--`; None for the configured one."""
    command: tuple[str, ...]
    """The command line of `launch`, for the manifest; secrets masked."""
    directory: str
    """Where it was given."""
    min_nodes: int
    max_nodes: int
    fit_model: ModelDimensions | None = None
    """The model that the job's first node judges, since the submission did not know the nodes."""
    agent: str = "torchrun"
    """What starts the ranks: `direct` or `torchrun`."""

    @property
    def progress_patterns(self) -> tuple[str, ...]:
        """`progress.paths`, absolute."""
        paths = self.config.progress.paths
        return tuple(os.path.join(self.directory, os.path.expanduser(path)) for path in paths)  # noqa: PTH111, PTH118 - patterns are no paths


@contextlib.contextmanager
def hold_manifest(run_path: Path) -> Iterator[None]:
    """Let neither the job nor its submission change the manifest meanwhile, if the filesystem has locks."""
    try:
        descriptor = os.open(run_path / REQUEST_FILE, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        yield
        return
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def make_job_request(spec: "JobSpec", argv: Sequence[str]) -> JobRequest:
    """Return what the job's processes on the cluster read."""
    return JobRequest(
        config=spec.config,
        choices=spec.choices,
        words=spec.program,
        command=tuple(mask_words(["launch", *argv])),
        directory=str(Path.cwd()),
        min_nodes=spec.cluster.min_nodes,
        max_nodes=spec.cluster.max_nodes,
        fit_model=spec.fit_model,
        agent=spec.agent.kind,
    )


def write_job_request(request: JobRequest, run_path: Path) -> dict[str, Any]:
    """Write a request into its run directory, and return the values that were left out; raises OSError.

    They are the secrets, each by its keys and indices in the request as JSON: see `read_job_request`.
    LAUNCH_SECRETS carries them: JSON, {run directory: what is returned here}, with the empty name for all the
    runs of a job array. SLURM keeps a job's environment, so the variable is there on every attempt.
    """
    whole = json.loads(json.dumps(asdict(request)))
    masked = {**whole, "config": mask_tree(whole["config"])}
    masked["words"] = None if request.words is None else mask_words(request.words)
    write_json(run_path / REQUEST_FILE, {"schema": 1, **masked})
    shown = dict(list_leaves(masked))
    return {json.dumps(path): value for path, value in list_leaves(whole) if shown[path] != value}


def read_job_request(run_path: Path, environ: Mapping[str, str]) -> JobRequest:
    """Read a run directory's request, with the secrets that the environment carries; raises MachineError."""
    path = run_path / REQUEST_FILE
    try:
        data = json.loads(read_file(path, LARGEST, own=True).decode())  # it says what the job's nodes run
        carried = json.loads(environ.get(LAUNCH_SECRETS) or "{}")
        for keys, value in carried.get(str(run_path), carried.get("", {})).items():
            *above, last = json.loads(keys)
            functools.reduce(operator.getitem, above, data)[last] = value
        return convert(JobRequest, data)
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise MachineError(
            f"{path} cannot be read on {os.uname().nodename} ({error!r}): is the run directory on a"
            " filesystem that all nodes share? runs_dir=DIR chooses another"
        ) from None


def list_leaves(tree: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[tuple[str | int, ...], Any]]:  # noqa: ANN401 - JSON
    """Give the values of a tree that are no trees, each by its keys and indices."""
    if isinstance(tree, dict | list):
        for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from list_leaves(value, (*path, key))
    else:
        yield path, tree
