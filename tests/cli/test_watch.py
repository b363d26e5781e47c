"""`launch watch` of run directories made by hand: on a terminal with somebody at it, and without one."""

import asyncio
import json
import os
import shlex
import signal
import subprocess
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pyte
import pytest
from textual.pilot import Pilot

from launcher.cli.watch import read_view
from launcher.report.live import WatchApp
from launcher.report.watch import View
from launcher.runs.run_status import read_status
from launcher.watch.run_reader import RunReader
from tests.cli.make_runs import (
    GPU,
    HANGING,
    JOB,
    PARTS,
    RANK,
    SENTENCE,
    make_rank,
    make_report,
    make_run,
    make_watched_run,
    read_manifest,
    write_log,
    write_watch,
)
from tests.launch.terminals import COLUMNS, ROWS, Terminal, open_terminal
from tests.seam import LAUNCH, PATIENCE, Launch, clean_environ, run_outside, start, wait_for, write_program


def read_screen(terminal: Terminal, rows: int = ROWS, columns: int = COLUMNS) -> list[str]:
    """What the terminal shows now."""
    screen = pyte.Screen(columns, rows)
    pyte.ByteStream(screen).feed(bytes(terminal.seen))
    return [row.rstrip() for row in screen.display]


def await_screen(
    terminal: Terminal, is_there: Callable[[list[str]], bool], rows: int = ROWS, columns: int = COLUMNS
) -> list[str]:
    """Read until the screen is as it should be; return it."""
    deadline = time.monotonic() + PATIENCE
    while not is_there(shown := read_screen(terminal, rows, columns)):
        terminal.take_some(min(deadline, time.monotonic() + 1))
        if time.monotonic() > deadline or terminal.process.poll() is not None:
            pytest.fail("waited in vain, with this on the screen:\n" + "\n".join(shown))
    return shown


def has(*texts: str) -> Callable[[list[str]], bool]:
    return lambda rows: all(any(text in row for row in rows) for text in texts)


def list_ranks(rows: list[str]) -> list[int]:
    """The first column of the table."""
    words = [row.split() for row in rows]
    return [int(row[0]) for row in words if len(row) > 3 and row[0].isdecimal() and row[2] == "training"]


@pytest.fixture
def run(here: Path) -> Path:
    """A run of two nodes with four ranks each, which lives as long as the tests."""
    return make_watched_run(here / "runs")


@pytest.fixture
def watch(here: Path, run: Path) -> Iterator[Terminal]:
    """`launch watch` on a terminal."""
    with open_terminal(here, *LAUNCH, "watch", COLUMNS="80", LINES="24") as terminal:
        yield terminal


class Screen:
    """The screen of `launch watch` with somebody at it, by Textual's pilot."""

    def __init__(self, path: Path) -> None:
        reader = RunReader(path)
        self.asked: list[int] = []

        def look(rank: int | None, asks_stack: bool) -> View:
            if asks_stack and rank is not None:
                self.asked.append(rank)
            return read_view(path, read_status(path), reader.read(), rank)

        self.app = WatchApp(look(None, False), None, look)

    def read(self) -> list[str]:
        strips = self.app.screen._compositor.render_strips()
        return ["".join(segment.text for segment in strip).rstrip() for strip in strips]

    async def press(self, pilot: Pilot[int], key: str, *texts: str) -> list[str]:
        """Press a key, if there is one, and wait until the texts are there."""
        if key:
            await pilot.press(key)
        deadline = time.monotonic() + PATIENCE
        while not has(*texts)(rows := self.read()):
            await pilot.pause(0.05)
            assert time.monotonic() < deadline, "waited in vain, with this on the screen:\n" + "\n".join(rows)
        return rows


def play(path: Path, script: Callable[[Screen, Pilot[int]], Awaitable[None]], *, width: int = 80) -> None:
    async def run() -> None:
        screen = Screen(path)
        async with screen.app.run_test(size=(width, 24)) as pilot:
            await script(screen, pilot)

    asyncio.run(run())


