"""What a policy does to the collector, in programs without torch that mark their steps themselves."""

import sys
from pathlib import Path

import pytest

from tests.inprocess.hooked import QUICK, ROOT, STEPS, run_code, run_program

STATE = """
young, middle, oldest = gc.get_threshold()
live = [[] for _ in range(50 * young * middle)]

def look():
    return [gc.isenabled(), gc.get_threshold()[2] > oldest, gc.get_freeze_count() > len(live)]
"""
"""Whether the collector is on, its oldest generation waits longer, and objects are frozen."""


@pytest.mark.parametrize(
    ("policy", "collected", "enabled"),
    [
        (QUICK, [3, 5, 10, 15], True),
        ("disabled,every=4", [4, 8, 12, 16], False),
        ("frozen,warmup=6", [6], True),
        ("synchronized,warmup=2,every=0", [2], True),
        ("default", [], True),
        ("no such thing", [], True),
        ("synchronized,warmup=x", [], True),
    ],
)
def test_steps_at_which_a_policy_collects(
    policy: str, collected: list[int], enabled: bool, tmp_path: Path
) -> None:
    code = STEPS + "print(json.dumps([[n for n in range(1, 18) if collect()], gc.isenabled()]))"
    assert run_code(code, tmp_path, policy) == [collected, enabled]


def test_the_collector_is_as_it_was_until_the_warm_up_is_over(tmp_path: Path) -> None:
    code = (
        STEPS + STATE + "for _ in range(5):\n    seen.append(look())\n    collect()\nprint(json.dumps(seen))"
    )
    before, after = [True, False, False], [True, True, True]
    assert run_code(code, tmp_path) == [before, before, before, after, after]


@pytest.mark.parametrize(
    ("policy", "step", "deed", "state"),
    [
        (QUICK, 1, "gc.disable()", [False, False, False]),
        (QUICK, 1, "gc.freeze()", [True, False, True]),
        (QUICK, 1, "gc.set_threshold(700, 10, 2_000)", [True, True, False]),
        (QUICK, 7, "gc.disable()", [False, False, False]),
        (QUICK, 7, "gc.set_threshold(700, 10, 2_000)", [True, True, False]),
        ("frozen,warmup=3", 1, "gc.disable()", [False, False, False]),
        ("disabled,every=5", 1, "gc.enable()", [True, False, False]),
        ("disabled,every=5", 7, "gc.set_threshold(700, 10, 2_000)", [True, True, False]),
    ],
)
def test_a_program_that_handles_gc_itself_is_left_alone(
    policy: str, step: int, deed: str, state: list[bool], tmp_path: Path
) -> None:
    code = (
        STEPS
        + STATE
        + f"""
for step in range(1, 30):
    if step == {step}:
        {deed}
    if collect():
        seen.append(step)
print(json.dumps([look(), [step for step in seen if step > {step}]]))
"""
    )
    assert run_code(code, tmp_path, policy) == [state, []]


def test_a_program_may_pause_the_collector_for_a_while(tmp_path: Path) -> None:
    code = (
        STEPS
        + """
for _ in range(4):
    gc.disable()
    gc.enable()
    seen.append(collect())
print(json.dumps(seen))
"""
    )
    assert run_code(code, tmp_path) == [False, False, True, False]


def test_a_programs_pickled_collect_is_pythons(tmp_path: Path) -> None:
    code = "import gc, inspect, json, pickle\n"
    code += "print(json.dumps([pickle.dumps(gc.collect).hex(), str(inspect.signature(gc.collect))]))"
    assert run_code(code, tmp_path) == run_code(code, tmp_path, None)


def test_a_collect_in_a_class_is_no_method_as_pythons_is_none(tmp_path: Path) -> None:
    """A function of Python's would get the instance as the generation."""
    code = STEPS + "class Model:\n    clean = gc.collect\n"
    code += "for _ in range(4):\n    collect()\nprint(json.dumps(Model().clean() >= 0))"
    assert run_code(code, tmp_path) is True


@pytest.mark.parametrize("call", ["gc.collect(generation=3)", "gc.collect(0, 1)", "gc.collect('x')"])
def test_a_wrong_call_of_collect_says_what_it_says(call: str, tmp_path: Path) -> None:
    code = (
        f"import gc, json\ntry:\n    {call}\nexcept Exception as error:\n    print(json.dumps(repr(error)))"
    )
    assert run_code(code, tmp_path) == run_code(code, tmp_path, None)


def test_collections_are_told_on_request(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(STEPS + "for _ in range(11):\n    collect()\n")
    done = run_program(
        [sys.executable, "program.py"], tmp_path, f"{QUICK},log", PYTHONPATH=str(ROOT), RANK="7"
    )
    assert done.stdout == ""
    steps = zip((3, 5, 10), (" are frozen", " are frozen", " ms"), done.stderr.splitlines(), strict=True)
    for step, end, line in steps:
        assert line.startswith(f"launch: rank 7: step {step}: ") and line.endswith(end), line


def test_nothing_is_collected_while_a_cuda_graph_is_captured(tmp_path: Path) -> None:
    """What torch tells of a GPU is played here: a collection could free memory that the capture may not."""
    code = (
        STEPS
        + """
from types import ModuleType, SimpleNamespace
torch = sys.modules["torch"] = ModuleType("torch")
torch.cuda = SimpleNamespace(is_initialized=lambda: True)
torch.cuda.is_current_stream_capturing = lambda: step in (3, 10)
for step in range(1, 18):
    if collect():
        seen.append(step)
print(json.dumps(seen))
"""
    )
    assert run_code(code, tmp_path) == [4, 5, 15]


def test_a_failure_of_ours_does_not_end_the_program(tmp_path: Path) -> None:
    code = (
        STEPS
        + """
collect(), collect(), collect()
sys.modules["launch_inprocess.garbage_collection"].policy.every = None
print(json.dumps([collect() for _ in range(5)]))
"""
    )
    assert run_code(code, tmp_path) == [False] * 5


def test_a_closed_stderr_ends_nothing(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(STEPS + "os.close(2)\nprint([n for n in range(1, 6) if collect()])")
    done = run_program([sys.executable, "program.py"], tmp_path, f"{QUICK},log", PYTHONPATH=str(ROOT))
    assert (done.returncode, done.stdout) == (0, "[3, 5]\n")


def test_collect_without_the_hook_does_nothing(tmp_path: Path) -> None:
    code = STEPS + "print(json.dumps([collect(), collect(now=True), gc.isenabled()]))"
    assert run_code(code, tmp_path, None) == [False, False, True]
