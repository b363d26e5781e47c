"""Ranks that are forked from a process with torch: as they are by themselves, or executed with the reason."""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from launcher.launch.supervisor import spawn_rank
from launcher.launch.warm.process import WarmProcess
from launcher.launch.warm.program import ExecNeededError, read_program
from tests.data_files import read_data
from tests.seam import PATIENCE, clean_environ, find_port

PROGRAM = "program.py"
PLAIN_MODULES = ("json", "logging", "multiprocessing")
"""In torch's place where a program needs none: an import of torch takes a second."""


@dataclass(frozen=True, slots=True)
class Ended:
    """How a rank has ended."""

    code: int
    """-n for signal n."""
    out: str
    err: str
    pid: int

    def read(self) -> list[object]:
        """The list that it has printed as JSON."""
        found = json.loads(self.out)
        assert isinstance(found, list)
        return found


@dataclass(slots=True)
class Ranks:
    """A folder with a program, and ways to run it as a rank."""

    folder: Path
    environ: dict[str, str]
    warm: WarmProcess
    argv: tuple[str, ...] = (PROGRAM, "--lr", "3e-4")

    def write(self, code: str) -> None:
        """Make this the program."""
        (self.folder / PROGRAM).write_text(code)

    def fork(self, code: str | None = None, **variables: str) -> Ended:
        """Run the program in a forked rank; raises ExecNeededError."""
        if code is not None:
            self.write(code)
        return self.collect(self.begin_fork(**variables))

    def begin_fork(self, **variables: str) -> int:
        """Fork a rank and return its PID; raises ExecNeededError."""
        with open(os.devnull) as null:  # noqa: PTH123
            return self.warm.fork_rank(self.argv, {**self.environ, **variables}, (null.fileno(),) * 3)

    def exec(self, code: str | None = None, **variables: str) -> Ended:
        """Run the program by exec."""
        if code is not None:
            self.write(code)
        with contextlib.chdir(self.folder), open(os.devnull) as null:  # noqa: PTH123
            return self.collect(spawn_rank(self.argv, {**self.environ, **variables}, (null.fileno(),) * 3))

    def collect(self, pid: int, rank: int = 0) -> Ended:
        """Wait for a rank, and take its logs."""
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        texts = []
        for stream in ("out", "err"):
            path = self.folder / "logs" / "0" / f"rank-{rank}.{stream}"
            texts.append(path.read_text() if path.exists() else "")
            path.unlink(missing_ok=True)
        return Ended(code, texts[0], texts[1], pid)

    def print_json(self, code: str, **variables: str) -> object:
        """Return what a program prints as JSON in a forked rank."""
        ended = self.fork(code, **variables)
        assert (ended.code, ended.err) == (0, ""), ended.err
        return json.loads(ended.out)


@contextlib.contextmanager
def open_ranks(
    folder: Path,
    argv: Sequence[str] = (PROGRAM, "--lr", "3e-4"),
    modules: Sequence[str] = PLAIN_MODULES,
    **variables: str,
) -> Iterator[Ranks]:
    """Start a warm process for a program in a folder, whose file is written later."""
    entry = {"local_rank": 0, "gpu": None, "memory": {"policy": "default"}, "num_workers": 3, "env": {}}
    cpus = str(min(os.sched_getaffinity(0))) if "OMP_NUM_THREADS" in variables else format_own_cpus()
    (folder / "plan.json").write_text(json.dumps({"ranks": [{**entry, "cpus": cpus}]}))
    (folder / "logs" / "0").mkdir(parents=True, mode=0o700)
    (folder / PROGRAM).touch()
    folder.chmod(0o700)
    base = {**clean_environ(), "PYTHONDONTWRITEBYTECODE": "", **variables}
    given = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "LAUNCH_QUIET": "1"}
    ours = {"LAUNCH_PLAN": str(folder / "plan.json"), "LAUNCH_RECORD_DIR": str(folder), "LAUNCH_ATTEMPT": "0"}
    environ = {**base, **given, **ours}
    with contextlib.chdir(folder):
        warm = WarmProcess.start(argv, base, modules)
    try:
        yield Ranks(folder, environ, warm, tuple(argv))
    finally:
        warm.close()


def format_own_cpus() -> str:
    """The CPUs of this process, in the kernel's notation."""
    return ",".join(map(str, sorted(os.sched_getaffinity(0))))


