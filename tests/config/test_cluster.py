"""Where a job runs, from the configuration, SLURM's variables and torchrun's `PET_*`."""

import errno
import os
import socket
from collections.abc import Mapping
from pathlib import Path

import pytest

from launcher.config.cluster import (
    Cluster,
    check_port_free,
    choose_cluster,
    parse_endpoint,
    parse_nodes,
    pet_overrides,
)
from launcher.errors import LaunchError, MachineError, UsageError
from launcher.launch.torchrun import parse_pairs
from tests.seam import Launch


@pytest.fixture
def port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


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


def test_more_nodes_than_the_allocation_has(path: str) -> None:
    environ = {"PATH": path, "SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2"}
    with pytest.raises(MachineError, match="nodes=4, but SLURM job 7 has 2: set nodes=2"):
        choose_cluster("auto", 4, None, None, environ)


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


def test_one_node_of_several(port: int) -> None:
    first = choose_cluster("manual", "2:4", 0, f"node0:{port}", {})
    assert (first.min_nodes, first.max_nodes, first.endpoint, first.is_host) == (2, 4, f"node0:{port}", True)
    assert not choose_cluster("manual", "2:4", 3, "node0:29500", {}).is_host


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (("pbs", 1, None, None), UsageError, "cluster.kind=pbs: choose from auto, local, slurm, allocation"),
        (("allocation", 1, None, None), MachineError, "SLURM_JOB_ID is not set"),
        (("auto", 4, None, None), MachineError, "nodes=4, and there is no SLURM here"),
        (("local", "1:2", None, None), MachineError, "set nodes=1"),
        (("manual", 2, None, None), UsageError, "needs this node's number, node_rank=0 to node_rank=1"),
        (("manual", 2, 2, "a:1"), UsageError, "node_rank=2"),
        (("manual", 2, -1, "a:1"), UsageError, "node_rank=-1"),
        (("manual", 2, 0, None), UsageError, "needs rdzv_endpoint=HOST:PORT"),
        (("manual", 2, 0, ""), UsageError, "needs rdzv_endpoint=HOST:PORT"),
        (("manual", 2, 0, "node0"), UsageError, "rdzv_endpoint=node0: give HOST:PORT, as in"),
        (("manual", 2, 1, "node0:0"), UsageError, "give one above 0"),
        (("auto", 1, None, "nowhere"), UsageError, "give HOST:PORT"),
        (("auto", 0, None, None), UsageError, "nodes=0"),
    ],
)
def test_what_cannot_be(
    arguments: tuple[str, object, int | None, str | None], error: type[LaunchError], message: str
) -> None:
    with pytest.raises(error) as caught:
        choose_cluster(*arguments, {"PATH": "/nowhere"})
    assert message in str(caught.value)


def test_several_nodes_from_a_task_of_srun_say_what_to_run() -> None:
    with pytest.raises(MachineError, match="run launch outside of srun"):
        choose_cluster("auto", 4, None, None, {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"})


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (1, (1, 1)),
        ("3", (3, 3)),
        ("2:4", (2, 4)),
        ("1:1", (1, 1)),
        (True, None),
        ("", None),
        (":", None),
        ("2:", None),
        (":2", None),
        ("4:2", None),
        ("1:2:3", None),
        ("0:1", None),
        (1.5, None),
        ([1], None),
        (None, None),
        ("9" * 5000, None),
    ],
)
def test_numbers_of_nodes(text: object, found: tuple[int, int] | None) -> None:
    if found:
        assert parse_nodes(text) == found
    else:
        with pytest.raises(UsageError, match="give a number of at least 1, or min:max"):
            parse_nodes(text)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("node0:29500", ("node0", 29500)),
        ("10.0.0.1:0", ("10.0.0.1", 0)),
        ("[::1]:29500", ("::1", 29500)),
        ("[fe80::1%eth0]:65535", ("fe80::1%eth0", 65535)),
        ("node0", None),
        (":29500", None),
        ("node0:", None),
        ("node0:http", None),
        ("node0:65536", None),
        ("node0:-1", None),
        ("", None),
        ("::1:29500", ("::1", 29500)),
        ("node0:٣", None),
        ("node0:²", None),
        ("a b:1", None),
        ("node0:" + "9" * 5000, None),
    ],
)
def test_endpoints(text: str, found: tuple[str, int] | None) -> None:
    if found:
        assert parse_endpoint(text) == found
    else:
        with pytest.raises(UsageError, match="give HOST:PORT"):
            parse_endpoint(text)


