"""What a running interpreter of ours loads, and the LAUNCH_* variables against the code that uses them.

pyproject.toml's contracts say who may import whom.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import launcher
from launcher import protocol
from tests.seam import PATIENCE, clean_environ, list_loaded, list_modules

ROOT = Path(launcher.__file__).parents[1]
STDLIB = sys.stdlib_module_names
NAMES = {name for name in vars(protocol) if name.startswith("LAUNCH_")}
OTHERS = {"LAUNCH_FAILED"}
"""A state of SLURM's."""


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


def test_the_launcher_loads_no_torch_and_its_help_no_hydra(tmp_path: Path) -> None:
    heavy = {"torch", "numpy"}
    starts = (("nproc_per_node=2", "dry_run=true"), ("plan", "format=json"), ("--cfg", "job"))
    for several, unwanted in (
        (starts, heavy),
        ((("--help",), ("--help-all",)), heavy | {"hydra", "omegaconf", "rich"}),
    ):
        runs = "".join(f"assert run_guarded({[*words]}) == 0\n" for words in several)
        loaded = list_modules(f"from launcher.cli.main import run_guarded\n{runs}", tmp_path)
        assert not loaded & unwanted and "launcher.cli.main" in loaded


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


def test_every_variable_anywhere_is_listed_and_every_one_is_used() -> None:
    """In every file that is shipped, but for the list itself."""
    files = [path for folder in ("launcher", "slurm", "conf") for path in (ROOT / folder).rglob("*")]
    found = set[str]()
    for path in files:
        if path.is_file() and path.suffix != ".pyc" and path.name != "protocol.py":
            found |= {*re.findall(r"\bLAUNCH_[A-Z_]*[A-Z]\b", path.read_text(encoding="utf-8"))}
    assert found - OTHERS == NAMES
    assert all(getattr(protocol, name) == name for name in NAMES)
    assert set(protocol.OWN_VARIABLES) < NAMES, "no user sets these"
