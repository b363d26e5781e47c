"""The order in which nodes get their ranks: by switches, blocks or a file, and what is wrong with those."""

import random
import shutil
import time
from pathlib import Path

import pytest

from launcher.slurm.node_order import (
    fold_in_order,
    make_natural_key,
    order_by_names,
    order_by_topology,
    order_nodes,
    parse_host_file,
    parse_topology,
)
from launcher.slurm.node_order_sources import find_node_order
from launcher.slurm.notation import expand_hosts
from launcher.slurm.slurm_environ import read_task_identity
from tests.seam import clean_environ

TREE = """\
SwitchName=s0 Level=0 LinkSpeed=1 Nodes=n0,n2
SwitchName=s1 Level=0 LinkSpeed=1 Nodes=n1,n3
SwitchName=top Level=1 LinkSpeed=1 Nodes=n[0-3] Switches=s0,s1
"""
"""As SLURM 22.05 prints it."""
DEEP = """\
SwitchName=leaf10 Level=0 LinkSpeed=1 Nodes=n[1-2]
SwitchName=leaf2 Level=0 LinkSpeed=1 Nodes=n[9-10]
SwitchName=leaf3 Level=0 LinkSpeed=1 Nodes=n[3-4]
SwitchName=leaf1 Level=0 LinkSpeed=1 Nodes=n[11-12]
SwitchName=spine2 Level=1 LinkSpeed=1 Nodes=n[1-2,9-10] Switches=leaf2,leaf10
SwitchName=spine1 Level=1 LinkSpeed=1 Nodes=n[3-4,11-12] Switches=leaf[1,3]
SwitchName=core Level=2 LinkSpeed=1 Nodes=n[1-4,9-12] Switches=spine[1-2]
"""
BLOCKS = """\
BlockName=b2 BlockIndex=0 Nodes=n[10-13] BlockSize=4
BlockName=b10 BlockIndex=1 Nodes=n[2-5] BlockSize=4
BlockName=b1 BlockIndex=2 Nodes=n[6-9] BlockSize=4
AggregatedBlock=b[2,10] BlockIndex=4 Nodes=n[2-5,10-13] BlockSize=8
"""


@pytest.mark.parametrize(
    ("text", "hosts", "wanted"),
    [
        (TREE, "n[0-3]", "n0,n2,n1,n3"),
        (TREE, "n[3,2,1,0]", "n0,n2,n1,n3"),
        (DEEP, "n[1-4,9-12]", "n11,n12,n3,n4,n9,n10,n1,n2"),
        (DEEP, "n[2,4,10,12]", "n12,n4,n10,n2"),
        (BLOCKS, "n[2-13]", "n6,n7,n8,n9,n10,n11,n12,n13,n2,n3,n4,n5"),
        (BLOCKS, "n[2,10,6]", "n6,n10,n2"),
        ("", "n[2,10,1]", "n1,n2,n10"),
        ("SwitchName=s0 Nodes=n[9-", "n[10,9]", "n9,n10"),
        ("SwitchName=s0 Level=0 LinkSpeed=1 Nodes=(null)", "n[10,9]", "n9,n10"),
        # A switch with a single one below it, and nodes that no switch has.
        ("SwitchName=b Nodes=n2,n7\nSwitchName=a Nodes=n2,n7\nSwitchName=c Nodes=n1,n9", "n[1-9]", None),
    ],
)
def test_nodes_of_a_switch_follow_each_other(text: str, hosts: str, wanted: str | None) -> None:
    ordered = order_nodes(expand_hosts(hosts), parse_topology(text))
    assert ",".join(ordered) == (wanted or "n2,n7,n1,n9,n3,n4,n5,n6,n8")


def test_numbers_in_names_are_numbers() -> None:
    names = ["node10", "node2", "node1", "rack2n1", "rack10n1", "rack2n10", "node02", "10", "9", "login"]
    wanted = ["9", "10", "login", "node1", "node02", "node2", "node10", "rack2n1", "rack2n10", "rack10n1"]
    assert sorted(names, key=make_natural_key) == wanted


def test_any_order_of_the_same_nodes_gives_the_same() -> None:
    hosts = list(expand_hosts("n[1-4,9-12]"))
    for seed in range(20):
        mixed = random.Random(seed).sample(hosts, len(hosts))
        assert order_nodes(mixed, parse_topology(DEEP)) == order_nodes(hosts, parse_topology(DEEP))


def test_a_large_cluster_is_ordered_at_once() -> None:
    """4,000 nodes on 250 leaf switches below 16: each switch's nodes are one stretch."""
    hosts = expand_hosts("node[1-4000]")
    leaves = {leaf: hosts[leaf::250] for leaf in range(250)}
    lines = [f"SwitchName=leaf{leaf} Nodes={','.join(nodes)}" for leaf, nodes in leaves.items()]
    lines += [
        f"SwitchName=spine{spine} Nodes=" + ",".join(",".join(leaves[leaf]) for leaf in range(spine, 250, 16))
        for spine in range(16)
    ]
    begin = time.process_time()
    ordered = order_nodes(hosts, parse_topology("\n".join(lines)))
    assert time.process_time() - begin < 5  # it takes 0.05 s
    at = {host: place for place, host in enumerate(ordered)}
    assert len(at) == 4000
    for nodes in leaves.values():
        places = [at[host] for host in nodes]
        assert places == list(range(places[0], places[0] + 16))


