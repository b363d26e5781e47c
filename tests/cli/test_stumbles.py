"""What a newcomer stumbles over, as real runs: the words that say so, and what the program gets."""

import json
import re
import sys
from pathlib import Path

import pytest

from tests.launch.terminals import launch_on_terminal
from tests.seam import Launch, in_shell, run_outside

PROGRAM = """\
import json, sys
print(json.dumps(sys.argv[1:]))
"""


def test_odd_words_and_surroundings(here: Path) -> None:
    """Keys after the program, secrets, left variables, a file named as a module."""
    (here / "train.py").write_text("import torch\n" + PROGRAM)
    (here / "asyncio.base_events.cover").touch()
    words = ["lr=3", "nproc_per_node=2", "--pw", "hidden-one", "--cred", "hidden-two"]
    left = {"LAUNCH_WARM": "nonsense", "LAUNCH_TERMINAL": "nonsense"}
    result = run_outside(["nproc_per_node=1", "name=odd", "train.py", *words], here, left)
    assert (result.code, json.loads(result.out.splitlines()[-1])) == (0, words), result
    assert "launch: nproc_per_node=2 stands after the program" in result.err
    for word in ("lr=3 ", "terminal", "warm process", "asyncio", "by exec"):
        assert word not in result.err
    (run,) = (here / "runs/odd").iterdir()
    assert (run / "manifest.json").is_file()
    for file in run.rglob("*"):
        assert not file.is_file() or file.name == "rank-0.out" or b"hidden-" not in file.read_bytes(), file

    result = run_outside(["nproc_per_node=1", "train.py", "lr=3", "model=x"], here)
    assert result.code == 0 and "after the program" not in result.err


def test_limits_of_the_shell(here: Path) -> None:
    result = in_shell("ulimit -n 12; launch nproc_per_node=1 -- true", here)
    assert result.code == 3 and "may open 12 files" in result.err and "torchrun" not in result.err
    spin = f"{sys.executable} -c 'while True: pass'"
    result = in_shell(f"ulimit -t 3; launch nproc_per_node=1 -- {spin}", here)
    assert result.code == 137 and "after 3 s of CPU time" in result.err, result


@pytest.mark.parametrize("agent", ["direct", "torchrun"])
def test_a_breakpoint_in_several_ranks_ends_them_and_says_why(tmp_path: Path, agent: str) -> None:
    """No rank of several reads from the terminal, so that nobody's typing is torn between two debuggers."""
    program = "import sys\nassert not sys.stdin.isatty()\nbreakpoint()\n"
    with launch_on_terminal(tmp_path, program, "nproc_per_node=2", f"agent={agent}") as terminal:
        assert terminal.finish(120) == 1
        shown = " ".join(terminal.text().split())
        assert "bdb.BdbQuit" in shown
        assert "breakpoint() needs a terminal, which only a single rank has: nproc_per_node=1" in shown


def test_the_words_of_an_end(here: Path) -> None:
    """One rank's traceback is shown once, few steps are counted right, a resume is no restart."""
    (here / "boom.py").write_text("raise ValueError('no data')\n")
    result = run_outside(["nproc_per_node=1", "boom.py"], here)
    said = [line for line in result.err.splitlines() if not line.startswith("launch: run directory")]
    assert (result.code, result.err.count("Traceback")) == (1, 1), result
    assert re.fullmatch(r"launch: rank 0 on \S+ exited with code 1", said[-2]), result
    assert re.fullmatch(r"launch: failed after [\d.]+ s", said[-1]) and result.err.count("failed") == 1

    (here / "few.py").write_text("print('step 0 loss 1.4687')\n")
    result = run_outside(["nproc_per_node=1", "new_run_dir=few", "few.py"], here)
    assert "loss 1.4687 at step 0\n" in result.err, result
    (here / "few.py").write_text("for n in range(4): print(f'step {n} loss {4 - n}')\n")
    result = run_outside(["nproc_per_node=1", "run_dir=few", "few.py"], here)
    assert "loss 4 to 1 over 4 steps" in result.err, result
    (run,) = json.loads(run_outside(["status", "few", "format=json"], here).out)["runs"]
    assert (run["state"], run["restarts"], len(run["attempts"])) == ("succeeded", 0, 2)


def test_a_plan_says_what_it_judges(launch: Launch) -> None:
    plan = launch("plan", "nproc_per_node=1")
    assert plan.code == 0 and "CUDA" not in plan.out and "Python and torch" in plan.out
    assert "launch: no program is given: memory is judged for the bundled one" in plan.err
    assert "bundled" not in launch("plan", "+model=gpt2").err


def test_a_number_of_workers_in_a_file_is_the_users_own(launch: Launch, here: Path) -> None:
    """Whether it is a workload's own number or another: no core is there for so many, and they stay."""
    (here / "conf/experiment").mkdir(parents=True)
    for number in (8, 9):
        text = f"# @package _global_\ndataloader:\n  num_workers: {number}\n"
        (here / "conf/experiment/mine.yaml").write_text(text)
        words = ["+experiment=mine", "dataloader=video", "machine=aws_p3_16xlarge", "format=json"]
        plan = json.loads(launch("plan", *words).out)
        assert [rank["num_workers"] for rank in plan["ranks"]] == [number] * 8
