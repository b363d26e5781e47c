"""The programs that a cluster needs, and Debian's packages that hold them."""

import os
import shutil
import subprocess

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


def ensure_programs(accounting: bool) -> None:
    """Install what is missing; raises SandboxError where that is not possible."""
    missing = list_missing(accounting)
    if not missing:
        return
    command = ["apt-get", "install", "--yes", "--no-install-recommends", *missing]
    if os.geteuid() or not shutil.which("apt-get"):
        raise SandboxError(f"{' '.join(missing)} not installed: {'sudo ' if os.geteuid() else ''}{' '.join(command)}")
    print(f"sandbox: installing {' '.join(missing)}", flush=True)
    environ = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for words in (["apt-get", "update"], command):
        done = subprocess.run(words, env=environ, capture_output=True, text=True, check=False)
        if done.returncode and words is command:
            raise SandboxError(f"{' '.join(command)} failed: {done.stderr.strip()[-300:]}: install them by hand")


def list_missing(accounting: bool) -> list[str]:
    """Packages whose programs are not there."""
    needed = {**PROGRAMS, **(ACCOUNTING if accounting else {})}
    path = f"{os.environ.get('PATH', '')}:{SYSTEM_PATH}"
    return sorted({package for program, package in needed.items() if not shutil.which(program, path=path)})