def test_a_topology_without_the_jobs_nodes_is_told_if_somebody_asked() -> None:
    for asked in (True, False):
        order = order_by_topology(["x1", "x2"], parse_topology(TREE), asked=asked)
        assert (order.hosts, order.source) == (("x1", "x2"), "slurm")
        assert bool(order.warnings) == asked


def test_nodes_on_no_switch_are_told() -> None:
    order = order_by_topology(expand_hosts("n[0-9]"), parse_topology(TREE), asked=False)
    assert order.hosts[:4] == ("n0", "n2", "n1", "n3") and order.source == "topology"
    assert order.warnings == ("n4, n5, n6 and 3 more: on none of SLURM's switches, and so last in the order",)


def test_a_file_gives_the_order(tmp_path: Path) -> None:
    names = parse_host_file("# by rack\nn3\n\n n[1,0]  # two\nelsewhere\nn3\n")
    assert names == ("n3", "n1", "n0", "elsewhere", "n3")
    order = order_by_names(["n0", "n1", "n10", "n2", "n3"], names, "F")
    assert (order.hosts, order.source) == (("n3", "n1", "n0", "n2", "n10"), "file")
    assert order.warnings == (
        "F does not name n10, n2, which come last",
        "F names n3 more than once: the first place counts",
    )


@pytest.mark.parametrize(
    ("content", "part"),
    [
        (None, "No such file"),
        ("n1 slots=8\nn0\n", "'n1 slots=8' is no node"),
        ("n[1-\n", "names none of"),
        ("n[1-x]\n", "is no node"),
        ("\0\x1b[2J\n", "is no node"),
        ("elsewhere\n", "names none of the job's nodes, such as n0"),
        ("", "names none of the job's nodes"),
    ],
    ids=str,
)
def test_a_bad_file_leaves_slurms_order(content: str | None, part: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "hosts").write_text(content)
    order = find_node_order("hosts", ["n0", "n1"], {}, str(tmp_path))
    assert (order.hosts, order.source) == (("n0", "n1"), "slurm")
    (warning,) = order.warnings
    assert part in warning and "SLURM's order" in warning and warning.isprintable()


def test_slurm_is_not_asked_if_it_has_no_switches(tmp_path: Path) -> None:
    environ = {"SLURM_TOPOLOGY_ADDR_PATTERN": "node", "PATH": str(tmp_path)}
    assert not find_node_order("auto", ["n1", "n0"], environ, "/").warnings
    (warning,) = find_node_order("topology", ["n1", "n0"], environ, "/").warnings
    assert warning.startswith("SLURM knows of no switches or blocks: ")
    assert find_node_order("slurm", ["n1", "n0"], environ, "/").hosts == ("n1", "n0")


def test_a_scontrol_that_fails_leaves_slurms_order(tmp_path: Path) -> None:
    scontrol = tmp_path / "scontrol"
    environ = {**clean_environ(), "PATH": f"{tmp_path}:{Path(shutil.which('sh') or '').parent}"}
    assert find_node_order("auto", ["n1", "n0"], environ, "/").hosts == ("n1", "n0")
    scontrol.write_text("#!/bin/sh\necho slurm_load_topo error: down >&2\nexit 1\n")
    scontrol.chmod(0o755)
    (warning,) = find_node_order("topology", ["n1", "n0"], environ, "/").warnings
    assert "scontrol: slurm_load_topo error: down" in warning
    scontrol.write_text(f"#!/bin/sh\ncat <<'X'\n{TREE}X\n")
    assert find_node_order("auto", ["n1", "n3", "n2"], environ, "/").hosts == ("n2", "n1", "n3")


@pytest.mark.parametrize(
    "hosts", ["n0", "n0,n2,n1,n3", "n[3-5],n2,n[09-12],login,x9y,n007", "n9,n10,n[011-012]", "n5,n4,n5"]
)
def test_names_are_folded_in_their_order(hosts: str) -> None:
    names = expand_hosts(hosts)
    assert expand_hosts(fold_in_order(names)) == names
    assert fold_in_order(expand_hosts("n[0-3999]")) == "n[0-3999]"
    assert fold_in_order([]) == ""


def test_a_task_finds_its_number_in_the_order() -> None:
    environ = {"SLURMD_NODENAME": "n1", "SLURM_NODEID": "1"}
    assert read_task_identity(environ).node_rank == 1
    assert read_task_identity({**environ, "LAUNCH_NODE_ORDER": "n[0,2],n1,n3"}).node_rank == 2
    assert read_task_identity({**environ, "LAUNCH_NODE_ORDER": "n[0,2]"}).node_rank == 1
