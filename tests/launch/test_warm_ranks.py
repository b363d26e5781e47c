"""A program in a forked rank is as it is by itself: what it sees, what it prints, how it ends."""

import json
import os
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch.warm_ranks import PROGRAM, Ranks, open_ranks

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
    by_exec, forked = (json.loads(end.out) for end in (ranks.exec(SURROUNDINGS), ranks.fork(SURROUNDINGS)))
    assert forked == by_exec
    assert forked["argv"] == [PROGRAM, "--lr", "3e-4"] and not forked["own"]
    assert forked["parent"] == os.getpid() and forked["death"] == signal.SIGTERM


def test_a_record_tells_of_the_rank_and_its_agent(ranks: Ranks) -> None:
    pid = ranks.fork("").pid
    record = json.loads((ranks.folder / "rank-0.applied.json").read_text())
    assert (record["pid"], record["agent"], record["problems"]) == (pid, os.getpid(), [])


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
    ranks.argv, kept = (PROGRAM, "--workers={num_workers}"), ranks.argv
    arguments = [PROGRAM, "--workers=3"]
    try:
        assert ranks.print_json("import json, sys\nprint(json.dumps([sys.argv, sys.orig_argv[2:]]))") == [
            arguments,
            arguments,
        ]
    finally:
        ranks.argv = kept


def test_another_program_than_the_warm_ones_is_executed(ranks: Ranks) -> None:
    (ranks.folder / "other.py").write_text("print('other')")
    ranks.argv, kept = ("other.py",), ranks.argv
    try:
        ended = ranks.fork()
    finally:
        ranks.argv = kept
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
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    torch_ranks.write(COLLECTIVE)
    given = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "2"}
    pids = [torch_ranks.begin_fork(RANK=str(rank), **given) for rank in range(2)]
    told = [torch_ranks.collect(pid, rank) for rank, pid in enumerate(pids)]
    assert [end.code for end in told] == [0, 0], told
    first, second = (end.read() for end in told)
    assert first[:2] == second[:2] == [128.0, 4.0]
    assert not {*first[2:]} & {*second[2:]}
