"""The rooms: who may import what, held against the code and against a running interpreter."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

import launcher
from tests.seam import clean_environ

PACKAGE = Path(launcher.__file__).parent
STDLIB = sys.stdlib_module_names

LEAVES = {
    "launcher.errors",
    "launcher.cpulist",
    "launcher.protocol",
    "launcher.decode",
    "launcher.files",
    "launcher.text",
}
"""Modules beside the packages, which know none of them; see docs/architecture.md."""
PACKAGES: dict[str, set[str]] = {
    "plan": {"launcher.errors", "launcher.cpulist", "launcher.decode", "launcher.protocol"},
    "probe": {
        "launcher.plan.model",
        "launcher.doctor.facts",
        "launcher.doctor.node_facts",
        "launcher.doctor.finding",
        "launcher.watch.watch_model",
        "launcher.errors",
        "launcher.cpulist",
        "launcher.protocol",
        "pynvml",
    },
    "config": {
        "launcher.plan",
        "launcher.fit",
        "launcher.runs.secrets",
        *LEAVES,
        "hydra",
        "omegaconf",
        "yaml",
        "dotenv",
    },
    "launch": {
        "launcher.plan.model",
        "launcher.config.schema",
        "launcher.runs",
        "launcher.watch",
        *LEAVES,
        "psutil",
    },
    "agent": {
        "launcher.plan.model",
        "launcher.config.cache_folder",
        "launcher.config.schema",
        "launcher.launch",
        "launcher.rank",
        "launcher.runs",
        *LEAVES,
        "psutil",
    },
    "slurm": {
        "launcher.agent",
        "launcher.config.agent_choice",
        "launcher.config.schema",
        "launcher.config.cluster",
        "launcher.config.fit_check",
        "launcher.config.fit_request",
        "launcher.config.program",
        "launcher.config.request",
        "launcher.probe",
        "launcher.plan",
        "launcher.launch",
        "launcher.runs",
        "launcher.report",
        "launcher.watch",
        "launcher.fit",
        "launcher.preflight",
        "launcher.doctor",
        *LEAVES,
        "submitit",
        "yaml",
    },
    "rank": {"launcher.cpulist", "launcher.protocol", "launcher.files"},
    "inprocess": {"torch", "launch_inprocess"},
    "runs": {"launcher.plan.model", *LEAVES},
    "watch": {"launcher.runs", *LEAVES, "psutil", "prometheus_client"},
    "fit": {"launcher.plan.model", "launcher.plan.rules", *LEAVES},
    "preflight": {
        "launcher.probe",
        "launcher.doctor",
        "launcher.plan.model",
        "launcher.config.schema",
        "launcher.runs",
        *LEAVES,
        "psutil",
    },
    "doctor": {"launcher.plan.model", "launcher.plan.rules", "launcher.runs", *LEAVES},
    "tune": {"launcher.fit", "launcher.plan.model", "launcher.runs", *LEAVES},
    "report": {
        "launcher.plan.model",
        "launcher.runs",
        "launcher.doctor",
        "launcher.tune",
        "launcher.watch",
        "launcher.fit",
        *LEAVES,
        "rich",
        "PIL",
        "matplotlib",
        "jinja2",
        "markupsafe",
    },
    "programs": {"torch", "numpy"},
    "cli": {"launcher", *LEAVES},
}
"""What each package may import beside the standard library and itself."""
DOORS = {
    "rank/standalone.py": {"launcher.probe", "launcher.plan", "launcher.errors"},
    "watch/__main__.py": {"launcher.probe"},
    "agent/read_ahead_program.py": {"launcher.probe"},
}
"""Files that know more than their package. `launch-rank` without a plan makes one; the watcher's program
passes to the watcher what reads GPUs and cgroups; the one that reads ahead asks how much memory is free."""
AT_THE_TOP = {"__init__", "__main__", "errors", "cpulist", "protocol", "decode", "files", "text"}
ONE_PACKAGE = {
    "hydra": {"config"},
    "omegaconf": {"config"},
    "yaml": {"config", "slurm"},
    "dotenv": {"config"},
    "pynvml": {"probe"},
    "submitit": {"slurm"},
    "PIL": {"report"},
    "matplotlib": {"report"},
    "jinja2": {"report"},
    "prometheus_client": {"watch"},
    "rich": {"report"},
    "torch": {"programs", "inprocess"},
    "numpy": {"programs"},
}
"""Heavy packages and the packages of ours that may know them."""


def list_files() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def read_imports(path: Path) -> set[str]:
    """Every module that a file imports, anywhere in it, but for type checkers alone."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = []
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 or "inprocess" in path.parts, f"{path}: a relative import"
            inside = "" if node.level == 0 else f"{'.'.join(path.relative_to(PACKAGE.parent).parent.parts)}."
            found |= {find_module(f"{inside}{node.module or ''}", alias.name) for alias in node.names}
    return found


def find_module(module: str, name: str) -> str:
    """`from launcher.plan import model` imports a module, `from launcher.errors import X` a name in one."""
    inner = PACKAGE.parent.joinpath(*module.split("."), name)
    return f"{module}.{name}" if inner.is_dir() or inner.with_suffix(".py").is_file() else module


def is_within(module: str, names: set[str]) -> bool:
    return any(module == name or module.startswith(f"{name}.") for name in names)


def find_violations() -> set[tuple[str, str]]:
    """Every (file, module) that the table does not allow."""
    found = set()
    for package, allowed in PACKAGES.items():
        for path in (PACKAGE / package).rglob("*.py"):
            name = str(path.relative_to(PACKAGE))
            permitted = {*allowed, f"launcher.{package}", *DOORS.get(name, ())}
            found |= {
                (name, module)
                for module in read_imports(path)
                if module.partition(".")[0] not in STDLIB and not is_within(module, permitted)
            }
    return found


