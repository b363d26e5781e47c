"""A rank's entry of the plan: from the file in LAUNCH_PLAN, or planned here and now; and the JSON for it.

JSON is read by the interpreter's own C scanner: the `json` package costs 14 ms of every rank's start.
"""

import sys
from _json import encode_basestring_ascii as quote
from _json import make_scanner
from types import ModuleType

from launcher.cpulist import parse_cpulist
from launcher.files import LARGEST, read_file
from launcher.protocol import LAUNCH_PLAN
from launcher.rank.identity import Identity

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


class PlacementError(Exception):
    """There is no usable placement for this rank; the text says why."""


class PlanEntry:
    """One entry of the plan's `ranks`, which the shim applies."""

    __slots__ = (
        *("advice", "cpus", "env", "gpu", "gpu_label", "nodes", "notes", "num_workers", "policy"),
        *("problems", "raw"),
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
        self.gpu: str | None = None
        self.gpu_label = ""
        """Index and PCI address, for people."""
        if isinstance(gpu, dict):
            self.gpu = str(gpu["uuid"])
            self.gpu_label = f"{gpu.get('index', '?')} {gpu.get('pci', '')}".rstrip()
        self.notes: list[str] = []
        """How it came to be, in a few words, if that is not the usual way."""
        self.problems: list[str] = []
        """In what it falls short for this rank."""
        self.advice: list[str] = []
        """Warnings of a plan that was made here, which are the same for all ranks of the node."""


def find_entry(identity: Identity, environ: dict[str, str], argv: list[str]) -> PlanEntry:
    """Return this rank's entry, for the program `argv`; raises PlacementError."""
    if path := environ.get(LAUNCH_PLAN):
        return select_entry(identity, read_plan_file(path), path)
    # 8 ms for `dataclasses`, which needs it for classes without a docstring.
    sys.modules.setdefault("inspect", _LazyModule("inspect"))
    from launcher.rank.standalone import make_entry

    return make_entry(identity, environ, argv)


class _LazyModule(ModuleType):
    """Stands for a module until one of its names is looked up."""

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        return getattr(__import__(self.__name__), name)


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


class _ScannerSettings:
    """The attributes of `json.JSONDecoder` that the scanner reads."""

    strict = True
    object_hook = object_pairs_hook = None
    parse_float = parse_constant = float
    parse_int = int


def load_json(text: str) -> object:
    """Read one JSON value; raises ValueError."""
    text = text.strip()
    settings: Any = _ScannerSettings  # the stub of `make_scanner` asks for a scanner here
    try:
        value, end = make_scanner(settings)(text, 0)
    except (StopIteration, SystemError):  # without the package, the scanner cannot say what is wrong
        import json

        return json.loads(text)
    if end != len(text):
        raise ValueError(f"not JSON after character {end}")
    return value


def dump_json(value: object) -> str:
    """Write objects, lists, strings, numbers, true, false and null as JSON."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{quote(str(key))}: {dump_json(item)}" for key, item in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(dump_json, value)) + "]"
    if isinstance(value, str):
        return quote(value)
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return repr(value)
