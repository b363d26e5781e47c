"""The placement table and the summary, as people read them."""

import io
import itertools
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from launcher.plan.model import Cpu, Gpu, Machine, Memory, Nic, NumaNode, Plan, RankPlan, warn
from launcher.plan.planner import plan
from launcher.report.placement import print_placement
from tests.plan.lab_machines import ask
from tests.report import full_machines
from tests.seam import Launch, run_inside


def make_machine(cores: int, nodes: int = 2, packages: int = 2, threads: int = 1) -> Machine:
    """Cores in blocks over the nodes, siblings far."""
    cpus = [
        Cpu(core + t * cores, core, core * packages // cores, core * nodes // cores, 0)
        for t in range(threads)
        for core in range(cores)
    ]
    places = tuple(NumaNode(at, 2**20, True, ()) for at in range(nodes))
    every = frozenset(cpu.id for cpu in cpus)
    gpus = tuple(Gpu(at, f"GPU-{at}", f"0000:{at:02x}:00.0", 0, name="H100") for at in range(2))
    return Machine(tuple(cpus), places, gpus, every, frozenset(range(nodes)), name="box")


SMALL = make_machine(16)
FIRST = RankPlan(
    0,
    SMALL.gpus[1],
    frozenset(range(4)),
    frozenset(range(6)),
    Memory("preferred", frozenset({1})),
    2,
    3,
    notes=("[bold]why[/bold]",),
)
SECOND = RankPlan(1, None, frozenset({8}), frozenset({8}), Memory("default"), 10, 1)
PLAN = Plan(SMALL, (FIRST, SECOND))


def show(
    placed: Plan, *, width: int = 160, encoding: str = "utf-8", explain: bool = False, full: bool = False
) -> list[str]:
    """The lines that a terminal of this width and encoding shows."""
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding=encoding)
    console = Console(file=file, width=width, force_terminal=True, color_system=None)
    print_placement(console, placed, explain=explain, full=full)
    file.flush()
    lines = raw.getvalue().decode(encoding).splitlines()
    assert max(map(len, lines)) <= width
    return [line.rstrip() for line in lines]


def test_a_row_for_each_rank() -> None:
    assert show(PLAN) == [
        "rank  gpu  pci           node  node 0   node 1    cpus  workers also on  memory  workers  threads",
        "   0  1    0000:01:00.0  0     ████▒▒·· ········  0-3   4-5              node 1        2        3",
        "   1  -    -             1     ········ █·······  8     -                any          10        1",
    ]


def test_marks_heading_and_legend() -> None:
    barred = replace(SMALL, allowed_cpus=SMALL.allowed_cpus - {14, 15}, isolated=frozenset({13}))
    bars = [line.split()[4:6] for line in show(replace(PLAN, machine=barred), encoding="ascii")[1:]]
    assert bars == [["####++..", ".....xxx"], ["........", "#....xxx"]]
    machine = replace(SMALL, allowed_cpus=SMALL.allowed_cpus - {15}, nics=(Nic("mlx5_0", "", 0),))
    lines = show(replace(PLAN, machine=machine), full=True)
    assert lines[0] == (
        "box, 2 packages, 2 NUMA nodes, 16 cores, 16 PUs, 2 x H100; "
        "this job may use 15 of 16 PUs (0-14) and the memory of all NUMA nodes"
    )
    assert lines[-1] == (
        "█ own cores  ▒ its workers' alone  · not this rank's  x not for this job  above: NUMA nodes"
    )
    assert len(show(replace(PLAN, machine=machine))) == len(lines) - 2


@pytest.mark.parametrize("cores", [32, 112, 512])
def test_ranks_sit_side_by_side_at_every_width(cores: int) -> None:
    machine = replace(make_machine(cores, nodes=4, threads=2), gpus=())
    for width, ranks in itertools.product((80, 120, 160, 200), (1, 2, 8, 16)):
        lines = show(plan(machine, ask(nproc_per_node=ranks)), width=width)
        bars = [[at for at, mark in enumerate(line) if mark == "█"] for line in lines[1 : ranks + 1]]
        places = [at for bar in bars for at in bar]
        assert len(bars) == ranks and all(bars)
        assert places == sorted(set(places)), "no two ranks in one cell"
        assert max(map(len, bars)) - min(map(len, bars)) <= 1


def test_a_narrow_terminal_keeps_what_counts_most() -> None:
    placed = plan(full_machines.lab("dgx-a100"), ask(nproc_per_node=8))
    columns = {width: show(placed, width=width)[0].split() for width in (30, 50, 80, 120, 200)}
    assert [word for word in columns[80] if word.isalpha()] == [
        *("rank", "gpu", "pci", "node", "workers", "threads", "nic")
    ]
    assert {"cpus", "memory"} <= set(columns[120]) and {"cpus", "memory"} <= set(columns[200])
    assert {"rank", "gpu", "workers"} <= set(columns[50]) and "pci" not in columns[50]
    assert "rank" in columns[30]
    assert "memory on the rank's node" in " ".join(show(placed, width=80, full=True)[-2:])


