"""Odd surroundings of the shim: closed streams, refused system calls, hidden files, small limits."""

import os
import resource
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests.rank.seccomp_filter import ENOSYS, EPERM, KNOWN, forbid
from tests.rank.start_shim import (
    ALLOWED,
    COMMAND,
    ECHO,
    SHIM,
    TELL,
    assert_ran,
    run_shim,
    run_words,
    tell,
    write_plan,
)
from tests.seam import drop_powers


@pytest.mark.parametrize("closed", [(2,), (1, 2), (0, 1, 2)], ids=str)
@pytest.mark.parametrize("planned", [True, False])
def test_closed_standard_streams(tmp_path: Path, closed: tuple[int, ...], planned: bool) -> None:
    variables = {"LAUNCH_PLAN": str(write_plan(tmp_path, str(ALLOWED[0])))} if planned else {}
    program = (sys.executable, "-c", f"open({str(tmp_path / 'ran')!r}, 'w').close()")
    redirections = [f"{stream}>&-" for stream in closed]
    done = run_words(["sh", "-c", f'exec "$0" "$@" {" ".join(redirections)}', *COMMAND, *program], variables)
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "ran").exists()


def test_a_full_stderr_and_one_that_nobody_reads(tmp_path: Path) -> None:
    command = ["sh", "-c", 'exec "$0" "$@" 2>/dev/full', *COMMAND, *ECHO]
    assert run_words(command, {}).stdout == "ran\n"
    end, other = os.pipe()
    os.close(end)
    with os.fdopen(other, "w") as broken:
        environ = {"PATH": os.environ["PATH"], "LOCAL_RANK": "0"}
        done = subprocess.run(
            [*COMMAND, *ECHO], env=environ, stdout=subprocess.PIPE, stderr=broken, check=True
        )
    assert done.stdout == b"ran\n"


@pytest.mark.skipif(not KNOWN, reason="the filter knows x86_64 and aarch64 alone")
@pytest.mark.parametrize(
    ("calls", "error", "planned", "says"),
    [
        (("sched_setaffinity",), EPERM, True, "were refused ([Errno 1]"),
        (("sched_setaffinity",), EPERM, False, "were refused ([Errno 1]"),
        (("sched_setaffinity", "sched_getaffinity"), ENOSYS, True, "cpus unknown"),
        (("sched_setaffinity", "sched_getaffinity"), ENOSYS, False, "rank 0 is not placed"),
        (("set_mempolicy", "get_mempolicy"), EPERM, True, "was refused ([Errno 1]"),
        (("set_mempolicy",), ENOSYS, True, "was refused ([Errno 38]"),
        (("get_mempolicy",), ENOSYS, True, "memory unknown"),
    ],
    ids=str,
)
def test_system_calls_that_are_refused(
    tmp_path: Path, calls: tuple[str, ...], error: int, planned: bool, says: str
) -> None:
    variables = {"LAUNCH_PLAN": str(write_plan(tmp_path, str(ALLOWED[0])))} if planned else {}
    done = run_shim(*ECHO, preexec=partial(forbid, *calls, error=error), **variables)
    assert (done.returncode, done.stdout) == (0, "ran\n"), done.stderr
    assert says in done.stderr
    assert "Traceback" not in done.stderr
    strict = run_shim(*ECHO, preexec=partial(forbid, *calls, error=error), LAUNCH_STRICT="1", **variables)
    assert (strict.returncode, strict.stdout) == (3, "")


HIDE = "mount -t tmpfs none /proc"
HIDEPID = "mount -t proc -o hidepid=2 proc /proc"


def can_unshare() -> bool:
    done = subprocess.run(["unshare", "--mount", "sh", "-c", HIDE], capture_output=True, check=False)
    return done.returncode == 0


