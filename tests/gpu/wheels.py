"""Gathers the wheels that the proof needs beside torch: `python -m tests.gpu.wheels [FOLDER]`.

They are for Linux on x86-64: those of compiled packages for each of VERSIONS, all others once. pip is among
them, for a Python that has none. This needs a network.
"""

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.gpu.environment import ROOT, list_requirements

VERSIONS = ("3.11", "3.12", "3.13", "3.14")
"""Pythons that the wheels are for."""
PLATFORMS = (
    "manylinux_2_28_x86_64",
    "manylinux_2_27_x86_64",
    "manylinux_2_17_x86_64",
    "manylinux2014_x86_64",
)
"""What compiled wheels are built for: pip matches each of these names by itself."""
SOURCE = "antlr4-python3-runtime==4.9.*"
"""What hydra-core needs, and is published as source alone."""
LARGEST = 60
"""MiB of all wheels together."""


def main() -> None:
    """Put the wheels into a folder, in place of those that are there."""
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / ".gpu-wheels"
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder, "wheels")
        pip("wheel", "--no-deps", "--wheel-dir", str(made), SOURCE)
        for version in VERSIONS:
            download(version, made)
        size = sum(path.stat().st_size for path in made.iterdir()) / 2**20
        if size > LARGEST:
            sys.exit(f"the wheels have {size:.0f} MiB, more than {LARGEST}")
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(made, target)
    print(f"{target}: {len(list(target.iterdir()))} wheels, {size:.1f} MiB")


def download(version: str, folder: Path) -> None:
    """Download what one Python needs; pip leaves out what is in the folder already."""
    options = ["--only-binary=:all:", "--implementation=cp", f"--python-version={version}"]
    options += [f"--platform={platform}" for platform in PLATFORMS]
    pip("download", *options, f"--dest={folder}", f"--find-links={folder}", "pip", *list_requirements())


def pip(command: str, *words: str) -> None:
    """Run pip; raises CalledProcessError."""
    options: Sequence[str] = ("--quiet", "--disable-pip-version-check")
    subprocess.run([sys.executable, "-m", "pip", command, *options, *words], check=True)


if __name__ == "__main__":
    main()
