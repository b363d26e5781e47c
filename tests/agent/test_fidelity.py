"""A program finds in a rank what it finds by itself."""

from pathlib import Path

import pytest

from tests.agent.frames import Case, copy_programs, describe_difference, make_launch, run_alone


@pytest.mark.parametrize("setting", ["start.warm=off", "start.warm=auto"])
@pytest.mark.parametrize("words", [("interpreter.py", "a", "--b=c", ""), ("own_launcher.py",)], ids=str)
@pytest.mark.slow
def test_a_program_finds_its_interpreter_as_by_itself(
    words: tuple[str, ...], setting: str, tmp_path: Path
) -> None:
    """Its argv, `__main__`, streams, signals, threads, filters of warnings, the collector, its end, …"""
    work = copy_programs(tmp_path)
    case = Case("the interpreter", words)
    alone, ran = run_alone(case, work), make_launch("agent=direct", setting)(case, work)
    assert not describe_difference(alone, ran)
    assert "launch-rank: " in ran.said
    assert "by itself" not in ran.said and "not forked" not in ran.said, ran.said