@pytest.mark.parametrize("address", ["0.0.0.0", "127.0.0.1"])
def test_a_port_in_use_is_noticed(address: str) -> None:
    with socket.socket() as taken:
        taken.bind((address, 0))
        taken.listen()
        number = taken.getsockname()[1]
        with pytest.raises(MachineError, match=f"port {number} of this host is not free"):
            check_port_free(number)
    check_port_free(number)
    check_port_free(0)


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
ELASTIC_V1 = {
    "PET_RDZV_ENDPOINT": "job-worker-0:29400",
    "PET_RDZV_BACKEND": "c10d",
    "PET_NNODES": "2:4",
    "PET_NPROC_PER_NODE": "8",
    "PET_MAX_RESTARTS": "3",
    "PET_RDZV_CONF": "timeout=900,join_timeout=60",
}
TRAINER_V2 = {
    "PET_NNODES": "2",
    "PET_NPROC_PER_NODE": "auto",
    "PET_NODE_RANK": "1",
    "PET_MASTER_ADDR": "job-node-0-0.job",
    "PET_MASTER_PORT": "29500",
}


@pytest.mark.parametrize(
    ("environ", "overrides"),
    [
        ({}, {}),
        ({"PET_NNODES": "1"}, {"nodes": "1"}),
        ({"PET_NNODES": "1:1", "PET_NPROC_PER_NODE": "2"}, {"nodes": "1:1", "nproc_per_node": "2"}),
        ({"PET_MASTER_ADDR": "a", "PET_NODE_RANK": "0"}, {}),
        (
            TRAINER_V2,
            {
                "nodes": "2",
                "nproc_per_node": "auto",
                "cluster": "manual",
                "node_rank": "1",
                "rdzv_endpoint": "job-node-0-0.job:29500",
            },
        ),
        (
            {**TRAINER_V2, "PET_MASTER_PORT": "1"},
            {
                "nodes": "2",
                "nproc_per_node": "auto",
                "cluster": "manual",
                "node_rank": "1",
                "rdzv_endpoint": "job-node-0-0.job:1",
            },
        ),
        (
            ELASTIC_V1,
            {
                "nodes": "2:4",
                "nproc_per_node": "8",
                "cluster": "manual",
                "node_rank": "0",
                "rdzv_endpoint": "job-worker-0:29400",
            },
        ),
    ],
)
def test_torchruns_variables_stand_for_overrides(environ: dict[str, str], overrides: dict[str, str]) -> None:
    assert pet_overrides(environ) == overrides


def run_with(launch: Launch, monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], *words: str) -> str:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    result = launch(*words, "dry_run=true", "--", "/bin/true")
    assert result.code == 0, result.err
    return result.out


def test_a_node_of_the_kubeflow_trainer(launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    command = run_with(launch, monkeypatch, {**TRAINER_V2, "PET_NPROC_PER_NODE": "2"})
    for part in (
        "--nnodes=2:2",
        "--nproc-per-node=2",
        "--node-rank=1",
        "--rdzv-endpoint=job-node-0-0.job:29500",
        "--rdzv-conf=is_host=0",
    ):
        assert part in command


def test_an_elastic_node_keeps_what_torchrun_reads_by_itself(
    launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = run_with(launch, monkeypatch, ELASTIC_V1, "node_rank=2")
    assert "--nnodes=2:4" in command and "--rdzv-endpoint=job-worker-0:29400" in command
    assert "--rdzv-conf=is_host=0,timeout=900,join_timeout=60" in command
    assert "--max-restarts" not in command and "--rdzv-backend" not in command


def test_the_users_words_win_over_torchruns_variables(
    launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = run_with(
        launch,
        monkeypatch,
        {**TRAINER_V2, "PET_NPROC_PER_NODE": "2"},
        "nodes=1",
        "cluster=local",
        "nproc_per_node=1",
    )
    assert "--nnodes=1:1" in command and "--nproc-per-node=1" in command


def test_torchruns_variables_that_make_no_sense(launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PET_NNODES", "two")
    launch("dry_run=true", "--", "true").assert_error(2, "nodes=two")
    monkeypatch.setenv("PET_NNODES", "2")
    monkeypatch.setenv("PET_NODE_RANK", "one'")
    launch("dry_run=true", "--", "true").assert_error(2, "node_rank")


def test_pairs() -> None:
    assert parse_pairs("timeout=900, is_host = 1,,x=a=b") == {"timeout": "900", "is_host": "1", "x": "a=b"}
    assert parse_pairs("") == {}


def test_a_node_rank_without_a_manual_cluster_is_not_ignored() -> None:
    with pytest.raises(UsageError, match="node_rank=1 goes with cluster=manual"):
        choose_cluster("auto", 1, 1, None, {})
    assert choose_cluster("local", 1, 1, None, {"PET_NODE_RANK": "1"}).kind == "local"
