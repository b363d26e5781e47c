"""What is read on a node before its ranks are planned: the machine, and the variables that count.

`launch-rank` comes here from every rank that has no plan at hand, so imports count.
"""

from launcher.errors import UsageError
from launcher.plan.model import HONOURED, Machine
from launcher.probe.machine import probe


def read_machine(root: str, snapshot: str | None) -> Machine:
    """Return the machine below `root`, or a snapshot's; raises UsageError or MachineError."""
    return load_snapshot(snapshot) if snapshot else probe(root)


def load_snapshot(path: str) -> Machine:
    """Read a machine from what `launch topo save=FILE` or `launch plan format=json` wrote.

    Raises UsageError for a file that cannot be read, or that holds something else.
    """
    from launcher.plan.snapshot import parse_machine

    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
    except (OSError, ValueError) as error:
        raise UsageError(
            f"machine.snapshot={path} cannot be read ({getattr(error, 'strerror', '') or error}): "
            "give a path from here, or a file in conf/machine/"
        ) from None
    try:
        return parse_machine(text)
    except UsageError as error:
        raise UsageError(f"machine.snapshot={path}: {error}") from None


def honoured_environ(environ: dict[str, str]) -> tuple[tuple[str, str], ...]:
    """Return the variables that the plan depends on.

    torchrun sets OMP_NUM_THREADS=1 by itself where there are several ranks: that is nobody's choice.
    """
    kept = {name: environ[name] for name in HONOURED if name in environ}
    if "TORCHELASTIC_RUN_ID" in environ and kept.get("OMP_NUM_THREADS") == "1":
        del kept["OMP_NUM_THREADS"]
    return tuple(kept.items())
