"""Variables that slow jobs down or bind them a second time."""

from collections.abc import Iterator

from launcher.doctor.finding import Case, Finding, pass_check, skip_check
from launcher.plan.rules import BINDERS, BINDS, OFF, find_binders

ENVIRONMENT = "environment"
SERIAL = "each kernel launch waits for the last kernel to end: made for debugging (CUDA programming guide)"
DETOUR = "NCCL's own choice of the fastest path is overruled (NCCL's environment variables: for debugging)"
DOUBTFUL = {
    **dict.fromkeys(BINDERS, ("warning", BINDS)),
    "CUDA_LAUNCH_BLOCKING": ("warning", SERIAL),
    "AMD_SERIALIZE_KERNEL": ("warning", SERIAL),
    "PYTORCH_NO_CUDA_MEMORY_CACHING": ("warning", "each tensor costs a cudaMalloc, which waits for the GPU"),
    **dict.fromkeys(("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "NCCL_IB_DISABLE"), ("note", DETOUR)),
}
"""Level and reason for each variable."""


def is_in_effect(value: str) -> bool:
    """Tell whether a variable does something."""
    return value.strip().lower() not in OFF


def judge_environment(case: Case) -> Iterator[Finding]:
    """The environment that ranks would inherit."""
    environ = case.environ
    if environ is None:
        yield skip_check(case, ENVIRONMENT, "variables", "unknown")
        return
    others = [name for name in DOUBTFUL if name not in BINDERS]
    found = [*find_binders(environ), *(name for name in others if is_in_effect(environ.get(name, "")))]
    for name in found:
        level, why = DOUBTFUL[name]
        yield Finding(level, ENVIRONMENT, f"{name}={environ[name]} is set", why, f"unset {name}")
    if environ.get("TORCH_DISTRIBUTED_DEBUG", "").upper() == "DETAIL":
        yield Finding(
            "note",
            ENVIRONMENT,
            "TORCH_DISTRIBUTED_DEBUG=DETAIL is set",
            "each collective is checked against the other ranks' before it starts",
            "unset TORCH_DISTRIBUTED_DEBUG",
        )
        return
    if not found:
        yield pass_check(ENVIRONMENT, f"none of {len(DOUBTFUL)} variables that slow jobs down is set")
