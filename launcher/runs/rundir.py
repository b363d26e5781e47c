"""The run directory, `RUNS_DIR/NAME/ID/`: made once, and the same for every rank and attempt."""

import json
import os
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path


@dataclass(frozen=True, slots=True)
class RunDir:
    """Where everything of a run is kept; all of it is readable by its owner alone."""

    path: Path
    first_attempt: int = 0
    """Number of this start's first attempt, after those of earlier starts into the same directory."""

    node_rank: int = 0
    """Number of this node in a job that is started by hand, whose nodes may share the directory."""

    @property
    def manifest_path(self) -> Path:
        """The manifest; nodes above 0 of a job that is started by hand have their own."""
        return self.path / ("manifest.json" if self.node_rank == 0 else f"manifest-{self.node_rank}.json")

    @property
    def id(self) -> str:
        """The run's identifier, unique among runs of its name."""
        return self.path.name

    def plan_path(self, host: str) -> Path:
        """The plan of one node."""
        return self.path / f"plan-{host}.json"

    def agent_log(self, host: str) -> Path:
        """What torchrun's agent on one node printed."""
        return self.path / "logs" / f"agent-{host}.log"

    def rank_log(self, rank: int, attempt: int, ending: str) -> Path:
        """Output of one rank: `ending` is `out` or `err`."""
        return self.path / "logs" / str(attempt) / f"rank-{rank}.{ending}"


def name_run_dir(run: RunDir) -> dict[str, str]:
    """Return the variables that tell programs of their run directory and its identifier."""
    return {"LAUNCH_RUN_DIR": str(run.path), "LAUNCH_RUN_ID": run.id}


def create_run_dir(runs_dir: Path, name: str, now: datetime) -> RunDir:
    """Make `runs_dir/name/YYYYMMDD-HHMMSS`, with `-2`, `-3` … for runs of the same second; raises OSError."""
    (runs_dir / name).mkdir(mode=0o700, parents=True, exist_ok=True)
    stem = now.strftime("%Y%m%d-%H%M%S")
    number = 1
    while True:
        path = runs_dir / name / (stem if number == 1 else f"{stem}-{number}")
        try:
            path.mkdir(mode=0o700)
        except FileExistsError:
            number += 1
            continue
        try:
            return RunDir(prepare_folders(path.absolute()))
        except OSError:
            import shutil

            shutil.rmtree(path, ignore_errors=True)
            raise


def open_run_dir(path: Path, node_rank: int | None) -> RunDir:
    """Open a run directory by name, making it if need be; raises OSError.

    A later start goes on counting attempts where the last one ended. Nodes that are started by hand, with
    a `node_rank`, may share the directory and all count from 0, since none knows which came first.
    """
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    prepare_folders(path.absolute())
    earlier = [int(entry.name) for entry in (path / "logs").iterdir() if entry.name.isdecimal()]
    if node_rank is not None:
        return RunDir(path.absolute(), 0, node_rank)
    return RunDir(path.absolute(), max(earlier, default=-1) + 1)


def prepare_folders(path: Path) -> Path:
    """Close the directory to others and make its folder for logs; raises OSError."""
    path.chmod(0o700)
    (path / "logs").mkdir(mode=0o700, exist_ok=True)
    return path


def write_private(path: Path, text: str) -> None:
    """Write a file for its owner alone, whole or not at all; raises OSError."""
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8", errors="surrogateescape") as file:
            file.write(text)
        draft.replace(path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise


def write_json(path: Path, value: object) -> None:
    """Write a JSON file for its owner alone, whole or not at all; raises OSError."""
    write_private(path, json.dumps(value, indent=1) + "\n")
