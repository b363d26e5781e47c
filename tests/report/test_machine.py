"""Machines as `launch topo` prints and draws them."""

import io
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from launcher.cpulist import parse_cpulist
from launcher.plan.model import Cpu, Gpu, Machine, Nic, NumaNode, Plan, Request
from launcher.plan.planner import plan
from launcher.report.machine import PALETTE, find_colour, lighten, print_topology, render_machine
from launcher.text import shorten_cpulist
from tests.plan.lab_machines import NAMES, ask, fsroot, load
from tests.probe.machine_trees import short_lived
from tests.report import full_machines
from tests.seam import Result

TREES = json.loads((Path(__file__).parents[1] / "data" / "machine_trees.json").read_text())
"""Trees of machines as lines; python -m tests.golden outputs has those of the machines that are shipped."""
SNAPSHOTS = ("hybrid", "huge", "odd")
SVG = "{http://www.w3.org/2000/svg}"


def make(name: str) -> Machine:
    return full_machines.read(name) if name in SNAPSHOTS else full_machines.lab(name)


def show(machine: Machine, *, explain: bool = False, encoding: str = "utf-8", width: int = 160) -> str:
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding=encoding)
    print_topology(Console(file=file, width=width, highlight=False), machine, explain=explain)
    file.flush()
    return "".join(f"{line.rstrip()}\n" for line in raw.getvalue().decode(encoding).splitlines())


@pytest.mark.parametrize("name", ["gh200", "a100-slurm-32of112"])
def test_a_probed_machine(name: str, launch: Callable[..., Result]) -> None:
    with short_lived() as root:
        fsroot.materialize(load(name), root)
        done = launch("topo", f"machine.root={root}")
    assert (done.code, done.err) == (0, "")
    assert [line.rstrip() for line in done.out.splitlines()] == TREES[name]


@pytest.mark.parametrize("name", ["dgx-a100", "odd", "hybrid"])
def test_the_tree_of_a_machine(name: str) -> None:
    """Switches, caches that are alike, what a job may not use, devices of unknown place."""
    assert show(make(name)).splitlines() == TREES[name]


def test_what_is_out_of_the_ordinary() -> None:
    """Machines, and a line of their trees."""
    hybrid, dgx, odd = full_machines.read("hybrid"), full_machines.lab("dgx-a100"), full_machines.read("odd")
    gb200, azure = full_machines.lab("gb200-nvl4"), full_machines.lab("azure-ndv4")
    low = {cpu.node for cpu in azure.cpus if cpu.package == 0}
    near = NumaNode(0, 1 << 20, normal=True, distances=((0, 10),))
    virtual = tuple(Cpu(at, at, package=at, node=0, l3=at) for at in range(64))
    everything = frozenset(range(64))
    up = ("pci0000:15", "0000:15:01.0", "0000:16:00.0")
    pair = (Gpu(0, "", "0000:19:00.0", 0, path=up), Gpu(1, "", "0000:1a:00.0", 0, path=up))
    ports = (Nic("a", "0000:19:00.0", 0, up), Nic("b", "0000:19:00.1", 0, up))
    below = (replace(odd.gpus[0], node=2),)
    found = {
        "a cache above two nodes": (
            replace(azure, cpus=tuple(replace(cpu, l3=0) if cpu.node in low else cpu for cpu in azure.cpus)),
            "shared L3 32 MiB",
        ),
        "alike nodes without CPUs": (
            gb200,
            "NUMANodes 2,10,18,26  186 GiB each  no CPUs, GPU or expansion memory",
        ),
        "packages of a virtual machine are in its one node": (
            Machine(virtual, (near,), (), everything, frozenset({0}), memory_kib=1 << 20),
            "64 packages, 1 NUMA node, 64 cores, 64 PUs\n└── NUMANode 0  1 GiB  64 cores  PUs 0-63\n",
        ),
        "a neighbour of which part is allowed stands apart": (
            replace(dgx, allowed_cpus=dgx.allowed_cpus - {5}),
            "├── L3 32 MiB  4 cores  PUs 4-7,132-135  (allowed 4,6-7,132-135)\n",
        ),
        "gaps in the numbers": (
            replace(hybrid, cpus=tuple(cpu for cpu in hybrid.cpus if cpu.id != 20)),
            "not online PUs 20 (offline, or no such CPUs)\n",
        ),
        "nothing allowed": (
            replace(hybrid, allowed_cpus=frozenset(), allowed_mems=frozenset()),
            "may use 0 of 24 PUs () and the memory of NUMA nodes (none)",
        ),
        "a node that is not there": (
            replace(hybrid, gpus=(replace(hybrid.gpus[0], node=7),)),
            "└── GPU 0  0000:01:00.0",
        ),
        "a device next to a node without CPUs": (
            replace(odd, gpus=below, nics=()),
            "NUMANode 2  256 GiB  no CPUs  (memory not allowed)\n    └── GPU 0  ",
        ),
        "one switch": (replace(hybrid, gpus=pair), "PCI switch 0000:16:00.0\n"),
        "two ports of a card are no switch": (
            replace(hybrid, gpus=(), nics=ports),
            "├── NIC a  0000:19:00.0  active\n".replace("  active", ""),
        ),
        "MIG": (
            replace(hybrid, gpus=(replace(hybrid.gpus[0], mig=("MIG-1", "MIG-2")),)),
            "24 GiB  2 MIG instances",
        ),
        "an AMD GPU": (replace(hybrid, gpus=(Gpu(0, "", "x", None, vendor="amd"),)), "GPU 0  x  AMD GPU"),
    }
    for case, (machine, line) in found.items():
        assert line in show(machine), case


