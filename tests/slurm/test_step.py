"""What srun is told, in which environment, over which nodes in which order: `srun.toml`."""

import errno
import os
import shlex
import subprocess
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.config.settings import ContainerConfig, Settings
from launcher.launch.job import list_ports, read_client_ports
from launcher.preflight import PreflightRequest
from launcher.slurm import first_node
from launcher.slurm.commands import expand_hosts, fold_in_order
from launcher.slurm.step import KEPT_LINES, NodeStep, Step, StepReport, find_task_ends
from tests.seam import wait_for, write_script

TABLES: dict[str, Any] = tomllib.loads(Path(__file__).with_name("srun.toml").read_text())
STEP = Step(("n0", "n1"), ("python", "-m", "task", "/runs/x"), elastic=False, directory="/home/me/a b")
BOX = ContainerConfig(
    "pyxis", "nvcr.io/x:1", ["/runs/x:/runs/x", "/data:/data:ro"], args=["--container-writable"]
)


def test_a_step_has_all_of_its_nodes() -> None:
    assert shlex.join(STEP.render({})) == (
        "srun --nodes=2 --ntasks=2 --ntasks-per-node=1 --nodelist=n0,n1 --whole --overlap --mem=0"
        " --cpu-bind=none --mpi=none --export=ALL --input=all '--chdir=/home/me/a b' --quiet"
        " --kill-on-bad-exit=1 --wait=0 python -m task /runs/x"
    )
    elastic = replace(STEP, elastic=True).render({})
    assert {"--no-kill", "--kill-on-bad-exit=0", "--wait=0"} <= {*elastic}


def test_the_users_options_win() -> None:
    for options, has, lacks in TABLES["options"]:
        words = replace(STEP, options=options).render({})
        assert {*has} <= {*words} and not {*lacks} & {*words}, options
        assert words[-4:] == STEP.command
    assert "--nodelist=n0,n1" not in replace(STEP, options={"nodelist": None}).render({})


def test_a_nodes_task_that_srun_binds_has_all_cpus() -> None:
    for options, cpus, count in TABLES["cpus"]:
        step = replace(STEP, options=options)
        words = step.render({"SLURM_JOB_CPUS_PER_NODE": cpus})
        told = [word for word in words if "cpus-per-task" in word]
        assert told == ([f"--cpus-per-task={count}"] if count else []), options
        assert {*step.render({})} <= {*words}


def test_containers() -> None:
    words = shlex.join(replace(STEP, container=BOX).render({}))
    assert words.endswith(
        "--container-image=nvcr.io/x:1 --container-mounts=/runs/x:/runs/x,/data:/data:ro"
        " '--container-workdir=/home/me/a b' --container-writable python -m task /runs/x"
    )
    box = replace(BOX, runtime="apptainer", args=["--cleanenv"])
    assert shlex.join(replace(STEP, container=box).render({})).endswith(
        "apptainer exec --nv --bind /runs/x:/runs/x --bind /data:/data:ro --pwd '/home/me/a b' --cleanenv"
        " nvcr.io/x:1 python -m task /runs/x"
    )


def test_lists_of_nodes_and_of_jobs() -> None:
    for text, names in TABLES["expanded"]:
        assert list(expand_hosts(text)) == names.split()
    for names, folded in TABLES["folded"]:
        assert fold_in_order(names.split()) == folded
    for text in (*TABLES["in_order"], "n[0-3999]"):
        assert expand_hosts(fold_in_order(expand_hosts(text))) == expand_hosts(text)
    assert fold_in_order(expand_hosts("n[0-3999]")) == "n[0-3999]"
    with pytest.raises(ValueError, match="invalid literal"):
        expand_hosts("n[a-b]")


HOST = st.from_regex(r"[a-z.-]{0,3}([0-9]{1,3}[a-z.-]{0,2}){0,2}[0-9]{0,3}", fullmatch=True).filter(bool)


@given(st.lists(HOST, max_size=40))
def test_what_is_folded_is_expanded_to_the_same(names: list[str]) -> None:
    assert expand_hosts(fold_in_order(names)) == tuple(names)


def tell_topology(folder: Path, text: str) -> dict[str, str]:
    """Make an scontrol that prints a topology, or fails with what is after "!"; returns its environment."""
    (folder / "topology").write_text(f"{text.removeprefix('!')}\n")
    says = "cat topology >&2; exit 1" if text.startswith("!") else "cat topology"
    write_script(folder / "scontrol", f"cd {folder}\n{says}")
    return {"PATH": f"{folder}:/usr/bin:/bin"}


