"""An environment for the proof: a Python that has torch, this checkout, and wheels for what is missing.

Nothing is installed into the Python that is there. With the standard library alone, since prove starts before
there is anything else.
"""

import json
import os
import subprocess
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path

from launcher.plan.environment import HONOURED

ROOT = Path(__file__).parents[2]
"""The checkout."""
THERE = ("torch", "numpy")
TESTS = ("pytest", "hypothesis")
"""Packages of the test extra that the proof needs."""
MODULES = (
    *("torch", "numpy", "hydra", "omegaconf", "submitit", "dotenv", "pynvml", "psutil", "rich", "PIL"),
    *("pytest", "hypothesis"),
)
"""What is imported to see that all is there."""
LEFT_OUT = ("LAUNCH_", "PET_", "TORCHELASTIC_", "SLURM_", "SBATCH_", "SRUN_", "HYDRA_", "GPU_PROOF_")
TORCHRUN = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"),
    *("PYTHONHOME", "VIRTUAL_ENV", "PYTEST_ADDOPTS"),
)
"""Variables that are not handed on, nor those that the launcher honours: they would change what is seen."""
PTH = "import site; site.addsitedir({!r})\n"
FIND = "import json, sys; print(json.dumps([list(sys.version_info[:2]), sys.path]))"
IMPORT = """
import importlib, sys
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except ImportError as error:
        print(f"{name} ({error})")
"""


class ProofError(Exception):
    """The proof cannot begin; the text says why, and what to do."""


def list_requirements() -> list[str]:
    """Return what the project and the proof's tests need beside what the machine's Python has to have."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extra = [need for need in project["optional-dependencies"]["test"] if need.startswith(TESTS)]
    return [need for need in [*project["dependencies"], *extra] if not need.startswith(THERE)]


def make_environment(python: str, wheels: Path | None, folder: Path) -> str:
    """Make a virtual environment in `folder`; returns its Python. Raises ProofError.

    It has the packages of `python`, which may belong to a virtual environment itself, then the checkout.
    From `wheels` it gets what is missing, or is there in a version that the project does not take.
    """
    version, paths = json.loads(run([python, "-c", FIND], "be asked for its packages"))
    if version < [3, 11]:
        raise ProofError(f"{python} is Python {version[0]}.{version[1]}: give --python one of 3.11 or later")
    run([python, "-m", "venv", "--without-pip", str(folder)], "make a virtual environment")
    made = str(folder / "bin/python")
    (site,) = folder.glob("lib/python*/site-packages")
    sites = [path for path in paths if Path(path).name in ("site-packages", "dist-packages")]
    # The checkout comes before the others' packages, one of which may be called `tests`.
    (site / "proof.pth").write_text(f"{ROOT}\n{''.join(PTH.format(path) for path in sites)}")
    write_script(folder / "bin/launch-rank", made)
    if wheels:
        install(made, wheels)
    check_modules(made, wheels)
    return made


def write_script(path: Path, python: str) -> None:
    """Write the shim's script as pip does: its first line names the interpreter."""
    text = (ROOT / "launcher/rank/launch-rank").read_text(encoding="utf-8")
    path.write_text(text.replace("#!python", f"#!{python}", 1), encoding="utf-8")
    path.chmod(0o755)


def install(python: str, wheels: Path) -> None:
    """Install what the project needs and is not there, from the folder alone; raises ProofError.

    If what is there contradicts itself, so that pip finds no solution, all of the folder is installed.
    """
    pips = sorted(wheels.glob("pip-*.whl"))
    if not pips:
        raise ProofError(f"{wheels} holds no wheel of pip: make it with `make gpu-wheels`")
    options = (
        "--isolated",
        "install",
        "--quiet",
        "--no-index",
        "--no-cache-dir",
        "--disable-pip-version-check",
    )
    command = [python, str(pips[-1] / "pip"), *options, f"--find-links={wheels}"]
    what = f"install from {wheels}"
    try:
        run([*command, *list_requirements()], what)
    except ProofError:
        names = sorted({path.name.partition("-")[0] for path in wheels.glob("*.whl")} - {"pip"})
        run([*command, "--no-deps", "--ignore-installed", *names], what)


def check_modules(python: str, wheels: Path | None) -> None:
    """Raise ProofError where a module cannot be imported."""
    missing = run([python, "-c", IMPORT, *MODULES], "be asked for its modules").strip()
    if missing:
        remedy = f"{wheels} lacks them" if wheels else "no folder of wheels was given"
        names = "; ".join(missing.splitlines())
        raise ProofError(
            f"cannot import {names}; {remedy}: run `make gpu-wheels` where there is a network, give --wheels"
        )


def run(
    command: Sequence[str], what: str, environ: Mapping[str, str] | None = None, limit: float = 180
) -> str:
    """Return what a command prints; raises ProofError where it fails: PYTHON cannot `what`."""
    environ = clean(os.environ) if environ is None else environ
    try:
        # Another project's folder may hold packages with the names of ours.
        done = subprocess.run(
            command, cwd="/", env=environ, capture_output=True, text=True, timeout=limit, check=False
        )
    except subprocess.TimeoutExpired:
        raise ProofError(f"{command[0]} cannot {what}: no answer within {limit:.0f} s") from None
    except OSError as error:
        raise ProofError(
            f"{command[0]} cannot {what}: {error.strerror}: give --python one with torch"
        ) from None
    if done.returncode:
        last = " | ".join((done.stderr or done.stdout).strip().splitlines()[-3:])
        raise ProofError(f"{command[0]} cannot {what} (exit code {done.returncode}): {last}")
    return done.stdout


def clean(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without what changes how the launcher plans; the GPUs that are shown stay."""
    dropped = {*TORCHRUN, *HONOURED} - {"CUDA_VISIBLE_DEVICES"}
    return {
        name: value
        for name, value in environ.items()
        if name not in dropped and not name.startswith(LEFT_OUT)
    }


def prepare_environ(folder: Path, python: str, *, cpu: bool) -> dict[str, str]:
    """Return the steps' environment: home, caches and temporary files are in `folder`."""
    places = {"HOME": "home", "XDG_CACHE_HOME": "cache", "TMPDIR": "tmp"}
    for name in places.values():
        (folder / name).mkdir()
    environ = clean(os.environ) | {name: str(folder / place) for name, place in places.items()}
    environ["PATH"] = f"{Path(python).parent}{os.pathsep}{environ.get('PATH', os.defpath)}"
    # A machine without a network may name a name server all the same, and each start waits for its answer.
    environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
    if cpu:
        environ["CUDA_VISIBLE_DEVICES"] = ""
    return environ
