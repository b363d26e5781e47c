"""A program finds in a rank what it finds by itself, and trains to the same losses, to the bit."""

from pathlib import Path

import pytest

from tests.agent.frames import Case, copy_programs, describe_difference, make_launch, run_alone

INTERPRETER = Case("the interpreter", ("interpreter.py", "a", "--b=c", ""))
"""Its argv, `__main__`, streams, signals, threads, filters of warnings, the collector, its end, …"""
CASES = (
    (INTERPRETER, "start.warm=off"),
    (INTERPRETER, "start.warm=auto"),
    (Case("a user's module named launcher", ("own_launcher.py",)), "start.warm=auto"),
    (Case("DDP", ("training.py", "ddp"), ranks=2), "start.warm=auto"),
    (Case("accelerate", ("training.py", "accelerate"), ranks=2), "start.warm=auto"),
    (Case("transformers", ("training.py", "hf"), ranks=2, preload="transformers"), "start.warm=auto"),
    (Case("lightning", ("training.py", "lightning"), ranks=2, preload="lightning"), "start.warm=auto"),
)


@pytest.mark.parametrize(
    ("case", "setting"), CASES, ids=[f"{case.name}, {setting}" for case, setting in CASES]
)
@pytest.mark.slow
def test_a_program_finds_in_a_rank_what_it_finds_by_itself(case: Case, setting: str, tmp_path: Path) -> None:
    work = copy_programs(tmp_path)
    alone, ran = run_alone(case, work), make_launch("agent=direct", setting)(case, work)
    assert not describe_difference(alone, ran)
    assert "launch-rank: " in ran.said
    assert ("by itself" in ran.said or "not forked" in ran.said) is (case.name == "lightning"), ran.said
