"""Where a job runs, from the configuration, SLURM's variables and torchrun's `PET_*`."""

import errno
import os
import socket
from collections.abc import Mapping
from pathlib import Path

import pytest

from launcher.config.start import (
    Cluster,
    check_port_free,
    choose_cluster,
)
from launcher.errors import MachineError


@pytest.mark.parametrize(
    ("kind", "nodes", "environ", "cluster"),
    [
        ("auto", 1, {}, Cluster("local", "nodes=1", 1, 1, "localhost:0", is_host=True)),
        ("local", "1:1", {}, Cluster("local", "cluster=local", 1, 1, "localhost:0", is_host=True)),
        ("auto", "1:4", {}, Cluster("local", "nodes=1:4", 1, 1, "localhost:0", is_host=True)),
        ("auto", "auto", {}, Cluster("local", "one node", 1, 1, "localhost:0", is_host=True)),
        (
            "auto",
            1,
            {"SLURM_JOB_ID": "7"},
            Cluster(
                "local",
                "nodes=1, on this node of SLURM job 7, and no srun on PATH",
                *(1, 1),
                "localhost:0",
                is_host=True,
            ),
        ),
        (
            "auto",
            "auto",
            {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1"},
            Cluster("local", "one node, a task of SLURM step 7.0", 1, 1, "localhost:0", is_host=True),
        ),
    ],
)
def test_one_machine(kind: str, nodes: object, environ: Mapping[str, str], cluster: Cluster) -> None:
    assert choose_cluster(kind, nodes, None, None, {"PATH": "/nowhere", **environ}) == cluster


def test_several_tasks_of_a_step_are_told() -> None:
    environ = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2"}
    assert "which has 2: each starts a job of its own" in choose_cluster("auto", 1, None, None, environ).why


@pytest.fixture
def path(tmp_path: Path) -> str:
    """A PATH with SLURM's commands on it; they are looked up, and not run."""
    for name in ("srun", "sbatch"):
        (tmp_path / name).touch(mode=0o755)
    return str(tmp_path)


@pytest.mark.parametrize(
    ("kind", "nodes", "environ", "found"),
    [
        ("auto", 4, {}, ("slurm", "nodes=4", 4, 4)),
        ("auto", "2:4", {}, ("slurm", "nodes=2:4", 2, 4)),
        ("slurm", "auto", {}, ("slurm", "cluster=slurm", 1, 1)),
        ("auto", 1, {}, ("local", "nodes=1", 1, 1)),
        ("auto", "auto", {"SLURM_JOB_ID": "7", "SLURM_NNODES": "3"}, ("allocation", "SLURM job 7", 3, 3)),
        ("auto", 2, {"SLURM_JOB_ID": "7", "SLURM_NNODES": "3"}, ("allocation", "SLURM job 7", 2, 2)),
        ("auto", "2:9", {"SLURM_JOB_ID": "7", "SLURM_NNODES": "3"}, ("allocation", "SLURM job 7", 2, 3)),
        # The batch script's own step, as slurm.h numbers it.
        (
            "auto",
            1,
            {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "4294967291"},
            ("allocation", "SLURM job 7", 1, 1),
        ),
        ("slurm", 2, {"SLURM_JOB_ID": "7"}, ("slurm", "cluster=slurm", 2, 2)),
        ("allocation", "auto", {"SLURM_JOB_ID": "7"}, ("allocation", "cluster=allocation", 1, 1)),
    ],
)
def test_where_there_is_slurm(
    path: str, kind: str, nodes: object, environ: Mapping[str, str], found: tuple[str, str, int, int]
) -> None:
    cluster = choose_cluster(kind, nodes, None, None, {"PATH": path, **environ})
    assert (cluster.kind, cluster.why, cluster.min_nodes, cluster.max_nodes) == found


def test_spare_nodes_of_an_allocation(path: str) -> None:
    environ = {"PATH": path, "SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "4"}
    cluster = choose_cluster("auto", "auto", None, None, environ, spares=1)
    assert (cluster.min_nodes, cluster.max_nodes) == (3, 3)
    assert choose_cluster("auto", 2, None, None, environ, spares=1).max_nodes == 2
    with pytest.raises(
        MachineError, match=r"nodes=3 and cluster\.spares=2, but SLURM job 7 has 4 nodes: .* 5"
    ):
        choose_cluster("auto", 3, None, None, environ, spares=2)
    with pytest.raises(MachineError, match=r"nodes=1 and cluster\.spares=4, but"):
        choose_cluster("auto", "auto", None, None, environ, spares=4)


def test_a_kernel_without_ipv6_has_free_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with the kernel's parameter ipv6.disable=1, whatever Python was built with."""
    make_socket = socket.socket

    def refuse(family: int, *rest: int) -> socket.socket:
        if family == socket.AF_INET6:
            raise OSError(errno.EAFNOSUPPORT, os.strerror(errno.EAFNOSUPPORT))
        return make_socket(family, *rest)

    with make_socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        number = taken.getsockname()[1]
        monkeypatch.setattr(socket, "socket", refuse)
        with pytest.raises(MachineError, match="is not free"):
            check_port_free(number)
    check_port_free(number)


# The variables that the Kubeflow trainer sets, version 1 (PyTorchJob) and version 2 (TrainJob).
