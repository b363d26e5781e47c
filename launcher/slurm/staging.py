"""A run directory filled for submission, and emptied again where the job is refused."""

import contextlib
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from launcher.files import LARGEST, read_file
from launcher.launch.job import Draft, name_run
from launcher.launch.local_run import prepare_run, refuse_run
from launcher.runs.manifest import read_manifest, write_manifest
from launcher.runs.run_directory import RunDir, write_private
from launcher.slurm.job_request import FILE, make_request, write_request

SCRIPT = "submission.sh"
KEPT = ("config.yaml", "manifest.json", FILE, SCRIPT)
"""What a submission writes."""


@dataclass(frozen=True, slots=True)
class Staged:
    """A run directory that is ready for its job."""

    run: RunDir
    draft: Draft
    secrets: Mapping[str, object]
    """What `job.json` must not hold."""
    before: Mapping[str, str | None]
    """The files' contents before, None where there was none."""
    fresh: tuple[Path, ...]
    """Directories that were not there, the innermost first."""

    @property
    def script(self) -> Path:
        """The submission script."""
        return self.run.path / SCRIPT

    def undo(self) -> None:
        """Leave things as they were."""
        with contextlib.suppress(OSError):
            for name, text in self.before.items():
                if text is None:
                    (self.run.path / name).unlink(missing_ok=True)
                else:
                    write_private(self.run.path / name, text)
        for folder in self.fresh:
            with contextlib.suppress(OSError):
                (shutil.rmtree if folder == self.run.path else Path.rmdir)(folder)

    def note_job(self, job_id: str) -> None:
        """Add the job's number to the manifest, unless the job has done so; raises OSError or KeyError."""
        found = read_manifest(self.run.path)
        if found["outcome"]["state"] == "submitted":
            write_manifest(self.run, {**found, "slurm": {"job_id": job_id}})


def stage_run(draft: Draft, argv: Sequence[str], origin: Mapping[str, object]) -> Staged:
    """Make or open the run directory, with configuration, manifest and request in it.

    `origin` are the manifest's sources. Raises UsageError, MachineError or SchedulerError, leaving nothing.
    """
    given = draft.config.run_dir
    target = Path(given) if given else None
    above = Path(draft.config.runs_dir, name_run(draft)).absolute()
    missing = list_missing(target.absolute() if target else above)
    before = {name: read_text(target / name) if target else None for name in KEPT}
    run, manifest = prepare_run(draft, argv, [])
    fresh = missing if target else (run.path, *missing)
    staged = Staged(run, draft, {}, before, fresh)
    try:
        secrets = write_request(make_request(draft, argv, run.path), run.path)
        write_manifest(run, {**manifest, **origin, "outcome": {"state": "submitted"}})
    except OSError as error:
        staged.undo()
        raise refuse_run(draft.config, error) from None
    except BaseException:
        staged.undo()
        raise
    return Staged(run, draft, secrets, before, fresh)


def list_missing(path: Path) -> tuple[Path, ...]:
    """Return the directories of a path that are not there, the innermost first."""
    return tuple(folder for folder in (path, *path.parents) if not folder.exists())


def read_text(path: Path) -> str | None:
    """Return a file's text; None where it cannot be read."""
    try:
        return read_file(path, LARGEST).decode("utf-8", "surrogateescape")
    except OSError:
        return None