@pytest.mark.skipif(not can_unshare(), reason="mounting in a namespace of its own is not permitted here")
@pytest.mark.parametrize(
    "mount", [HIDE, HIDEPID, f"{HIDE}; mount -t tmpfs none /sys"], ids=("proc", "hidepid", "both")
)
def test_file_systems_that_are_hidden(mount: str) -> None:
    command = ["unshare", "--mount", "sh", "-c", f'{mount}; exec "$0" "$@"', *COMMAND]
    words = ["taskset", "-c", str(ALLOWED[-1]), *command, sys.executable, "-c", TELL]
    done = run_words(words, {"PYTHONPATH": str(SHIM.parents[2])})
    assert tell(done)["cpus"] == ALLOWED[-1:]
    assert done.stderr.startswith("launch-rank: ")
    assert "Traceback" not in done.stderr


def limit(what: int, value: int) -> Callable[[], None]:
    return lambda: resource.setrlimit(what, (value, value))


@pytest.mark.parametrize("planned", [True, False])
@pytest.mark.parametrize("files", [5, 6, 8, 16])
def test_few_file_descriptors(tmp_path: Path, files: int, planned: bool) -> None:
    variables = {"LAUNCH_PLAN": str(write_plan(tmp_path, str(ALLOWED[0])))} if planned else {}
    done = run_shim(*ECHO, preexec=limit(resource.RLIMIT_NOFILE, files), **variables)
    assert (done.returncode, done.stdout) == (0, "ran\n"), done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("mebibytes", [20, 26, 32, 48])
def test_little_memory(mebibytes: int) -> None:
    bare = subprocess.run(
        [sys.executable, "-I", "-S", "-c", "import os, ctypes"],
        preexec_fn=limit(resource.RLIMIT_AS, mebibytes << 20), capture_output=True, check=False,
    )  # fmt: skip
    done = run_shim(*ECHO, preexec=limit(resource.RLIMIT_AS, mebibytes << 20))
    if bare.returncode == 0:  # below that, the interpreter itself does not start
        assert (done.returncode, done.stdout) == (0, "ran\n"), done.stderr
        assert "Traceback" not in done.stderr


@pytest.mark.parametrize("planned", [True, False])
def test_an_empty_environment(tmp_path: Path, planned: bool) -> None:
    plan = write_plan(tmp_path, str(ALLOWED[0]))
    variables = {"LAUNCH_PLAN": str(plan)} if planned else {}
    done = subprocess.run([*COMMAND, *ECHO], env=variables, capture_output=True, text=True, check=False)
    assert_ran(done, "launch-rank: rank 0, cpus")


def test_a_script_without_a_first_line_runs_as_under_numactl(tmp_path: Path) -> None:
    script = tmp_path / "train"
    script.write_text('echo "$0" "$@"\n')
    script.chmod(0o755)
    assert run_shim(str(script), "a b", "c").stdout == f"{script} a b c\n"
    assert run_shim("train", "x", PATH=f"{tmp_path}:{os.environ['PATH']}").stdout == f"{script} x\n"
    script.write_bytes(b"\x7fELF" + bytes(60))
    assert run_shim(str(script)).returncode == 126


@pytest.mark.parametrize("mode", [0o644, 0o755])
def test_a_python_file_is_run_as_torchrun_runs_it(tmp_path: Path, mode: int) -> None:
    script = tmp_path / "train.py"
    script.write_text("import sys; print(sys.argv, sys.executable, sys.orig_argv[1])\n")
    script.chmod(mode)
    for path in (str(script), os.path.relpath(script)):
        done = run_shim(path, "a b", LAUNCH_QUIET="1")
        assert done.stdout == f"{[path, 'a b']} {sys.executable} -u\n", done.stderr
    script.write_text("#!/bin/sh\necho its own\n")
    script.chmod(0o755)
    assert run_shim(str(script)).stdout == "its own\n"
    assert run_shim("absent.py").returncode == 127


