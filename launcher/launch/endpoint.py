"""Where the ranks of a job on one node meet: MASTER_ADDR and MASTER_PORT."""

import os
from collections.abc import Callable
from pathlib import Path

from launcher.config.start import check_port_free
from launcher.errors import MachineError

LOOPBACK = "127.0.0.1"
"""torchrun's default of --master-addr."""
DEFAULT_LOCAL = (32768, 60999)
"""The kernel's own ports for outgoing connections (ip(7), ip_local_port_range), if it cannot be read."""
LOWEST = 10240
"""Below are the services of the system, SLURM's own (6817 to 6819) among them."""
FEWEST = 1000
"""Ports of a range that is worth the name."""
TRIALS = 100


def make_endpoint_finder(given: tuple[str, int] | None) -> Callable[[str, int], tuple[str, int]]:
    """Return what gives MASTER_ADDR and MASTER_PORT for a start of this machine's ranks, by its number.

    A `given` one is for the first start; a port of 0 there is any free one. Each restart takes another port,
    since peers of an earlier start must not meet this one.
    """

    def find(_host: str, restart: int) -> tuple[str, int]:
        address, port = given or (LOOPBACK, 0)
        return address, port if port and restart == 0 else find_free_port()

    return find


def find_free_port() -> int:
    """Return a port that nobody serves, outside of those that the kernel gives to outgoing connections.

    Rank 0 serves it a second or more later, once it has imported torch: it is to be free then too. Raises
    OSError if there is none.
    """
    ports = list_ports(*read_client_ports())
    for _ in range(TRIALS):
        port = ports[int.from_bytes(os.urandom(4)) % len(ports)]
        if is_port_free(port):
            return port
    raise OSError(f"no port of {ports.start} to {ports.stop - 1} is free")


def read_client_ports(root: Path = Path("/proc/sys")) -> tuple[int, int]:
    """Return the first and the last port that the kernel gives to outgoing connections."""
    try:
        low, high = map(int, (root / "net/ipv4/ip_local_port_range").read_text(encoding="ascii").split())
    except (OSError, ValueError):
        return DEFAULT_LOCAL
    return low, high


def list_ports(first: int, last: int) -> range:
    """Return the larger range below or above those ports; all but the system's if neither is of use."""
    ports = max(range(LOWEST, min(first, 65536)), range(max(LOWEST, last + 1), 65536), key=len)
    return ports if len(ports) >= FEWEST else range(LOWEST, 65536)


def is_port_free(port: int) -> bool:
    """Tell whether this host can listen on a port, in all of its address families."""
    try:
        check_port_free(port)
    except MachineError:
        return False
    return True
