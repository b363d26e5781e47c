"""Ranks in the order of the network, on a real SLURM with two switches.

n0 and n2 are on one, n1 and n3 on the other; SLURM's own order is n0, n1, n2, n3.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.cluster.conftest import Sandbox, demand_programs, start_sandbox

pytestmark = pytest.mark.slurm

PROGRAM = """
import os
names = ("RANK", "GROUP_RANK", "SLURMD_NODENAME", "MASTER_ADDR", "WORLD_SIZE")
open(f"rank-{os.environ['RANK']}", "w").write(" ".join(os.environ[name] for name in names))
"""


@pytest.fixture(scope="module")
def switched() -> Iterator[Sandbox]:
    """A cluster with switches."""
    demand_programs("--no-accounting")
    with start_sandbox("--no-accounting", "--switches", "2", "--gpus", "0") as cluster:
        yield cluster


@pytest.mark.parametrize(
    ("words", "hosts", "source"),
    [
        ((), "n0 n2 n1 n3", "topology"),
        (("agent=torchrun", "cluster.node_order=order.txt"), "n3 n1 n2 n0", "file"),
        (("cluster.node_order=slurm",), "n0 n1 n2 n3", "slurm"),
    ],
    ids=str,
)
def test_ranks_follow_the_network(
    switched: Sandbox, tmp_path: Path, words: tuple[str, ...], hosts: str, source: str
) -> None:
    (tmp_path / "order.txt").write_text("n3\nn1\nn2\nn0\nn9\n")
    (tmp_path / "train.py").write_text(PROGRAM)
    program = ("--", "python", "train.py")
    done = switched.launch(
        "nodes=4", "nproc_per_node=2", "follow=true", "name=x", *words, *program, cwd=tmp_path
    )
    assert done.code == 0, done.err
    found = [(tmp_path / f"rank-{rank}").read_text().split() for rank in range(8)]
    names = hosts.split()
    assert [host for _, _, host, *_ in found] == [host for host in names for _ in range(2)]
    assert [int(group) for _, group, *_ in found] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert {master for *_, master, _ in found} == {names[0]}
    (path,) = tmp_path.glob("runs/x/*/manifest.json")
    order = json.loads(path.read_text())["node_order"]
    assert (order["source"], order["hosts"]) == (source, names)
    told = done.err + done.out
    assert ("ranks are in the order of" in told) == (source != "slurm"), told