def test_a_read_only_run_directory(tmp_path: Path) -> None:
    plan = write_plan(tmp_path, str(ALLOWED[0]))
    run = tmp_path / "run"
    run.mkdir(mode=0o500)
    done = run_shim(*ECHO, LAUNCH_PLAN=str(plan), LAUNCH_RECORD_DIR=str(run), preexec=drop_powers)
    assert_ran(done, "has no log files", lines=3)
    assert "there is no record of what was applied" in done.stderr


def test_an_interpreter_without_ctypes(tmp_path: Path) -> None:
    plan = write_plan(tmp_path, str(ALLOWED[0]))
    code = f"import sys; sys.path.insert(0, {str(SHIM.parents[2])!r}); sys.modules['_ctypes'] = None\n"
    code += "from launcher.rank.shim import main\nsys.argv[0:1] = ['launch-rank']\nsys.exit(main())"
    words = [sys.executable, "-I", "-S", "-c", code, *ECHO]
    run = {"LAUNCH_PLAN": str(plan), "LAUNCH_QUIET": "1"}
    assert_ran(run_words(words, run), "memory policy preferred of node 0 was refused")
    done = run_words(words, {**run, "LAUNCH_RECORD_DIR": str(tmp_path)})
    assert (done.returncode, (tmp_path / "logs/0/rank-0.out").read_text()) == (0, "ran\n")


def test_an_interrupt_leaves_no_traceback() -> None:
    code = f"""
import os, signal, sys
sys.path.insert(0, {str(SHIM.parents[2])!r})
from launcher.rank import shim
def interrupt(*_):
    os.kill(os.getpid(), signal.SIGINT)
    raise OSError("not reached")
shim.place_rank = interrupt
sys.argv = ["launch-rank", "true"]
sys.exit(shim.main())
"""
    done = run_words([sys.executable, "-I", "-S", "-c", code], {})
    assert (done.returncode, done.stderr) == (-2, "")


def test_help_on_a_closed_stdout() -> None:
    assert run_words(["sh", "-c", 'exec "$0" "$@" >&-', *COMMAND, "--help"], {}).returncode == 0


def test_an_ignored_interrupt_stays_ignored() -> None:
    """nohup and a shell's `&` ignore SIGINT: that stays so."""
    code = "import signal; print(signal.getsignal(signal.SIGINT) == signal.SIG_IGN)"
    command = ["sh", "-c", 'trap "" INT; exec "$0" "$@"', *COMMAND, sys.executable, "-c", code]
    assert run_words(command, {}).stdout == "True\n"


@pytest.mark.parametrize(
    "variables",
    [
        {"LAUNCH_PLAN": "/nowhere/" + "x" * 50_000},
        {"LAUNCH_PLAN": "/nowhere/\x1b[2J\x1b]0;title\x07"},
        {"LAUNCH_BINDING": "\x1b[2J" + "z" * 50_000},
        {"LAUNCH_RECORD_DIR": "/nowhere/\x1b[2J" + "w" * 3_000},
    ],
    ids="".join,
)
def test_what_variables_hold_is_not_poured_onto_the_terminal(variables: dict[str, str]) -> None:
    done = run_words([*COMMAND, *ECHO], {**variables, "LOCAL_WORLD_SIZE": "1"})
    assert (done.returncode, done.stdout) == (0, "ran\n"), done.stderr
    assert done.stderr and "\x1b" not in done.stderr and "\x07" not in done.stderr
    assert max(map(len, done.stderr.splitlines())) < 1100


def test_a_program_that_is_a_pipe_is_refused_as_exec_refuses_it(tmp_path: Path) -> None:
    plan = write_plan(tmp_path, str(ALLOWED[0]))
    os.mkfifo(tmp_path / "pipe", 0o755)
    done = run_shim(str(tmp_path / "pipe"), LAUNCH_PLAN=str(plan), LAUNCH_GC="synchronized")
    assert done.returncode == 126 and "cannot be run (" in done.stderr, done
