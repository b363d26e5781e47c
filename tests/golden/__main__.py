"""Write expected results again: `python -m tests.golden [WORD ...]`.

Words are `machines`, `plans`, `outputs`, `report`, `runs` and folders of clusters.

Without words, all but those on SLURM, which need the folder of a cluster: `slurm/sandbox --folder FOLDER up`.
`runs` starts real jobs, for a minute.
"""

import sys
import tempfile
from pathlib import Path

from tests.golden import outputs
from tests.probe import test_odd_machines
from tests.report import test_page
from tests.runs.recordings import KINDS, LOCAL, REPOSITORY, record, run_local, run_on_slurm
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


KNOWN = ["machines", "plans", "outputs", "report", "runs"]
words = sys.argv[1:] or KNOWN
if any(word not in KNOWN and not Path(word, "slurm.conf").is_file() for word in words):
    sys.exit(__doc__)
for word in sorted(words, reverse=True):  # plans and outputs clear the environment: they come last
    if word == "runs":
        record_local()
    elif word == "report":
        test_page.write_tables()
    elif word == "machines":
        test_odd_machines.write()
    elif word not in ("plans", "outputs"):
        record_on_slurm(word)
for word in ("plans", "outputs"):
    if word in words:
        outputs.write_all(word)
