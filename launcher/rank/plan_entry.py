"""A rank's entry of the plan: from the file in LAUNCH_PLAN, or planned here and now."""

from launcher.cpulist import parse_cpulist
from launcher.files import LARGEST, read_file
from launcher.protocol import LAUNCH_PLAN
from launcher.rank.identity import Identity
from launcher.rank.plain_json import load_json


class PlacementError(Exception):
    """There is no usable placement for this rank; the text says why."""


class PlanEntry:
    """One entry of the plan's `ranks`, which the shim applies."""

    __slots__ = (
        "advice",
        "cpus",
        "env",
        "gpu",
        "gpu_label",
        "nodes",
        "notes",
        "num_workers",
        "plan",
        "policy",
        "problems",
        "raw",
    )

    def __init__(self, raw: dict[str, object]) -> None:
        """Read the entry; raises KeyError, TypeError, ValueError or AttributeError if it is not one."""
        self.raw = raw
        memory, env, gpu = raw["memory"], raw["env"], raw["gpu"]
        if not isinstance(memory, dict) or not isinstance(env, dict):
            raise TypeError("memory and env are objects")
        self.cpus = parse_cpulist(str(raw["cpus"]))
        self.policy = str(memory["policy"])
        self.nodes = parse_cpulist(str(memory.get("nodes", "")))
        self.num_workers = int(str(raw["num_workers"]))
        self.env = {str(name): str(value) for name, value in env.items()}
        if any(not name or "=" in name or "\0" in name + value for name, value in self.env.items()):
            raise ValueError("env has what no environment can hold")
        self.gpu = str(gpu["uuid"]) if isinstance(gpu, dict) else None
        self.gpu_label = (
            f"{gpu.get('index', '?')} {gpu.get('pci', '')}".rstrip() if isinstance(gpu, dict) else ""
        )
        """Index and PCI address, for people."""
        self.notes: list[str] = []
        """How it came to be, in a few words, if that is not the usual way."""
        self.problems: list[str] = []
        """In what it falls short for this rank."""
        self.advice: list[str] = []
        """Warnings of a plan that was made here, which are the same for all ranks of the node."""
        self.plan: dict[str, object] | None = None
        """All of a plan that was made here, if this rank keeps it for its node."""


def find_entry(identity: Identity, environ: dict[str, str], argv: list[str]) -> PlanEntry:
    """Return this rank's entry, for the program `argv`; raises PlacementError."""
    path = environ.get(LAUNCH_PLAN)
    if path:
        return select_entry(identity, read_plan_file(path), path)
    from launcher.rank.lazy_import import import_lazily

    import_lazily("inspect")  # 8 ms for `dataclasses`, which needs it for classes without a docstring
    from launcher.rank.standalone import make_entry

    return make_entry(identity, environ, argv)


def select_entry(identity: Identity, plan: dict[str, object], source: str) -> PlanEntry:
    """Take this rank's entry out of a plan; `source` is for messages. Raises PlacementError."""
    try:
        ranks = plan["ranks"]
        if not isinstance(ranks, list):
            raise TypeError("ranks is a list")
        for raw in ranks:
            if raw["local_rank"] == identity.local_rank:
                return PlanEntry(raw)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise PlacementError(f"the plan {source} is not as expected ({error!r})") from None
    raise PlacementError(
        f"the plan {source} has {len(ranks)} ranks, none of them local rank {identity.local_rank}: "
        "set LOCAL_WORLD_SIZE to the ranks of this node, or give the plan as many (nproc_per_node)"
    )


def read_plan_file(path: str) -> dict[str, object]:
    """Read a plan as `launch plan format=json` prints it; raises PlacementError.

    Another user's file is refused: its variables would be the program's, LD_PRELOAD among them.
    """
    try:
        plan = load_json(read_file(path, LARGEST, follow=True, own=True).decode())
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or error
        raise PlacementError(f"LAUNCH_PLAN={path} cannot be read ({reason})") from None
    if not isinstance(plan, dict):
        raise PlacementError(f"LAUNCH_PLAN={path} is not a plan")
    return plan
