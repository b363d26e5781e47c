"""What becomes of garbage under a policy, in programs without torch that mark their steps themselves."""

from pathlib import Path

import pytest

from tests.inprocess.hooked import QUICK, STEPS, run_code

STATE = """
def look():
    return [gc.isenabled(), gc.get_threshold()[1] > 100, gc.get_freeze_count() > 1000]
"""
CYCLE = """
class Node:
    pass

def make_cycle():
    node = Node()
    node.me = node
    return node
"""


def test_what_outlives_the_young_collections_goes_in_step_and_not_between(tmp_path: Path) -> None:
    code = (
        STEPS
        + CYCLE
        + """
def take_step():
    young, node = weakref.ref(make_cycle()), make_cycle()
    gc.collect(0)
    old = weakref.ref(node)
    del node
    for _ in range(30_000):  # Python's own collector would let neither lie
        make_cycle()
    collect()
    return young() is None, old() is None
print(json.dumps([[step, *take_step()] for step in range(1, 12)][3:]))
"""
    )
    assert run_code(code, tmp_path) == [[step, True, step in (5, 10)] for step in range(4, 12)]


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


@pytest.mark.parametrize("policy", [QUICK, "frozen,warmup=3"])
def test_a_program_that_looks_for_objects_finds_those_that_are_frozen(policy: str, tmp_path: Path) -> None:
    code = (
        STEPS
        + CYCLE
        + """
import inspect, pickle
node = make_cycle()
holder = [node]
for _ in range(4):
    collect()
frozen = gc.get_freeze_count() > 1000
seen.append(str(inspect.signature(gc.get_objects)))
seen += [pickle.dumps(call).hex() for call in (gc.get_objects, gc.get_referrers)]
seen.append(sum(type(each) is Node for each in gc.get_objects()))
collect()
found = gc.get_referrers(node)
seen.append([len(found), any(each is holder for each in found)])
print(json.dumps([seen, frozen]))
"""
    )
    without, found = run_code(code, tmp_path, None), run_code(code, tmp_path, policy)
    assert isinstance(without, list) and isinstance(found, list)
    assert found[0] == without[0]
    assert (found[1], without[1]) == (True, False)


def test_garbage_is_not_frozen_by_a_look_at_the_objects(tmp_path: Path) -> None:
    code = (
        STEPS
        + STATE
        + CYCLE
        + """
for step in range(1, 41):
    node = weakref.ref(make_cycle())
    len(gc.get_objects())
    collect()
    if node() is None:
        seen.append(step)
print(json.dumps([seen, look()]))
"""
    )
    assert run_code(code, tmp_path) == [[3, *range(5, 41, 5)], [True, True, True]]


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


def test_without_steps_the_collector_still_bounds_memory(tmp_path: Path) -> None:
    """Evaluation after training: no steps, and garbage that must go all the same."""
    code = (
        STEPS
        + CYCLE
        + """
for _ in range(4):
    collect()
watch = [weakref.ref(make_cycle()) for _ in range(100)]
old = watch[-1]()
gc.collect(0)
del old  # it has outlived a young collection
for _ in range(1_200_000):
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


MANY = "for _ in range(100 + step % 300): make_cycle().text = bytes(500)"
"""Garbage of a step: many small things, or few with much in them, as tensors have."""
LARGE = "for _ in range(100): make_cycle()\n    make_cycle().text = bytes(range(250)) * 20_000"


def grow(folder: Path, policy: str | None, garbage: str, steps: int) -> float:
    """Highest resident size in MB of a program with a million objects and much cyclic garbage."""
    code = (
        f"{STEPS}{CYCLE}\nSTEPS = {steps}\n"
        + """
live = [{"number": number} for number in range(1_000_000)]
for step in range(STEPS):
    GARBAGE
    collect()
with open("/proc/self/status") as file:
    text = file.read()
print(json.dumps(int(text.split("VmHWM:")[1].split()[0]) / 1e3))
"""
    )
    peak = run_code(code.replace("GARBAGE", garbage), folder, policy)
    assert isinstance(peak, float)
    return peak


@pytest.mark.parametrize(("garbage", "steps"), [(MANY, 3000), (LARGE, 300)], ids=["many", "large"])
def test_memory_stays_within_a_tenth_of_the_defaults(garbage: str, steps: int, tmp_path: Path) -> None:
    default = grow(tmp_path, None, garbage, steps)
    assert grow(tmp_path, "synchronized", garbage, steps) < 1.1 * default
    assert grow(tmp_path, "disabled,every=0", garbage, steps) > 2 * default  # the garbage is there
