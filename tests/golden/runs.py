"""Records jobs that end in every way, and what their run directories have: names, keys, and types of JSON."""

import json
import sys
import tempfile
from pathlib import Path

from tests.runs.recordings import (
    DATA,
    FILE,
    KINDS,
    LOCAL,
    REPOSITORY,
    find_keys,
    name_files,
    record,
    run_local,
    run_on_slurm,
)
from tests.seam import clean_environ


def record_local() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for name, run_dir in run_local(LOCAL, Path(folder)).items():
            record(name, run_dir)


def record_on_slurm(cluster: str) -> None:
    """Record jobs on the sandbox in this folder."""
    environ = {**clean_environ(), "SLURM_CONF": str(Path(cluster) / "slurm.conf")}
    sandbox = (sys.executable, str(REPOSITORY / "slurm/sandbox"), "--folder", cluster)
    for name in sorted(KINDS.keys() - set(LOCAL)):
        with tempfile.TemporaryDirectory() as folder:
            record(name, run_on_slurm(name, Path(folder), sandbox, environ))


def write_shapes() -> None:
    """Write the shapes of all recorded runs."""
    names, keys = {}, dict[str, dict[str, set[str]]]()
    for kind in sorted(KINDS):
        files = json.loads((DATA / f"{kind}.json").read_text())["files"]
        names[kind] = name_files(files)
        for file, found in find_keys(files).items():
            for key, types in found.items():
                keys.setdefault(file, {}).setdefault(key, set()).update(types)
    shown = {
        file: {key: "|".join(sorted(types)) for key, types in sorted(found.items())}
        for file, found in sorted(keys.items())
    }
    FILE.write_text(json.dumps({"names": names, "keys": shown}, indent=1) + "\n")
