"""`launch report`: pages that are valid, self-contained and small, with all text in them escaped."""

import json
import os
import re
import shutil
import stat
import sys
import tempfile
from collections.abc import Callable
from functools import cached_property, partial
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree.ElementTree import Element

import html5lib
import pytest

from tests.cli.make_runs import identify_process, make_run, write_applied
from tests.runs.recordings import DATA, restore
from tests.seam import QUICK_AGENT, Launch, Result, drop_powers, find_run, run_inside, run_outside
from tests.strangers import give_away

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


def test_it_is_html_that_loads_nothing_and_all_is_there(page: Parsed) -> None:
    page.assert_harmless()
    assert page.find("html")[0].get("lang") == "en"
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
    spans = [
        [float(x) for x in re.findall(r"[ML] ([\d.]+) ", element.get("d", ""))]
        for element in steps.iter()
        if "fill: #d55e00" in element.get("style", "")
    ]
    assert max(max(span) - min(span) for span in spans[:1]) > 20, "3 of 90 minutes in 900 pixels"


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


def test_damaged_lines_cost_themselves_alone_and_events_of_the_metrics_stand_in_for_the_jobs(
    tmp_path: Path,
) -> None:
    """Lines as a node leaves them that dies, before the next attempt goes on with its file."""
    path = restore("full", tmp_path)
    metrics = path / "watch/metrics-n1.jsonl"
    whole = metrics.read_bytes()
    for garbage in (b"\0" * 99, b'[]\n{}\n{"event": 5}', b"\xff\xfe", b"[" * 9999, whole[:100]):
        metrics.write_bytes(metrics.read_bytes() + garbage + b"\n")
    metrics.write_bytes(whole.splitlines()[0][:100] + b"\n" + metrics.read_bytes())
    metrics = path / "watch/metrics-n0.jsonl"
    time = json.loads(metrics.read_text().splitlines()[0])["time"] + 60
    lines = [{"event": kind, "time": time, "sentence": f"{kind} told"} for kind in ("hang", "straggler")]
    metrics.write_text(metrics.read_text() + "".join(f"{json.dumps(line)}\n" for line in lines))
    found = render(path)
    assert read_tables(found) == json.loads(TABLES.read_text()) and " told" not in found.words
    (path / "watch/job.json").write_text("{")
    shutil.rmtree(path / "hang-1")
    words = render(path).words
    assert "hang told" in words and "straggler told" in words


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


# Which run, and where the page goes


PROGRAM = """
for step in range(1, 4):
    print(f"step {step}/3 loss {5 / step:.2f}", flush=True)
"""


def test_a_real_run(launch: Launch, here: Path) -> None:
    (here / "job.py").write_text(PROGRAM)
    program = (sys.executable, "job.py", "--api-key", "hunter3")
    words = ("nproc_per_node=2", "env.HF_TOKEN=hunter2", "--", *program)
    ran = run_outside(words, here, {"PYTHONPATH": QUICK_AGENT})
    assert ran.code == 0, ran.err
    run = find_run(here)
    (host,) = (one.stem.removeprefix("plan-") for one in run.glob("plan-*.json"))
    report = json.loads((DATA / "full.json").read_text())["files"]["watch/node-n0.json"]
    report |= {"nodes": 1, "time": run.stat().st_mtime, "ranks": report["ranks"][:2]}
    (run / "watch").mkdir(exist_ok=True)
    (run / f"watch/node-{host}.json").write_text(json.dumps(report))
    name = run.relative_to(here)
    told = f"launch: report of {name.relative_to('runs')}, the newest run\n"
    assert launch("report") == Result(0, f"{name}/report.html\n", told)
    page = run / "report.html"
    assert stat.S_IMODE(page.stat().st_mode) == 0o600
    text = page.read_text()
    for part in ("2 ranks on", "It has succeeded", "step 3/3", "as planned", "***", "<svg"):
        assert part in text, part
    assert "hunter" not in text and text.count("<td>yes</td>") == 2
    record = run / "rank-1.applied.json"
    refused = {**json.loads(record.read_text()), "problems": ["set_mempolicy is not permitted"]}
    record.write_text(json.dumps(refused))
    assert launch("report").code == 0
    text = page.read_text()
    assert (text.count("<td>yes</td>"), text.count("<td>no</td>")) == (1, 1)


def test_without_a_run(launch: Launch, here: Path) -> None:
    launch("report").assert_error(2, "no run below runs_dir=runs yet")
    make_run(here / "runs")
    launch("report", "tinny").assert_error(2, "no run 'tinny'", "tiny")
    launch("report", "tiny", "nodes=2", "train.py").assert_error(2)


def test_another_place(launch: Launch, here: Path) -> None:
    path = make_run(here / "runs")
    done = launch("report", "tiny", "save=page one.html")
    assert done == Result(0, "page one.html\n", "")
    assert (here / "page one.html").read_text().startswith("<!DOCTYPE html>")
    assert not (path / "report.html").exists()
    launch("report", "tiny", "save=no/page.html").assert_error(2, "there is no directory no")
    launch("report", "tiny", "save=").assert_error(2, "save= is empty")
    launch("report", "tiny", "image=x.svg").assert_error(2, "launch topo image=")


def test_a_run_that_goes_on(launch: Launch, here: Path) -> None:
    make_run(here / "runs", state="running", process=identify_process(os.getpid()))
    done = launch("report", "tiny")
    told = "launch: tiny/20260801-120000 is running: the report tells of it so far\n"
    assert (done.code, done.err) == (0, told)
    assert "this is what there is so far" in Path(done.out.strip()).read_text()


def test_a_page_that_is_there_is_replaced_and_a_link_is_not_followed(launch: Launch, here: Path) -> None:
    path = make_run(here / "runs")
    (here / "precious").write_text("precious")
    (path / "report.html").symlink_to(here / "precious")
    for _ in range(2):
        assert launch("report", "tiny").code == 0
    assert (here / "precious").read_text() == "precious"
    assert not (path / "report.html").is_symlink()
    (path / "report.html").unlink()
    os.mkfifo(path / "report.html")  # as a device, which root could replace
    launch("report", "tiny").assert_error(2, "report.html", "it is no regular file")
    assert (path / "report.html").is_fifo()


def test_another_users_run(launch: Launch, here: Path) -> None:
    path = make_run(here / "runs")
    write_applied(path, 0, "box")
    give_away(path)
    launch("report", "tiny").assert_error(2, "it belongs to", "save=FILE")
    assert launch("report", "tiny", "save=x.html").code == 0


def test_a_run_directory_that_cannot_be_written_to_and_a_page_without_matplotlib(here: Path) -> None:
    path = make_run(here / "runs")
    path.chmod(0o500)
    done = run_outside(["report", "tiny"], here, preexec_fn=drop_powers)
    done.assert_error(2, "report.html cannot be written", "save=FILE")
    (here / "sitecustomize.py").write_text(
        "import importlib.util, sys\nfind = importlib.util.find_spec\nsys.modules['matplotlib'] = None\n"
        "importlib.util.find_spec = lambda name, *a: None if name == 'matplotlib' else find(name, *a)\n"
    )
    hidden = {"PYTHONPATH": str(here)}
    done = run_outside(["report", "tiny", "save=x.html"], here, hidden, preexec_fn=drop_powers)
    path.chmod(0o700)
    assert done.code == 0 and "pip install 'launch-ranks[report]'" in done.err, done
    page = (here / "x.html").read_text()
    assert "Charts: matplotlib is not installed" in page and "<svg" not in page
    assert "matplotlib is not installed" in run_outside(["doctor"], here, hidden).out