def test_a_gpu_without_a_node_stands_by_the_cpus_next_to_it() -> None:
    machine = full_machines.lab("a100-slurm-32of112")
    far = frozenset(cpu.id for cpu in machine.cpus if cpu.node == 1)
    gpus = tuple(replace(gpu, node=None, local_cpus=far) if gpu.node else gpu for gpu in machine.gpus)
    assert show(replace(machine, gpus=gpus)) == show(machine)


def test_explain_shows_each_cache_and_core() -> None:
    lines = show(full_machines.lab("dgx-a100"), explain=True).splitlines()
    assert sum("L3 32 MiB" in line for line in lines) == 32
    cores = [line.partition("Core ")[2] for line in lines if "Core " in line]
    assert cores == [f"{core}  PUs {core},{core + 128}" for core in range(128)]


@pytest.mark.parametrize(
    ("rows", "lines"),
    [
        ([(10,)], 0),
        ([(10, 32), (32, 10)], 1),
        ([(10, 16, 22, 17), (16, 10, 17, 22), (22, 17, 10, 16), (17, 22, 16, 10)], 5),
        ([(10, 20), (30, 10)], 3),
        (
            [
                tuple(10 if a == b else 11 + (a * 7 + b * 7 + a * b) % 97 for b in range(20))
                for a in range(20)
            ],
            1,
        ),
    ],
)
def test_distances(rows: list[tuple[int, ...]], lines: int) -> None:
    """A matrix; one sentence where all nodes are alike, or where there are too many."""
    nodes = tuple(NumaNode(at, 1, True, tuple(enumerate(row))) for at, row in enumerate(rows))
    shown = show(replace(full_machines.read("hybrid"), nodes=nodes)).splitlines()
    at = next((number for number, line in enumerate(shown) if line.startswith("distances")), len(shown))
    assert len(shown[at:]) == lines
    if lines == 5:
        assert shown[at + 1].split() == ["0", "10", "16", "22", "17"]


@pytest.mark.parametrize("name", [*NAMES, *SNAPSHOTS])
def test_it_fits_80_columns_and_plain_terminals(name: str) -> None:
    machine = replace(make(name), name=name)
    for encoding in ("ascii", "utf-8"):
        text = show(machine, encoding=encoding, width=80)
        assert max(map(len, text.splitlines())) <= 80
        assert all(f"GPU {gpu.index}  {gpu.pci}" in text for gpu in machine.gpus)
        assert all(f"NIC {nic.name}" in text for nic in machine.nics)


def read_picture(placed: Plan) -> tuple[dict[str, list[str]], list[str]]:
    """The colours of each thing in a picture by its name, and all texts."""
    picture = ElementTree.fromstring(render_machine(placed, "a note", "svg"))
    found: dict[str, list[str]] = {}
    for group in picture.iter(f"{SVG}g"):
        if name := re.fullmatch(r"((?:pu|gpu|nic).*)-(\d+)", group.get("id", "")):
            fills = found.setdefault(name[1], [])
            assert int(name[2]) == len(fills), "drawn twice"
            fills += re.findall(r"fill: (#\w+)", group[0].get("style", ""))[:1]
    return found, [text.text or "" for text in picture.iter(f"{SVG}text")]


