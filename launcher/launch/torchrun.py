"""torchrun's command line, rendered from values."""

import re
import socket
from collections.abc import Mapping, Sequence

from launcher.errors import MachineError, UsageError

MODULE = "torch.distributed.run"
"""What the `torchrun` script runs."""
ENDPOINT = re.compile(r"(?P<host>\[[\w.:%-]+\]|[\w.:-]+):(?P<port>[0-9]{1,5})")
"""torchrun reads the last number of `::1:29500` as the port too."""


def render_torchrun(
    python: str, options: Mapping[str, object], shim: Sequence[str], program: Sequence[str]
) -> tuple[str, ...]:
    """Return the agent's command: torchrun's options, then the shim, then the program's words as they are.

    An option that is None is left out, so that torchrun takes it from `PET_*` or its own default. As with
    the `torchrun` script, a `json.py` in the working directory is not what the agent imports (-P). Without
    the `--`, argparse (of Python 3.13.0 too) looks for torchrun's options among the program's words, and
    refuses `--log=x`, which may be short for two of them.
    """
    rendered = [
        f"--{name.replace('_', '-')}={render_value(value)}"
        for name, value in options.items()
        if value is not None and value != {}
    ]
    return (python, "-P", "-m", MODULE, *rendered, "--no-python", "--", *shim, *program)


def render_value(value: object) -> str:
    """Write a value as torchrun reads it; a mapping is `key=value,key=value` (its `--rdzv-conf`)."""
    if isinstance(value, Mapping):
        return ",".join(f"{key}={item}" for key, item in value.items())
    return str(value)


def parse_pairs(text: str) -> dict[str, str]:
    """Read torchrun's `key=value,key=value`, as in `PET_RDZV_CONF`."""
    pairs = (piece.partition("=") for piece in text.split(",") if piece)
    return {key.strip(): value.strip() for key, _, value in pairs}


def parse_nodes(text: object) -> tuple[int, int]:
    """Read `nodes`: a number, or `min:max`; raises UsageError."""
    low, colon, high = str(text).partition(":")
    try:
        minimum, maximum = int(low), int(high if colon else low)
    except ValueError:
        minimum, maximum = 0, 0
    if not 1 <= minimum <= maximum:
        shown = "null" if text is None else text
        raise UsageError(f"nodes={shown}: give a number of at least 1, or min:max as in nodes=2:4")
    return minimum, maximum


def parse_endpoint(text: str) -> tuple[str, int]:
    """Read HOST:PORT, also `[::1]:29500`; raises UsageError."""
    match = ENDPOINT.fullmatch(text)
    if not match or not int(match["port"]) < 1 << 16:
        raise UsageError(
            f"rdzv_endpoint={text}: give HOST:PORT, as in rdzv_endpoint=node0:29500 or [::1]:29500"
        )
    return match["host"].strip("[]"), int(match["port"])


def check_port_free(port: int) -> None:
    """Raise MachineError where another process listens on a port that this host is to serve.

    torchrun itself would take that for a rendezvous that is already up, and wait for it until its timeout.
    """
    if port == 0:
        return
    family = socket.AF_INET6 if socket.has_ipv6 else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
            probe.listen(1)
        except OSError as error:
            raise MachineError(
                f"port {port} of this host is not free ({error.strerror}): choose another for rdzv_endpoint"
            ) from None