def test_nodes_of_a_switch_follow_each_other(tmp_path: Path) -> None:
    for table in TABLES["order"]:
        environ = tell_topology(tmp_path, table["text"])
        for hosts, wanted in table["hosts"]:
            order = first_node.find_node_order("topology", expand_hosts(hosts), environ, "/")
            assert (",".join(order.hosts), order.source) == (wanted, "topology"), (table["text"], hosts)


def test_a_large_cluster_is_ordered(tmp_path: Path) -> None:
    """4,000 nodes on 250 leaf switches below 16: each switch's nodes are one stretch."""
    hosts = expand_hosts("node[1-4000]")
    leaves = {leaf: hosts[leaf::250] for leaf in range(250)}
    lines = [f"SwitchName=leaf{leaf} Nodes={','.join(nodes)}" for leaf, nodes in leaves.items()]
    for spine in range(16):
        below = ",".join(",".join(leaves[leaf]) for leaf in range(spine, 250, 16))
        lines.append(f"SwitchName=spine{spine} Nodes={below}")
    order = first_node.find_node_order("auto", hosts, tell_topology(tmp_path, "\n".join(lines)), "/")
    at = {host: place for place, host in enumerate(order.hosts)}
    assert len(at) == 4000
    for nodes in leaves.values():
        places = [at[host] for host in nodes]
        assert places == list(range(places[0], places[0] + 16))


@pytest.mark.parametrize("row", TABLES["source"][0]["rows"], ids=lambda row: repr(row[:2]))
def test_where_the_order_of_nodes_is_from(row: list[str], tmp_path: Path) -> None:
    setting, topology, wanted, source, warning = row
    setting, is_file, content = setting.partition(":")
    if is_file:
        (tmp_path / setting).write_text(content)
    environ = tell_topology(tmp_path, topology)
    if not topology:
        (tmp_path / "scontrol").unlink()
        environ["SLURM_TOPOLOGY_ADDR_PATTERN"] = "node"  # SLURM has no switches
    order = first_node.find_node_order(setting, ["n1", "n0", "n10"], environ, str(tmp_path))
    assert (",".join(order.hosts), order.source) == (wanted, source)
    told = "\n".join(order.warnings)
    assert warning in told and bool(warning) == bool(told) and told.replace("\n", "").isprintable()


def test_what_srun_has_said_is_read_while_it_says_more() -> None:
    """As on a SIGTERM, when the attempt's end is prepared while its step runs."""
    line = "srun: error: n0: task 0: Exited with exit code 7"
    talker = ["sh", "-c", f"while echo '{line}' >&2; do :; done"]
    with subprocess.Popen(talker, stdin=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdin
        report = StepReport()
        step = NodeStep(process, os.dup(process.stdin.fileno()), report)
        wait_for(lambda: len(report.srun_lines) == KEPT_LINES, "srun's lines", 30)
        for _ in range(2000):
            assert find_task_ends(report.srun_lines) == {"n0": "Exited with exit code 7"}
        process.kill()
        step.close()


def test_a_port_is_a_free_one_where_this_process_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the ranks, and for what preflight has the nodes do together."""
    found = list[str]()

    def check(_command: object, request: PreflightRequest, _environ: object, **_more: object) -> None:
        found.append(request.endpoint)
        raise OSError(errno.ENOENT, "as without srun")

    monkeypatch.setattr("launcher.preflight.run_checks", check)
    monkeypatch.setattr(first_node, "find_free_port", lambda: 20000)
    monkeypatch.setattr(first_node, "list_ports", lambda *_: [30000])
    for own, port in (("n0", 20000), ("n1", 30000), ("", 30000)):
        environ = {"SLURMD_NODENAME": own} if own else {}
        assert first_node.choose_port("n0", environ) == port
        first_node.check_allocation(Settings(), environ, ("n0", "n1"), directory=Path("/"), kind="light")
        assert found[-1] == f"n0:{port}"


LOWEST, DEFAULT_LOCAL = 10240, (32768, 60999)
LOCAL = st.tuples(st.integers(1024, 65535), st.integers(1024, 65535)).map(lambda pair: (min(pair), max(pair)))


@given(LOCAL)
def test_ports_are_outside_of_the_kernels_own_where_there_is_room(local: tuple[int, int]) -> None:
    ports = list_ports(*local)
    assert LOWEST <= ports.start < ports.stop <= 65536
    room = max(local[0] - LOWEST, 65535 - max(local[1], LOWEST - 1))
    assert not {*ports} & {*range(local[0], local[1] + 1)} or room < 1000


def test_the_kernels_own_ports(tmp_path: Path) -> None:
    assert read_client_ports(tmp_path) == DEFAULT_LOCAL
    (tmp_path / "net/ipv4").mkdir(parents=True)
    (tmp_path / "net/ipv4/ip_local_port_range").write_text("15000\t61000\n")
    assert read_client_ports(tmp_path) == (15000, 61000)
