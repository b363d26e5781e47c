"""The variables of a rank: which of the user's the plan keeps, and who set each one."""

from collections.abc import Iterator, Mapping, Sequence

from launcher.plan.model import RankPlan, Request, Variable
from launcher.plan.rules import BINDERS
from launcher.protocol import LAUNCH_GC, LAUNCH_LOADER_DEFAULT, LAUNCH_NIC, LAUNCH_NUM_WORKERS

VariablesAndNotes = tuple[Mapping[str, str], Sequence[str]]
"""Variables of a rank by name, and notes on them for people."""
COUNTS = {
    "OMP_NUM_THREADS": 1,
    "NUMEXPR_NUM_THREADS": 1,
    "TORCHINDUCTOR_COMPILE_THREADS": 0,
    LAUNCH_NUM_WORKERS: 0,
}
"""Variables that hold a number, and the least that each may be."""
VISIBLE_DEVICES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
"""Variables that choose and number the GPUs of a machine."""
ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""Variables that hold settings; torch hears the first that is set, and no other.

Tried with 2.13. Up to 2.9, CUDA builds do not know the last (github.com/pytorch/pytorch/issues/183387).
"""
MERGED = (*ALLOCATOR_VARIABLES, "LD_PRELOAD")
"""Variables whose settings the plan joins with its own."""
DEVICES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
"""Variables that can show a rank its GPU, alone or with others."""
EMPTY = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
"""Variables that hide all GPUs if they are empty."""
HONOURED = (
    *("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"),
    *COUNTS,
    *("NUMEXPR_MAX_THREADS", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"),
    *BINDERS,
    *(LAUNCH_LOADER_DEFAULT, LAUNCH_GC, LAUNCH_NIC, "NCCL_IB_HCA"),
    *MERGED,
)
"""Variables of the user's that the plan depends on; one that the user has set wins."""
REASONS = {
    "CUDA_DEVICE_ORDER": "GPUs are numbered as in this plan",
    LAUNCH_GC: "the group gc",
    LAUNCH_LOADER_DEFAULT: "dataloader.default=true",
    LAUNCH_NIC: "the RDMA device next to its GPU",
    LAUNCH_NUM_WORKERS: "DataLoader workers",
    "LD_PRELOAD": "allocator.host",
    "NCCL_IB_HCA": "binding.nic=true",
    "NUMEXPR_NUM_THREADS": "as many as NumExpr takes",
    "OMP_NUM_THREADS": "its cores less its workers",
    "PYTORCH_ALLOC_CONF": "the group allocator",
    "PYTORCH_CUDA_ALLOC_CONF": "the group allocator",
    "PYTORCH_HIP_ALLOC_CONF": "the group allocator",
    **dict.fromkeys(("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"), "on the node, for this job alone"),
    "TORCHINDUCTOR_COMPILE_THREADS": "its hardware threads, at most 32",
}
"""What the plan's variables come from."""


def read_variable_count(environ: Mapping[str, str], name: str, minimum: int) -> int | None:
    """The number in a variable, the first of a list (`OMP_NUM_THREADS=8,4`); None if there is none."""
    text = environ.get(name, "").split(",")[0].strip()
    # Longer numbers are no count of anything here, and int() refuses some thousands of digits.
    number = int(text) if text.isascii() and text.isdigit() and len(text) < 10 else -1
    return number if number >= minimum else None


def list_kept(environ: Mapping[str, str], decided: Mapping[str, str]) -> tuple[str, ...]:
    """Names of the user's variables that keep their value; `decided` are the plan's that show GPUs."""
    return tuple(name for name in HONOURED if name in environ and is_kept(environ, name, decided))


def is_kept(environ: Mapping[str, str], name: str, decided: Mapping[str, str]) -> bool:
    """Whether a variable stays as the user has it: not if it holds a number that no program could read.

    An empty value is as good as none unless it hides GPUs.
    """
    if name in COUNTS:
        return read_variable_count(environ, name, COUNTS[name]) is not None
    if name in BINDERS or name in MERGED or (name in DEVICES and name in decided):
        return False
    return bool(environ[name]) or name in EMPTY


def list_variables(request: Request, rank: RankPlan) -> tuple[Variable, ...]:
    """All that the plan and the configuration set for a rank, and what the user has of `request.environ`."""
    found = {variable.name: variable for variable in list_given(request)}
    found |= {name: describe_planned(request, name, value) for name, value in rank.env}
    return tuple(found[name] for name in sorted(found))


def list_given(request: Request) -> Iterator[Variable]:
    """Variables that are there before the plan sets its own; the configuration's come over the user's."""
    for source, given in (("user", request.environ), ("configuration", request.configured)):
        for name, value in given:
            yield Variable(name, value, source, describe_given(name))


def describe_given(name: str) -> str:
    """What becomes of a variable that is there before the plan sets its own."""
    if name in BINDERS:
        return "binds threads a second time: see the warning"
    return "kept" if name in HONOURED else ""


def describe_planned(request: Request, name: str, value: str) -> Variable:
    """A variable that the plan sets, and what was there before."""
    before = describe_before(dict(request.environ), dict(request.configured), name, value)
    reason = f"devices={request.devices}" if name in DEVICES else REASONS.get(name, "")
    return Variable(name, value, "plan", ", ".join(filter(None, [reason, before])))


def describe_before(environ: Mapping[str, str], configured: Mapping[str, str], name: str, value: str) -> str:
    """What the plan has put a variable in place of, or taken into it; empty if there was nothing."""
    old = environ.get(name, "")
    if not old or old == value:
        return ""
    whose = "the configuration's" if name in configured else "the user's"
    parts = value.replace(",", ":").split(":")
    taken = all(part in parts for part in old.replace(",", ":").split(":"))
    return f"with {whose} {old} in it" if taken else f"in place of {whose} {old}"