def find_refusal(ranks: Ranks) -> str:
    """Why no rank is forked now; fails if one is."""
    try:
        pid = ranks.begin_fork()
    except ExecNeededError as error:
        return str(error)
    os.kill(pid, signal.SIGKILL)
    ranks.collect(pid)
    raise AssertionError("a rank was forked")


SURROUNDINGS = """
import sys
own = [name for name in sys.modules if name.partition(".")[0] in ("launcher", "launch_inprocess")]
import ctypes, gc, json, os, resource, signal, threading
def describe(stream):
    buffer = stream.buffer
    return [
        type(stream).__name__, type(buffer).__name__, stream.encoding, stream.errors, stream.line_buffering,
        stream.write_through, stream.name, stream.mode, stream.isatty(), buffer.name, stream.seekable(),
    ]
death = ctypes.c_int()
ctypes.CDLL(None).prctl(2, ctypes.byref(death), 0, 0, 0)
skipped = ("__builtins__", "__loader__")
dunder = {k: repr(v) for k, v in globals().items() if k[:2] == "__" and k not in skipped}
main = threading.main_thread()
print(json.dumps({
    "argv": sys.argv, "orig_argv": sys.orig_argv, "path": sys.path, "flags": str(sys.flags), "own": own,
    "main": [dunder, type(__loader__).__name__, sys.modules["__main__"].__dict__ is globals()],
    "frames": sys._getframe().f_back is None,
    "signals": {int(n): str(signal.getsignal(n)) for n in signal.valid_signals()},
    "mask": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
    "caught": [line for line in open("/proc/self/status") if line.startswith(("SigCgt", "SigBlk"))],
    "environ": dict(os.environ), "streams": [describe(s) for s in (sys.stdin, sys.stdout, sys.stderr)],
    "limits": [resource.getrlimit(n) for n in range(16)],
    "leads": [os.getsid(0) == os.getpid(), os.getpgrp() == os.getpid()], "parent": os.getppid(),
    "cpus": sorted(os.sched_getaffinity(0)), "death": death.value, "cwd": os.getcwd(), "mask2": os.umask(0),
    "files": [os.readlink(f"/proc/self/fd/{n}") for n in range(3)],
    "more": len([n for n in os.listdir("/proc/self/fd") if int(n) > 2]) <= 1,
    "thread": [main is threading.current_thread(), main.native_id == os.getpid()],
    "hooks": [sys.excepthook is sys.__excepthook__, sys.gettrace()],
    "meta": [type(f).__name__ for f in sys.meta_path],
    "finders": [p for p in sys.path_importer_cache if "launcher" in p],
    "name": open("/proc/self/comm").read(),
}, indent=1))
"""


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    with open_ranks(tmp_path_factory.mktemp("ranks")) as opened:
        yield opened


def test_a_program_finds_what_it_finds_by_itself(ranks: Ranks) -> None:
    ends = ranks.exec(SURROUNDINGS), ranks.fork(SURROUNDINGS)
    by_exec, forked = (json.loads(end.out) for end in ends)
    assert forked == by_exec
    record = json.loads((ranks.folder / "rank-0.applied.json").read_text())
    assert (record["pid"], record["agent"], record["problems"]) == (ends[1].pid, os.getpid(), [])
    assert forked["argv"] == [PROGRAM, "--lr", "3e-4"] and not forked["own"]
    assert forked["parent"] == os.getpid() and forked["death"] == signal.SIGTERM


def test_ranks_have_seeds_and_keys_of_their_own(ranks: Ranks) -> None:
    code = """
import json, multiprocessing, random, uuid
key = multiprocessing.current_process().authkey
print(json.dumps([random.random(), key.hex(), str(uuid.uuid4())]))
"""
    first, second = ranks.print_json(code), ranks.print_json(code)
    assert isinstance(first, list) and isinstance(second, list)
    assert not {*first} & {*second}


def test_arguments_with_values_of_the_plan(ranks: Ranks) -> None:
    asking = replace(ranks, argv=(PROGRAM, "--workers={num_workers}"))
    found = asking.print_json("import json, sys\nprint(json.dumps([sys.argv, sys.orig_argv[2:]]))")
    assert found == [[PROGRAM, "--workers=3"]] * 2


def test_another_program_than_the_warm_ones_is_executed(ranks: Ranks) -> None:
    (ranks.folder / "other.py").write_text("print('other')")
    ended = replace(ranks, argv=("other.py",)).fork()
    assert (ended.code, ended.out) == (0, "other\n")
    assert "the warm process was started for another command line" in ended.err


