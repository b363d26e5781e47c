"""`launch report`: which run, where the page goes, and what it says of runs of all kinds."""

import json
import os
import stat
import sys
from pathlib import Path

from launcher.runs.manifest import identify_process
from tests.cli.make_runs import make_run, write_applied
from tests.runs.recordings import DATA
from tests.seam import QUICK_AGENT, Launch, Result, drop_powers, run_outside
from tests.strangers import give_away

PROGRAM = """
for step in range(1, 4):
    print(f"step {step}/3 loss {5 / step:.2f}", flush=True)
"""


def test_a_real_run(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(PROGRAM)
    environ = {"PYTHONPATH": QUICK_AGENT}
    words = [
        "nproc_per_node=2",
        "env.HF_TOKEN=hunter2",
        "--",
        sys.executable,
        "job.py",
        "--api-key",
        "hunter3",
    ]
    ran = run_outside(words, tmp_path, environ)
    assert ran.code == 0, ran.err
    (run,) = tmp_path.glob("runs/*/*")
    (host,) = (one.stem.removeprefix("plan-") for one in run.glob("plan-*.json"))
    report = json.loads((DATA / "full.json").read_text())["files"]["watch/node-n0.json"]
    report |= {"nodes": 1, "time": run.stat().st_mtime, "ranks": report["ranks"][:2]}
    (run / "watch").mkdir(exist_ok=True)
    (run / f"watch/node-{host}.json").write_text(json.dumps(report))
    done = run_outside(["report"], tmp_path)
    name = run.relative_to(tmp_path)
    told = f"launch: report of {name.relative_to('runs')}, the newest run\n"
    assert done == Result(0, f"{name}/report.html\n", told)
    page = run / "report.html"
    assert stat.S_IMODE(page.stat().st_mode) == 0o600
    text = page.read_text()
    for part in ("2 ranks on", "It has succeeded", "step 3/3", "as planned", "***", "<svg"):
        assert part in text, part
    assert "hunter" not in text and text.count("<td>yes</td>") == 2
    record = run / "rank-1.applied.json"
    refused = {**json.loads(record.read_text()), "problems": ["set_mempolicy is not permitted"]}
    record.write_text(json.dumps(refused))
    assert run_outside(["report"], tmp_path).code == 0
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


def test_a_run_directory_that_cannot_be_written_to(tmp_path: Path) -> None:
    path = make_run(tmp_path / "runs")
    path.chmod(0o500)
    done = run_outside(["report", "tiny"], tmp_path, preexec_fn=drop_powers)
    done.assert_error(2, "report.html cannot be written", "save=FILE")
    assert run_outside(["report", "tiny", "save=x.html"], tmp_path, preexec_fn=drop_powers).code == 0
    path.chmod(0o700)


def test_another_users_run(launch: Launch, here: Path) -> None:
    path = make_run(here / "runs")
    write_applied(path, 0, "box")
    give_away(path)
    launch("report", "tiny").assert_error(2, "it belongs to", "save=FILE")
    assert launch("report", "tiny", "save=x.html").code == 0


def test_without_matplotlib_the_page_has_no_charts(here: Path) -> None:
    make_run(here / "runs")
    (here / "sitecustomize.py").write_text(
        "import importlib.util, sys\nfind = importlib.util.find_spec\nsys.modules['matplotlib'] = None\n"
        "importlib.util.find_spec = lambda name, *a: None if name == 'matplotlib' else find(name, *a)\n"
    )
    hidden = {"PYTHONPATH": str(here)}
    done = run_outside(["report", "tiny"], here, hidden)
    assert done.code == 0 and "pip install 'launch-ranks[report]'" in done.err, done
    page = Path(done.out.strip()).read_text()
    assert "Charts: matplotlib is not installed" in page and "<svg" not in page
    assert "matplotlib is not installed" in run_outside(["doctor"], here, hidden).out
