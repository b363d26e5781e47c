"""Steps of real optimizers: which one leads, and what torch.compile makes of the hook."""

import gc
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.inprocess.hooked import PYTHON, QUICK, WITHOUT_COMPILER, run_code, run_program

LOG = "synchronized,warmup=3,every=5,log"
MODEL = """
import gc, json, torch
model = torch.nn.Linear(4, 4)

def make(kind=torch.optim.SGD):
    return kind(model.parameters(), lr=0.01)

def train(*optimizers, steps=1):
    for _ in range(steps):
        for optimizer in optimizers:
            optimizer.zero_grad()
            for _ in range(2):  # gradient accumulation
                model(torch.ones(2, 4)).square().mean().backward()
            optimizer.step()
"""


def read_steps(code: str, folder: Path, policy: str = LOG) -> list[int]:
    """Steps at which a program's garbage was collected, as the log has them."""
    (folder / "program.py").write_text(MODEL + code)
    done = run_program([*PYTHON, "program.py"], folder, policy)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    found = re.findall(r"^launch: rank 0: step (\d+): .*$", done.stderr, re.MULTILINE)
    assert len(found) == done.stderr.count("\n"), done.stderr
    return [int(step) for step in found]


@pytest.mark.slow
def test_the_first_of_several_optimizers_leads_until_another_replaces_it(tmp_path: Path) -> None:
    """The new one leads from its tenth step on, which is number 13, and has its own warm-up."""
    code = """
first, second = make(), make(torch.optim.AdamW)
train(first, second, second, second, steps=12)
train(make(), steps=9 + 8)
"""
    assert read_steps(code, tmp_path) == [3, 5, 10, 12, 15, 17]


def test_of_many_small_optimizers_one_counts(tmp_path: Path) -> None:
    """An optimizer for each parameter, as those are that step within the backward pass."""
    code = WITHOUT_COMPILER + "train(*(make() for _ in range(40)), steps=12)"
    assert read_steps(code, tmp_path) == [3, 5, 10]


@pytest.mark.slow
def test_short_trainings_after_one_another_end_the_first_ones_phase(tmp_path: Path) -> None:
    """None of them leads; after ten rounds without the leader, Python's own collector is back."""
    code = """
live = [[] for _ in range(350_000)]
train(make(), steps=7)
for number in range(30):
    train(make(), steps=2)
    look = gc.get_threshold()[2], gc.get_freeze_count()
    assert (look == (START, 0)) == (number >= 9), (number, look)
train(make(), steps=12)
"""
    code = f"{WITHOUT_COMPILER}{code}\nassert gc.get_threshold()[2] != START".replace(
        "START", str(gc.get_threshold()[2])
    )
    assert read_steps(code, tmp_path) == [3, 5, 7, 10]


def test_without_an_optimizers_step_nothing_is_touched(tmp_path: Path) -> None:
    code = (
        MODEL
        + WITHOUT_COMPILER
        + """
make()
with torch.no_grad():
    for _ in range(100):
        model(torch.ones(2, 4))
print(json.dumps([gc.isenabled(), gc.get_threshold(), gc.get_freeze_count()]))
"""
    )
    look = "import gc, json\nprint(json.dumps([gc.isenabled(), gc.get_threshold(), gc.get_freeze_count()]))"
    assert run_code(code, tmp_path) == run_code(look, tmp_path, None)


COMPILED = """
import gc, json, sys, torch
from torch._dynamo.utils import counters
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, foreach=False)

def step(x, collect):
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    if collect:
        gc.collect()
    optimizer.zero_grad()
    return loss

run = torch.compile(step, backend="eager")
alone = torch.compile(optimizer.step, backend="eager")
for number in range(8):  # two steps in each
    run(torch.ones(2, 4), number % 2 == 1)
    alone()
found = {name: dict(counters[name]) for name in ("stats", "recompile_limit")}
found["breaks"] = sorted(counters["graph_break"].values())  # gc.collect() is one, for another reason
print(json.dumps([found, gc.get_freeze_count() > 1000]))
"""


@pytest.mark.slow
def test_compiled_steps_have_no_more_graphs_nor_breaks(tmp_path: Path) -> None:
    def run(policy: str | None) -> object:
        folder = tmp_path / str(policy is None)
        folder.mkdir()
        return run_code(COMPILED, folder, policy, python=(sys.executable,))

    with ThreadPoolExecutor() as pool:
        with_hook, without = pool.map(run, (QUICK, None))
    assert isinstance(with_hook, list) and isinstance(without, list)
    assert with_hook[0] == without[0]
    assert without[0]["stats"]["unique_graphs"] > 1
    assert (with_hook[1], without[1]) == (True, False)
