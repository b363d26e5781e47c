"""What the verbs answer, as values: estimates of memory, findings, machines as they are read, dry runs, help;
and where every rank of every described machine is placed.

Wording is left out: what an answer means is held, and how it is put may change. `python -m tests.golden`
writes the files again; read their diff before it is committed.
"""

import contextlib
import json
import os
import re
import shlex
import sys
import tempfile
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from tests.machines.build import NAMES as SHIPPED
from tests.plan.lab_machines import NAMES as LAB
from tests.plan.lab_machines import fsroot, load
from tests.probe.machine_trees import short_lived
from tests.seam import run_inside

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
BINDINGS = ("exclusive", "numa", "socket", "l3", "none")
GIB = 1 << 30
QUESTIONS: dict[str, list[str]] = tomllib.loads(Path(__file__).with_name("questions.toml").read_text())


def _answer(verb: str, *words: str) -> Any:
    done = run_inside([verb, "format=json", *words])
    assert done.out, (verb, words, done)
    return json.loads(done.out)


def render_fit() -> dict[str, Any]:
    """Of each training the verdict, what is chosen, and memory by part: low, expected, high in GiB."""
    return {line: _describe_fit(_answer("plan", *line.split())["fit"]) for line in QUESTIONS["trainings"]}


def _describe_fit(fit: dict[str, Any]) -> dict[str, str]:
    settings, layout = fit["settings"], fit["layout"]
    names = ("precision", "optimizer", "checkpointing", "micro_batch", "accumulation", "seq_len")
    shares = {name: size for name, size in layout.items() if size not in (1, None, True, False)}
    parts = {part["name"]: part for part in fit["memory"]["parts"]} | {"total": fit["memory"]["total"]}
    sizes = {
        name: " ".join(f"{part[end] / GIB:.2f}" for end in ("low", "expected", "high"))
        for name, part in parts.items()
    }
    return {
        "verdict": fit["verdict"],
        "settings": " ".join(f"{name}={settings[name]}" for name in names),
        "layout": " ".join(f"{name}={size}" for name, size in shares.items()),
        "device": f"{fit['device']['name']} {fit['device']['memory_mib']} MiB",
        **sizes,
        "changes": ", ".join(" ".join(change["settings"]) for change in fit["changes"]),
    }


def render_doctor() -> dict[str, Any]:
    """Of each machine how many findings of each level there are on each subject."""
    found = {}
    for line in QUESTIONS["examined"]:
        findings = _answer("doctor", *line.split())["findings"]
        counts = Counter((each["level"], each["subject"]) for each in findings)
        found[line] = [f"{level} {subject} {count}" for (level, subject), count in sorted(counts.items())]
    return found


def render_topo() -> dict[str, Any]:
    """Machines of the lab as they are read from their files."""
    machines = {}
    for name in QUESTIONS["read"]:
        with choose(f"lab/{name}") as words:
            machine = _answer("topo", *words)
        machines[name] = {
            key: [_describe_part(part) for part in value] if isinstance(value, list) else value
            for key, value in machine.items()
            if key not in ("schema", "kind", "source", "name", "limits")
        }
    return machines


def _describe_part(part: Any) -> Any:
    if not isinstance(part, dict):
        return part
    return " ".join(f"{key}={_join(value)}" for key, value in part.items() if value not in (None, "", []))


def _join(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def render_dry_runs() -> dict[str, Any]:
    """Of each job the command that starts its ranks, or the options of sbatch."""
    return {
        line: _describe_command(run_inside(["dry_run=true", *shlex.split(line)]).out)
        for line in QUESTIONS["dry_runs"]
    }


def _describe_command(out: str) -> list[str]:
    if "#SBATCH" in out:
        return sorted(re.findall(r"^#SBATCH (?!--chdir)(.*)", out, re.MULTILINE))
    (line,) = [line for line in out.splitlines() if " -- " in line or "launcher" in line][-1:]
    return [word.replace(sys.executable, "PYTHON").replace(str(ROOT), "ROOT") for word in shlex.split(line)]


def render_help() -> dict[str, Any]:
    """What the help names: verbs, flags, groups with their options, and the keys of each verb's own help."""
    whole = run_inside(["--help-all"]).out
    parts = dict(re.findall(r"^(verbs|keys|groups|flags|exit codes)\b(.*(?:\n .*)*)", whole, re.MULTILINE))
    verbs = re.findall(r"^  (\w+) ", parts["verbs"], re.MULTILINE)
    groups = re.findall(r"^  (\w+) +(.*(?:\n {5,}.*)*)", parts["groups"], re.MULTILINE)
    keys = {verb: _list_keys(run_inside([verb, "--help"]).out) for verb in verbs}
    return {
        "verbs": verbs,
        "flags": sorted(set(re.findall(r"(?<!\S)--?[a-z][\w-]*", parts["flags"]))),
        "groups": {name: re.findall(r"[\w-]+", options) for name, options in groups},
        "keys": _list_keys(parts["keys"]),
        "keys of verbs": keys,
        "exit codes": re.findall(r"[\d+n]*\d[\d+n]*", parts["exit codes"]),
    }


def _list_keys(text: str) -> list[str]:
    """The keys at the beginnings of lines: `fit.gpu=NAME`, `nodes`."""
    found = re.findall(r"^  ([a-z_.]+(?:X|NAME)?)(?=[=, ])", text, re.MULTILINE)
    return [key for key in found if key != "launch"]


def render_plan(case: str) -> dict[str, Any]:
    """The placements of a machine under each binding, a line for each rank."""
    with choose(case) as words:
        return {binding: _place([*words, f"binding={binding}"]) for binding in BINDINGS}


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


OUTPUTS: dict[str, Callable[[], dict[str, Any]]] = {
    "outputs/fit": render_fit,
    "outputs/doctor": render_doctor,
    "outputs/topo": render_topo,
    "outputs/dry_runs": render_dry_runs,
    "outputs/help": render_help,
    **{f"plans/shipped/{name}": partial(render_plan, f"shipped/{name}") for name in SHIPPED},
    **{f"plans/lab/{name}": partial(render_plan, f"lab/{name}") for name in LAB},
}
"""What each file holds."""


def path_of(name: str) -> Path:
    return FOLDER / f"{name}.json"


def render(name: str) -> str:
    return json.dumps(OUTPUTS[name](), indent=1, ensure_ascii=False) + "\n"


def write_all(kind: str) -> None:
    """Write the files of a kind, from an empty directory and with an environment that asks for nothing."""
    os.environ.clear()
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        for name in OUTPUTS:
            if name.startswith(f"{kind}/"):
                path_of(name).parent.mkdir(parents=True, exist_ok=True)
                path_of(name).write_text(render(name))
