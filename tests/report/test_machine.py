"""`launch topo`: the tree, the picture, JSON and snapshots, and what goes wrong with files."""

import io
import json
import os
import re
import shlex
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from launcher.config.words import quote_value
from launcher.plan.model import (
    Cpu,
    Gpu,
    Machine,
    Nic,
    NumaNode,
    Plan,
    Request,
    machine_to_json,
    parse_machine,
)
from launcher.plan.planner import plan
from launcher.report.charts import draw_machine
from launcher.report.machine import print_topology
from tests.plan.lab_machines import NAMES, ask, fsroot, load
from tests.probe.machine_trees import short_lived
from tests.report import full_machines
from tests.seam import Launch, Result, drop_powers, in_shell, run_outside

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
        "memory of a GPU": (gb200, "NUMANode 10  186 GiB  no CPUs, GPU or expansion memory"),
        "packages of a virtual machine are in its one node": (
            Machine(virtual, (near,), (), everything, frozenset({0}), memory_kib=1 << 20),
            "64 packages, 1 NUMA node, 64 cores, 64 PUs\n└── NUMANode 0  1 GiB  64 cores  PUs 0-63\n",
        ),
        "a part is allowed": (
            replace(dgx, allowed_cpus=dgx.allowed_cpus - {5}),
            "4 x L3 32 MiB  16 cores  PUs 0-15,128-143  (allowed 0-4,6-15,128-143)\n",
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


def read_picture(placed: Plan) -> tuple[dict[int, str], list[str]]:
    """The colour of each PU in a picture, and all texts."""
    picture = ElementTree.fromstring(draw_machine(placed, "a note", "svg"))
    texts = ["".join(text.itertext()) for text in picture.iter(f"{SVG}text")]
    fills = [
        re.findall(r"fill: (#\w+)", path.get("style", ""))[0]
        for group in picture.iter(f"{SVG}g")
        if group.get("id", "").startswith("QuadMesh")
        for path in group
    ]
    labels = [text for text in texts if re.fullmatch(r"([Rw][\d,+-]+:)?\d+", text)]
    pus = [int(label.rpartition(":")[2]) for label in labels]
    assert len(pus) == len({*pus}), "a PU is drawn twice"
    return dict(zip(pus, fills, strict=True)), texts


@pytest.mark.parametrize(
    ("name", "request_", "marks"),
    [
        ("hybrid", ask(nproc_per_node=40), []),
        ("odd", ask(), ["not allowed: outside this job's cpuset", "isolated at boot, left alone"]),
        ("dgx-a100", ask(), ["light: cores of a rank's DataLoader workers alone"]),
        ("cpu-only-2s", ask(reserve_cores=1), ["no rank's"]),
        ("huge", ask(binding="numa"), []),
    ],
)
def test_every_pu_is_drawn_once_in_the_colour_of_its_rank(
    name: str, request_: Request, marks: list[str]
) -> None:
    machine = make(name)
    placed = plan(machine, request_)
    fills, texts = read_picture(placed)
    assert set(fills) == {cpu.id for cpu in machine.cpus}
    colours: dict[tuple[int, str], set[str]] = {}
    for pu, fill in fills.items():
        owners = [rank.local_rank for rank in placed.ranks if pu in rank.cpus]
        workers = [rank.local_rank for rank in placed.ranks if pu in rank.worker_cpus]
        kind = (min(owners) % 9, "") if owners else (min(workers, default=-1) % 9, "light")
        if not owners and (pu in machine.isolated or not workers):
            kind = (-1, "")
            assert fill in ("#ffffff", "#e0e0e0", "#c0c0c0")
        colours.setdefault(kind, {fill}).add(fill)
    shown = [fill for kind, fill in sorted(colours.items()) if kind != (-1, "")]
    assert all(len(fill) == 1 for fill in shown), "a rank has a colour, and its workers another one"
    assert len(set.union(*shown)) == len(shown), "no two ranks, of nine, have the same"
    for rank in placed.ranks:
        for device in (f"{rank.gpu.pci}," if rank.gpu else "", f"NIC {rank.nic}," if rank.nic else ""):
            assert not device or any(re.match(r"R[\d,+-]+: ", text) and device in text for text in texts)
        assert any(text.startswith(f"rank {rank.local_rank} ") for text in texts)
    assert next(text for text in texts if text.endswith("a note")).count(f"{len(machine.cpus)} PU") == 1
    every = ("not allowed: outside", "isolated at boot", "light: cores of", "no rank's")
    assert [text for text in texts if text.startswith(every)] == marks


@pytest.mark.parametrize("name", ["<&>\"'$x$ 表 🚀", "\x00\x1b[0m\ufffe\udc80" + "x" * 500])
def test_any_name_can_be_drawn(name: str) -> None:
    machine = full_machines.read("odd")
    path = ("pci0000:00", f"{name[:40]}.")
    gpus = tuple(replace(gpu, name=name, pci=f"{name[:40]}{gpu.index}", path=path) for gpu in machine.gpus)
    nics = tuple(replace(nic, name=name) for nic in machine.nics)
    placed = plan(replace(machine, name=name, gpus=gpus, nics=nics), ask())
    texts = read_picture(placed)[1]
    assert any(name in text for text in texts) or not name.isprintable()
    for form, beginning in (("png", b"\x89PNG"), ("pdf", b"%PDF")):
        assert draw_machine(placed, "", form).startswith(beginning)


def test_a_legend_of_many_ranks_ends() -> None:
    document = draw_machine(plan(full_machines.read("hybrid"), ask(nproc_per_node=1000)), "", "svg")
    texts = ["".join(text.itertext()) for text in ElementTree.fromstring(document).iter(f"{SVG}text")]
    ranks = [text.split()[1] for text in texts if re.match(r"rank \d+ +\w", text)]
    assert ranks == [str(number) for number in range(64)]
    assert "and 936 more ranks: launch plan lists them all" in texts


@given(st.sets(st.integers(0, 299)))
def test_a_short_list_means_the_same(numbers: set[int]) -> None:
    """It is shown of a core with 301 threads, of which the job may use some."""
    odd = full_machines.read("odd")
    cpus = tuple(replace(odd.cpus[0], id=number) for number in range(301))
    shown = show(replace(odd, cpus=cpus, allowed_cpus=frozenset(numbers)), width=2000)
    read = set()
    for part in filter(None, shown.partition(" of 301 PUs (")[2].partition(")")[0].split(",")):
        span, _, step = part.partition(":1/")
        low, _, high = span.partition("-")
        read |= {*range(int(low), int(high or low) + 1, int(step or 1))}
    assert read == numbers


# The command: JSON, snapshots, pictures, and what goes wrong with files


@pytest.fixture(scope="module")
def root() -> Iterator[Path]:
    with short_lived() as folder:
        fsroot.materialize(load("dgx-h100"), folder)
        yield folder


@pytest.fixture
def odd(here: Path) -> str:
    """A snapshot of an odd machine, as an override."""
    path = here.parent / "odd.json"
    path.write_text(json.dumps(machine_to_json(full_machines.read("odd"))))
    return f"machine.snapshot={path}"


def test_json_is_the_snapshot_and_a_snapshot_of_a_snapshot_is_the_same(
    launch: Launch, odd: str, here: Path
) -> None:
    done = launch("topo", "save=a.json", "format=json", odd)
    assert done.code == 0 and done.err.startswith("launch: the machine is saved in a.json; ")
    assert done.err.count("\n") == 1 and done.out == (here / "a.json").read_text()
    assert launch("topo", "format=json", odd) == Result(0, done.out, "")
    assert parse_machine(done.out) == full_machines.read("odd")
    assert launch("topo", "save=b.json", "machine.snapshot=a.json").code == 0
    assert (here / "b.json").read_text() == done.out


def test_a_snapshot_is_planned_as_the_machine_is(launch: Launch, root: Path, here: Path) -> None:
    here_plan = launch("plan", "format=json", f"machine.root={root}")
    done = launch("topo", f"machine.root={root}", "save=dgx h100.json")
    assert (done.code, done.out) == (0, "")
    told, _, use = done.err.partition("; plan for it anywhere: ")
    assert told == "launch: the machine is saved in dgx h100.json"
    words = shlex.split(use)[1:]
    assert launch(*words, "format=json").out == here_plan.out
    assert (here / "dgx h100.json").read_text() == launch("topo", "format=json", f"machine.root={root}").out


def test_the_command_that_is_shown_reads_the_file(launch: Launch, odd: str) -> None:
    planned = launch("plan", odd, "format=json").out
    for name in ("it's.json", "a,b [x] $c=\\.json", "日本.json", "~.json"):
        done = launch("topo", odd, "save=" + quote_value(name))
        assert done.err.startswith(f"launch: the machine is saved in {name}; "), done
        words = shlex.split(done.err.partition("; plan for it anywhere: ")[2])[1:]
        assert launch(*words, "format=json").out == planned, name


def test_only_a_snapshot_or_an_empty_file_is_replaced_and_modes_are_kept(
    launch: Launch, odd: str, here: Path
) -> None:
    """A new one can be read by the team."""
    (here / "a.json").write_text('{"kind": "machine", "schema": 99}')
    (here / "a.json").chmod(0o640)
    (here / "link.json").symlink_to("a.json")
    before = os.umask(0o022)
    try:
        (here / "empty.json").touch()
        assert [launch("topo", f"save={name}.json", odd).code for name in ("link", "new", "empty")] == [0] * 3
    finally:
        os.umask(before)
    for name, mode in (("a", 0o640), ("new", 0o644), ("empty", 0o644)):
        assert parse_machine((here / f"{name}.json").read_text()) == full_machines.read("odd")
        assert (here / f"{name}.json").stat().st_mode & 0o777 == mode, name
    assert (here / "link.json").is_symlink()
    for text in ("a poem", "[]", '{"kind": "run"}'):
        (here / "a.json").write_text(text)
        launch("topo", "save=a.json", odd).assert_error(2, "save=a.json is there already")
        assert (here / "a.json").read_text() == text
    assert len(list(here.iterdir())) == 4


@pytest.mark.parametrize("word", ["save=closed/a.svg", "image=closed/a.svg"])
def test_a_folder_without_permission(word: str, odd: str, here: Path) -> None:
    (here / "closed").mkdir(mode=0o500)
    done = run_outside(["topo", word, odd], here, preexec_fn=drop_powers)
    done.assert_error(2, f"{word} cannot be written (Permission denied): name a file")


def test_a_disk_that_fills_leaves_the_earlier_snapshot(launch: Launch, odd: str, here: Path) -> None:
    """A limit on the size of files stands for the disk: SIGXFSZ ignored, so that write fails with EFBIG."""
    assert launch("topo", "save=a.json", odd).code == 0
    before = (here / "a.json").read_text()
    done = in_shell(f"trap '' XFSZ; ulimit -f 1; launch topo save=a.json image=a.svg {odd}", here)
    assert (done.code, done.out) == (3, "")
    assert "cannot be written (File too large): name a file" in done.err.splitlines()[-1]
    assert (here / "a.json").read_text() == before
    assert sorted(path.name for path in here.iterdir()) == ["a.json"]


def test_a_device_is_written_to_and_not_replaced(odd: str, here: Path) -> None:
    done = run_outside(["topo", "save=/dev/stdout", odd], here)
    assert done.code == 0
    assert parse_machine(done.out) == full_machines.read("odd")


@pytest.mark.parametrize("name", ["m.svg", "m.png", "M.PNG", "m.pdf"])
def test_a_picture(name: str, launch: Launch, odd: str, here: Path) -> None:
    (here / name).write_text("an earlier picture")
    done = launch("topo", f"image={name}", "nproc_per_node=4", "binding=numa", odd)
    assert (done.code, done.out) == (0, "")
    assert done.err.splitlines()[-1] == f"launch: the machine is drawn in {name}, with the ranks on it"
    assert "launch: warning: numa_node of 0000:17:00.1 is -1\n" in done.err
    beginning = {"png": b"\x89PNG\r\n", "pdf": b"%PDF-"}.get(name[-3:].lower())
    if beginning:
        assert (here / name).read_bytes().startswith(beginning)
    else:
        text = "".join(ElementTree.parse(here / name).getroot().itertext())
        assert "R3" in text and "R4" not in text and "4 ranks" in text and "binding=numa" in text


def test_a_picture_without_matplotlib(
    launch: Launch, odd: str, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("launcher.report.charts.DRAWS", False)
    launch("topo", "image=a.svg", odd).assert_error(
        3, "needs matplotlib", "pip install 'launch-ranks[report]'"
    )
    assert not list(here.iterdir())


def test_a_placement_that_falls_short_is_drawn_unless_strict(launch: Launch, odd: str, here: Path) -> None:
    assert launch("topo", "image=a.svg", odd).code == 0
    launch("topo", "image=b.svg", "binding.strict=true", odd).assert_error(3, "local rank")
    assert [path.name for path in here.iterdir()] == ["a.svg"]


def test_this_machine_on_an_ascii_terminal_and_a_pipe_that_ends(odd: str, here: Path) -> None:
    ascii_terminal = {"COLUMNS": "80", "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    done = run_outside(["topo"], here, ascii_terminal)
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith("Machine  ") and done.out.isascii() and "\n`-- " in done.out
    assert f"may use {'all ' if len(os.sched_getaffinity(0)) == os.cpu_count() else ''}" in done.out
    piped = in_shell(f"launch topo {odd} | head -n 1", here)
    assert piped.out.startswith("Machine  R750") and piped.err == ""