@pytest.mark.parametrize(
    ("name", "request_", "marks"),
    [
        ("hybrid", ask(nproc_per_node=40), []),
        ("odd", ask(), ["not allowed: outside this job's cpuset", "isolated at boot, left alone"]),
        ("dgx-a100", ask(), ["DataLoader workers of rank 0 alone"]),
        ("cpu-only-2s", ask(reserve_cores=1), ["no rank's"]),
        ("huge", ask(binding="numa"), []),
    ],
)
def test_every_pu_is_drawn_once_in_the_colours_of_its_ranks(
    name: str, request_: Request, marks: list[str]
) -> None:
    machine = make(name)
    placed = plan(machine, request_)
    found, texts = read_picture(placed)
    expected: dict[str, set[str]] = {f"pu{cpu.id}": set() for cpu in machine.cpus}
    for rank in placed.ranks:
        for pu in rank.cpus:
            expected[f"pu{pu}"].add(find_colour(rank.local_rank))
    for rank in placed.ranks:
        for pu in rank.worker_cpus - rank.cpus:
            if not any(pu in other.cpus for other in placed.ranks):
                expected[f"pu{pu}"].add(lighten(find_colour(rank.local_rank)))
        if rank.gpu:
            expected.setdefault(f"gpu{rank.gpu.pci}", set()).add(find_colour(rank.local_rank))
        if rank.nic:
            (pci,) = {nic.pci for nic in machine.nics if nic.name == rank.nic}
            expected.setdefault(f"nic{pci}", set()).add(find_colour(rank.local_rank))
        assert any(text.startswith(f"rank {rank.local_rank} ") for text in texts)
    for thing, fills in found.items():
        assert set(fills) == expected[thing] or (not expected[thing] and not set(fills) & set(PALETTE)), thing
    assert set(found) == set(expected)
    assert next(text for text in texts if text.endswith("a note")).count(f"{len(machine.cpus)} PU") == 1
    every = ("not allowed: outside", "isolated at boot", "DataLoader workers of", "no rank's")
    assert [text for text in texts if text.startswith(every)] == marks


@pytest.mark.parametrize("name", ["<&>\"'$x$ 表 🚀", "\x00\x1b[0m\ufffe\udc80" + "x" * 500])
def test_any_name_can_be_drawn(name: str) -> None:
    machine = full_machines.read("odd")
    path = ("pci0000:00", f"{name[:40]}.")
    gpus = tuple(replace(gpu, name=name, pci=f"{name[:40]}{gpu.index}", path=path) for gpu in machine.gpus)
    nics = tuple(replace(nic, name=name) for nic in machine.nics)
    placed = plan(replace(machine, name=name, gpus=gpus, nics=nics), ask())
    texts = read_picture(placed)[1]
    assert name in texts or not name.isprintable() or not 0 < len(name) < 60
    for form, beginning in (("png", b"\x89PNG"), ("pdf", b"%PDF")):
        assert render_machine(placed, "", form).startswith(beginning)


def test_a_legend_of_many_ranks_ends_and_nothing_is_outside() -> None:
    document = render_machine(plan(full_machines.read("hybrid"), ask(nproc_per_node=1000)), "", "svg")
    picture = ElementTree.fromstring(document)
    texts = [text.text or "" for text in picture.iter(f"{SVG}text")]
    ranks = [text.split()[1] for text in texts if re.match(r"rank \d+ +(no )?GPU", text)]
    assert ranks == [str(number) for number in range(64)]
    assert "and 936 more ranks: launch plan lists them all" in texts
    _, _, width, height = map(float, picture.get("viewBox", "").split())
    for path in picture.iter(f"{SVG}path"):
        places = re.findall(r"[ML] (-?[\d.]+) (-?[\d.]+)", path.get("d", ""))
        assert all(-1 <= float(x) <= width + 1 and -1 <= float(y) <= height + 1 for x, y in places)


@given(st.sets(st.integers(0, 300)))
def test_a_short_list_means_the_same(numbers: set[int]) -> None:
    assert parse_cpulist(shorten_cpulist(numbers)) == numbers