def test_the_table_and_its_keys(run: Path) -> None:
    async def script(screen: Screen, pilot: Pilot[int]) -> None:
        rows = await screen.press(pilot, "", "rank", "thermal", "q quit", "8 rows, by slowest")
        assert rows[0] == "train/20260801-120000  running  step 120/400  2.5 steps/s  1 min 52 s left"
        assert list_ranks(rows) == [5, 0, 1, 2, 3, 4, 6, 7]
        rows = await screen.press(pilot, "s", "by rank")
        assert list_ranks(rows) == list(range(8))
        await screen.press(pilot, "s", "by node")
        await screen.press(pilot, "S", "by rank")
        await screen.press(pilot, "S", "by slowest")
        await screen.press(pilot, "end", "by slowest")
        await screen.press(pilot, "s", "by rank")
        await screen.press(pilot, "enter", "rank 7 on n1")

    play(run, script)


def test_a_rank_is_opened_with_its_stack_and_lines(run: Path) -> None:
    async def script(screen: Screen, pilot: Pilot[int]) -> None:
        await screen.press(pilot, "", "q quit")
        rows = await screen.press(
            pilot, "enter", "rank 5 on n1", "data.py:88, read_shard", "reading shard 17"
        )
        assert any("hrtimer_nanosleep" in row for row in rows)
        assert any("left no record" in row for row in rows)
        await screen.press(pilot, "t", "rank 5 on n1")
        await screen.press(pilot, "escape", "by slowest")
        await screen.press(pilot, "down", "by slowest")
        await screen.press(pilot, "enter", "rank 0 on n0", "step 120/400 loss 2.412")
        assert screen.asked[0] == 5 and screen.asked[-1] == 0

    play(run, script)


def test_news_a_pause_and_another_size(run: Path) -> None:
    async def script(screen: Screen, pilot: Pilot[int]) -> None:
        await screen.press(pilot, "", "q quit")
        write_watch(run, HANGING, "job.json")
        write_log(run, 0, "step 125/400 loss 2.3\n")
        await screen.press(pilot, "", "hanging", "step 125/400", SENTENCE[:40], "which 7 ranks wait")
        await screen.press(pilot, "p", "paused")
        write_watch(run, JOB, "job.json")
        write_log(run, 0, "step 130/400 loss 2.2\n")
        await pilot.resize_terminal(150, 30)
        rows = await screen.press(pilot, "", "paused", "power", "held by")
        assert "step 125/400" in rows[0] and "hanging" in rows[0]
        await screen.press(pilot, "p", "step 130/400", "running")

    play(run, script)


@pytest.mark.parametrize("width", [20, 250])
def test_every_size_is_fitted(run: Path, width: int) -> None:
    async def script(screen: Screen, pilot: Pilot[int]) -> None:
        for key in ("s", "enter", "escape", "down", "S", "p"):
            await pilot.press(key)
            await pilot.pause(0.1)
            rows = screen.read()
            assert max(map(len, rows)) <= width and any(rows)
        await pilot.resize_terminal(width, 5)
        await pilot.pause(0.2)
        rows = screen.read()
        assert len(rows) == 5 and rows[0].startswith("train/")

    write_watch(run, HANGING, "job.json")
    play(run, script, width=width)


def test_a_table_that_does_not_fit_is_moved(here: Path) -> None:
    async def script(screen: Screen, pilot: Pilot[int]) -> None:
        await screen.press(pilot, "", "60 rows", "n0 ")
        await screen.press(pilot, "end", "n59")
        await screen.press(pilot, "up", "n58")
        await screen.press(pilot, "enter", "node n58", "2 rows")
        await screen.press(pilot, "enter", "rank 116 on n58")
        await screen.press(pilot, "escape", "node n58", "2 rows")
        await screen.press(pilot, "escape", "n58", "60 rows")
        await screen.press(pilot, "pageup", "n44")

    play(make_watched_run(here / "runs", nodes=60, ranks=2), script)


