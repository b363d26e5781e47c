"""What becomes of garbage under a policy, in programs without torch that mark their steps themselves."""

from pathlib import Path

import pytest

from tests.inprocess.hooked import QUICK, STEPS, run_code

STATE = """
young, middle, oldest = gc.get_threshold()
live = [[] for _ in range(50 * young * middle)]

def look():
    return [gc.isenabled(), gc.get_threshold()[2] > oldest, gc.get_freeze_count() > len(live)]
"""
"""Whether the collector is on, its oldest generation waits longer, and objects are frozen."""
CYCLE = """
class Node:
    pass

def make_cycle():
    node = Node()
    node.me = node
    return node
"""


def test_garbage_of_the_younger_generations_goes_at_once_and_older_garbage_in_step(tmp_path: Path) -> None:
    code = (
        STEPS
        + CYCLE
        + """
def take_step():
    old = make_cycle()
    gc.collect(1)  # to the oldest generation
    middle = make_cycle()
    gc.collect(0)  # to the middle one
    young = make_cycle()
    found = [weakref.ref(node) for node in (young, middle, old)]
    del young, middle, old
    for _ in range(12 * gc.get_threshold()[0]):  # the middle generation is collected, the oldest is not
        make_cycle()
    collect()
    return [node() is None for node in found]
print(json.dumps([[step, *take_step()] for step in range(1, 12)][3:]))
"""
    )
    assert run_code(code, tmp_path) == [[step, True, True, step in (5, 10)] for step in range(4, 12)]


@pytest.mark.parametrize("policy", [QUICK, "frozen,warmup=3"])
def test_a_programs_own_collect_frees_what_is_frozen(policy: str, tmp_path: Path) -> None:
    code = (
        STEPS
        + STATE
        + CYCLE
        + """
node = make_cycle()
watch = weakref.ref(node)
for _ in range(6):
    collect()
del node
for _ in range(6):  # the tenth step's does not look at what is frozen
    collect()
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
for _ in range(6):  # the fifth step's is the first that looks
    collect()
del node
for step in range(7, 200):
    collect()
    if watch() is None:
        break
print(json.dumps(step))
"""
    )
    assert run_code(code, tmp_path) == 16 * 5


def test_frozen_garbage_goes_in_step_once_memory_has_grown(tmp_path: Path) -> None:
    code = (
        STEPS
        + CYCLE
        + """
node = make_cycle()
node.text = bytes(range(250)) * 200_000  # 50 MB
watch = weakref.ref(node)
for step in range(1, 30):
    if step == 6:
        del node
    if step == 12:
        live = bytes(range(250)) * 200_000
    collect()
    if watch() is None:
        break
print(json.dumps(step))
"""
    )
    assert run_code(code, tmp_path) == 15


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
LARGE = "for _ in range(100): make_cycle()\n    make_cycle().text = bytes(range(250)) * 20_000"
OUTLIVING = (
    "node = make_cycle()\n    node.text = bytes(range(250)) * 20_000\n    alive = [[] for _ in range(2000)]"
)
"""Garbage of a step: many small things; few with much in them, as tensors have; things that outlive the
collections of the youngest generation.
"""


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


@pytest.mark.parametrize(
    ("garbage", "steps"),
    [
        pytest.param(MANY, 3000, id="many"),
        pytest.param(LARGE, 300, id="large", marks=pytest.mark.slow),
        pytest.param(OUTLIVING, 300, id="outliving", marks=pytest.mark.slow),
    ],
)
def test_memory_stays_within_a_tenth_of_the_defaults(garbage: str, steps: int, tmp_path: Path) -> None:
    default = grow(tmp_path, None, garbage, steps)
    assert grow(tmp_path, "synchronized", garbage, steps) < 1.1 * default
    assert grow(tmp_path, "disabled,every=0", garbage, steps) > 2 * default  # the garbage is there