@pytest.mark.parametrize(
    ("name", "value", "forked"),
    [
        ("NCCL_DEBUG", "INFO", True),
        ("CUDA_VISIBLE_DEVICES", "", True),
        ("LAUNCH_NUM_WORKERS", "7", True),
        ("LAUNCH_FIT", "{}", False),
        ("MINE", "1", False),
        ("PYTHONHASHSEED", "5", False),
        ("PYTHONPATH", "/nowhere", False),
        ("LC_ALL", "C", False),
    ],
)
def test_variables_that_may_differ_from_the_warm_process(
    ranks: Ranks, name: str, value: str, forked: bool
) -> None:
    ended = ranks.fork(f"import os, logging, sys\nprint(os.environ.get({name!r}))", **{name: value})
    told = f"launch-rank: this program starts by itself, not from the warm process: {name} may have been read"
    assert (ended.code, ended.out) == (0, f"{value}\n")
    assert ended.err.startswith(told) is not forked and bool(ended.err) is not forked


def test_a_module_of_the_programs_own_that_was_imported_from_elsewhere(ranks: Ranks) -> None:
    own = ranks.folder / "multiprocessing.py"
    own.touch()
    try:
        ended = ranks.fork("import multiprocessing\nprint(multiprocessing.__file__)")
    finally:
        own.unlink()
    assert ended.out == f"{own}\n" and "a module multiprocessing of its own" in ended.err
    (ranks.folder / "launcher.py").write_text("mine = 1")
    try:
        assert ranks.print_json("import launcher\nprint(launcher.mine)") == 1
    finally:
        (ranks.folder / "launcher.py").unlink()


COMMANDS: dict[str, tuple[str, ...]] = {
    "-m of a module": ("python", "-u", "-m", "package.part", "-x"),
    "-m of a package": ("python", "-m", "package"),
    "-c": ("python", "-u", "-c", "import sys; print(sys.argv, sys.path[0], __name__); sys.exit(2)", "-c"),
    "a folder": ("python", "package", "a"),
    "options": ("python", "-O", "-W", "error", "program.py"),
    "a #! line": ("./script", "a"),
    "no such file": ("python", "none.py"),
}
SHOWN = """
import json, sys
print(sys.argv, sys.orig_argv, sys.path[:2], __name__, __file__, __package__, __spec__ and __spec__.name)
print(sys.flags, sys.warnoptions, sys.stdout.line_buffering, type(sys.stdout.buffer))
assert False, "asserted"
"""


@pytest.mark.parametrize("argv", COMMANDS.values(), ids=COMMANDS)
def test_ways_to_start_a_program(tmp_path: Path, argv: tuple[str, ...]) -> None:
    (tmp_path / "package").mkdir()
    for name in ("part", "__main__", "__init__"):
        (tmp_path / "package" / f"{name}.py").write_text(SHOWN if name != "__init__" else "")
    script = tmp_path / "script"
    script.write_text(f"#!/usr/bin/env python\n{SHOWN}")
    script.chmod(0o700)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    with open_ranks(tmp_path, argv, ["json"], PATH=path, PYTHONFAULTHANDLER="1") as ranks:
        (tmp_path / PROGRAM).write_text(SHOWN)
        by_exec, forked = ranks.exec(), ranks.fork()
    assert (forked.code, forked.out, forked.err) == (by_exec.code, by_exec.out, by_exec.err)
    assert forked.out or argv[-1] == "none.py"


