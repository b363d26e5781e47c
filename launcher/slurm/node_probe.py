"""Tries from a node of a job whether another one is there."""

import errno
import re
import socket
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from launcher.slurm.client import run_slurm
from launcher.slurm.job_control import SHORT_TIMEOUT
from launcher.slurm.slurm_environ import clean_for_step
from launcher.slurm.srun_command import Step, render_step

CONNECT_TIMEOUT = 2.0
"""Seconds for a connection within a cluster; the kernel's first repetition comes after one."""
STEP_TIMEOUT = 8.0
"""Seconds in which a node that is only slow starts a small process (0.1 s on an idle one)."""
SLURMD_PORT = 6818
"""SLURM's default (slurm.conf, SlurmdPort)."""
PORT_SETTING = re.compile(r"^SlurmdPort\s*=\s*(\d+)", re.MULTILINE)
NODE_NAME = re.compile(r"^NodeName=(\S+)")
NODE_ADDRESS, NODE_PORT = re.compile(r"\bNodeAddr=(\S+)"), re.compile(r"\bPort=(\d+)")
UNREACHABLE = frozenset(
    (errno.ECONNREFUSED, errno.ECONNRESET, errno.EHOSTUNREACH, errno.EHOSTDOWN, errno.ETIMEDOUT)
)
"""Errors that tell of the other node, rather than of this one or of its name's lookup."""
ANSWER = "launch-probe: here"


@dataclass(frozen=True, slots=True)
class NodeAddress:
    """Where a node's slurmd listens."""

    address: str
    port: int


def ask_addresses(hosts: Sequence[str], environ: Mapping[str, str]) -> dict[str, NodeAddress]:
    """Ask SLURM where the nodes' daemons listen; raises SchedulerError."""
    text = run_slurm(
        ["scontrol", "--oneliner", "show", "node", ",".join(hosts)], environ, timeout=SHORT_TIMEOUT
    )
    lines = text.splitlines()
    default = SLURMD_PORT
    if not all(NODE_PORT.search(line) for line in lines):
        found = PORT_SETTING.search(run_slurm(["scontrol", "show", "config"], environ, timeout=SHORT_TIMEOUT))
        default = int(found[1]) if found else SLURMD_PORT
    return parse_addresses(text, default)


def parse_addresses(text: str, default_port: int) -> dict[str, NodeAddress]:
    """Read what `scontrol --oneliner show node` prints; a node with the default port has none there."""
    found = {}
    for line in text.splitlines():
        name, address, port = NODE_NAME.search(line), NODE_ADDRESS.search(line), NODE_PORT.search(line)
        if name and address:
            found[name[1]] = NodeAddress(address[1], int(port[1]) if port else default_port)
    return found


def try_connection(where: NodeAddress, timeout: float = CONNECT_TIMEOUT) -> bool | None:
    """Tell whether a node takes a connection to its slurmd; None if that says nothing about the node."""
    try:
        with socket.create_connection((where.address, where.port), timeout):
            return True
    except TimeoutError:
        return False
    except OSError as error:
        return False if error.errno in UNREACHABLE else None


def is_frozen(host: str, witness: str, environ: Mapping[str, str]) -> bool | None:
    """Tell whether a node starts no process, while another one does; None if that one starts none either.

    slurmctld may be away, without which SLURM starts nothing anywhere.
    """
    if (has_run := try_step(host, environ)) is not False:
        return False if has_run else None
    return True if try_step(witness, environ) else None


def try_step(host: str, environ: Mapping[str, str]) -> bool | None:
    """Tell whether a node starts a process in time; None if there is no srun.

    The exit code says nothing: srun 22.05 ends with 0 if a node did not take its part.
    """
    step = Step(1, (host,), elastic=True, directory="/", command=("echo", ANSWER), options={"input": "none"})
    try:
        process = subprocess.Popen(
            render_step(step),
            env=clean_for_step(environ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    except OSError:
        return None
    with process:
        try:
            return ANSWER.encode() in process.communicate(timeout=STEP_TIMEOUT)[0]
        except subprocess.TimeoutExpired:
            process.kill()
            return False
