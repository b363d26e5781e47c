"""torchrun's command line, as its own parser reads it; and what its ranks have, and those of `launch`."""

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

from tests.seam import Launch, clean_environ, find_port, run_outside, start, write_program


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
