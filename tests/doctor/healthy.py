"""A machine as a tree of files, and the nodes of a job, healthy until a test changes something."""

import copy
import json
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from launcher.codec import convert
from launcher.doctor.model import Facts
from tests.plan.lab_machines import fsroot
from tests.probe.machine_trees import CPU, PCI, STATUS, put
from tests.seam import Result, run_inside

HERE = Path(__file__).parent
TABLES = tomllib.loads((HERE / "healthy.toml").read_text())
MACHINE: dict[str, Any] = TABLES["machine"]
DEVICES = [*MACHINE["gpus"], *MACHINE["nics"]]
Files = dict[str, str | bytes | None]


def list_limits(
    nproc: str = "unlimited", files: str = "65536", files_hard: str = "", locked: str = ""
) -> Files:
    rows = {
        "Max processes": (nproc, "unlimited", "processes"),
        "Max open files": (files, files_hard or files, "files"),
        "Max locked memory": (locked or "unlimited", "unlimited", "bytes"),
    }
    lines = [f"{name:<26}{soft:<21}{hard:<21}{unit}" for name, (soft, hard, unit) in rows.items()]
    return {"proc/self/limits": "\n".join(["Limit Soft Limit Hard Limit Units", *lines])}


def list_clocks(driver: str, governor: str, preference: str | None = None) -> Files:
    files: Files = {}
    for cpu in range(64):
        here = f"{CPU}/cpu{cpu}/cpufreq/"
        files |= {f"{here}scaling_driver": driver, f"{here}scaling_governor": governor}
        files |= {f"{here}energy_performance_preference": preference} if preference else {}
    return files


def list_links(width: str) -> Files:
    widths = (("current", width), ("max", "16"))
    return {f"{PCI}/{one['bdf']}/{kind}_link_width": lanes for one in DEVICES for kind, lanes in widths}


def list_memory(swap: int) -> Files:
    free = (8 << 20) - swap
    return {"proc/meminfo": f"MemTotal: {1 << 30} kB\nSwapTotal: {8 << 20} kB\nSwapFree: {free} kB"}


SEVERAL = {"clock": lambda words: list_clocks(*words), "limits": lambda values: list_limits(**values)}
SEVERAL |= {"links": list_links, "swap": list_memory}
HEALTHY: Files = {
    **TABLES["files"],
    **list_links("16"),
    **list_clocks("acpi-cpufreq", "performance"),
    **list_limits(),
    **list_memory(0),
}


def list_edits(case: Mapping[str, Any]) -> Files:
    """The files that a case changes."""
    files: Files = {}
    for key, function in SEVERAL.items():
        files |= function(case[key]) if key in case else {}  # type: ignore[no-untyped-call]
    if "allowed" in case or "mems" in case:
        cpus, mems = case.get("allowed", "0-63"), case.get("mems", "0-1")
        files[STATUS] = f"Name:\tx\nCpus_allowed_list:\t{cpus}\nMems_allowed_list:\t{mems}\n"
    return {**files, **case.get("files", {}), **dict.fromkeys(case.get("remove", ()))}


def write_healthy(root: Path, **changes: Any) -> Path:
    """Write a machine that has nothing to mend, with other values for some keys of its description."""
    fsroot.materialize({**MACHINE, **changes}, root)
    for path, content in HEALTHY.items():
        put(root, path, content or "")
    return root


def run_doctor(*words: str) -> tuple[Result, list[dict[str, Any]]]:
    """Run `launch doctor format=json`: the result and its findings, each with its texts filled."""
    done = run_inside(["doctor", "format=json", *words])
    assert done.code in (0, 1), done
    told = json.loads(done.out)
    assert told["schema"] == 1
    findings: list[dict[str, Any]] = told["findings"]
    for finding in findings:
        explains = finding["level"] in ("error", "warning", "note")
        assert all(
            bool(finding[key]) == explains for key in ("why", "fix") if finding["rule"][:6] != "checks"
        )
        assert finding["what"] and "{" not in "".join(finding[key] for key in ("what", "why", "fix")), finding
    assert done.code == int(bool(pick(findings, "error", "warning")))
    return done, findings


