"""What a program prints arrives as it is; what it finds: its words, its placement, torchrun's variables."""

import json
import os
import shlex
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from launcher.cpulist import parse_cpulist
from launcher.probe.machine import SONAMES, locate_malloc
from tests.seam import (
    Launch,
    clean_environ,
    find_port,
    in_shell,
    run_outside,
    run_to_end,
    start,
    wait_for,
    write_program,
)

LONG = 8 << 20
ANYTHING = f"""
import os, time
lines = "".join(f"line {{number}}\\n" for number in range(20_000)).encode()
anything = b"0123456789" * {LONG // 10} + b"\\n" + bytes(range(256)) * 12288
while os.environ["RANK"] == "1" and not os.path.exists("written"):
    time.sleep(0.02)
os.write(1, (lines if os.environ["RANK"] == "1" else anything) + b"no end")
open("written", "w").close()
os.write(2, b"\\xff error\\n")
"""
"""One after the other: a long line is shown before it is whole, and what another rank prints then ends it."""
WHOLE = b"0123456789" * (LONG // 10) + b"\n" + bytes(range(256)) * 12288 + b"no end"


@pytest.mark.usefixtures("quick_agent")
def test_one_ranks_output_is_its_bytes(tmp_path: Path) -> None:
    run_to_end(tmp_path, ANYTHING, "nproc_per_node=1")
    assert (tmp_path / "stdout").read_bytes() == WHOLE
    assert b"\n\xff error\nlaunch: succeeded" in (tmp_path / "stderr").read_bytes()


@pytest.mark.usefixtures("quick_agent")
def test_several_ranks_output_has_a_prefix_at_each_lines_start_and_nothing_else(tmp_path: Path) -> None:
    run_to_end(tmp_path, ANYTHING, "nproc_per_node=2", "logs.console=all")
    prefixes = [f"[{os.uname().nodename}:{rank}] ".encode() for rank in (0, 1)]
    lines = (tmp_path / "stdout").read_bytes().split(b"\n")
    assert all(line.startswith(tuple(prefixes)) for line in lines)
    shown = [[line.removeprefix(p) for line in lines if line.startswith(p)] for p in prefixes]
    assert b"\n".join(shown[0]) == WHOLE
    assert shown[1] == [b"line %d" % number for number in range(20_000)] + [b"no end"]


ASKING = """
import os, time
from pathlib import Path
print(end=f"rank {os.environ['RANK']}? ", flush=True)
while not Path("answer").exists():
    time.sleep(0.02)
print("yes")
"""


@pytest.mark.usefixtures("quick_agent")
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_prompt_is_seen_in_a_file_before_its_line_has_an_end(tmp_path: Path, ranks: int) -> None:
    """After a line that the ranks are starting: a terminal would show nothing while they import torch."""
    words = (f"nproc_per_node={ranks}", "logs.console=rank0", "--", write_program(tmp_path, ASKING))
    prefix = f"[{os.uname().nodename}:0] " if ranks > 1 else ""
    with start(tmp_path, *words) as started:
        wait_for(lambda: started.read("stdout") == f"{prefix}rank 0? ", "the prompt")
        (tmp_path / "answer").touch()
        assert started.wait() == 0
    assert started.read("stdout") == f"{prefix}rank 0? yes\n"
    table, *rest = started.read().split("launch: starting the ranks: ")
    assert table.count("\n") > 1 and len(rest) == 1


@pytest.mark.usefixtures("quick_agent")
def test_stdout_that_is_closed_is_not_taken_for_another_file(tmp_path: Path) -> None:
    write_program(tmp_path, "print('hello')")
    assert in_shell("launch nproc_per_node=1 -- program.py >&- 2>errors", tmp_path).code == 0
    files = [path for path in tmp_path.rglob("*") if path.is_file() and path.name != "program.py"]
    assert [path.name for path in files if b"hello" in path.read_bytes()] == ["rank-0.out"]


SHOW = """
import json, os
from launcher.rank.affinity import get_mempolicy
policy, nodes = get_mempolicy()
found = {"cpus": sorted(os.sched_getaffinity(0)), "policy": policy, "nodes": sorted(nodes)}
names = [n for n in os.environ if n.startswith("LAUNCH_") and "TEST" not in n or "SHUTDOWN" in n]
found["names"] = sorted(names)
print(json.dumps({**found, "threads": os.environ["OMP_NUM_THREADS"], "rank": os.environ["RANK"]}))
"""
NAMES = ["LAUNCH_GC", "LAUNCH_NUM_WORKERS", "LAUNCH_RANK_PLAN", "LAUNCH_RUN_DIR", "LAUNCH_RUN_ID"]


def run_placed(folder: Path, ranks: int, **variables: str) -> tuple[list[Any], list[Any], str]:
    """What the ranks of SHOW found, what was planned, and what `launch` said."""
    words = (f"nproc_per_node={ranks}", "--", write_program(folder, SHOW))
    with start(folder, *words, **variables) as started:
        assert started.wait(120) == 0, started.read()
        run = started.run_dir()
    found = [json.loads((run / "logs" / "0" / f"rank-{n}.out").read_text()) for n in range(ranks)]
    (plan,) = run.glob("plan-*.json")
    return found, json.loads(plan.read_text())["ranks"], started.read()


def test_ranks_find_the_cpus_and_memory_of_their_plan(tmp_path: Path) -> None:
    """Two ranks at most, and two variables of torchrun's that would start another program."""
    ranks = min(2, len(os.sched_getaffinity(0)))
    found, planned, _ = run_placed(tmp_path, ranks, PET_MODULE="1", PET_RUN_PATH="1")
    for told, plan in zip(found, planned, strict=True):
        assert told["cpus"] == sorted(parse_cpulist(plan["cpus"]))
        assert told["policy"] == plan["memory"]["policy"]
        assert told["nodes"] == sorted(parse_cpulist(plan["memory"]["nodes"]))
        assert told["threads"] == str(plan["omp_num_threads"])
        assert told["names"] == NAMES, "the program is told no more of the launcher"
    cpus = [cpu for told in found for cpu in told["cpus"]]
    assert len(cpus) == len(set(cpus))


@pytest.mark.usefixtures("quick_agent")
@pytest.mark.slow
def test_more_ranks_than_cores_are_told_and_run(tmp_path: Path) -> None:
    allowed = os.sched_getaffinity(0)
    found, _, said = run_placed(tmp_path, len(allowed) + 1)
    assert {cpu for told in found for cpu in told["cpus"]} <= allowed
    assert "warning: " in said and "share" in said


TELL = """
import json, os
def read_libraries(pid):
    with open(f"/proc/{pid}/maps") as file:
        return sorted({line.split()[-1] for line in file if "malloc" in line})
print(json.dumps([read_libraries("self"), read_libraries(os.getppid()), os.environ.get("LD_PRELOAD")]))
"""


@pytest.mark.parametrize("word", SONAMES)
def test_a_malloc_library_serves_the_ranks_and_not_their_agent(here: Path, word: str) -> None:
    path = locate_malloc(word, os.environ, "/") or ""
    if not path:
        pytest.skip(f"needs {word}: apt-get install libtcmalloc-minimal4 libjemalloc2")
    (here / "tell.py").write_text(TELL)
    words = ["nproc_per_node=2", f"allocator.host={word}", "new_run_dir=run", "--", "tell.py"]
    done = run_outside(words, here, {"CUDA_VISIBLE_DEVICES": ""}, timeout=120)
    assert done.code == 0, done.err
    for rank in (0, 1):
        lines = (here / f"run/logs/0/rank-{rank}.out").read_text().splitlines()
        ((own, agents, preload),) = [json.loads(line) for line in lines if line.startswith("[[")]
        assert [os.path.realpath(path)] == [os.path.realpath(library) for library in own]
        assert not agents and preload == path
    (plan,) = (here / "run").glob("plan-*.json")
    assert [rank["env"]["LD_PRELOAD"] for rank in json.loads(plan.read_text())["ranks"]] == [path] * 2


def test_where_there_is_no_such_library_the_job_runs_with_a_warning(
    launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("launcher.probe.machine.SONAMES", {})
    result = launch("plan", "format=json", "allocator.host=jemalloc")
    assert result.code == 0
    data = json.loads(result.out)
    assert [text for text in data["warnings"] if "allocator.host=jemalloc" in text and "libjemalloc2" in text]
    assert not [rank for rank in data["ranks"] if "LD_PRELOAD" in rank["env"]]


# torchrun's command line, as its own parser reads it; and what its ranks have, and those of `launch`


def test_torchrun_itself_reads_its_command_line_and_leaves_the_programs_words(
    here: Path, launch: Launch
) -> None:
    """Also those that may be short for its own options."""
    from torch.distributed.run import get_args_parser, parse_args

    parser: Any = get_args_parser()
    parse: Callable[[list[str]], Namespace] = parse_args
    names = parser._option_string_actions
    short = sorted({name[:size] for name in names for size in range(1, len(name) + 1)})
    program = ["prog", *short, *(f"{word}=x" for word in short), "--", "", "a b", "--", "-"]
    (here / "prog").touch(0o755)
    options = ["agent=torchrun", "nproc_per_node=2", "restarts=3", "torchrun.monitor_interval=0.5"]
    options += ["torchrun.rdzv_conf={a: 1, b: x y}", "dry_run=true"]
    done = launch(*options, "--", "./prog", *program[1:])
    (line,) = (line for line in done.out.splitlines() if "torch.distributed.run" in line)
    command = shlex.split(line)
    begin = command.index("-P")
    assert command[begin : begin + 3] == ["-P", "-m", "torch.distributed.run"]
    parsed = parse(command[begin + 3 :])
    assert (parsed.nnodes, parsed.nproc_per_node, parsed.max_restarts) == ("1:1", "2", 3)
    assert (parsed.monitor_interval, parsed.no_python) == (0.5, True)
    assert parsed.rdzv_conf.endswith("a=1,b=x y")
    assert parsed.training_script == sys.executable
    assert parsed.training_script_args[:2] == ["-I", "-S"] and parsed.training_script_args[4:] == program[1:]


@pytest.mark.parametrize("agent", ["direct", pytest.param("torchrun", marks=pytest.mark.slow)])
def test_a_program_gets_them_through_launch_and_has_no_descriptor_of_its(tmp_path: Path, agent: str) -> None:
    program = "import os, sys\nopen('words', 'wb').write(b'\\0'.join(map(os.fsencode, sys.argv[1:])))\n"
    program += "print(sorted(os.listdir('/proc/self/fd'))[:-1])"
    (tmp_path / "save.py").write_text(program)
    words = ["--log=x", "--max=1", "--run=a", "--n", "--", "a", "--", "b", "", "--nnodes=9", "-m", "é\n"]
    words += ["\udcff", "${local_rank}", "$HOME", "a$$b", "x=${run_dir}", '{"a": {num_workers}}']
    settings = ["nproc_per_node=1", f"agent={agent}", "start.warm=off", "--", sys.executable, "save.py"]
    with (tmp_path / "save.py").open() as own:
        done = run_outside([*settings, *words], tmp_path, pass_fds=(own.fileno(),))
    assert done.code == 0, done.err
    assert (tmp_path / "words").read_bytes() == b"\0".join(map(os.fsencode, words))
    assert agent == "torchrun" or done.out == "['0', '1', '2']\n"


DUMP = """
import json, os
with open(f"rank-{os.environ['RANK']}.json", "w") as file:
    json.dump(dict(os.environ), file)
"""
DIFFERENT = {
    "MASTER_PORT": "another job's",
    "TORCHELASTIC_RUN_ID": "the run's identifier; torchrun's own default is none",
    "TORCHELASTIC_USE_AGENT_STORE": "rank 0 serves the store, since there is no torch in launch",
    "TORCHELASTIC_ERROR_FILE": "a file of the run directory, not of a temporary one",
}
"""Variables that may differ, and why."""
FROM_LAUNCH = {
    "LAUNCH_GC": "the default of gc",
    "LAUNCH_NUM_WORKERS": "the plan's",
    "LAUNCH_RANK_PLAN": "the plan's",
    "LAUNCH_RUN_DIR": "there is a run directory",
    "LAUNCH_RUN_ID": "there is a run directory",
    "PYTHONUNBUFFERED": "lines of a rank are shown as they are printed",
    "TORCHINDUCTOR_COMPILE_THREADS": "the plan's share of a rank",
}
"""Variables that torchrun's ranks lack, and why those of `launch` have them, under torchrun too."""


def read_rank(folder: Path, rank: int) -> dict[str, str]:
    found: dict[str, str] = json.loads((folder / f"rank-{rank}.json").read_text())
    return found


def test_a_rank_has_what_torchrun_would_give_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(
        "TORCHINDUCTOR_CACHE_DIR", raising=False
    )  # what torch leaves in the tests' own process
    folders = [tmp_path / name for name in ("torchrun", "direct")]
    for folder in folders:
        folder.mkdir()
    program = write_program(tmp_path, DUMP)
    environ = {name: value for name, value in clean_environ().items() if name != "OMP_NUM_THREADS"}
    static = ("--rdzv-backend=static", "--master-addr=127.0.0.1", f"--master-port={find_port()}")
    options = ("--nnodes=1", "--node-rank=0", *static, "--nproc-per-node=2")
    command = [sys.executable, "-m", "torch.distributed.run", *options, program]
    subprocess.run(command, cwd=folders[0], env=environ, check=True, capture_output=True)
    words = (
        "agent=direct",
        "nproc_per_node=2",
        "start.warm=off",
        "watch.enabled=false",
        "dataloader=none",
        "--",
        program,
    )
    with start(folders[1], *words) as started:
        assert started.wait() == 0, started.read()
    for rank in (0, 1):
        theirs, ours = (read_rank(folder, rank) for folder in folders)
        different = {name for name in {*theirs, *ours} if theirs.get(name) != ours.get(name)}
        different -= {"LAUNCH_TEST_MARK", *FROM_LAUNCH}
        assert different == set(DIFFERENT), {name: (theirs.get(name), ours.get(name)) for name in different}
        assert not set(FROM_LAUNCH) & set(theirs) - set(environ)
