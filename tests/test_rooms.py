"""The rooms: who may import what, held against the code and against a running interpreter."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

import launcher
from tests.conftest import clean_environ

PACKAGE = Path(launcher.__file__).parent
STDLIB = sys.stdlib_module_names

ROOMS: dict[str, set[str]] = {
    "plan": {"launcher.errors", "launcher.cpulist"},
    "probe": {"launcher.plan.model", "launcher.errors", "launcher.cpulist", "pynvml"},
    "launch": {
        "launcher.plan.model",
        "launcher.plan.allocator",
        "launcher.plan.allocator_keys",
        "launcher.plan.allocator_text",
        "launcher.errors",
        "launcher.descriptors",
        "psutil",
        "submitit",
    },
    "rank": {"launcher.cpulist", "launcher.descriptors"},
    "inprocess": {
        "torch",
        "launch_inprocess",
    },  # the latter is the room itself, as a rank's interpreter has it
    "runs": {"launcher.plan.model", "launcher.cpulist", "launcher.descriptors", "launcher.terminal"},
    "tune": {"launcher.descriptors"},
    "doctor": {
        "launcher.plan.model",
        "launcher.plan.rules",
        "launcher.cpulist",
        "launcher.wording",
        "launcher.probe.health",
        "launcher.runs",
    },
    "report": {
        "launcher.plan.model",
        "launcher.cpulist",
        "launcher.terminal",
        "launcher.wording",
        "launcher.runs",
        "launcher.doctor.finding",
        "launcher.tune.search",
        "rich",
        "PIL",
    },
    "programs": {"torch", "numpy"},
}
"""What each room may import beside the standard library and itself."""
WIRING = {"batch", "follow", "submit", "verbs"}
"""Folders that join the rooms, as the files beside them do: they may import all of them."""
DOORS = {("rank/share.py", "launcher.errors"), ("rank/share.py", "launcher.standalone")}
"""Imports that a room makes only where it is used by itself: `launch-rank` without a plan makes one."""
ONE_FILE = {
    "hydra": {"config.py", "hydra_output.py", "hydra_settings.py", "multirun.py", "trials.py"},
    "omegaconf": {"config.py", "hydra_settings.py", "multirun.py"},
    "pynvml": {"probe/nvml.py"},
    "PIL": {"report/png.py"},
    "submitit": {"launch/slurm/submission.py"},
    "dotenv": {"envfile.py"},
}
"""Heavy packages and the files that may know them."""
FEW_ROOMS = {"torch": {"programs", "inprocess"}, "numpy": {"programs"}, "rich": {"report"}}


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


def test_the_rooms_are_the_folders() -> None:
    assert {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").is_file()} == {
        *ROOMS,
        *WIRING,
    }


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_what_its_row_says(room: str) -> None:
    allowed = {*ROOMS[room], f"launcher.{room}"}
    for path in (PACKAGE / room).rglob("*.py"):
        name = str(path.relative_to(PACKAGE))
        outside = {
            module
            for module in read_imports(path)
            if module.partition(".")[0] not in STDLIB
            and not is_within(module, allowed)
            and (name, module) not in DOORS
        }
        assert not outside, f"{name} imports {sorted(outside)}"


def test_the_doors_are_used_and_are_not_open_at_import() -> None:
    for name, module in DOORS:
        assert module in read_imports(PACKAGE / name)
    tree = ast.parse((PACKAGE / "rank/share.py").read_text())
    top = {ast.unparse(node) for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)}
    assert not [line for line in top if "launcher.standalone" in line or "launcher.errors" in line]


@pytest.mark.parametrize(("package", "files"), ONE_FILE.items(), ids=ONE_FILE)
def test_a_package_is_known_to_one_file(package: str, files: set[str]) -> None:
    found = {str(path.relative_to(PACKAGE)) for path in list_files() if is_within_any(path, package)}
    assert found == files


@pytest.mark.parametrize(("package", "rooms"), FEW_ROOMS.items(), ids=FEW_ROOMS)
def test_a_package_is_known_to_few_rooms(package: str, rooms: set[str]) -> None:
    found = {path.relative_to(PACKAGE).parts[0] for path in list_files() if is_within_any(path, package)}
    assert found and found <= rooms


def test_the_room_in_the_ranks_interpreter_imports_nothing_of_torch_by_itself() -> None:
    for path in (PACKAGE / "inprocess").rglob("*.py"):
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
    source += "def f():\n    from launcher.plan import model, codec\n"
    (tmp_path / "x.py").write_text(source)
    assert read_imports(tmp_path / "x.py") == {"typing", "launcher.plan.model", "launcher.plan.codec"}


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
    assert "launcher.rank.shim" in ours and "launcher.rank.record" in ours
    assert {module.partition(".")[0] for module in loaded} - {"launcher"} <= STDLIB
    assert {module for module in ours if not is_within(module, {"launcher.rank"})} == {
        "launcher",
        "launcher.cpulist",
        "launcher.descriptors",
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
    [["nproc_per_node=2", "dry_run=true"], ["plan", "format=json"], ["--cfg", "job"], ["--help"]],
    ids=str,
)
def test_the_launcher_loads_no_torch(words: list[str], tmp_path: Path) -> None:
    loaded = list_loaded(
        f"from launcher.cli import run_guarded\nassert run_guarded({words!r}) == 0", tmp_path
    )
    heavy = {"torch", "numpy"} | ({"hydra", "omegaconf", "rich"} if words == ["--help"] else set())
    assert not loaded & heavy
    assert "launcher.cli" in loaded
