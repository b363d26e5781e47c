"""The files that SLURM reads: slurm.conf(5), gres.conf(5), cgroup.conf(5), slurmdbd.conf(5)."""

import os
import re
import socket
import stat
from dataclasses import asdict
from pathlib import Path

from sandboxed.cluster import Cluster, SandboxError, find_user

NVIDIA, FIRST_MINOR = 195, 256
"""Linux's number for NVIDIA's driver (Documentation/admin-guide/devices.txt), and ours in it."""
TRACKING = """\
ProctrackType=proctrack/pgid
TaskPlugin=task/none
"""
CGROUPS = """\
ProctrackType=proctrack/cgroup
TaskPlugin=task/cgroup,task/affinity
JobAcctGatherType=jobacct_gather/cgroup
"""
PREEMPT_SIGNAL = "SlurmctldParameters=preempt_send_user_signal\n"
"""The name that every version knows; from 23.02 it is also PreemptParameters=send_user_signal."""
ACCOUNTING = """\
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=127.0.0.1
AccountingStoragePort={ports[1]}
AccountingStoragePass={folder}/munge.socket
"""
NODE = (
    "NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} Sockets={sockets} "
    "CoresPerSocket={cores} ThreadsPerCore={threads} RealMemory={memory} Feature=sandbox{gres}\n"
)


def render_files(cluster: Cluster, user: str, slurm: str, swap: bool) -> dict[str, str]:
    """Return the texts of the files by name; `slurm` is what `slurmd -V` prints.

    `swap` says whether cgroups can limit that. Without cgroups, slurmd is kept from them, which it sets up at
    its start through systemd, also where nothing uses them: `disabled` came with 24.05; before, the plugin
    for version 1 does nothing until it is used.
    """
    version = re.search(r"(\d+)\.(\d+)", slurm)
    if not version:
        raise SandboxError(f"slurmd -V printed no version, but {slurm!r}: is slurmd in PATH SLURM's?")
    sockets, threads = (1, 1) if cluster.cpus % 4 else (2, 2)
    values = {**asdict(cluster), "user": user, "host": socket.gethostname(), "swap": "yes" if swap else "no"}
    values |= {"sockets": sockets, "threads": threads, "cores": cluster.cpus // sockets // threads}
    values |= {"memory_per_cpu": max(1, cluster.memory // cluster.cpus), "names": ",".join(cluster.names)}
    values |= {"gres": f" Gres=gpu:{cluster.gpus}" if cluster.gpus else ""}
    parts = {
        CGROUPS if cluster.cgroup else TRACKING: True,
        PREEMPT_SIGNAL: cluster.preempt_signal,
        ACCOUNTING: cluster.accounting,
        "TopologyPlugin=topology/tree\n": cluster.switches,
    }
    values["more"] = "".join(part for part, wanted in parts.items() if wanted).format(**values)
    nodes = zip(cluster.names, cluster.ports[2:], strict=True)
    values["node_lines"] = "".join(NODE.format(**values, name=name, port=port) for name, port in nodes)
    devices = f"{cluster.folder}/gpus/nvidia[0-{cluster.gpus - 1}]"
    gres = [f"NodeName={name} Name=gpu File={devices}\n" for name in cluster.names if cluster.gpus]
    templates = (Path(__file__).parent / "templates").iterdir()
    files = {path.name: path.read_text(encoding="utf-8").format(**values) for path in templates}
    files["gres.conf"] = "".join(gres)
    if not cluster.cgroup:
        is_old = (int(version[1]), int(version[2])) < (24, 5)
        files["cgroup.conf"] = f"CgroupPlugin={'cgroup/v1' if is_old else 'disabled'}\n"
    if cluster.switches:  # n0 on s0, n1 on s1, …, all below `top`: not SLURM's own order
        leaves = [f"s{number}" for number in range(cluster.switches)]
        dealt = (",".join(cluster.names[number :: cluster.switches]) for number in range(cluster.switches))
        lines = [f"SwitchName={leaf} Nodes={nodes}\n" for leaf, nodes in zip(leaves, dealt, strict=True)]
        files["topology.conf"] = "".join([*lines, f"SwitchName=top Switches={','.join(leaves)}\n"])
    return files


def write_files(cluster: Cluster, *, swap: bool) -> None:
    """Write the configuration, the key and the devices; the folder is the user's alone."""
    for name in ("state", "log", "gpus", *(f"spool/{node}" for node in cluster.names)):
        cluster.path(name).mkdir(parents=True, exist_ok=True, mode=0o700)
    for number in range(cluster.gpus):
        make_device(cluster.path("gpus", f"nvidia{number}"), number)
    files = render_files(cluster, find_user(), cluster.run("slurmd", "-V"), swap)
    contents = {"munge.key": os.urandom(1024), **{name: text.encode() for name, text in files.items()}}
    for name, content in contents.items():
        # Its owner alone may read it, as munged and slurmdbd demand.
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        with os.fdopen(os.open(cluster.path(name), flags, 0o600), "wb") as file:
            file.write(content)


def make_device(path: Path, number: int) -> None:
    """Make a device that no driver serves; only root can, and a plain file does for SLURM's counting.

    It is of NVIDIA's kind with a number that no GPU has (they end at 255), since SLURM's device cgroups
    forbid jobs by these numbers what is not theirs: a copy of /dev/null would lock away that, and one of a
    real GPU's number the GPU.
    """
    try:
        os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(NVIDIA, FIRST_MINOR + number))
    except PermissionError:
        path.touch()
