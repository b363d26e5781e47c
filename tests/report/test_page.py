"""The page of a run: valid, self-contained, all text in it escaped, nothing missing, small for large jobs."""

import json
import re
import shutil
import tempfile
from collections.abc import Callable
from functools import cached_property, partial
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree.ElementTree import Element

import html5lib
import pytest

from tests.runs.recordings import DATA, restore
from tests.seam import run_inside

EVIL = (
    "</title></style></script><script>alert(1)</script>\"'><img src=//evil.example/x onerror=a>&amp;"
    "\x00\x1b]0;title\x07\u202e\ud800{{ 7*7 }} $\\frac{1}{0}$"
)
SECTIONS = ["summary", "warnings", "hangs", "steps", "time", "gpu", "cpu", "placement", "attempts"]
TABLES = DATA.parent / "report_tables.json"


class Parsed:
    """A page as a browser reads it; what the HTML standard calls a parse error fails."""

    def __init__(self, data: bytes) -> None:
        self.text = data.decode()
        root: Element = html5lib.HTMLParser(strict=True, namespaceHTMLElements=False).parse(self.text)
        self.elements = [element for element in root.iter() if isinstance(element.tag, str)]

    def find(self, *tags: str) -> list[Element]:
        return [element for element in self.elements if element.tag.rpartition("}")[2] in tags]

    @cached_property
    def words(self) -> str:
        return " ".join(" ".join(text for one in self.find("html") for text in one.itertext()).split())

    def assert_harmless(self) -> None:
        """Nothing acts, nothing is loaded, and control characters are not there."""
        assert not self.find("script", "img", "iframe", "object", "embed", "link", "form", "foreignObject")
        for element in self.elements:
            for key, value in element.attrib.items():
                assert not key.startswith("on"), (element.tag, key)
                assert key not in ("src", "srcset", "action", "data")
                assert key.rpartition("}")[2] != "href" or value.startswith("#"), value
                assert "url(" not in value.replace("url(#", ""), value
        assert "@import" not in self.text and not re.search(r"url\((?!#)", self.text)
        policies = [one.get("content", "") for one in self.find("meta") if one.get("http-equiv")]
        assert policies and policies[0].startswith("default-src 'none'; style-src 'unsafe-inline'")
        assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", self.text)


def render(path: Path) -> Parsed:
    """Return the page that `launch report` writes of a run."""
    done = run_inside(["report", str(path)])
    assert done.code == 0, done
    return Parsed((path / "report.html").read_bytes())


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Parsed:
    """The page of a run with everything."""
    return render(restore("full", tmp_path_factory.mktemp("runs")))


def read_tables(page: Parsed) -> dict[str, list[list[str]]]:
    """Return the rows of all tables, by section."""
    return {
        str(section.get("id")): [
            [" ".join(" ".join(cell.itertext()).split()) for cell in row if cell.tag in ("td", "th")]
            for row in section.iter("tr")
        ]
        for section in page.find("section")
    }


def write_tables() -> None:
    """Write what the tables of the recorded run's page have."""
    with tempfile.TemporaryDirectory() as folder:
        found = read_tables(render(restore("full", Path(folder))))
    rows = {name: ",\n  ".join(json.dumps(row) for row in rows) for name, rows in found.items()}
    sections = ",\n ".join(f'"{name}": [\n  {text}\n ]' for name, text in rows.items())
    TABLES.write_text(f"{{\n {sections}\n}}\n")


def test_it_is_html_that_loads_nothing(page: Parsed) -> None:
    page.assert_harmless()
    assert page.find("html")[0].get("lang") == "en"


def test_all_is_there(page: Parsed) -> None:
    assert [section.get("id") for section in page.find("section")] == SECTIONS
    for part in (DATA.parent / "report_words.txt").read_text().splitlines():
        assert part in page.words, part


def test_the_tables_have_what_the_reports_say(page: Parsed) -> None:
    """Rates, percentiles, where time goes, and what happened when; `python -m tests.golden report`."""
    assert read_tables(page) == json.loads(TABLES.read_text())


def test_events_are_marked(page: Parsed) -> None:
    (steps, *_) = [one for one in page.find("section") if one.get("id") == "steps"]
    drawn = [element.text for element in steps.iter() if str(element.tag).endswith("}text")]
    assert {"hangs", "stragglers", "requeues", "time of a step (s)"} <= {*drawn}


def test_pictures_have_words(page: Parsed) -> None:
    known = {element.get("id"): element for element in page.elements if element.get("id")}
    assert len(known) == sum(bool(element.get("id")) for element in page.elements), "an id twice"
    pictures = page.find("svg")
    labels = [picture.get("aria-label", "") for picture in pictures]
    assert {picture.get("role") for picture in pictures} == {"img"} and len(pictures) == 5
    assert labels[0].startswith("The median step takes 0.") and "1 hang, 1 straggler" in labels[0]
    assert labels[1].startswith("All ranks together: compute 48%, waiting for others ")
    assert labels[4].startswith("4 ranks on n0")
    assert all(picture.get("viewBox") and not picture.get("width") for picture in pictures)
    for element in page.elements:
        for key, value in element.attrib.items():
            target = [value[1:]] if key.rpartition("}")[2] == "href" else []
            for name in target + re.findall(r"url\(#([^)]+)\)", value):
                assert name in known, name