def test_ctrl_z_gives_the_terminal_back_until_it_goes_on(here: Path, run: Path) -> None:
    with open_terminal(here, "bash", "--norc", "--noprofile", "-i", PS1="$ ") as shell:
        shell.type(f"{shlex.join([*LAUNCH, 'watch'])}\n")
        shell.expect("\x1b[?1049h", "quit")
        shell.type("\x1a")
        shell.expect("\x1b[?1049l", "Stopped")
        shell.type("stty -a\n")
        shell.expect(" icanon", " echo ")
        shell.type("fg\n")
        shell.expect("\x1b[?1049h", "quit")
        shell.type("q")
        shell.expect("\x1b[?1049l", "$ ")
        shell.type("exit $?\n")
        assert shell.finish() == 0


@pytest.mark.parametrize("number", [0, signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_it_ends_by_a_key_or_a_signal_and_the_terminal_is_as_before(watch: Terminal, number: int) -> None:
    await_screen(watch, has("rank", "q quit"))
    assert not watch.is_restored(), "keys come one by one"
    if number in (0, signal.SIGINT):
        watch.type("q" if number == 0 else "\x03")
        assert watch.finish() == (0 if number == 0 else 130)
    else:
        os.kill(watch.process.pid, number)
        assert watch.finish() == -number
    assert watch.is_restored() and b"\x1b[?1049l\x1b[?25h" in watch.seen[-60:]


def test_the_window_is_followed_on_a_machine_that_is_slow(here: Path, run: Path) -> None:
    """The timer for a new size, of 8 ms, was lost if it was over before it waited, and all others with it."""
    (here / "sitecustomize.py").write_text(
        "import time\nfrom textual import _time\n"
        "_time.get_time = lambda: time.sleep(0.01) or time.monotonic()\n"
    )
    command = (*LAUNCH, "watch")
    variables = {"PYTHONPATH": str(here), "COLUMNS": "", "LINES": ""}  # pytest-xdist sets a size
    with open_terminal(here, *command, **variables) as terminal:
        await_screen(terminal, has("rank", "q quit"))
        for rows, columns in ((20, 60), (30, 150), (12, 70)):
            terminal.seen.clear()  # all of the screen is drawn again
            terminal.resize(rows, columns)
            shown = await_screen(
                terminal, lambda seen: seen[0].startswith("train/") and "q quit" in seen[-1], rows, columns
            )
            assert ("power" in " ".join(shown)) is (columns == 150)
        terminal.type("q")
        assert terminal.finish() == 0


def test_without_keys_there_is_one_view_and_without_its_terminal_it_ends(here: Path, run: Path) -> None:
    """A screen without keys took a core, and one whose terminal had gone stayed for good."""
    with open_terminal(here, "sh", "-c", shlex.join([*LAUNCH, "watch"]) + " </dev/null") as terminal:
        assert terminal.finish() == 0 and "rank" in terminal.text() and "\x1b[?1049h" not in terminal.text()
    master, slave = os.openpty()
    command, environ = [*LAUNCH, "watch"], {**clean_environ(), "TERM": "xterm"}
    with subprocess.Popen(
        command, cwd=here, env=environ, stdin=slave, stdout=slave, stderr=slave, start_new_session=True
    ) as process:
        os.close(slave)
        seen = b""
        while b"quit" not in seen:
            seen += os.read(master, 65536)
        os.close(master)  # nobody sends a signal: the terminal was not its session's own
        try:
            assert process.wait(PATIENCE) == 128 + signal.SIGHUP
        finally:
            process.kill()


def test_it_ends_with_the_run_and_says_how(watch: Terminal, run: Path) -> None:
    await_screen(watch, has("q quit"))
    manifest = read_manifest(run)
    manifest["outcome"] = {"state": "failed", "cause": "time limit", "reason": "time limit"}
    (run / "manifest.json").write_text(json.dumps(manifest))
    assert watch.finish() == 0
    text = watch.text().rpartition("\x1b[?1004l")[2]
    assert "train/20260801-120000" in text and "rank" in text
    assert "launch: train/20260801-120000 has failed: time limit" in text
    assert watch.is_restored()


def test_a_node_that_is_silent_and_one_of_an_earlier_attempt(here: Path, run: Path) -> None:
    old = time.time() - 100
    for host in ("n1", "gone"):
        write_watch(run, make_report(1, host=host))
        os.utime(run / "watch" / f"node-{host}.json", (old, old))
    write_watch(run, make_report(0, attempt=1))
    write_watch(run, make_report(1, attempt=1))
    os.utime(run / "watch/node-n1.json", (old, old))
    with open_terminal(here, *LAUNCH, "watch") as terminal:
        rows = await_screen(terminal, has("not heard of: n1", "silent 1m4"))
        assert not any("gone" in row for row in rows)
        assert "step" in rows[0]


def test_without_a_terminal_it_is_printed_once(launch: Launch, run: Path) -> None:
    result = launch("watch")
    assert result.code == 0 and "\x1b" not in result.out
    assert result.err == "launch: watch of train/20260801-120000, the newest run that has not ended\n"
    lines = result.out.splitlines()
    assert lines[0].startswith("train/20260801-120000  running  step 120/400")
    titles = (
        "rank node phase step last p50 p99 own data others cpu delay rss gpu sm mem power temp clock held by"
    )
    assert " ".join(lines[4].split()) == titles
    assert [int(line.split()[0]) for line in lines[5:]] == [5, 0, 1, 2, 3, 4, 6, 7]
    shown = launch("watch", "rank=5").out
    assert "rank 5 on n1" in shown and "data.py:88, read_shard" in shown and "reading shard 17" in shown


def test_the_json_form(launch: Launch, run: Path) -> None:
    data = json.loads(launch("watch", "format=json").out)
    assert (data["schema"], data["run"]["state"], data["progress"]["step"]) == (1, "running", 120)
    assert [node["host"] for node in data["nodes"]] == ["n0", "n1"]
    assert data["nodes"][1]["ranks"][1]["gpu"]["event_reasons"] == ["sw_thermal_slowdown"]
    assert data["job"]["stragglers"][0]["rank"] == 5
    assert 0 <= data["nodes"][0]["age"] < 60 and data["nodes"][0]["is_silent"] is False


def test_runs_that_there_are_not_and_wrong_settings(launch: Launch, run: Path) -> None:
    launch("watch", "nothing").assert_error(2, "there is no run 'nothing'")
    launch("watch", "train", "format=xml").assert_error(2, "format=xml")
    launch("watch", "train", "rank=-1").assert_error(2, "rank=-1")
    launch("watch", "train", "rank=8").assert_error(2, "rank=8 is not known: the run's ranks are 0 to 7")


def test_a_run_that_is_not_watched(launch: Launch, run: Path) -> None:
    for file in (run / "watch").iterdir():
        file.unlink()
    for config, text in (
        ("watch: {enabled: false}\n", "not watched (watch.enabled=false)"),
        ("watch: {enabled: true}\n", "no node has reported yet"),
        ("a: [1\n", "its ranks are not watched"),
    ):
        (run / "config.yaml").write_text(config)
        result = launch("watch")
        assert result.code == 0 and text in result.out


def test_a_run_that_has_ended(launch: Launch, here: Path) -> None:
    make_run(here / "runs", "old", outcome={"cause": "signal", "reason": "by you"}, state="stopped")
    result = launch("watch")
    assert result.code == 0 and "its nodes have left no reports" not in result.err
    assert result.err.endswith("launch: old/20260801-120000 has stopped: by you\n")


def test_damaged_files_are_left_out(launch: Launch, run: Path) -> None:
    (run / "watch/node-n9.json").mkdir()
    for text in ("", "{", "[]", '{"host": 3}', '{"host": "n0"}'):
        (run / "watch/node-n0.json").write_text(text)
        (run / "watch/job.json").write_text(text)
        result = launch("watch")
        assert result.code == 0 and list_ranks(result.out.splitlines()) == [5, 4, 6, 7], text


def test_nothing_planted_acts_on_the_terminal(here: Path, run: Path) -> None:
    evil = "\x1b[2J\x1b]0;title\x07\x9b31m\u202e"
    ranks = [make_rank(rank, rank - 4, phase=evil, notes=[evil]) for rank in range(4, 8)]
    write_watch(run, make_report(1, ranks=ranks, notes=[evil]))
    (hang,) = HANGING["hangs"]
    hang = {**hang, "verdict": {**hang["verdict"], "sentence": evil}}
    write_watch(run, {**HANGING, "notes": [evil], "hangs": [hang]}, "job.json")
    write_log(run, 5, f"a {evil} line\n")
    with open_terminal(here, *LAUNCH, "watch", "rank=5") as terminal:
        await_screen(terminal, has("rank 5 on n1", "a ?"))
        terminal.type("\x1b")
        await_screen(terminal, has("by slowest"))
        terminal.type("q")
        assert terminal.finish() == 0
        for part in ("\x1b[2J", "\x1b]0;", "\x9b", "\u202e"):
            assert part not in terminal.text()


STEPS = """
import os, time
import launcher

def read_shard():
    time.sleep(0.05 + 0.95 * (os.environ["RANK"] == "1"))  # rank 1 is seen nowhere else

for step in range(1, 100000):
    read_shard()
    launcher.step()
    if step % 10 == 0 and os.environ["RANK"] == "0":
        print(f"step {step}/100000 loss 1.5", flush=True)
"""


def test_a_real_run_and_the_stack_of_its_rank_now(quick_agent: None, here: Path) -> None:
    program = write_program(here, STEPS)
    with start(here, "nproc_per_node=2", "watch.interval=1", "--", program):
        wait_for(lambda: list(here.glob("runs/*/*/watch/job.json")), "the first report")
        with open_terminal(here, *LAUNCH, "watch") as terminal:
            rows = await_screen(terminal, has("2 training", "/100000", "loss 1.5", "left"))
            header = next(row for row in rows if row.strip().startswith("rank"))
            assert "p50" in header and "gpu" not in header and "node" not in header
            terminal.type("s\x1b[F\r")
            await_screen(terminal, has("rank 1 on", "(asked for): it sleeps", "program.py:6, read_shard"))
            rows = read_screen(terminal)
            assert any(row.startswith("placement: CPUs") and "as planned" in row for row in rows), rows
            terminal.type("q")
            assert terminal.finish() == 0
        shown = run_outside(["status"], here).out.splitlines()
        assert "last step" in shown[0] and "running" in shown[1]


# The table: its rows, their order, its columns, and how it fits terminals of all sizes


def make_job(here: Path, *ranks: dict[str, Any], age: float = 0.0, **more: Any) -> None:
    """A job of one node with these ranks, without GPUs unless they say so."""
    path = make_watched_run(here / "runs", nodes=0)
    found = [{**RANK, "rank": n, "local_rank": n, "pid": 100 + n, **rank} for n, rank in enumerate(ranks)]
    write_watch(path, make_report(0, 1, ranks=found, **more))
    os.utime(path / "watch/node-n0.json", (time.time() - age,) * 2)
    write_watch(path, {"time": 1e9, "host": "n0", "attempt": 0, "state": "running", "nodes": 1}, "job.json")


def read_table(launch: Launch) -> tuple[list[str], list[list[str]]]:
    """The titles of the table that is printed, and its rows."""
    result = launch("watch")
    assert result.code == 0, result
    rows = [line.split() for line in result.out.splitlines()]
    (head,) = (number for number, row in enumerate(rows) if row[:1] == ["rank"] and "phase" in row)
    return rows[head], [row for row in rows[head + 1 :] if row]


@pytest.mark.parametrize(
    ("ranks", "order"),
    [
        ([{"wait_share": share} for share in (0.30, 0.29, 0.05, 0.31)], [2, 0, 1, 3]),
        ([{}, {"p50": 0.9}, {"phase": "exited", "exit_code": 3, "p50": None}], [2, 1, 0]),
    ],
    ids=["who waits least is the slowest, and hardly different ranks stay in order", "failed, slow"],
)
def test_the_order_of_rows(launch: Launch, here: Path, ranks: list[dict[str, Any]], order: list[int]) -> None:
    make_job(here, *ranks)
    assert [int(row[0]) for row in read_table(launch)[1]] == order


def test_who_holds_the_others_up_comes_first_and_then_stragglers(launch: Launch, here: Path) -> None:
    make_job(here, {}, {"p50": 0.9}, {}, {})
    (path,) = here.glob("runs/*/*")
    (hang,) = HANGING["hangs"]
    hang = {**hang, "verdict": {**hang["verdict"], "ranks": [3]}}
    write_watch(
        path, {**HANGING, "hangs": [hang], "stragglers": [{**PARTS["straggler"], "rank": 2}]}, "job.json"
    )
    assert [int(row[0]) for row in read_table(launch)[1]] == [3, 2, 1, 0]


def test_one_rank_without_a_gpu_has_no_columns_of_gpus_nodes_and_nics(launch: Launch, here: Path) -> None:
    make_job(here, {"wait_share": 0.22})
    titles, (row,) = read_table(launch)
    assert " ".join(titles) == "rank phase step last p50 p99 own data others cpu delay rss"
    assert " ".join(row) == "0 training 120 0s 400ms 520ms 312ms 2% 22% 3.8 1% 2G"


@pytest.mark.parametrize(("step", "has_column"), [(0, False), (25, True)])
def test_steps_that_are_printed_are_no_steps_of_the_optimizer(
    launch: Launch, here: Path, step: int, has_column: bool
) -> None:
    make_job(here, {"step": step}, {"step": step})
    (path,) = here.glob("runs/*/*")
    write_log(path, 0, "step 120/400 loss 2.5\n")
    assert ("step" in read_table(launch)[0]) is has_column


def test_a_node_whose_ranks_have_all_ended_is_not_silent(launch: Launch, here: Path) -> None:
    """Nothing is to be heard of it any more."""
    ended = {"phase": "exited", "exit_code": 0}
    make_job(here, ended, {}, age=100)
    assert "silent" in launch("watch").out
    (path,) = here.glob("runs/*/*")
    ranks = [{**RANK, "rank": n, "local_rank": n, "pid": 100 + n, **ended} for n in (0, 1)]
    write_watch(path, make_report(0, 1, ranks=ranks))
    os.utime(path / "watch/node-n0.json", (time.time() - 100,) * 2)
    shown = launch("watch").out
    assert "exited" in shown and "silent" not in shown


def test_xids_and_low_clocks_are_columns_once_there_are_some(launch: Launch, here: Path) -> None:
    bad = {**GPU, "index": 1, "xids": [79, 48], "event_reasons": ["new_one"]}
    make_job(here, {"gpu": {**GPU, "index": 0}}, {"gpu": bad})
    titles, rows = read_table(launch)
    assert "xid" in titles
    (row,) = (row for row in rows if row[0] == "1")
    assert "79,48" in row and "new one" in " ".join(row)


def test_a_thousand_nodes_have_a_row_each_and_a_hang_stands_above(launch: Launch, here: Path) -> None:
    path = make_watched_run(here / "runs", nodes=1000, ranks=2)
    write_watch(path, HANGING, "job.json")
    shown = launch("watch").out
    assert " ".join(shown.split()).count("training") >= 1000 and "2000 ranks" in shown
    table = shown.index("phase")
    assert " ".join(shown[:table].split()).find(SENTENCE) > 0
