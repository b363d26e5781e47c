"""`launch topo` as a command: JSON, snapshots, pictures, and what goes wrong with files."""

import json
import os
import shlex
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest

from launcher.config.words import quote_value
from launcher.plan.model import machine_to_json, parse_machine
from launcher.report import machine
from tests.plan.lab_machines import fsroot, load
from tests.probe.machine_trees import short_lived
from tests.report import full_machines
from tests.seam import Launch, drop_powers, in_shell, run_outside


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


def test_json_is_the_snapshot_and_nothing_else(launch: Launch, odd: str) -> None:
    done = launch("topo", "format=json", odd)
    assert (done.code, done.err) == (0, "")
    assert parse_machine(done.out) == full_machines.read("odd")


def test_a_snapshot_is_planned_as_the_machine_is(launch: Launch, root: Path, here: Path) -> None:
    here_plan = launch("plan", "format=json", f"machine.root={root}")
    done = launch("topo", f"machine.root={root}", "save=dgx h100.json")
    assert (done.code, done.out) == (0, "")
    told, _, use = done.err.partition("; plan for it anywhere: ")
    assert told == "launch: the machine is saved in dgx h100.json"
    words = shlex.split(use)[1:]
    assert launch(*words, "format=json").out == here_plan.out
    assert (here / "dgx h100.json").read_text() == launch("topo", "format=json", f"machine.root={root}").out


@pytest.mark.parametrize("name", ["it's.json", "a,b [x] $c=\\.json", "日本.json", "~.json"])
def test_the_command_that_is_shown_reads_the_file(name: str, launch: Launch, odd: str) -> None:
    done = launch("topo", odd, "save=" + quote_value(name))
    assert done.err.startswith(f"launch: the machine is saved in {name}; "), done
    words = shlex.split(done.err.partition("; plan for it anywhere: ")[2])[1:]
    assert launch(*words, "format=json").out == launch("plan", odd, "format=json").out


def test_a_snapshot_of_a_snapshot_is_the_same(launch: Launch, odd: str, here: Path) -> None:
    done = launch("topo", "save=a.json", "format=json", odd)
    assert done.out == (here / "a.json").read_text() and "saved in a.json" in done.err
    assert launch("topo", "save=b.json", "machine.snapshot=a.json").code == 0
    assert (here / "a.json").read_text() == (here / "b.json").read_text()


def test_an_earlier_snapshot_is_replaced_and_keeps_its_mode(launch: Launch, odd: str, here: Path) -> None:
    (here / "a.json").write_text('{"kind": "machine", "schema": 99}')
    (here / "a.json").chmod(0o640)
    (here / "link.json").symlink_to("a.json")
    assert launch("topo", "save=link.json", odd).code == 0
    assert parse_machine((here / "a.json").read_text()) == full_machines.read("odd")
    assert (here / "a.json").stat().st_mode & 0o777 == 0o640
    assert (here / "link.json").is_symlink()
    assert sorted(path.name for path in here.iterdir()) == ["a.json", "link.json"]


def test_a_file_that_is_no_snapshot_stays(launch: Launch, odd: str, here: Path) -> None:
    for text in ("a poem", "[]", '{"kind": "run"}'):
        (here / "a.json").write_text(text)
        launch("topo", "save=a.json", odd).assert_error(2, "save=a.json is there already")
        assert (here / "a.json").read_text() == text


def test_a_new_snapshot_can_be_read_by_the_team_and_an_empty_file_is_filled(
    launch: Launch, odd: str, here: Path
) -> None:
    (here / "b.json").touch()
    before = os.umask(0o022)
    try:
        assert [launch("topo", f"save={name}.json", odd).code for name in "ab"] == [0, 0]
    finally:
        os.umask(before)
    assert (here / "a.json").stat().st_mode & 0o777 == 0o644
    assert (here / "b.json").stat().st_size > 1000


@pytest.mark.parametrize("word", ["save=closed/a.svg", "image=closed/a.svg"])
def test_a_folder_without_permission(word: str, odd: str, here: Path) -> None:
    (here / "closed").mkdir(mode=0o500)
    done = run_outside(["topo", word, odd], here, preexec_fn=drop_powers)
    done.assert_error(2, f"{word} cannot be written (Permission denied): name a file in a directory that")


def test_a_disk_that_fills_leaves_the_earlier_snapshot(odd: str, here: Path) -> None:
    """A limit on the size of files stands for the disk: SIGXFSZ ignored, so that write fails with EFBIG."""
    assert run_outside(["topo", "save=a.json", odd], here).code == 0
    before = (here / "a.json").read_text()
    done = in_shell(f"trap '' XFSZ; ulimit -f 1; launch topo save=a.json image=a.svg {odd}", here)
    assert (done.code, done.out) == (3, "")
    assert "cannot be written (File too large): make room" in done.err.splitlines()[-1]
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
    monkeypatch.setattr(machine, "DRAWS", False)
    launch("topo", "image=a.svg", odd).assert_error(
        3, "needs matplotlib", "pip install 'launch-ranks[report]'"
    )
    assert not list(here.iterdir())


def test_a_placement_that_falls_short_is_drawn_unless_strict(launch: Launch, odd: str, here: Path) -> None:
    assert launch("topo", "image=a.svg", odd).code == 0
    launch("topo", "image=b.svg", "binding.strict=true", odd).assert_error(3, "local rank")
    assert [path.name for path in here.iterdir()] == ["a.svg"]


def test_this_machine_as_a_command(here: Path) -> None:
    done = run_outside(["topo"], here, {"COLUMNS": "80"})
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith("Machine  ")
    assert f"may use {'all ' if len(os.sched_getaffinity(0)) == os.cpu_count() else ''}" in done.out


def test_an_ascii_terminal_and_a_pipe_that_ends(odd: str, here: Path) -> None:
    done = run_outside(["topo", odd], here, {"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"})
    assert (done.code, done.err) == (0, "")
    assert done.out.isascii() and "-- Package 0" in done.out
    piped = in_shell(f"launch topo {odd} | head -n 1", here)
    assert piped.out.startswith("Machine  R750") and piped.err == ""
