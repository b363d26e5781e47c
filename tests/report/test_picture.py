"""The picture of a machine with its ranks: what the layout holds to, and what the writers make of it."""

import io
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations
from xml.etree import ElementTree

import pytest
from PIL import Image

from launcher.cli.topo import number_classes
from launcher.plan.model import Machine, Plan, Request
from launcher.plan.planner import plan
from launcher.report.machine_picture import lay_out
from launcher.report.picture import NAMESPACE, Box, arrange, measure_text, render_png, render_svg, walk_boxes
from launcher.report.rank_colours import find_colour, lighten
from tests.plan.lab_machines import NAMES
from tests.report import full_machines

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


def draw(placed: Plan) -> Box:
    return lay_out(placed, number_classes(placed.machine), "a note", measure_text)


def list_kind(picture: Box, kind: str) -> list[Box]:
    return [box for box, _, _ in walk_boxes(picture) if box.kind == kind]


def read_pus(picture: Box) -> dict[int, Box]:
    """The box of each PU; one that is drawn twice fails."""
    boxes = list_kind(picture, "pu")
    found = {int(box.texts[0].text): box for box in boxes}
    assert len(found) == len(boxes)
    return found


def read_colours(box: Box) -> set[str]:
    return {*box.fills, *(fill for part in box.parts for fill in part.fills)}


@pytest.fixture(params=[*NAMES, *MAKERS], scope="module")
def machine(request: pytest.FixtureRequest) -> Machine:
    return make(request.param)


@pytest.fixture(params=REQUESTS, scope="module")
def placed(request: pytest.FixtureRequest, machine: Machine) -> Plan:
    return plan(machine, REQUESTS[request.param])


@pytest.fixture(scope="module")
def picture(placed: Plan) -> Box:
    return draw(placed)


def test_every_box_and_text_is_inside_its_parent(picture: Box) -> None:
    for box, _, _ in walk_boxes(picture):
        for part in box.parts:
            assert part.x >= 0 and part.x + part.width <= box.width, (box.kind, part)
            assert part.y >= 0 and part.y + part.height <= box.height, (box.kind, part)
        for text in box.texts:
            assert 0 <= text.x <= text.x + text.width <= box.width, (box.kind, text)
            assert text.size <= text.y + 3 and text.y <= box.height, (box.kind, text)
            assert text.width == measure_text(text.text, text.size) > 0


def test_siblings_do_not_overlap(picture: Box) -> None:
    for box, _, _ in walk_boxes(picture):
        for one, other in combinations(box.parts, 2):
            beside = one.x + one.width <= other.x or other.x + other.width <= one.x
            above = one.y + one.height <= other.y or other.y + other.height <= one.y
            assert beside or above, (box.kind, one, other)


def test_headings_are_above_what_is_inside(picture: Box) -> None:
    for box, _, _ in walk_boxes(picture):
        if box.kind in ("package", "node", "cache", "class", "switch") and box.texts:
            assert all(part.y > text.y for part in box.parts for text in box.texts)


def test_every_pu_is_drawn_once_in_the_colours_of_its_ranks(picture: Box, placed: Plan) -> None:
    pus = read_pus(picture)
    assert pus.keys() == {cpu.id for cpu in placed.machine.cpus}
    for pu, box in pus.items():
        owners = {find_colour(rank.local_rank) for rank in placed.ranks if pu in rank.cpus}
        workers = {lighten(find_colour(rank.local_rank)) for rank in placed.ranks if pu in rank.worker_cpus}
        free = {"#e8e8e8"} if box.hatched else {"#c8c8c8"} if pu in placed.machine.isolated else set()
        assert read_colours(box) - {"#ffffff"} == (owners or workers or free)
        assert box.hatched == (pu not in placed.machine.allowed_cpus and not owners | workers)


def test_every_core_is_drawn_once_with_its_pus(picture: Box, placed: Plan) -> None:
    drawn = {tuple(sorted(read_pus(core))): core for core in list_kind(picture, "core")}
    cores: dict[int, list[int]] = {}
    for cpu in placed.machine.cpus:
        cores.setdefault(cpu.core, []).append(cpu.id)
    assert drawn.keys() == {tuple(sorted(pus)) for pus in cores.values()}
    assert len(list_kind(picture, "core")) == len(cores)


def test_every_gpu_and_rank_is_named(picture: Box, placed: Plan) -> None:
    cards = list_kind(picture, "gpu")
    assert len(cards) == len(placed.machine.gpus)
    for gpu in placed.machine.gpus:
        (card,) = (card for card in cards if card.texts[0].text.endswith(gpu.pci))
        users = {find_colour(r.local_rank) for r in placed.ranks if r.gpu and r.gpu.pci == gpu.pci}
        bands = [band for band in card.parts if band.kind == "band"]
        assert {colour for band in bands for colour in read_colours(band)} - {"#ffffff"} == users
    swatches = {box.texts[0].text for box in list_kind(picture, "swatch") if box.texts}
    assert swatches >= {f"R{rank.local_rank}" for rank in placed.ranks}


def test_the_picture_is_filled(picture: Box) -> None:
    """The machine's boxes take most of it, and it is neither a strip nor a tower."""
    (machine,) = list_kind(picture, "machine")
    (content,) = machine.parts
    inside = sum(part.width * part.height for part in content.parts)
    assert inside > 0.6 * machine.width * machine.height
    assert 0.4 < machine.width / machine.height < 5


