"""What a job gives out while it runs: notifications, pings, metrics for Prometheus; by real jobs."""

import json
import socket
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.seam import QUICK_AGENT, run_outside, start, wait_for, write_program
from tests.watch.hook_server import SECRET, serving

PROGRAM = """
import os, time
import launcher

for _ in range(5):
    time.sleep(0.05)
    launcher.step()
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    time.sleep(600)
while not os.path.exists("go"):
    time.sleep(0.1)
    launcher.step()
"""
MEMORY = "launch_rank_resident_memory_bytes"
WORDS = (
    *("nproc_per_node=2", "binding=none", "watch.interval=1", "watch.metrics_interval=1"),
    *("watch.hang_seconds=2", "watch.on_hang=restart", "name=job"),
)


def find(text: str, name: str, **labels: str) -> list[float]:
    """The values of a metric; the text has to be what Prometheus's own parser takes."""
    families = text_string_to_metric_families(text)
    samples = [sample for family in families for sample in family.samples]
    return [one.value for one in samples if one.name == name and labels.items() <= one.labels.items()]


def fetch(port: int, accept: str = "") -> str:
    request = urllib.request.Request(f"http://127.0.0.1:{port}/metrics", headers={"Accept": accept})
    with urllib.request.urlopen(request, timeout=30) as answer:
        text: bytes = answer.read()
    return text.decode()


def test_a_job_that_hangs_and_is_restarted(tmp_path: Path) -> None:
    textfile = tmp_path / "textfile"
    textfile.mkdir()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with serving() as hook:
        urls = (f"notify.url={hook.url}", f"notify.ping_url={hook.url}/ping", "notify.ping_interval=3600")
        outputs = (f"watch.prometheus_port={port}", f"watch.textfile={textfile}")
        program = write_program(tmp_path, PROGRAM)
        with start(
            tmp_path, *WORDS, *urls, *outputs, "--", program, PYTHONPATH=QUICK_AGENT, no_proxy="*"
        ) as job:

            def list_posts() -> list[dict[str, Any]]:
                return [json.loads(data) for method, _, data in hook.requests if method == "POST"]

            def is_restarted() -> bool:
                return "recover" in [post["event"] for post in list_posts()]

            wait_for(is_restarted, "the restart", 90, job.read)

            def read_both() -> list[str]:
                return [fetch(port), *(path.read_text() for path in textfile.glob("*.prom"))]

            def have_memory() -> bool:
                return [bool(find(text, MEMORY, rank="0")) for text in read_both()] == [True, True]

            wait_for(have_memory, "the second report of the ranks", 60, job.read)
            for text in read_both():
                assert find(text, "launch_rank_steps_total", rank="1", local_rank="1")[0] > 5
                assert find(text, "launch_rank_phase", rank="0", phase="training") == [1]
                assert find(text, "launch_rank_phase", rank="0", phase="saving") == [0]
                assert find(text, MEMORY, rank="0")[0] > 1e6
                assert 0.05 < find(text, "launch_rank_step_seconds", rank="0", quantile="0.5")[0] < 5
                assert not find(text, "launch_gpu_temperature_celsius"), "what is not known is left out"
            opened = fetch(port, "application/openmetrics-text; version=1.0.0")
            assert opened.endswith("# EOF\n") and "# TYPE launch_rank_steps counter" in opened
            (tmp_path / "go").touch()
            assert job.wait(60) == 0, job.read()
        posts = list_posts()
    assert list(textfile.iterdir()) == [], "the run has ended"
    assert [post["event"] for post in posts] == ["start", "hang", "recover", "end"]
    begin, hang, recovery, end = posts
    run_dir = job.run_dir()
    assert {(post["run"], post["run_dir"], post["job_id"]) for post in posts} == {
        (f"job/{run_dir.name}", str(run_dir), None)
    }
    assert (begin["sentence"], hang["state"], hang["step"]) == ("2 ranks", "hanging", 5)
    told = json.loads((run_dir / "manifest.json").read_text())["hangs"][0]
    assert hang["sentence"] == told["verdict"]["sentence"] and told["action"] == "restart"
    assert (end["state"], end["exit_code"]) == ("succeeded", 0)
    assert recovery["state"] == "running"
    assert [path for method, path, _ in hook.requests if method == "GET"] == [f"/{SECRET}/ping"]
    (metrics,) = run_dir.glob("watch/metrics-*.jsonl")
    lines = metrics.read_text().splitlines()
    events = [found["event"] for line in lines if "event" in (found := json.loads(line))]
    assert events == ["start", "hang", "restart", "recovered"]
    for path in (path for path in run_dir.rglob("*") if path.is_file()):
        assert SECRET not in path.read_text(errors="replace"), path
    assert SECRET not in job.read() + job.read("stdout")


@pytest.mark.usefixtures("quick_agent")
def test_what_cannot_be_given_out_is_a_warning_each_and_the_job_goes_on(tmp_path: Path) -> None:
    reports = "import glob, time\nwhile not glob.glob('runs/*/*/watch/metrics*'): time.sleep(0.1)\n"
    program = write_program(tmp_path, f"{reports}time.sleep(2)\n")
    with socket.socket() as taken, serving([403] * 9) as hook:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        done = run_outside(
            [
                *("nproc_per_node=1", "watch.interval=1", "watch.metrics_interval=1"),
                *(f"watch.prometheus_port={taken.getsockname()[1]}", f"watch.textfile={tmp_path}/none"),
                *(f"notify.url={hook.url}", "notify.events=[start]", "--", program),
            ],
            tmp_path,
            {"no_proxy": "*"},
        )
    assert done.code == 0, done
    for setting in ("watch.prometheus_port", "watch.textfile", "notify.url"):
        assert done.err.count(setting) == 1, (setting, done.err)
    assert "403" in done.err and SECRET not in done.err + done.out