def test_headings_are_in_order_and_colours_known(page: Parsed) -> None:
    levels = [int(one.tag[1]) for one in page.find("h1", "h2", "h3", "h4")]
    assert levels[0] == 1 and levels.count(1) == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))
    assert all(one.get("scope") for one in page.find("th"))
    light, dark, _ = re.split(r"@media screen and \(prefers-color-scheme: dark\)|@media print", page.text)
    defined = [set(re.findall(r"(--\w+):", part)) for part in (light, dark.partition("* {")[0])]
    assert defined[0] == defined[1] and set(re.findall(r"var\((--\w+)\)", page.text)) <= defined[0]
    assert len(page.text) < 1_000_000


def change(path: Path, file: str, edit: Callable[[Any], object]) -> None:
    """Change a file of JSON, or each line of one of JSON lines."""
    place = path / file
    lines = place.read_text().splitlines() if file.endswith(".jsonl") else [place.read_text()]
    place.write_text("\n".join(json.dumps(edit(json.loads(line))) for line in lines) + "\n")


def poison(value: Any, key: str = "") -> Any:
    """Replace all words but those that say what a value means."""
    if isinstance(value, dict):
        return {name: poison(item, name) for name, item in value.items()}
    if isinstance(value, list):
        return [poison(item, key) for item in value]
    fixed = ("started", "ended", "kind", "cpus", "worker_cpus", "allowed_cpus", "cores", "marks")
    return EVIL if isinstance(value, str) and key not in fixed else value


def test_what_others_wrote_is_text(tmp_path: Path) -> None:
    path = restore("full", tmp_path)
    for file in path.rglob("*.json*"):
        if not file.name.startswith("plan-"):
            change(path, str(file.relative_to(path)), poison)
    change(path, "manifest.json", lambda found: {**found, "packages": {EVIL: EVIL}})
    (path / "logs/1/rank-0.out").write_bytes(f"{EVIL}\nstep 3/4 loss 1\n".encode("utf-8", "replace"))
    found = render(path)
    found.assert_harmless()
    assert found.words.count("<script>alert(1)</script>") >= 8
    assert "\\x1b]0;title" in found.words or "?]0;title" in found.words


@pytest.mark.parametrize(
    "damage",
    [
        "\x00\xff",
        '{"host": "n0", "node_rank": 0, "nodes": 1, "attempt": 0, "time": 1e300, "number": 1, "interval": -5,'
        ' "ranks": [{"rank": -7, "local_rank": 0, "pid": 0, "attempt": 0, "phase": "training", "step": -1,'
        ' "step_age": -1e300, "p50": 1e300, "p99": -1, "wait_share": 1e9, "data_share": -4, "rss": 9e99}]}',
        '{"host": "n0", "node_rank": 0, "nodes": 1, "attempt": 0, "time": 1785585700, "number": 1,'
        ' "interval": 1e300, "ranks": [{"rank": 0, "local_rank": 0, "pid": 0, "attempt": 0, "step": 5,'
        ' "phase": "training", "step_age": 1, "p50": 1e300, "wait_share": 1e9, "data_share": -4, "cpu": 1e14'
        "}]}",
    ],
)
def test_damaged_files(tmp_path: Path, damage: str) -> None:
    path = restore("full", tmp_path)
    for file in ("watch/metrics-n0.jsonl", "watch/node-n0.json", "watch/job.json", "plan-n0.json"):
        (path / file).write_text(damage + "\n")
    (path / "rank-0.applied.json").write_text(damage)
    assert "plan-n0.json cannot be read" in render(path).words


def test_damaged_lines_cost_themselves_alone(tmp_path: Path) -> None:
    """As a node leaves them that dies, before the next attempt goes on with its file."""
    path = restore("full", tmp_path)
    metrics = path / "watch/metrics-n1.jsonl"
    whole = metrics.read_bytes()
    for garbage in (b"\0" * 99, b'[]\n{}\n{"event": 5}', b"\xff\xfe", b"[" * 9999, whole[:100]):
        metrics.write_bytes(metrics.read_bytes() + garbage + b"\n")
    metrics.write_bytes(whole.splitlines()[0][:100] + b"\n" + metrics.read_bytes())
    assert read_tables(render(path)) == json.loads(TABLES.read_text())


def test_what_is_not_there_is_left_out_with_a_word(tmp_path: Path) -> None:
    path = restore("full", tmp_path)
    for file in path.iterdir():
        if file.is_dir():
            shutil.rmtree(file)
        elif file.name != "manifest.json":
            file.unlink()
    change(path, "manifest.json", lambda found: {**found, "earlier": []})
    found = render(path)
    assert [section.get("id") for section in found.find("section")] == ["summary", "attempts"]
    for name in ("Hangs", "Step time", "Where the time went", "GPU", "CPU and memory", "Where the ranks ran"):
        assert f"{name}: " in found.words, name
    (path / "manifest.json").write_text("{")
    assert "its manifest.json cannot be read" in render(path).words.lower()


def test_a_large_job_is_summed_up(tmp_path: Path) -> None:
    path = restore("full", tmp_path)

    def move(node: int, report: Any) -> Any:
        ranks = [
            {**rank, "rank": 4 * node + number} if isinstance(rank, dict) else rank
            for number, rank in enumerate(report["ranks"])
        ]
        return {**report, "host": f"n{node}", "node_rank": node, "ranks": ranks}

    for node in range(2, 12):
        for name in ("watch/metrics-{}.jsonl", "watch/node-{}.json", "hang-1/evidence-{}.json"):
            file = name.format(f"n{node}")
            (path / file).write_text((path / name.format("n1")).read_text())
            change(path, file, partial(move, node))
    found = render(path)
    assert len(found.text) < 1_000_000
    assert "median of 48 ranks, with 5th to 95th percentile" in found.words
    assert "24 other ranks" in found.words and "rank 2 n0" in found.words
    assert "47 ranks: 0,2-47" in found.words