def pick(findings: list[dict[str, Any]], *levels: str) -> list[dict[str, Any]]:
    """The findings of some levels."""
    return [finding for finding in findings if finding["level"] in levels]


def read_cases(name: str) -> dict[str, Any]:
    """A file of cases."""
    return tomllib.loads((HERE / name).read_text())


JOBS = read_cases("jobs.toml")


def make_node(number: int, host: str = "") -> dict[str, Any]:
    """A healthy node of a job, as its answer's JSON."""
    node = copy.deepcopy(JOBS["node"])
    gpu, nic = node.pop("gpu"), node.pop("nic")
    node["gpus"] = [
        {
            **gpu,
            "index": index,
            "uuid": f"GPU-{index}",
            "pci": f"0000:{index + 1:02x}:00.0",
            "peers": [other for other in range(8) if other != index],
        }
        for index in range(8)
    ]
    node["nics"] = [{**nic, "name": f"mlx5_{index}:1"} for index in range(8)]
    return {**node, "host": host or f"n{number}", "node_rank": number - 1, "boot_id": f"boot-{number}"}


def change(node: dict[str, Any], path: str, value: Any) -> None:
    """Set a value of a node: `load`, `gpus.3.problem`, `gpus.*.nvlinks`, `paths.data.state`, `nics.4`.

    "null" stands for null, and "gone" takes an entry of a list away. `matmul` gives a value to each GPU's
    matrix product, and `cpu.MEASURE` to all CPUs'.
    """
    value = None if value == "null" else value
    first, *rest = path.split(".")
    if first == "matmul":
        result = {"measure": "matmul", "unit": "TFLOPS", "checksum": "8192:aa", "device": "H100"}
        node["work"] = [{**result, "where": f"GPU {at}", "value": one} for at, one in enumerate(value)]
    elif first == "cpu":
        result = {"measure": rest[0], "where": "CPU", "value": value, "unit": "", "device": "EPYC, 2 CPUs"}
        node.setdefault("work", []).append(result)
    elif not rest:
        node[first] = value
    else:
        for at, entry in list(enumerate(node[first])):
            if rest[0] in ("*", str(at), entry.get("purpose")):
                if value == "gone":
                    node[first].remove(entry)
                else:
                    entry[rest[1]] = value


def make_job(case: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The nodes of a case: healthy ones with its changes, `n3.load` or, of all, `*.load`."""
    nodes = [make_node(number) for number in range(1, case["nodes"] + 1)]
    for path, value in case.get("set", {}).items():
        host, _, rest = path.partition(".")
        for node in nodes:
            if host in ("*", node["host"]):
                change(node, rest, copy.deepcopy(value))
    return nodes


def write_answers(run: Path, nodes: list[dict[str, Any]], silent: tuple[str, ...] = ()) -> str:
    """Write the answers of a job's nodes as preflight does; returns the setting that names the run."""
    folder = run / "preflight" / "0"
    folder.mkdir(parents=True)
    for node in nodes:
        (folder / f"node-{node['host']}.json").write_text(json.dumps({"schema": 1, **node}))
    hosts = [*(node["host"] for node in nodes), *silent]
    report = {"schema": 1, "kind": "deep", "hosts": sorted(hosts), "silent": silent, "seconds": 80.0}
    (folder / "report.json").write_text(json.dumps(report))
    return f"run_dir={run}"


def list_found(findings: list[dict[str, Any]]) -> Iterator[str]:
    """Findings as `n3 gpu.slowed error`, `*` for the job as a whole."""
    for one in findings:
        yield f"{one.get('host') or '*'} {one['rule']} {one['level']}"


NODE = convert(Facts, make_node(1))
"""A healthy node's facts."""