def test_what_is_out_of_the_ordinary() -> None:
    assert "memory" in show(PLAN, width=60)[0], "memory from elsewhere is shown however narrow it is"
    machine = make_machine(512)
    lone = RankPlan(0, None, frozenset({300}), machine.allowed_cpus, Memory("default"), 2, 1)
    assert show(Plan(machine, (lone,)), width=70)[1].count("█") == 1, "a rank with part of a cell is seen"
    mig = replace(FIRST, gpu=replace(SMALL.gpus[0], uuid="MIG-12345678-9abc"))
    assert "MIG-12345678" in show(Plan(SMALL, (mig, SECOND)))[1]
    bare = Machine((), (), (), frozenset(), frozenset())
    assert [line.split()[0] for line in show(Plan(bare, (FIRST, SECOND)))] == ["rank", "0", "1"]
    odd = tuple(Cpu(at, at, at % 2, at % 4, 0) for at in range(16))
    rank = RankPlan(0, None, frozenset({2, 6}), frozenset({2, 6}), Memory("default"), 1, 1)
    titles, row = show(Plan(replace(make_machine(16), cpus=odd), (rank,)))
    assert "0    2    1    3   " in titles and "···· ██·· ···· ····" in row, "nodes are drawn by package"


def test_warnings_and_explanations_are_no_markup_and_a_pipe_has_whole_lines() -> None:
    assert "why" not in "".join(show(PLAN))
    assert show(Plan(SMALL, (FIRST,)), explain=True)[-1] == "rank 0: [bold]why[/bold]"
    warned = replace(PLAN, warnings=(warn("machine", text=f"node [0] has [red]no {'w' * 400}"),))
    pipe, terminal = io.StringIO(), io.StringIO()
    print_placement(Console(file=pipe, width=160), warned, full=True)
    assert pipe.getvalue().splitlines()[-1] == f"warning: node [0] has [red]no {'w' * 400}"
    assert "\x1b" not in pipe.getvalue()
    print_placement(Console(file=terminal, width=160, force_terminal=True, color_system="standard"), PLAN)
    assert "\x1b[32m████" in terminal.getvalue()


def test_launch_plan_prints_heading_and_legend_and_a_dry_run_neither(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shown = run_inside(["plan", "nproc_per_node=2"])
    assert "; this job may use " in shown.out.splitlines()[0]
    assert "own cores" in shown.out
    (tmp_path / "x.py").write_text("")
    dry = run_inside(["nproc_per_node=2", "dry_run=true", "--", "x.py"])
    assert dry.code == 0, dry
    assert "own cores" not in dry.err and "this job may use" not in dry.err
    assert dry.err.splitlines()[0].startswith("rank")


WORDS = ("plan", "machine=dgx_a100", "fit.check=off")


def read_rows(text: str) -> dict[str, list[list[str]]]:
    """The rows of the table by variable: value, ranks, who set it, why."""
    head, *lines = text[text.index("variable ") :].split("\n\n", maxsplit=1)[0].splitlines()
    starts = [head.index(title) for title in ("variable", "value", "ranks", "set by", "why")]
    found: dict[str, list[list[str]]] = {}
    for line in lines:
        cells = [line[a:b].strip() for a, b in zip(starts, [*starts[1:], None], strict=True)]
        found.setdefault(cells[0], []).append(cells[1:])
    return found


def test_the_plan_has_a_line_on_variables_and_explain_their_table(
    launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What all ranks have is one row, what differs a row for each value; odd values stay on their line."""
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    given = ("env.HF_TOKEN=hf-secret", "env.URL=http://me:secret@host/", "binding.nic=true")
    odd = ("env.ODD=two\nlines\x1b[31m [bold]x[/bold]", f"env.LONG={'y' * 700}")
    short, long = (launch(*WORDS, *given, *odd, *more).out for more in ((), ("explain=true",)))
    assert "4 by the configuration, 1 by you (explain=true lists them)" in short
    assert "set by" not in short and "explain=true" not in long and "secret" not in short + long
    assert (
        "two\\nlines\\x1b[31m [bold]x[/bold]" in long and 480 < long.count("y") < 600 and "\x1b" not in long
    )
    rows = read_rows(long)
    assert rows["HF_TOKEN"] == [["***", "all", "the configuration", ""]]
    assert rows["URL"] == [["http://***@host/", "all", "the configuration", ""]]
    assert rows["OMP_NUM_THREADS"] == [["3", "all", "you", "kept"]]
    nics = rows["NCCL_IB_HCA"]
    assert [ranks for _, ranks, *_ in nics] == [str(rank) for rank in range(8)]
    assert len({value for value, *_ in nics}) == 8
    assert {(who, why) for *_, who, why in nics} == {("the plan", "binding.nic=true")}
    shared = read_rows(launch(*WORDS, "explain=true", "binding.nic=true", "nproc_per_node=16").out)
    assert [ranks for _, ranks, *_ in shared["NCCL_IB_HCA"]] == [f"{rank},{rank + 8}" for rank in range(8)]
