"""A wheel in another environment, used from an empty folder."""

import json
import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def pip(*words: str | Path, python: str | Path = sys.executable, timeout: float = 300) -> None:
    """Run this environment's pip, for another environment if one is given."""
    command = [sys.executable, "-m", "pip", "--python", python, *words]
    subprocess.run([*command, "--quiet"], check=True, timeout=timeout)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    pip("wheel", "--no-deps", "--wheel-dir", folder, ROOT)
    (found,) = folder.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def scripts(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin/ of an environment with the wheel, whose other packages come from this one."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False)
    pip("install", "--no-deps", wheel, python=folder / "bin/python")
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "others.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    return folder / "bin"


def run(
    scripts: Path, folder: Path, *words: str, command: str = "launch"
) -> "subprocess.CompletedProcess[str]":
    environ = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    return subprocess.run(
        [str(scripts / command), *words],
        cwd=folder,
        env=environ,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_the_wheel_carries_all_that_is_shipped_and_the_licence(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    for folder, target in (
        *(("launcher", "launcher"), ("hydra_plugins", "hydra_plugins"), ("conf", "launcher/conf")),
        ("slurm", "launcher/slurm/scripts"),
    ):
        files = {path.relative_to(ROOT / folder) for path in (ROOT / folder).rglob("*") if path.is_file()}
        shipped = {f"{target}/{path}" for path in files if "__pycache__" not in path.parts}
        assert shipped and shipped - {"launcher/rank/launch-rank"} <= names  # which is a script
    assert not any("__pycache__" in name for name in names)
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert not any(name.startswith(("tests/", "conf/", "slurm/")) for name in names)


@pytest.mark.slow
def test_the_distribution_has_its_commands_and_a_name_of_its_own(
    wheel: Path, scripts: Path, tmp_path: Path
) -> None:
    """`pip install launch` and `pip install launcher` install something else."""
    name, version = wheel.name.split("-")[:2]
    assert name == "launch_ranks"
    assert run(scripts, tmp_path, "--version").stdout == f"launch {version}\n"
    done = run(scripts, tmp_path, "echo", "ran", command="launch-rank")
    assert (done.returncode, done.stdout) == (0, "ran\n")
    assert done.stderr.startswith("launch-rank: rank 0, cpus ")
    (folder,) = scripts.parent.glob("lib/python*/site-packages/launcher/slurm/scripts")
    done = run(folder, tmp_path, f"--folder={tmp_path}", "status", command="sandbox")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"sandbox: error: there is no cluster in {tmp_path}: ")


@pytest.mark.slow
def test_the_wheel_runs_in_an_empty_environment(wheel: Path, tmp_path: Path) -> None:
    """With what it depends on, by pip; it takes a minute and downloads torch, so CI alone does it."""
    if not os.environ.get("LAUNCH_CI"):
        pytest.skip("an environment of its own, with torch, is made where LAUNCH_CI is set")
    venv.create(tmp_path / "empty", with_pip=False)
    constraints = ROOT / "constraints.txt"
    pip("install", "--constraint", constraints, wheel, python=tmp_path / "empty/bin/python", timeout=900)
    scripts, folder = tmp_path / "empty/bin", tmp_path / "work"
    folder.mkdir()
    assert run(scripts, folder, "--version").stdout.startswith("launch ")
    assert run(scripts, folder, "plan", "machine=dgx_h100").returncode == 0
    done = run(scripts, folder, "nproc_per_node=2", "model.layers=1", "program.steps=3")
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_the_shipped_configuration_is_found_from_an_empty_folder(scripts: Path, tmp_path: Path) -> None:
    done = run(scripts, tmp_path, "--cfg", "job", "+model=llama7b", "-p", "model")
    assert done.returncode == 0, done.stderr
    assert "hidden_size: 4096" in done.stdout
    assert "llama70b" in run(scripts, tmp_path, "--help-all").stdout
    plan = json.loads(run(scripts, tmp_path, "plan", "format=json", "nproc_per_node=1").stdout)
    assert plan["schema"] == 1
    shipped = json.loads(run(scripts, tmp_path, "plan", "format=json", "machine=dgx_h100").stdout)
    assert [rank["gpu"]["pci"] for rank in shipped["ranks"]][::7] == ["0000:1b:00.0", "0000:df:00.0"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_job_runs_from_the_installed_package(scripts: Path, tmp_path: Path) -> None:
    code = "import launcher, sys; print(launcher.__file__, sys.modules['launch_inprocess'].__file__)"
    (tmp_path / "show.py").write_text(code)
    done = run(scripts, tmp_path, "--", "show.py")
    assert done.returncode == 0, done.stderr
    out = next(tmp_path.glob("runs/*/*/logs/0/rank-0.out")).read_text()
    assert done.stderr.count("launch-rank: rank 0") == 1
    package, hook = map(Path, out.split())
    assert package.is_relative_to(scripts.parent) and hook.is_relative_to(package.parent)
    shim = next(tmp_path.glob("runs/*/*/rank-0.applied.json"))
    assert json.loads(shim.read_text())["problems"] == []
