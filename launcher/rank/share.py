"""A rank's part of the plan: taken from the file that `LAUNCH_PLAN` names, or planned here and now."""

from launcher.cpulist import parse_cpulist
from launcher.rank.identity import Identity
from launcher.rank.plain_json import parse_json


class NoShareError(Exception):
    """There is no usable placement for this rank; the text says why."""


class Share:
    """What the shim applies: one entry of the plan's `ranks`."""

    __slots__ = ("cpus", "env", "gpu", "nodes", "num_workers", "policy")

    def __init__(self, entry: dict[str, object]) -> None:
        """Read the entry; raises KeyError, TypeError, ValueError or AttributeError where it is not one."""
        memory, env, gpu = entry["memory"], entry["env"], entry["gpu"]
        if not isinstance(memory, dict) or not isinstance(env, dict):
            raise TypeError("memory and env are objects")
        self.cpus = parse_cpulist(str(entry["cpus"]))
        self.policy = str(memory["policy"])
        self.nodes = parse_cpulist(str(memory.get("nodes", "")))
        self.num_workers = int(str(entry["num_workers"]))
        self.env = {str(name): str(value) for name, value in env.items()}
        self.gpu = str(gpu["uuid"]) if isinstance(gpu, dict) else None


def find_share(identity: Identity, environ: dict[str, str]) -> Share:
    """Return the share of this rank; raises NoShareError."""
    path = environ.get("LAUNCH_PLAN")
    plan = read_plan(path) if path else make_plan(identity, environ)
    try:
        ranks = plan["ranks"]
        if not isinstance(ranks, list):
            raise TypeError("ranks is a list")
        for entry in ranks:
            if entry["local_rank"] == identity.local_rank:
                return Share(entry)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise NoShareError(f"the plan {path or 'made here'} is not as expected ({error!r})") from None
    raise NoShareError(f"the plan has {len(ranks)} ranks, none of them local rank {identity.local_rank}")


def read_plan(path: str) -> dict[str, object]:
    """Read a plan as `launch plan format=json` prints it; raises NoShareError."""
    try:
        with open(path, encoding="utf-8") as file:
            plan = parse_json(file.read())
    except (OSError, ValueError) as error:
        raise NoShareError(f"LAUNCH_PLAN={path} cannot be read ({error})") from None
    if not isinstance(plan, dict):
        raise NoShareError(f"LAUNCH_PLAN={path} is not a plan")
    return plan


def make_plan(identity: Identity, environ: dict[str, str]) -> dict[str, object]:
    """Plan this node from here, as every other rank on it does; raises NoShareError."""
    from launcher.errors import LaunchError
    from launcher.node import plan_for_rank

    try:
        return plan_for_rank(identity.local_world_size, environ)
    except LaunchError as error:
        raise NoShareError(str(error)) from None
