"""Mistakes and hostile surroundings: one line on stderr with the fix, the right code, nothing left behind."""

import errno
import itertools
import os
import re
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from hydra._internal.config_loader_impl import ConfigLoaderImpl

from tests.seam import LAUNCH, Launch, drop_powers, in_shell, run_inside, run_outside

DRY = "dry_run=true"


def make(path: Path, mode: int) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n")
    path.chmod(mode)
    return path.name


def test_a_script_that_is_a_folder_or_cannot_be_read(launch: Launch, here: Path) -> None:
    (here / "folder.py").mkdir()
    launch("--", "folder.py").assert_error(2, "folder.py")
    make(here / "closed.py", 0)
    run_outside(["--", "closed.py"], here, preexec_fn=drop_powers).assert_error(
        2, "closed.py cannot be read", "chmod +r"
    )


def test_a_run_directory_without_permission(here: Path) -> None:
    (here / "locked").mkdir(mode=0o555)
    result = run_outside(["runs_dir=locked", "--", "true"], here, preexec_fn=drop_powers)
    result.assert_error(3, "Permission denied", "runs_dir=DIR")


def test_dots_in_the_path_of_the_runs_are_followed_once(here: Path) -> None:
    """Behind a link, `..` is beside what it leads to."""
    (here / "far/below").mkdir(parents=True)
    (here / "link").symlink_to("far/below")
    (here / "work").mkdir()
    for runs_dir, place in (("../x", here / "x"), ("../link/../y", here / "far/y")):
        result = run_outside([f"runs_dir={runs_dir}", "--", "true"], here / "work")
        assert result.code == 0 and f"run directory {place}/true/" in result.err and ".." not in result.err
        assert list(place.glob("true/*/manifest.json"))