def test_every_package_has_its_row() -> None:
    assert {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").is_file()} == set(PACKAGES)


def test_nothing_else_stands_beside_the_packages() -> None:
    assert {path.stem for path in PACKAGE.glob("*.py")} <= AT_THE_TOP


def test_a_package_imports_what_its_row_says() -> None:
    assert not find_violations()


@pytest.mark.parametrize(("package", "users"), ONE_PACKAGE.items(), ids=ONE_PACKAGE)
def test_a_heavy_package_is_known_to_few(package: str, users: set[str]) -> None:
    found = {path.relative_to(PACKAGE).parts[0] for path in list_files() if is_within_any(path, package)}
    assert found and found <= users


def test_the_room_in_the_ranks_interpreter_imports_nothing_of_torch_by_itself() -> None:
    for path in (PACKAGE / "inprocess").rglob("*.py"):
        if path.parent.name == "fake_step":  # loaded once the program has imported torch
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        top = {ast.unparse(node) for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)}
        assert not [line for line in top if "torch" in line], path


def is_within_any(path: Path, package: str) -> bool:
    return any(is_within(module, {package}) for module in read_imports(path))


def test_hydras_plugin_imports_hydra_alone() -> None:
    """Every program of the environment that uses Hydra imports it."""
    found = read_imports(PACKAGE.parent / "hydra_plugins/launch.py")
    assert {module.partition(".")[0] for module in found} - STDLIB == {"hydra", "omegaconf"}


def test_nothing_imports_the_programs() -> None:
    for path in list_files():
        if path.parent.name != "programs":
            assert not [
                module for module in read_imports(path) if is_within(module, {"launcher.programs"})
            ], path


def test_the_check_sees_an_import(tmp_path: Path) -> None:
    source = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch\n"
    source += "def f():\n    from launcher.plan import model, json_form\n"
    (tmp_path / "x.py").write_text(source)
    assert read_imports(tmp_path / "x.py") == {"typing", "launcher.plan.model", "launcher.plan.json_form"}


def list_loaded(script: str, cwd: Path) -> set[str]:
    """The modules that a script has loaded at its end, in an interpreter of its own."""
    script += "\nimport sys\nprint('LOADED', *sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=cwd,
        env=clean_environ(),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("LOADED "))
    return set(line.split()[1:])


def test_the_shim_loads_the_standard_library_alone(tmp_path: Path) -> None:
    rank = {"local_rank": 0, "gpu": None, "cpus": "0", "memory": {"policy": "default"}, "num_workers": 1}
    plan = json.dumps({"ranks": [{**rank, "env": {}}]})
    (tmp_path / "plan.json").write_text(plan)
    script = f"""
import os, sys
sys.path[:] = [p for p in sys.path if "site-packages" not in p] + [{str(PACKAGE.parent)!r}]
before = set(sys.modules)
os.environ.update(LAUNCH_PLAN="plan.json", LOCAL_RANK="0", LAUNCH_RECORD_DIR={str(tmp_path)!r})
from launcher.rank import shim
sys.argv = ["launch-rank", "/no/such/program"]
assert shim.main() == 127
new = set(sys.modules) - before
os.dup2(3, 1)
print("LOADED", *new)
sys.stdout.flush()
os._exit(0)
"""
    done = subprocess.run(
        ["/bin/sh", "-c", 'exec 3>&1; exec "$0" -I -S -c "$1"', sys.executable, script],
        cwd=tmp_path,
        env=clean_environ(),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    loaded = set(done.stdout.split()[1:])
    ours = {module for module in loaded if module.partition(".")[0] == "launcher"}
    assert "launcher.rank.shim" in ours and "launcher.rank.rank_record" in ours
    assert {module.partition(".")[0] for module in loaded} - {"launcher"} <= STDLIB
    assert {module for module in ours if not is_within(module, {"launcher.rank"})} == {
        "launcher",
        "launcher.cpulist",
        "launcher.files",
        "launcher.protocol",
    }
    for heavy in ("re", "json", "subprocess", "pathlib", "typing", "dataclasses", "argparse"):
        assert heavy not in loaded, heavy


def test_the_shim_without_a_plan_loads_the_standard_library_alone(tmp_path: Path) -> None:
    script = """
import os, sys
os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"] = "0", "1"
from launcher.rank import shim
sys.argv = ["launch-rank", "/no/such/program"]
assert shim.main() == 127
"""
    loaded = list_loaded(script, tmp_path) - list_loaded("", tmp_path)
    assert "launcher.plan.planner" in loaded and "launcher.probe.machine" in loaded
    assert {module.partition(".")[0] for module in loaded} - {"launcher"} <= STDLIB
    for heavy in (
        "subprocess",
        "pathlib",
        "argparse",
        "asyncio",
        "shutil",
        "tempfile",
        "typing",
    ):
        assert heavy not in loaded, heavy


@pytest.mark.parametrize(
    "words",
    [
        ["nproc_per_node=2", "dry_run=true"],
        ["plan", "format=json"],
        ["--cfg", "job"],
        ["--help"],
        ["--help-all"],
    ],
    ids=str,
)
def test_the_launcher_loads_no_torch(words: list[str], tmp_path: Path) -> None:
    loaded = list_loaded(
        f"from launcher.cli.main import run_guarded\nassert run_guarded({words!r}) == 0", tmp_path
    )
    heavy = {"torch", "numpy"} | ({"hydra", "omegaconf", "rich"} if words[0].startswith("--help") else set())
    assert not loaded & heavy
    assert "launcher.cli.main" in loaded
