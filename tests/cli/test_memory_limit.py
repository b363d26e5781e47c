"""What is chosen runs where the fixed defaults are killed: real ranks on CPUs under a memory cgroup."""

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.seam import run_outside

pytestmark = pytest.mark.slow

LIMIT_MIB = 1450
MODEL = ("+model=tiny", "model.layers=24", "model.max_seq_len=512")
"""512 tokens of each sequence keep 0.2 GiB in fp32: 2.5 GiB of 12 sequences, 1.7 GiB of 8."""
RUN = (
    "nproc_per_node=1",
    "program.device=cpu",
    "program.steps=1",
    "program.eval_batches=0",
    "start.warm=false",
)


def find_group_folder() -> tuple[Path, str]:
    """The folder of this process's memory cgroup, and its file of the limit; version 1 or 2."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        number, controllers, path = line.split(":", 2)
        if controllers == "memory":
            return Path("/sys/fs/cgroup/memory", path.lstrip("/")), "memory.limit_in_bytes"
        if number == "0" and Path("/sys/fs/cgroup/cgroup.controllers").is_file():
            return Path("/sys/fs/cgroup", path.lstrip("/")), "memory.max"
    pytest.skip("there is no memory cgroup")


@pytest.fixture
def group() -> Iterator[Path]:
    """A memory cgroup with the limit."""
    folder, limit = find_group_folder()
    own = folder / f"launch-test-{os.getpid()}"
    try:
        own.mkdir()
    except OSError as error:
        pytest.skip(f"no memory cgroup can be made: {error}")
    try:
        (own / limit).write_text(str(LIMIT_MIB << 20))
        # Nothing may be swapped out in place of being killed.
        for file, text in (("memory.swap.max", "0"), ("memory.swappiness", "0")):
            with contextlib.suppress(OSError):
                (own / file).write_text(text)
        yield own
    except OSError as error:
        pytest.skip(f"the memory of a cgroup cannot be limited: {error}")
    finally:
        own.rmdir()


def test_what_is_chosen_is_not_killed(group: Path, tmp_path: Path) -> None:
    def enter() -> None:
        (group / "cgroup.procs").write_text(str(os.getpid()))

    fixed = ("program.batch_size=12", "program.activation_checkpointing=none")
    killed = run_outside([*MODEL, *RUN, *fixed, "new_run_dir=fixed"], tmp_path, timeout=300, preexec_fn=enter)
    assert killed.code == 137, killed
    assert "does not fit" in killed.err and f"limit of the job's cgroup, {LIMIT_MIB} MiB" in killed.err
    done = run_outside([*MODEL, *RUN, "new_run_dir=auto"], tmp_path, timeout=300, preexec_fn=enter)
    assert done.code == 0, done
    chosen = json.loads((tmp_path / "auto/manifest.json").read_text())["training"]
    assert chosen["batch_size"] == 8 and chosen["activation_checkpointing"] != "none"