def test_a_full_device_for_the_run_directory(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a mount: the first file is refused for want of space, and the run directory goes again."""
    from launcher.cli.main import run_guarded
    from launcher.launch import local_run

    def refuse(path: Path, _value: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(local_run, "write_json", refuse)
    assert run_guarded(["--", "true"]) == 3
    assert not list((here / "runs").glob("*/*"))


def test_a_port_in_use(launch: Launch, here: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for words in (
            [f"rdzv_endpoint=localhost:{port}"],
            ["cluster=manual", "nodes=2", "node_rank=0", f"rdzv_endpoint=localhost:{port}"],
        ):
            launch(*words, "--", "true").assert_error(
                3, f"port {port} of this host is not free", "rdzv_endpoint"
            )
    assert launch(f"rdzv_endpoint=localhost:{port}", DRY, "--", "true").code == 0


def test_a_working_directory_that_is_gone(here: Path) -> None:
    result = in_shell("mkdir gone; cd gone; rmdir ../gone; launch dry_run=true -- true", here)
    result.assert_error(2, "the working directory is gone", "cd to another")
    assert in_shell("mkdir gone; cd gone; rmdir ../gone; launch --help", here).code == 0


def test_a_reader_that_leaves(here: Path) -> None:
    for words in ("--help", "plan format=json", "dry_run=true"):
        result = in_shell(f"launch {words} | true", here)
        assert (result.code, result.out) in ((141, ""), (0, "")), result
        assert not re.search("Traceback|BrokenPipe|Exception ignored", result.err), result
    assert in_shell("launch plan | head -1 | wc -l", here).out.strip() == "1"


@pytest.mark.parametrize(
    ("words", "closing"),
    [
        *(("plan", closing) for closing in (">&-", "2>&-", "<&- >&- 2>&-")),
        *(("--help", ">&-"), ("dry_run=true -- true", "<&- >&- 2>&-"), ("modle=1", "2>&-")),
    ],
)
def test_closed_streams(here: Path, words: str, closing: str) -> None:
    result = in_shell(f"launch {words} {closing}", here)
    assert result.code == (2 if words == "modle=1" else 0), result
    assert "Traceback" not in result.err and "Exception ignored" not in result.err
    assert not list(here.iterdir())


def test_a_full_device_for_output(here: Path) -> None:
    result = in_shell("launch plan format=json > /dev/full", here)
    assert result.code == 3, result
    assert result.err.startswith("launch: error: ") and result.err.count("\n") == 1


ASCII = {"PYTHONIOENCODING": "ascii", "LC_ALL": "POSIX", "PYTHONUTF8": "0"}
ODD = {
    **{b"name=\xff\xfe": 2, b"env.A=\xff": 0, b"\xff": 2, b"runs_dir=\xff/x": 0, b"model=\xff": 2},
    **{b"--\xff": 2, b"-cd=\xff": 2, b"data.path=\xff": 0},
}
"""Words, and the exit codes of dry runs with them."""


def test_bytes_that_are_no_text(here: Path) -> None:
    for (word, code), encoding in itertools.product(ODD.items(), ("utf-8", "ascii", "process")):
        if encoding != "process":
            result = run_inside([os.fsdecode(word), DRY, "--", "true"], encoding)
        elif word in (b"name=\xff\xfe", b"\xff"):
            result = run_outside([word, DRY, b"--", b"true"], here, ASCII)
        assert result.code == code, result
        assert "Traceback" not in result.err and "internal error" not in result.err
        assert code == 0 or (result.err.startswith("launch: error: ") and result.err.count("\n") == 1)
    done = subprocess.run(
        [*LAUNCH, DRY, "--", "echo", b"\xff \xc3"],
        cwd=here,
        env={**os.environb, b"ODD\xfe": b"\xff"},
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert rb"echo '\udcff \udcc3'" in done.stdout


def test_a_terminal_that_knows_ascii_alone(here: Path) -> None:
    plain = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    named = ["name=é", DRY, "--", "echo", "é"]
    for words in (["--help"], ["plan"], ["model=é"], named, ["--cfg", "job", "env.A=é"]):
        results = [run_inside(words, "ascii")]
        if words in (["plan"], named):
            results += [run_outside(words, here, variables) for variables in ({"LC_ALL": "C"}, plain)]
        for at, result in enumerate(results):
            # Where the locale has no such letter, the name of the run is no text.
            refused = words == ["model=é"] or (words == named and at == 2)
            assert result.code == (2 if refused else 0), result
            assert "internal error" not in result.err


@pytest.mark.parametrize("environ", [{"PATH": "/usr/bin:/bin"}, {}], ids=str)
def test_almost_without_an_environment(here: Path, environ: dict[str, str]) -> None:
    command = [*LAUNCH, DRY, "--", "/bin/true"]
    done = subprocess.run(command, cwd=here, env=environ, capture_output=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_huge_words(launch: Launch, here: Path) -> None:
    big = "x" * 120_000
    assert launch(f"env.BIG={big}", DRY, "--", "true").code == 0
    assert big in launch(DRY, "--", "echo", big).out
    result = launch(f"{big}=1", DRY)
    result.assert_error(2, "there is no key")
    assert len(result.err) < 1000
    assert len(launch(big).err) < 1000
    assert len(launch(f"name={big}", "--", "true").err) < 1000
    assert len(launch(f"model={big}").err) < 1000


def test_an_interrupt_while_reading_the_configuration(
    here: Path, launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    from launcher.config import compose

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(compose, "compose", interrupt)
    assert launch(DRY).code == 130


def test_a_defect_of_ours_is_one_line_that_says_so(launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    from launcher.config import compose

    def fail(*_: object) -> None:
        raise ZeroDivisionError("of ours")

    with monkeypatch.context() as patch:  # from Hydra, such an error would be a user's mistake
        patch.setattr("launcher.config.compose.mentions_hydra", None)
        launch(DRY, "name=odd").assert_error(70, "internal error", "TypeError")
    load: Callable[..., object] = ConfigLoaderImpl.load_configuration
    with monkeypatch.context() as patch:  # a wrong argument, for which Hydra fails inside
        patch.setattr(ConfigLoaderImpl, "load_configuration", lambda self, _, *more: load(self, 3, *more))
        launch(DRY, "name=odd").assert_error(70, "internal error", "Error: ")
    monkeypatch.setattr(compose, "compose", fail)
    launch(DRY).assert_error(70, "internal error", "ZeroDivisionError: of ours", "HYDRA_FULL_ERROR=1")
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    assert "Traceback" in launch(DRY).err
