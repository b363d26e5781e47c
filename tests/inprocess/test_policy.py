"""What a policy does to the collector, in programs without torch that mark their steps themselves."""

import sys
from pathlib import Path

import pytest

from tests.inprocess.hooked import QUICK, ROOT, STEPS, run_code, run_program

STATE = """
def look():
    return [gc.isenabled(), gc.get_threshold()[0] > 10_000, gc.get_freeze_count() > 1000]
"""
CYCLE = """
class Node:
    pass

def make_cycle():
    node = Node()
    node.me = node
    return node
"""


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


def test_garbage_goes_in_step_and_not_between(tmp_path: Path) -> None:
    code = (
        STEPS
        + CYCLE
        + """
for step in range(1, 12):
    node = weakref.ref(make_cycle())
    for _ in range(2000):  # what the automatic collector would not let lie
        []. append(make_cycle())
    collect()
    seen.append(node() is None)
print(json.dumps([step for step, gone in enumerate(seen, 1) if gone and step > 3]))
"""
    )
    assert run_code(code, tmp_path) == [5, 10]


@pytest.mark.parametrize("policy", [QUICK, "frozen,warmup=3"])
def test_a_programs_own_collect_frees_what_is_frozen(policy: str, tmp_path: Path) -> None:
    code = (
        STEPS
        + STATE
        + CYCLE
        + """
node = make_cycle()
watch = weakref.ref(node)
for _ in range(4):
    collect()
del node
collect(), collect()  # the fifth step's does not look at what is frozen
seen.append(watch() is not None)
seen.append(gc.collect(1) >= 0 and watch() is not None)
freed = gc.collect()
seen.append(watch() is None and freed > 0)
print(json.dumps([seen, look()]))
"""
    )
    found = run_code(code, tmp_path, policy)
    assert found == [[True, True, True], [True, policy == QUICK, True]]


def test_now_collects_everything_at_once(tmp_path: Path) -> None:
    code = (
        STEPS
        + CYCLE
        + """
node = make_cycle()
watch = weakref.ref(node)
for _ in range(4):
    collect()
del node
seen = [watch() is None, collect(now=True), watch() is None, collect(), collect(), collect()]
print(json.dumps(seen))
"""
    )
    assert run_code(code, tmp_path) == [False, True, True, True, False, False]


def test_what_is_frozen_is_looked_at_anew_at_doubling_distances(tmp_path: Path) -> None:
    code = (
        STEPS
        + CYCLE
        + """
node = make_cycle()
watch = weakref.ref(node)
collect(), collect(), collect()
del node
for step in range(4, 200):
    collect()
    if watch() is None:
        break
print(json.dumps(step))
"""
    )
    assert run_code(code, tmp_path) == 16 * 5


@pytest.mark.parametrize(
    ("policy", "step", "deed", "state"),
    [
        (QUICK, 1, "gc.disable()", [False, False, False]),
        (QUICK, 1, "gc.freeze()", [True, False, True]),
        (QUICK, 1, "gc.set_threshold(20_000)", [True, True, False]),
        (QUICK, 7, "gc.disable()", [False, False, False]),
        (QUICK, 7, "gc.set_threshold(20_000)", [True, True, False]),
        ("frozen,warmup=3", 1, "gc.disable()", [False, False, False]),
        ("disabled,every=5", 1, "gc.enable()", [True, False, False]),
        ("disabled,every=5", 7, "gc.set_threshold(20_000)", [True, True, False]),
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


def test_without_steps_the_collector_still_bounds_memory(tmp_path: Path) -> None:
    """Evaluation after training: no steps, and garbage that must go all the same."""
    code = (
        STEPS
        + CYCLE
        + """
for _ in range(4):
    collect()
watch = [weakref.ref(make_cycle()) for _ in range(100)]
for _ in range(120_000):
    make_cycle()
print(json.dumps(sum(node() is not None for node in watch)))
"""
    )
    assert run_code(code, tmp_path) == 0


@pytest.mark.parametrize("policy", [QUICK, "disabled,every=5", "frozen,warmup=3"])
def test_finalizers_run_at_the_end_as_without_us(policy: str, tmp_path: Path) -> None:
    code = STEPS + CYCLE + "Node.__del__ = lambda self: print(1)\nnode = make_cycle()\n"
    code += "for _ in range(8):\n    collect()\ndel node\n"
    assert run_code(code, tmp_path, policy) == 1


def test_a_programs_pickled_collect_is_pythons(tmp_path: Path) -> None:
    code = "import gc, inspect, json, pickle\n"
    code += "print(json.dumps([pickle.dumps(gc.collect).hex(), str(inspect.signature(gc.collect))]))"
    assert run_code(code, tmp_path) == run_code(code, tmp_path, None)


@pytest.mark.parametrize("call", ["gc.collect(generation=3)", "gc.collect(0, 1)", "gc.collect('x')"])
def test_a_wrong_call_of_collect_says_what_it_says(call: str, tmp_path: Path) -> None:
    code = (
        f"import gc, json\ntry:\n    {call}\nexcept Exception as error:\n    print(json.dumps(repr(error)))"
    )
    assert run_code(code, tmp_path) == run_code(code, tmp_path, None)


def test_collections_are_told_on_request(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(STEPS + "for _ in range(6):\n    collect()\n")
    done = run_program(
        [sys.executable, "program.py"], tmp_path, f"{QUICK},log", PYTHONPATH=str(ROOT), RANK="7"
    )
    assert done.stdout == ""
    first, second = done.stderr.splitlines()
    assert first.startswith("launch: rank 7: step 3: ") and first.endswith(" are frozen"), first
    assert second.startswith("launch: rank 7: step 5: ") and second.endswith(" ms"), second


def grow(folder: Path, policy: str | None) -> float:
    """Highest resident size in MB of a program with a million objects and much cyclic garbage."""
    code = (
        STEPS
        + CYCLE
        + """
live = [{"number": number} for number in range(1_000_000)]
for step in range(3000):
    for number in range(100 + step % 300):
        make_cycle().text = bytes(500)
    collect()
with open("/proc/self/status") as file:
    text = file.read()
print(json.dumps(int(text.split("VmHWM:")[1].split()[0]) / 1e3))
"""
    )
    peak = run_code(code, folder, policy)
    assert isinstance(peak, float)
    return peak


def test_memory_stays_within_a_tenth_of_the_defaults(tmp_path: Path) -> None:
    default = grow(tmp_path, None)
    assert grow(tmp_path, "synchronized") < 1.1 * default
    assert grow(tmp_path, "disabled,every=0") > 2 * default  # the garbage is there


def test_a_closed_stderr_ends_nothing(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(STEPS + "os.close(2)\nprint([n for n in range(1, 6) if collect()])")
    done = run_program([sys.executable, "program.py"], tmp_path, f"{QUICK},log", PYTHONPATH=str(ROOT))
    assert (done.returncode, done.stdout) == (0, "[3, 5]\n")


def test_collect_without_the_hook_does_nothing(tmp_path: Path) -> None:
    code = STEPS + "print(json.dumps([collect(), collect(now=True), gc.isenabled()]))"
    assert run_code(code, tmp_path, None) == [False, False, True]
