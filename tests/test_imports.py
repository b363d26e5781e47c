"""What a running interpreter of ours loads; pyproject.toml's contracts say who may import whom."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import launcher
from tests.seam import PATIENCE, clean_environ, list_loaded, list_modules

ROOT = Path(launcher.__file__).parents[1]
STDLIB = sys.stdlib_module_names


def test_the_shim_loads_the_standard_library_alone(tmp_path: Path) -> None:
    rank = {"local_rank": 0, "gpu": None, "cpus": "0", "memory": {"policy": "default"}, "num_workers": 1}
    plan = json.dumps({"ranks": [{**rank, "env": {}}]})
    (tmp_path / "plan.json").write_text(plan)
    script = f"""
import os, sys
sys.path[:] = [p for p in sys.path if "site-packages" not in p] + [{str(ROOT)!r}]
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
        timeout=PATIENCE,
        check=True,
    )
    loaded = set(done.stdout.split()[1:])
    ours = {module for module in loaded if module.partition(".")[0] == "launcher"}
    assert "launcher.rank.shim" in ours
    assert {module.partition(".")[0] for module in loaded} - {"launcher"} <= STDLIB
    assert {module for module in ours if not module.startswith("launcher.rank")} == {
        "launcher",
        "launcher.cpulist",
        "launcher.files",
        "launcher.protocol",
    }
    assert not loaded & {"re", "json", "subprocess", "pathlib", "typing", "dataclasses", "argparse"}


def test_the_shim_without_a_plan_loads_the_standard_library_alone(tmp_path: Path) -> None:
    script = """
import os, sys
os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"] = "0", "1"
from launcher.rank import shim
sys.argv = ["launch-rank", "/no/such/program"]
assert shim.main() == 127
"""
    loaded = list_modules(script, tmp_path) - list_modules("", tmp_path)
    assert "launcher.plan.planner" in loaded and "launcher.probe.machine" in loaded
    assert {module.partition(".")[0] for module in loaded} - {"launcher"} <= STDLIB
    # The codec needs typing: 3 ms.
    assert not loaded & {"subprocess", "pathlib", "argparse", "asyncio", "shutil", "tempfile"}


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
    loaded = list_loaded(words, tmp_path)
    heavy = {"torch", "numpy"} | ({"hydra", "omegaconf", "rich"} if words[0].startswith("--help") else set())
    assert not loaded & heavy
    assert "launcher.cli.main" in loaded


@pytest.mark.parametrize("words", [(), ("run_dir=run",)])
def test_a_start_loads_little_until_the_ranks_are_started(tmp_path: Path, words: tuple[str, ...]) -> None:
    (tmp_path / "x.py").touch()
    (tmp_path / "run").mkdir()
    (tmp_path / "run/manifest.json").write_text("{}")
    script = f"""
import os, sys
from launcher.launch.supervisor import DirectAgent
def begin(self):
    print("LOADED", *sys.modules, flush=True)
    os._exit(0)
DirectAgent.begin = begin
sys.argv = ["launch", "agent=direct", "nproc_per_node=1", *{words}, "x.py"]
from launcher.cli.main import main
main()
"""
    loaded = list_modules(script, tmp_path)
    assert {"launcher.launch.local_run", "launcher.plan.planner"} <= loaded
    assert ("launcher.slurm.run_states" in loaded) == bool(words)
    assert not {name.partition(".")[0] for name in loaded} & {
        *("rich", "psutil", "asyncio", "torch", "numpy", "submitit")
    }


def test_the_verbs_of_runs_need_no_hydra_unless_something_is_set(tmp_path: Path) -> None:
    hydra = {"hydra", "omegaconf", "antlr4"}
    assert not list_loaded(["status"], tmp_path) & hydra
    assert hydra <= list_loaded(["status", "runs_dir=runs"], tmp_path)
    (tmp_path / "conf").mkdir()
    assert hydra <= list_loaded(["status"], tmp_path)