THREADS = """
import ctypes, json, os, threading
import torch
import numpy
found = []
thread = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
thread.start()
thread.join()
blas = [line.split()[-1] for line in open("/proc/self/maps") if "openblas" in line][:1]
get = [getattr(ctypes.CDLL(p), "scipy_openblas_get_num_threads64_", None) for p in blas]
info = torch.__config__.parallel_info()
print(json.dumps([torch.get_num_threads(), found, [f() for f in get if f], info]))
"""
COLLECTIVE = """
import json, random
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(64, 64) @ torch.ones(64, 64)
dist.all_reduce(total)
model = torch.nn.Linear(64, 8)
loader = torch.utils.data.DataLoader(torch.ones(4, 64), batch_size=2, num_workers=1)
for batch in loader:
    model(batch).sum().backward()
print(json.dumps([total[0, 0].item(), model.bias.grad.tolist()[0], torch.initial_seed(), random.random()]))
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def torch_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    with open_ranks(tmp_path_factory.mktemp("ranks"), modules=["torch"]) as opened:
        yield opened


@pytest.mark.slow
def test_threads_are_those_that_the_imports_would_take(torch_ranks: Ranks) -> None:
    for variables in ({"OMP_NUM_THREADS": "1"}, {"OMP_NUM_THREADS": "64", "MKL_NUM_THREADS": "2"}):
        by_exec, forked = torch_ranks.exec(THREADS, **variables), torch_ranks.fork(THREADS, **variables)
        assert (forked.code, forked.out, forked.err) == (0, by_exec.out, by_exec.err)


def test_collectives_and_workers_of_two_ranks(torch_ranks: Ranks) -> None:
    port = str(find_port())
    torch_ranks.write(COLLECTIVE)
    given = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "2"}
    pids = [torch_ranks.begin_fork(RANK=str(rank), **given) for rank in range(2)]
    told = [torch_ranks.collect(pid, rank) for rank, pid in enumerate(pids)]
    assert [end.code for end in told] == [0, 0], told
    first, second = (end.read() for end in told)
    assert first[:2] == second[:2] == [128.0, 4.0]
    assert not {*first[2:]} & {*second[2:]}


CASES = read_data("program_texts")


def open_with(folder: Path, code: str, **variables: str) -> AbstractContextManager[Ranks]:
    """Start a warm process that imports a module `faulty` with this code; without code there is none."""
    (folder / "modules").mkdir()
    if code:
        (folder / "modules" / "faulty.py").write_text(code)
    return open_ranks(folder, modules=["faulty"], PYTHONPATH=str(folder / "modules"), **variables)


@pytest.mark.parametrize("case", CASES["import"], ids=lambda case: str(case["name"]))
def test_an_import_that_does_not_go_over_a_fork(case: dict[str, str], tmp_path: Path) -> None:
    with open_with(tmp_path, case["code"]) as ranks:
        assert case["reason"] in find_refusal(ranks) and case["reason"] in find_refusal(ranks)


def test_an_import_that_has_started_a_gpus_runtime(tmp_path: Path) -> None:
    text = "import sys, types\nnative = types.SimpleNamespace(_cuda_isInBadFork=lambda: True)\n"
    text += "sys.modules['torch'] = types.SimpleNamespace(_C=native)\n"
    with open_with(tmp_path, text) as ranks:
        ended = ranks.fork("import sys\nprint('faulty' in sys.modules)")
    assert (ended.code, ended.out) == (0, "False\n")
    assert "the imports have started a GPU's runtime, which no fork can use" in ended.err


def test_a_sitecustomize_of_the_users_own(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('mine')")
    told = f"{tmp_path}/sitecustomize.py runs before the program, and may change what is imported"
    with open_ranks(tmp_path, modules=["json"], PYTHONPATH=str(tmp_path)) as ranks:
        assert find_refusal(ranks) == told


def test_the_warm_process_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_ranks(tmp_path, modules=["json"]) as ranks:
        assert ranks.fork("").code == 0
        os.kill(ranks.warm.process.pid, signal.SIGSTOP)
        monkeypatch.setattr("launcher.launch.warm.process.FORK_TIMEOUT", 0.2)
        with pytest.raises(OSError, match="the warm process does not answer"):
            ranks.begin_fork()
        assert ranks.warm.process.returncode == -signal.SIGKILL
        assert find_refusal(ranks) == "the warm process does not answer"


@pytest.mark.parametrize("module", ["json", "sleeping"])
def test_it_ends_with_its_launcher(tmp_path: Path, module: str) -> None:
    """While it waits for orders, and while it imports."""
    (tmp_path / "sleeping.py").write_text("import time\ntime.sleep(60)")
    code = f"""
