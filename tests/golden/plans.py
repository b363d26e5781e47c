"""Where every rank of every described machine is placed, as `launch plan format=json` says it.

`python -m tests.golden` writes the files again; read their diff before it is committed.
"""

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path

from tests.machines.build import NAMES as SHIPPED
from tests.plan.lab_machines import NAMES as LAB
from tests.plan.lab_machines import fsroot, load
from tests.probe.machine_trees import short_lived
from tests.seam import run_inside

FOLDER = Path(__file__).parent / "plans"
BINDINGS = ("exclusive", "numa", "socket", "l3", "none")
CASES = [*(f"shipped/{name}" for name in SHIPPED), *(f"lab/{name}" for name in LAB)]


def path_of(case: str) -> Path:
    return FOLDER / f"{case}.json"


def render(case: str) -> str:
    """Return the placements of a machine under each binding, a line for each rank."""
    with choose(case) as words:
        placements = {binding: _place([*words, f"binding={binding}"]) for binding in BINDINGS}
    return json.dumps(placements, indent=1) + "\n"


@contextlib.contextmanager
def choose(case: str) -> Iterator[list[str]]:
    """The words that have `launch` plan for a described machine."""
    kind, name = case.split("/")
    if kind == "shipped":
        yield [f"machine={name}"]
        return
    data = load(name)
    with short_lived() as folder:
        fsroot.materialize(data, folder)
        yield [f"machine.root={folder}", f"nproc_per_node={len(data['gpus']) or 8}"]


def _place(words: list[str]) -> dict[str, object]:
    done = run_inside(["plan", *words, "format=json"])
    assert done.code == 0, done
    plan = json.loads(done.out)
    return {"warnings": len(plan["warnings"]), "ranks": [_describe(rank) for rank in plan["ranks"]]}


def _describe(rank: dict[str, object]) -> str:
    gpu, memory = rank["gpu"], rank["memory"]
    assert isinstance(memory, dict)
    parts = {
        "gpu": gpu["pci"] if isinstance(gpu, dict) else None,
        "cpus": rank["cpus"],
        "worker_cpus": None if rank["worker_cpus"] == rank["cpus"] else rank["worker_cpus"],
        "memory": f"{memory['policy']}:{memory['nodes']}",
        "num_workers": rank["num_workers"],
        "threads": rank["omp_num_threads"],
        "nic": rank["nic"],
    }
    return " ".join(f"{name}={value}" for name, value in parts.items() if value is not None)


def write_all() -> None:
    """Write all files, with an environment that asks for nothing."""
    os.environ.clear()
    for case in CASES:
        path = path_of(case)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(render(case))
