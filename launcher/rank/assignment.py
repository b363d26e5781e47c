"""A rank's part of the plan: taken from the file that `LAUNCH_PLAN` names, or planned here and now."""

from launcher.cpulist import format_cpulist, parse_cpulist
from launcher.files import LARGEST, read_file
from launcher.protocol import LAUNCH_PLAN, LAUNCH_RECORD_DIR
from launcher.rank.identity import Identity
from launcher.rank.plain_json import parse_json


class NoShareError(Exception):
    """There is no usable placement for this rank; the text says why."""


class Share:
    """What the shim applies: one entry of the plan's `ranks`."""

    __slots__ = (
        "advice",
        "cpus",
        "entry",
        "env",
        "gpu",
        "gpu_place",
        "nodes",
        "notes",
        "num_workers",
        "plan",
        "policy",
        "problems",
    )

    def __init__(self, entry: dict[str, object]) -> None:
        """Read the entry; raises KeyError, TypeError, ValueError or AttributeError where it is not one."""
        self.entry = entry
        memory, env, gpu = entry["memory"], entry["env"], entry["gpu"]
        if not isinstance(memory, dict) or not isinstance(env, dict):
            raise TypeError("memory and env are objects")
        self.cpus = parse_cpulist(str(entry["cpus"]))
        self.policy = str(memory["policy"])
        self.nodes = parse_cpulist(str(memory.get("nodes", "")))
        self.num_workers = int(str(entry["num_workers"]))
        self.env = {str(name): str(value) for name, value in env.items()}
        if any(not name or "=" in name or "\0" in name + value for name, value in self.env.items()):
            raise ValueError("env has what no environment can hold")
        self.gpu = str(gpu["uuid"]) if isinstance(gpu, dict) else None
        self.gpu_place = (
            f"{gpu.get('index', '?')} {gpu.get('pci', '')}".rstrip() if isinstance(gpu, dict) else ""
        )
        """Index and PCI address, for people."""
        self.notes: list[str] = []
        """How it came to be, in a few words, where that is not the usual way."""
        self.problems: list[str] = []
        """Where it falls short for this rank."""
        self.advice: list[str] = []
        """Warnings of a plan that was made here, which are the same for all ranks of the node."""
        self.plan: dict[str, object] | None = None
        """All of a plan that was made here, where this rank keeps it for its node."""


def find_share(identity: Identity, environ: dict[str, str], words: list[str]) -> Share:
    """Return the share of this rank, whose program has these words; raises NoShareError."""
    path = environ.get(LAUNCH_PLAN)
    return take_share(identity, read_plan(path), path) if path else make_share(identity, environ, words)


def take_share(identity: Identity, plan: dict[str, object], path: str) -> Share:
    """Take this rank's entry out of a plan; raises NoShareError."""
    try:
        ranks = plan["ranks"]
        if not isinstance(ranks, list):
            raise TypeError("ranks is a list")
        for entry in ranks:
            if entry["local_rank"] == identity.local_rank:
                return Share(entry)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise NoShareError(f"the plan {path} is not as expected ({error!r})") from None
    raise NoShareError(
        f"the plan {path} has {len(ranks)} ranks, none of them local rank {identity.local_rank}: "
        "set LOCAL_WORLD_SIZE to the ranks of this node, or give the plan as many (nproc_per_node)"
    )


def read_plan(path: str) -> dict[str, object]:
    """Read a plan as `launch plan format=json` prints it; raises NoShareError.

    Another user's is refused: the variables in it would be the program's, LD_PRELOAD among them.
    """
    try:
        plan = parse_json(read_file(path, LARGEST, follow=True, own=True).decode())
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or error
        raise NoShareError(f"LAUNCH_PLAN={path} cannot be read ({reason})") from None
    if not isinstance(plan, dict):
        raise NoShareError(f"LAUNCH_PLAN={path} is not a plan")
    return plan


def make_share(identity: Identity, environ: dict[str, str], words: list[str]) -> Share:
    """Plan this node from here, as every other rank on it does; raises NoShareError, OSError."""
    from launcher.errors import LaunchError
    from launcher.rank.lazy_import import import_later
    from launcher.rank.node_cpus import find_room

    import_later("inspect")  # 8 ms for `dataclasses`, which needs it for classes without a docstring
    from launcher.rank.standalone import plan_for_rank, read_wishes

    room = find_room(identity, environ)
    keeps = identity.local_rank == 0 and bool(environ.get(LAUNCH_RECORD_DIR))
    try:
        binding = str(read_wishes(environ)["binding"])
        if binding == "none":  # whoever bound this rank meant it
            room.keep_own()
        plan = plan_for_rank(
            identity.local_rank,
            identity.local_world_size,
            environ,
            cpus=room.cpus,
            alone=room.is_own,
            whole=keeps,
            words=words,
        )
    except LaunchError as error:
        raise NoShareError(str(error)) from None
    share = take_share(identity, plan, "made here")
    share.plan = plan if keeps else None
    share.notes += [f"binding {binding}"] if binding != "exclusive" else []
    share.notes += [f"bound to {format_cpulist(room.own)} before"] if room.cpus != room.own else []
    share.problems += [room.problem] if room.problem else []
    warnings = plan["warnings"]
    share.advice += warnings if isinstance(warnings, list) and identity.local_rank == 0 else []
    return share
