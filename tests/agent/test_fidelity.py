"""A program finds in a rank what it finds by itself."""

from pathlib import Path

import pytest

from tests.agent.frames import FRAMES, Case, copy_programs, describe_difference, run_alone


@pytest.mark.parametrize("name", ["launch, direct, exec", "launch, direct, warm"])
@pytest.mark.slow
def test_a_program_finds_its_interpreter_as_by_itself(name: str, tmp_path: Path) -> None:
    """Its argv, `__main__`, streams, signals, threads, filters of warnings, the collector, its end, …"""
    work = copy_programs(tmp_path)
    case = Case("the interpreter", ("interpreter.py", "a", "--b=c", ""))
    alone, ran = run_alone(case, work), FRAMES[name](case, work)
    assert not describe_difference(alone, ran)
    assert "launch-rank: " in ran.said
    assert "by itself" not in ran.said and "not forked" not in ran.said, ran.said
