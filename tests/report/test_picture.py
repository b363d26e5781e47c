"""The picture of a machine with its ranks, as the SVG shows it."""

import re
from dataclasses import replace
from xml.etree import ElementTree

import pytest

from launcher.cli.topo import number_classes
from launcher.plan.model import Machine, Plan, Request
from launcher.plan.planner import plan
from launcher.report.machine_picture import render_machine
from launcher.report.rank_colours import PALETTE, find_colour, lighten
from tests.report import full_machines

SVG = "{http://www.w3.org/2000/svg}"
MARKS = {
    "not allowed: outside this job's cpuset",
    "isolated at boot, left alone",
    "no rank's",
    "DataLoader workers of rank 0 alone",
}
MAKERS = {"hybrid": full_machines.hybrid, "huge": full_machines.huge, "odd": full_machines.odd}
REQUESTS = {
    "exclusive": Request(),
    "none": Request(binding="none"),
    "numa": Request(binding="numa"),
    "crowded": Request(nproc_per_node=40),
    "reserved": Request(reserve_cores=3),
}


def make(name: str) -> Machine:
    return MAKERS[name]() if name in MAKERS else full_machines.lab(name)


def draw(placed: Plan) -> ElementTree.Element:
    picture = render_machine(placed, number_classes(placed.machine), "a note", "svg")
    return ElementTree.fromstring(picture)


def list_texts(picture: ElementTree.Element) -> list[str]:
    return [text.text or "" for text in picture.iter(f"{SVG}text")]


def read_fills(picture: ElementTree.Element, kind: str) -> dict[str, list[str]]:
    """The colours of each PU or device that ranks have, by its name; one that is drawn twice fails."""
    found: dict[str, list[str]] = {}
    for group in picture.iter(f"{SVG}g"):
        if name := re.fullmatch(rf"{kind}(.*)-(\d+)", group.get("id", "")):
            fills = found.setdefault(name[1], [])
            assert int(name[2]) == len(fills)
            (path,) = group
            fills.append(re.findall(r"fill: (#\w+)", path.get("style", ""))[0])
    return found


@pytest.fixture(params=["hybrid", "odd", "huge", "dgx-a100", "cpu-only-2s"], scope="module")
def machine(request: pytest.FixtureRequest) -> Machine:
    return make(request.param)


def test_every_pu_is_drawn_once_in_the_colours_of_its_ranks(machine: Machine) -> None:
    for request in REQUESTS if machine.name == "Desktop" else ("exclusive",):
        placed = plan(machine, REQUESTS[request])
        picture = draw(placed)
        found, texts = read_fills(picture, "pu"), list_texts(picture)
        assert set(found) == {str(cpu.id) for cpu in machine.cpus}
        owners: dict[int, set[str]] = {}
        helpers: dict[int, set[str]] = {}
        for rank in placed.ranks:
            for pu in rank.cpus:
                owners.setdefault(pu, set()).add(find_colour(rank.local_rank))
            for pu in rank.worker_cpus - rank.cpus:
                helpers.setdefault(pu, set()).add(lighten(find_colour(rank.local_rank)))
        for name, fills in found.items():
            expected = owners.get(int(name)) or helpers.get(int(name))
            assert set(fills) == expected if expected else not set(fills) & set(PALETTE), name
        for rank in placed.ranks[:256]:
            assert any(text.startswith(f"rank {rank.local_rank} ") for text in texts)
        for gpu in machine.gpus:
            assert any(text.startswith(f"GPU {gpu.index}, {gpu.pci}"[:20]) for text in texts)
        known = [text for text in texts if text.endswith("a note")]
        assert len(known) == 1 and f"{len(machine.cpus)} PU" in known[0]


def test_everything_is_inside_the_picture() -> None:
    picture = draw(plan(make("dgx-h100"), Request()))
    _, _, width, height = map(float, picture.get("viewBox", "").split())
    for path in picture.iter(f"{SVG}path"):
        places = re.findall(r"[ML] (-?[\d.]+) (-?[\d.]+)", path.get("d", ""))
        assert all(-1 <= float(x) <= width + 1 and -1 <= float(y) <= height + 1 for x, y in places)


@pytest.mark.parametrize("name", ["<&>\"'$x$", "\x00\x1b[0m\ufffe\udc80", "表 🚀", "x" * 500, ""])
def test_any_name_can_be_drawn(name: str) -> None:
    machine = full_machines.odd()
    path = ("pci0000:00", f"{name[:40]}.")
    gpus = tuple(replace(gpu, name=name, pci=f"{name[:40]}{gpu.index}", path=path) for gpu in machine.gpus)
    nics = tuple(replace(nic, name=name) for nic in machine.nics)
    placed = plan(replace(machine, name=name, gpus=gpus, nics=nics), Request())
    texts = list_texts(draw(placed))
    assert any(text.startswith("PCI switch") for text in texts)
    if name.isprintable() and 0 < len(name) < 60:
        assert name in texts
    for form, beginning in (("png", b"\x89PNG"), ("pdf", b"%PDF")):
        assert render_machine(placed, number_classes(placed.machine), "", form).startswith(beginning)


def test_the_nic_of_a_rank_carries_its_colour() -> None:
    placed = plan(full_machines.lab("dgx-h100"), Request())
    ranks = (replace(placed.ranks[0], nic="mlx5_3"), *(replace(rank, nic=None) for rank in placed.ranks[1:]))
    assert read_fills(draw(replace(placed, ranks=ranks)), "nic") == {"NIC mlx5_3": [find_colour(0)]}


def test_the_legend_explains_the_marks_that_occur() -> None:
    def read_marks(name: str, request: Request) -> set[str]:
        return set(list_texts(draw(plan(make(name), request)))) & MARKS

    assert read_marks("cpu-only-2s", Request()) == set()
    assert read_marks("cpu-only-2s", Request(reserve_cores=1)) == {"no rank's"}
    assert read_marks("odd", Request()) == {
        "not allowed: outside this job's cpuset",
        "isolated at boot, left alone",
    }
    assert read_marks("dgx-a100", Request()) == {"DataLoader workers of rank 0 alone"}


def test_a_legend_of_many_ranks_ends() -> None:
    texts = list_texts(draw(plan(full_machines.hybrid(), Request(nproc_per_node=1000))))
    ranks = [text.split()[1] for text in texts if re.match(r"rank \d+ +(no )?GPU", text)]
    assert ranks == [str(number) for number in range(256)]
    assert "and 744 more ranks: launch plan lists them all" in texts
