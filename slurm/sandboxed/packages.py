"""The programs that a cluster needs, and Debian's packages that hold them."""

import os
import re
import shutil
import subprocess
import sys

from sandboxed.errors import SandboxError

PROGRAMS = {"munged": "munge", "slurmctld": "slurmctld", "slurmd": "slurmd", "srun": "slurm-client"}
ACCOUNTING = {
    "slurmdbd": "slurmdbd",
    "mariadbd": "mariadb-server-core",
    "mariadb-install-db": "mariadb-server-core",
    "mariadb": "mariadb-client-core",
}
SYSTEM_PATH = "/usr/sbin:/sbin"
"""Where the daemons are, which users' PATH often lacks."""
INSTALL = ("apt-get", "-o", "DPkg::Lock::Timeout=120", "install", "--yes", "--no-install-recommends")


def ensure_programs(accounting: bool) -> None:
    """Install what is missing; raises SandboxError where that is not possible."""
    missing = list_missing(accounting)
    packages = sorted(set(missing.values()))
    if not missing:
        return
    if not shutil.which("apt-get"):
        raise SandboxError(f"{', '.join(missing)} missing, and no apt-get: install SLURM, munge and MariaDB")
    if os.geteuid():
        command = f"sudo apt-get install --no-install-recommends {' '.join(packages)}"
        raise SandboxError(f"{', '.join(missing)} missing, and only root can install: {command}")
    sys.stderr.write(f"sandbox: installing {' '.join(packages)}, some 100 MB with what they need\n")
    run_apt("apt-get", "update")
    done = run_apt(*INSTALL, *packages)
    left = list_missing(accounting)
    if done.returncode or left:
        said = done.stderr.strip()[-300:] or f"{', '.join(left)} still missing"
        raise SandboxError(f"apt-get install {' '.join(packages)} failed: {said}: install them by hand")


def run_apt(*words: str) -> "subprocess.CompletedProcess[str]":
    """Run apt-get without questions."""
    environ = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    return subprocess.run(
        words, env=environ, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )


def list_missing(accounting: bool) -> dict[str, str]:
    """Return the programs that are not there, with their packages."""
    needed = {**PROGRAMS, **(ACCOUNTING if accounting else {})}
    path = f"{os.environ.get('PATH', '')}:{SYSTEM_PATH}"
    return {program: package for program, package in needed.items() if not shutil.which(program, path=path)}


def find_version(shown: str) -> tuple[int, int]:
    """Return SLURM's version, as (22, 5), from what `slurmd -V` prints."""
    match = re.search(r"(\d+)\.(\d+)", shown)
    if not match:
        raise SandboxError(f"slurmd -V printed no version, but {shown!r}: is slurmd in PATH SLURM's?")
    return int(match[1]), int(match[2])
