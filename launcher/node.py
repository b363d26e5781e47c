"""One node's work before anything is started: probe the machine, and plan its ranks.

`launch-rank` comes here from every rank that has no plan at hand, so imports count.
"""

from launcher.errors import UsageError
from launcher.plan.codec import plan_to_json
from launcher.plan.model import HONOURED, Machine, Request
from launcher.plan.planner import plan
from launcher.plan.snapshot import parse_machine
from launcher.probe.machine import probe


def read_machine(root: str, snapshot: str | None) -> Machine:
    """Return the machine below `root`, or a snapshot's; raises UsageError or MachineError."""
    return load_snapshot(snapshot) if snapshot else probe(root)


def load_snapshot(path: str) -> Machine:
    """Read a machine from what `launch plan format=json` printed; raises UsageError."""
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
    except (OSError, ValueError) as error:
        raise UsageError(f"machine.snapshot={path} cannot be read ({error}): check the path") from None
    return parse_machine(text)


def honoured_environ(environ: dict[str, str]) -> tuple[tuple[str, str], ...]:
    """Return the variables that the plan depends on.

    torchrun sets OMP_NUM_THREADS=1 by itself where there are several ranks: that is nobody's choice.
    """
    kept = {name: environ[name] for name in HONOURED if name in environ}
    if "TORCHELASTIC_RUN_ID" in environ and kept.get("OMP_NUM_THREADS") == "1":
        del kept["OMP_NUM_THREADS"]
    return tuple(kept.items())


def plan_for_rank(local_world_size: int | None, environ: dict[str, str]) -> dict[str, object]:
    """Return the plan of this node as JSON values, for a rank that was started without `launch`."""
    request = Request(
        nproc_per_node=local_world_size,
        binding=environ.get("LAUNCH_BINDING", "exclusive"),
        environ=honoured_environ(environ),
    )
    return plan_to_json(plan(probe("/"), request))