def test_the_svg_is_the_picture(picture: Box) -> None:
    root = ElementTree.fromstring(render_svg(picture))
    assert (root.get("width"), root.get("height")) == (str(picture.width), str(picture.height))
    texts = [element.text for element in root.iter(f"{{{NAMESPACE}}}text")]
    assert texts == [text.text for box, _, _ in walk_boxes(picture) for text in box.texts]
    edges = [element.get("class") for element in root.iter(f"{{{NAMESPACE}}}rect") if element.get("class")]
    assert edges.count("pu") == len(list_kind(picture, "pu"))


def list_pixels(picture: Box, kind: str) -> Iterator[tuple[Box, int, int]]:
    for box, x, y in walk_boxes(picture):
        if box.kind == kind:
            yield box, x + 2, y + 2


@pytest.mark.parametrize("name", ["dgx-a100", "odd", "huge"])
def test_the_png_is_the_picture(name: str) -> None:
    picture = draw(plan(make(name), Request()))
    with Image.open(io.BytesIO(render_png(picture))) as image:
        assert (image.format, image.size) == ("PNG", (picture.width, picture.height))
        plain = [
            (box, x, y) for box, x, y in list_pixels(picture, "pu") if len(box.fills) == 1 and not box.hatched
        ]
        assert len(plain) > 30
        pixels = image.convert("RGB")
        for box, x, y in plain:
            red, green, blue = pixels.crop((x, y, x + 1, y + 1)).tobytes()
            assert f"#{red:02x}{green:02x}{blue:02x}" == box.fills[0]


def test_hatching_is_in_both_forms() -> None:
    picture = draw(plan(full_machines.odd(), Request()))
    hatched = [(x, y) for box, x, y in walk_boxes(picture) if box.hatched and box.kind == "pu"]
    assert len(hatched) == 80
    rects = ElementTree.fromstring(render_svg(picture)).iter(f"{{{NAMESPACE}}}rect")
    assert sum(rect.get("fill") == "url(#hatching)" for rect in rects) == 80 + 1  # and the legend's
    with Image.open(io.BytesIO(render_png(picture))) as image:
        x, y = hatched[0]
        colours = image.crop((x + 1, y + 1, x + 20, y + 15)).getcolors() or []
        assert {(0xE8, 0xE8, 0xE8), (0xC4, 0xC4, 0xC4)} <= {colour for _, colour in colours}


@pytest.mark.parametrize("name", ["<&>\"'", "\x00\x1b[0m\ufffe\udc80", "表 🚀", "x" * 500, ""])
def test_any_name_can_be_drawn(name: str) -> None:
    machine = full_machines.odd()
    path = ("pci0000:00", f"{name[:40]}.")
    gpus = tuple(replace(gpu, name=name, pci=f"{name[:40]}{gpu.index}", path=path) for gpu in machine.gpus)
    nics = tuple(replace(nic, name=name) for nic in machine.nics)
    picture = draw(plan(replace(machine, name=name, gpus=gpus, nics=nics), Request()))
    assert list_kind(picture, "switch")
    root = ElementTree.fromstring(render_svg(picture))
    title = next(root.iter(f"{{{NAMESPACE}}}text"))
    if name.isprintable() and 0 < len(name) < 60:
        assert title.text == name
    assert render_png(picture).startswith(b"\x89PNG")
    assert picture.width < 4000


def test_the_nic_of_a_rank_carries_its_colour() -> None:
    placed = plan(full_machines.lab("dgx-h100"), Request())
    ranks = (replace(placed.ranks[0], nic="mlx5_3"), *(replace(rank, nic=None) for rank in placed.ranks[1:]))
    cards = list_kind(draw(replace(placed, ranks=ranks)), "nic")
    banded = {card.texts[0].text: card.parts[0].fills for card in cards if card.parts}
    assert banded == {"NIC mlx5_3": (find_colour(0),)}


def test_the_legend_explains_the_marks_that_occur() -> None:
    def read_rows(name: str, request: Request) -> list[str]:
        rows = list_kind(draw(plan(make(name), request)), "row")
        return [row.texts[0].text for row in rows if not row.texts[0].text.startswith("rank ")]

    assert read_rows("cpu-only-2s", Request()) == []
    assert read_rows("cpu-only-2s", Request(reserve_cores=1)) == ["no rank's"]
    assert read_rows("odd", Request()) == [
        "not allowed: outside this job's cpuset",
        "isolated at boot, left alone",
    ]
    assert read_rows("dgx-a100", Request()) == ["DataLoader workers of rank 0 alone"]


def test_a_legend_of_many_ranks_ends() -> None:
    picture = draw(plan(full_machines.hybrid(), Request(nproc_per_node=1000)))
    texts = [text.text for row in list_kind(picture, "row") for text in row.texts]
    assert "rank 255" in texts and "rank 256" not in texts
    assert "and 744 more ranks: launch plan lists them all" in texts


def test_boxes_are_arranged_without_empty_cells_where_that_is_near_the_ratio() -> None:
    def count_columns(number: int) -> int:
        group = arrange([Box("core", 30, 50)] * number)
        return len({part.x for part in group.parts})

    assert [count_columns(number) for number in (1, 4, 16, 28, 72)] == [1, 4, 8, 7, 12]
