"""The environment of a rank that `launch` starts itself, beside that of one that torchrun starts."""

import json
import socket
import subprocess
import sys
from pathlib import Path

from tests.seam import clean_environ, start, write_program

DUMP = """
import json, os
with open(f"rank-{os.environ['RANK']}.json", "w") as file:
    json.dump(dict(os.environ), file)
"""
DIFFERENT = {
    "MASTER_PORT": "another job's",
    "TORCHELASTIC_RUN_ID": "the run's identifier; torchrun's own default is none",
    "TORCHELASTIC_USE_AGENT_STORE": "rank 0 serves the store, since there is no torch in launch",
    "TORCHELASTIC_ERROR_FILE": "a file of the run directory, not of a temporary one",
}
"""Variables that may differ, and why."""
FROM_LAUNCH = {
    "LAUNCH_GC": "the default of gc",
    "LAUNCH_NUM_WORKERS": "the plan's",
    "LAUNCH_RANK_PLAN": "the plan's",
    "LAUNCH_RUN_DIR": "there is a run directory",
    "LAUNCH_RUN_ID": "there is a run directory",
    "PYTHONUNBUFFERED": "lines of a rank are shown as they are printed",
    "TORCHINDUCTOR_COMPILE_THREADS": "the plan's share of a rank",
}
"""Variables that torchrun's ranks lack, and why those of `launch` have them, under torchrun too."""


def read_rank(folder: Path, rank: int) -> dict[str, str]:
    found: dict[str, str] = json.loads((folder / f"rank-{rank}.json").read_text())
    return found


def test_a_rank_has_what_torchrun_would_give_it(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("torchrun", "direct")]
    for folder in folders:
        folder.mkdir()
    program = write_program(tmp_path, DUMP)
    environ = {name: value for name, value in clean_environ().items() if name != "OMP_NUM_THREADS"}
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    static = ("--rdzv-backend=static", "--master-addr=127.0.0.1", f"--master-port={port}")
    options = ("--nnodes=1", "--node-rank=0", *static, "--nproc-per-node=2")
    command = [sys.executable, "-m", "torch.distributed.run", *options, program]
    subprocess.run(command, cwd=folders[0], env=environ, check=True, capture_output=True)
    words = (
        "agent=direct",
        "nproc_per_node=2",
        "start.warm=off",
        "watch.enabled=false",
        "dataloader=none",
        "--",
        program,
    )
    with start(folders[1], *words) as started:
        assert started.wait() == 0, started.read()
    for rank in (0, 1):
        theirs, ours = (read_rank(folder, rank) for folder in folders)
        different = {name for name in {*theirs, *ours} if theirs.get(name) != ours.get(name)}
        different -= {"LAUNCH_TEST_MARK", *FROM_LAUNCH}
        assert different == set(DIFFERENT), {name: (theirs.get(name), ours.get(name)) for name in different}
        assert not set(FROM_LAUNCH) & set(theirs) - set(environ)
