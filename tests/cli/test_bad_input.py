"""Mistakes and hostile surroundings: one line on stderr with the fix, the right code, nothing left behind."""

import errno
import itertools
import json
import os
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hydra._internal.config_loader_impl import ConfigLoaderImpl

from launcher.text import escape_text, join_words, tame_text
from tests.cli.make_runs import make_run, read_manifest, write_applied, write_log
from tests.fuzzing import assert_harmless
from tests.launch.terminals import open_terminal
from tests.seam import LAUNCH, PATIENCE, Launch, drop_powers, in_shell, run_inside, run_outside

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


@pytest.mark.parametrize(
    "key", ["fit.timeout", "tune.seconds", "torchrun.shutdown_timeout", "watch.hang_seconds", "logs.tail"]
)
def test_a_number_that_no_float_holds(key: str) -> None:
    for number in (f"1{'0' * 400}", f"-1{'0' * 400}"):
        run_inside([DRY, f"{key}={number}", "--", "true"]).assert_error(2, f"error: {key}")


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


def test_a_full_device_for_the_run_directory(
    launch: Launch, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a mount: the first file is refused for want of space, and the run directory goes again."""
    from launcher.launch import local_run

    def refuse(path: Path, _value: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(local_run, "write_json", refuse)
    assert launch("--", "true").code == 3
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


def test_a_program_that_has_used_up_its_cpu_time(here: Path) -> None:
    spin = f"{sys.executable} -c 'while True: pass'"
    result = in_shell(f"ulimit -t 3; launch nproc_per_node=1 -- {spin}", here)
    assert result.code == 137 and "after 3 s of CPU time (`ulimit -t`)" in result.err, result


def test_a_reader_that_leaves(here: Path) -> None:
    for words in ("--help", "plan format=json", "dry_run=true"):
        result = in_shell(f"launch {words} | true", here)
        assert (result.code, result.out) in ((141, ""), (0, "")), result
        assert not re.search("Traceback|BrokenPipe|Exception ignored", result.err), result
    assert in_shell("launch plan | head -1 | wc -l", here).out.strip() == "1"


@pytest.mark.parametrize(
    ("words", "closing"),
    [
        *(("plan", ">&-"), ("--help", ">&-"), ("modle=1", "2>&-")),
        ("dry_run=true -- true", "<&- >&- 2>&-"),
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
        timeout=PATIENCE,
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


def test_without_an_environment(here: Path) -> None:
    command = [*LAUNCH, DRY, "--", "/bin/true"]
    done = subprocess.run(command, cwd=here, env={}, capture_output=True, timeout=PATIENCE, check=False)
    assert done.returncode == 0, done.stderr


def test_huge_words(launch: Launch, here: Path) -> None:
    big = "x" * 120_000
    assert launch(f"env.BIG={big}", DRY, "--", "true").code == 0
    assert big in launch(DRY, "--", "echo", big).out
    result = launch(f"{big}=1", DRY)
    result.assert_error(2, "too long")
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
        patch.setattr("launcher.config.compose.list_own_files", None)
        launch(DRY, "name=odd").assert_error(70, "internal error", "TypeError")
    load: Callable[..., object] = ConfigLoaderImpl.load_configuration
    with monkeypatch.context() as patch:  # a wrong argument, for which Hydra fails inside
        patch.setattr(ConfigLoaderImpl, "load_configuration", lambda self, _, *more: load(self, 3, *more))
        launch(DRY, "name=odd").assert_error(70, "internal error", "Error: ")
    monkeypatch.setattr(compose, "compose", fail)
    launch(DRY).assert_error(70, "internal error", "ZeroDivisionError: of ours", "HYDRA_FULL_ERROR=1")
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    assert "Traceback" in launch(DRY).err


# What acts on a terminal


EVIL = "\x1b[2J\x1b]0;title\x07\x9b31m\x08\x7f\u202e"


SCRIPT = ("cluster=slurm", "nproc_per_node=1", "dry_run=true", f"env.A={EVIL}")


EACH = """
import ast, os, sys
from launcher.cli.main import open_streams, run_guarded
open_streams()
for words, variables in ast.literal_eval(sys.argv[1]):
    os.environ.update(variables)
    code = run_guarded(words)
    print(f"ENDED {code}", flush=True)
    for name in variables:
        del os.environ[name]
"""
"""Runs some command lines, each with variables, in one process."""


def show(here: Path, *commands: tuple[list[str], dict[str, str]]) -> list[tuple[int, str]]:
    """Run command lines on a terminal; return the exit code of each and all that the terminal gets."""
    words = (sys.executable, "-c", EACH, ascii(commands))
    with open_terminal(here, *words, COLUMNS="300", TERM="xterm") as terminal:
        assert terminal.finish() == 0, terminal.text()
        parts = re.split(r"ENDED (\d+)\r\n", terminal.text())
    return [(int(code), text) for text, code in zip(parts[::2], parts[1::2], strict=False)]


def split_in_bash(line: str) -> list[str]:
    """The words that bash reads in a line."""
    done = subprocess.run(["bash", "-c", f"printf '%s\\0' {line}"], capture_output=True, check=True)
    return done.stdout.decode().split("\0")[:-1]


GIVEN: list[tuple[list[str], dict[str, str]]] = [
    ([f"name={EVIL}", "--", "true"], {}),
    ([f"{EVIL}=1"], {}),
    ([f"machine.snapshot={EVIL}", "dry_run=true"], {}),
    (["plan", "explain=true", "machine=dgx_a100"], {"CUDA_VISIBLE_DEVICES": EVIL, "NCCL_X": EVIL}),
    (["dry_run=true", "gc.every=3", "--", "echo", EVIL], {"PET_RDZV_CONF": f"a={EVIL}", "LAUNCH_GC": EVIL}),
    (["tune", "dataloader", "dry_run=true", f"save={EVIL}", "--", "true"], {}),
    (["status", f"runs_dir={EVIL}"], {}),
    (["cancel", EVIL], {}),
    (["--cfg", "all", f"env.A={EVIL}"], {}),
    (["--info", "all", f"env.A={EVIL}"], {}),
    (["-m", f'env.A=a,"{EVIL}"', "dry_run=true", "--", "true"], {}),
    (
        [*SCRIPT, f'cluster.setup=["echo {EVIL}"]', f'cluster.srun.comment="{EVIL}"', "--", "echo", EVIL],
        {},
    ),
]


def test_what_was_given(here: Path) -> None:
    """Harmless, and the command of a dry run is still the command."""
    printed = ["%s", EVIL, "it's", "a\\b", "two\nlines", "é"]
    *shown, (_, dry) = show(here, *GIVEN, (["dry_run=true", "--", "printf", *printed], {}))
    for (code, text), (words, _) in zip(shown, GIVEN, strict=True):
        assert code in (0, 2, 3) and text.strip(), words
        assert_harmless(text)
    assert split_in_bash(dry.replace("\r\n", "\n")[dry.index("-I -S ") :])[-6:] == printed


def test_what_was_planted(here: Path) -> None:
    """Runs, logs and configuration whose every text is hostile; logs keep colours, and all in a pipe."""
    name = EVIL.replace("\x9b", "")
    failure = {"rank": EVIL, "host": EVIL, "reason": EVIL, "last_lines": [EVIL]}
    outcome = {"cause": EVIL, "reason": EVIL, "signal": EVIL, "first_failure": failure}
    texts = {"command": [EVIL], "hosts": [EVIL], "slurm": {"job_id": EVIL}, "process": {"host": EVIL}}
    run = make_run(here / "runs", name, "20260801-120000", "failed", outcome=outcome, **texts)
    manifest = read_manifest(run)
    (run / "manifest.json").write_text(json.dumps({**manifest, "started": EVIL, "earlier": [manifest]}))
    write_log(run, 0, f"\x1b[31mred {EVIL}\x1b[0m\nnext\x1b[32m green\n")
    write_applied(run, 0, EVIL)
    (run / f"plan-{EVIL}.json").write_text("{")
    make_run(here / "runs", name, "20260801-130000", "running", hosts=[EVIL])
    for group in ("model", name):
        (here / "conf" / group).mkdir(parents=True)
        (here / "conf" / group / f"{EVIL}.yaml").write_text(f"a: {json.dumps(EVIL)}\n")
    commands = (
        ["status"],
        ["status", str(run)],
        ["logs", str(run)],
        ["logs", "rank=0", str(run)],
        ["cancel", str(run), str(run.with_name("20260801-130000"))],
        ["doctor", f"run_dir={run}"],
        ["plan", "--help"],
        ["plan", f"model={EVIL}"],
        ["--info", "searchpath"],
    )
    shown = show(here, *((words, {}) for words in commands))
    for (_, text), words in zip(shown, commands, strict=True):
        assert text.strip(), words
        assert_harmless(text)
    coloured = shown[commands.index(["logs", "rank=0", str(run)])][1].replace("\r\n", "\n")
    assert coloured.startswith("\x1b[31mred \\x1b[2J\\x1b]0;title\\x07\\x9b31m\\x08\\x7f\\u202e\x1b[0m\n")
    assert coloured.endswith("next\x1b[32m green\x1b[0m\n")
    piped = run_outside(["logs", "rank=0", str(run)], here)
    assert piped.out == f"\x1b[31mred {EVIL}\x1b[0m\nnext\x1b[32m green\n"


def test_the_script_of_a_dry_run_is_exact_in_a_file(here: Path) -> None:
    """An administrator runs it: there, what the program gets is what was given."""
    setup, words = f"export B='{EVIL}'", [EVIL, "it's", "two\nlines", "é", "$(id)"]
    done = run_outside([*SCRIPT, f'cluster.setup=["{setup}"]', "--", "echo", *words], here)
    assert done.code == 0, done.err
    assert f"\n{setup}\n" in done.out
    printing = done.out.replace("\nexec ", "\nprintf '%s\\0' ").encode()
    environ = {"PATH": os.environ["PATH"], "SLURM_JOB_ID": "7"}
    ran = subprocess.run(["bash"], input=printing, env=environ, capture_output=True, check=True)
    given = ran.stdout.decode().split("\0")[:-1]
    assert given[-7:] == ["--", "echo", *words] and f"env.A={EVIL}" in given
    remarks = [line for line in done.out.splitlines() if line.startswith("#")]
    assert_harmless("\n".join(remarks))


def test_quoting() -> None:
    texts = ["", "a b", EVIL, "'", "\\", "\x1b'\\", "é\x1b", "$x\x1b`y`", "\n\t", "-"]
    quoted = [join_words([text]) for text in texts]
    assert_harmless("".join(quoted))
    assert split_in_bash(" ".join(quoted)) == texts
    assert join_words(texts) == " ".join(quoted)
    printable = [text for text in texts if text.isprintable()]
    assert shlex.split(join_words(printable)) == printable


def test_long_texts_lose_their_middle_and_colours_are_ended() -> None:
    assert escape_text("a" * 3000 + "\x1b" + "b" * 3000, 100) == f"{'a' * 48} … {'b' * 48}"
    assert escape_text("\x1b" * 100, 100) == escape_text("\x1b" * 100_000, 100)
    assert len(escape_text("\x1b" * 100_000, 100)) <= 100
    assert escape_text("é\x1b\ud800\n") == "é\\x1b\\ud800\\n"
    assert tame_text("\x1b[31mred", colours=True) == "\x1b[31mred\x1b[0m"
    assert tame_text("\x1b[31mred\x1b[m", colours=True) == "\x1b[31mred\x1b[m"
    assert tame_text("plain\tand\nplain", colours=True) == "plain\tand\nplain"
    assert tame_text("\x1b[31mred\x1b[2K") == "\\x1b[31mred\\x1b[2K"
