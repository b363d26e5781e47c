"""Who set each variable of a rank: the plan, the configuration, or the user's environment."""

from collections.abc import Iterator, Mapping

from launcher.plan.environment import DEVICES, HONOURED
from launcher.plan.model import RankPlan, Request, Variable
from launcher.plan.rules import BINDERS
from launcher.protocol import LAUNCH_GC, LAUNCH_LOADER_DEFAULT, LAUNCH_NIC, LAUNCH_NUM_WORKERS

REASONS = {
    "CUDA_DEVICE_ORDER": "GPUs are numbered as in this plan",
    LAUNCH_GC: "the group gc",
    LAUNCH_LOADER_DEFAULT: "dataloader.default=true",
    LAUNCH_NIC: "the RDMA device next to its GPU",
    LAUNCH_NUM_WORKERS: "DataLoader workers",
    "LD_PRELOAD": "allocator.host",
    "MKL_NUM_THREADS": "as OMP_NUM_THREADS",
    "NCCL_IB_HCA": "binding.nic=true",
    "NUMEXPR_NUM_THREADS": "as OMP_NUM_THREADS, as far as NumExpr goes",
    "OMP_NUM_THREADS": "its cores less its workers",
    "OPENBLAS_NUM_THREADS": "as OMP_NUM_THREADS",
    "PYTORCH_ALLOC_CONF": "the group allocator",
    "PYTORCH_CUDA_ALLOC_CONF": "the group allocator",
    "PYTORCH_HIP_ALLOC_CONF": "the group allocator",
    **dict.fromkeys(("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"), "on the node, for this job alone"),
    "TORCHINDUCTOR_COMPILE_THREADS": "its hardware threads, at most 32",
}
"""What the plan's variables come from."""


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
    """What the plan has put a variable in place of, or taken into it; empty where there was nothing."""
    old = environ.get(name, "")
    if not old or old == value:
        return ""
    whose = "the configuration's" if name in configured else "the user's"
    parts = value.replace(",", ":").split(":")
    taken = all(part in parts for part in old.replace(",", ":").split(":"))
    return f"with {whose} {old} in it" if taken else f"in place of {whose} {old}"