import os, sys, time
from launcher.launch.warm.process import WarmProcess
environ = {{**os.environ, "PYTHONPATH": {str(tmp_path)!r}}}
warm = WarmProcess.start([sys.executable, "-c", "0"], environ, [{module!r}])
print(warm.process.pid, flush=True)
time.sleep(60)
"""
    words = [sys.executable, "-c", code]
    process = subprocess.Popen(words, env=clean_environ(), stdout=subprocess.PIPE, text=True)
    assert process.stdout
    descriptor = os.pidfd_open(int(process.stdout.readline()))
    process.kill()
    process.communicate()
    assert select.select([descriptor], [], [], PATIENCE)[0]
    os.close(descriptor)


REFUSED = {
    "python -u -I": "the interpreter has the option -I",
    "python -u -i": "the interpreter has the option -i",
    "python -Ximporttime": "the interpreter has the option -Ximporttime",
    "python --version": "the interpreter has the option --version",
    "python -u -": "the program comes from stdin",
    "python -m": "the interpreter has the option -m",
    "sh -c x.py": "sh is no Python program",
    "/usr/bin/python9 x.py": "/usr/bin/python9 is another interpreter than",
    "env A=1 python x.py": "env is no Python program",
    "no-such-program": "no-such-program is no Python program",
    "bin/python x.py": "bin/python is another interpreter than",
}


@pytest.mark.parametrize(("words", "reason"), REFUSED.items(), ids=REFUSED)
def test_command_lines_of_which_no_rank_is_forked(
    words: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another environment may have the same interpreter."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    argv = [sys.executable if word == "python" else word for word in words.split()]
    with pytest.raises(ExecNeededError) as caught:
        WarmProcess.start(argv, clean_environ(), ())
    assert str(caught.value).startswith(reason)


def write_files(folder: Path, files: Mapping[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def read(*words: str, to_the_end: bool = False, **environ: str) -> Any:
    found = read_program([sys.executable, *words], {**os.environ, **environ}, to_the_end=to_the_end)
    assert found
    return found


@pytest.mark.parametrize("case", CASES["program"], ids=lambda case: str(case["name"]))
def test_a_script_that_uses_torch(
    case: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = case["torch"]
    write_files(tmp_path / "src", case["files"])
    monkeypatch.chdir(tmp_path)
    assert read("src/x.py", "--lr", "1").uses_torch is expected
    monkeypatch.chdir(tmp_path / "src")
    assert read("-m", "x").uses_torch is expected
    assert not {"src", "x"} & sys.modules.keys()


def test_what_comes_after_torch_on_the_line_of_another(tmp_path: Path) -> None:
    write_files(tmp_path, {"x.py": "import sys; mine = 'a:b'; import torch\nsys.path.insert(0, 'x')\n"})
    assert not read(str(tmp_path / "x.py")).obstacle


@pytest.mark.parametrize(("text", "reason"), CASES["before"].items())
def test_what_comes_before_torch(text: str, reason: str, tmp_path: Path) -> None:
    path = str(tmp_path / "x.py")
    for lines, is_before in ((f"{text}\nimport torch\n", True), (f"import torch\n{text}\n", False)):
        write_files(tmp_path, {"x.py": lines})
        found = read(path).obstacle
        assert reason in found if is_before and reason else not found
        assert bool(read(path, to_the_end=True).obstacle) is bool(reason)
    write_files(tmp_path, {"x.py": "import own\nimport torch\n", "own.py": f"{text}\n"})
    assert reason.replace("x.py", "own.py") in read(path).obstacle
    write_files(tmp_path, {"own.py": f"import torch\n{text}\n"})
    assert not read(path).obstacle


def test_folders_modules_and_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_files(
        tmp_path, {"app/__main__.py": "import z\n", "app/__init__.py": "", "lib/z.py": "import torch\n"}
    )
    path = f"{tmp_path / 'lib'}{os.pathsep}"
    assert read("app", PYTHONPATH=path).uses_torch and read("-m", "app", PYTHONPATH=path).uses_torch
    (tmp_path / "lib/z.py").write_text("import os\n")
    assert not read("app", PYTHONPATH=path).uses_torch and not read("-m", "app", PYTHONPATH=path).uses_torch
    assert read("-m", "installed_elsewhere").uses_torch and read("missing.py").uses_torch
    assert read("-c", "import torch").uses_torch and not read("-c", "import os").uses_torch
    assert read("-c", "exec('x')").obstacle == "-c:1 runs other code"


def test_what_is_no_python_program_or_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "train.sh").write_text("#!/bin/sh\npython train.py\n")
    assert read_program(["sh", str(tmp_path / "train.sh")], dict(os.environ)) is None
    os.mkfifo(tmp_path / "x.py")
    assert read(str(tmp_path / "x.py")).uses_torch


def test_what_is_too_large_to_look_through_is_not_taken_for_harmless(tmp_path: Path) -> None:
    """Neither does the start wait for it."""
    line = "x = 1\n"
    large = line * ((2 << 20) // len(line))
    for size in (len(large) // 2, len(large)):
        own = {"x.py": "import own, two\nimport torch\n", "own.py": large[:size], "two.py": large[:size]}
        write_files(tmp_path, own)
        found = read(str(tmp_path / "x.py"))
        assert (
            found.uses_torch
            and found.obstacle == "its files cannot be read, or are too large to look through"
        )
    write_files(tmp_path, {"own.py": "import torch\n" + line * 9, "two.py": ""})
    assert read(str(tmp_path / "x.py")).obstacle == ""
