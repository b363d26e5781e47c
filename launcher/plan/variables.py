"""The variables of a rank: which of the user's the plan keeps, and who set each one."""

from collections.abc import Iterator, Mapping

from launcher.plan.allocator import ALLOCATOR_VARIABLES
from launcher.plan.model import GC_POLICIES, GcConfig, Request, Variable
from launcher.protocol import LAUNCH_GC, LAUNCH_LOADER_DEFAULT, LAUNCH_NIC, LAUNCH_NUM_WORKERS

BINDERS = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")
"""Variables that have OpenMP bind threads by itself: never set, and warned of."""
KMP_TYPES = ("balanced", "compact", "explicit", "logical", "physical", "scatter")
"""Words of KMP_AFFINITY that bind; `none` is what it does without one (LLVM's OpenMP runtime reference)."""
OFF_VALUES = ("", "0", "false", "no", "off", "none", "disabled")
"""Values by which a variable does nothing."""
COUNTS = {
    "OMP_NUM_THREADS": 1,
    "NUMEXPR_NUM_THREADS": 1,
    "TORCHINDUCTOR_COMPILE_THREADS": 0,
    LAUNCH_NUM_WORKERS: 0,
}
"""Variables that hold a number, and the least that each may be."""
VISIBLE_DEVICES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
"""Variables that choose and number the GPUs of a machine; the first two can show a rank its own."""
MERGED = (*ALLOCATOR_VARIABLES, "LD_PRELOAD")
"""Variables whose settings the plan joins with its own."""
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


def find_binders(environ: Mapping[str, str]) -> Iterator[str]:
    """Names of the variables that have OpenMP bind a rank's threads a second time."""
    values = {name: environ.get(name, "").strip().lower() for name in BINDERS}
    refused = values["OMP_PROC_BIND"] in OFF_VALUES[1:]
    for name, value in values.items():
        if name == "KMP_AFFINITY":
            acts = not {word.strip() for word in value.split(",")}.isdisjoint(KMP_TYPES)
        elif name == "GOMP_CPU_AFFINITY":  # a 0 in it is a CPU
            acts = bool(value) and not refused
        else:
            acts = value not in OFF_VALUES and not refused
        if acts:
            yield name


def read_variable_count(environ: Mapping[str, str], name: str, minimum: int) -> int | None:
    """The number in a variable, the first of a list (`OMP_NUM_THREADS=8,4`); None if there is none."""
    text = environ.get(name, "").split(",")[0].strip()
    # Longer numbers are no count of anything here, and int() refuses some thousands of digits.
    number = int(text) if text.isascii() and text.isdigit() and len(text) < 10 else -1
    return number if number >= minimum else None


def render_gc(config: GcConfig) -> str:
    """Return the text for LAUNCH_GC: `synchronized,warmup=30,every=50,log`."""
    steps = [f"{name}={getattr(config, name)}" for name in GC_POLICIES[config.policy]]
    return ",".join([config.policy, *steps, *(["log"] if config.log else [])])


def find_gc_fault(text: str) -> str:
    """What is wrong with a user's LAUNCH_GC, which has the form of `render_gc`; empty if nothing is.

    The hook in the rank's interpreter has a parser of its own, and a test compares the two.
    """
    name, *options = text.split(",")
    if name not in GC_POLICIES:
        return f"there is no policy {name!r}"
    for option in options:
        key, _, value = option.partition("=")
        is_number = value.isascii() and value.isdigit() and len(value) < 10
        if option != "log" and not (key in ("warmup", "every") and is_number):
            return f"{option!r} is neither log nor a number of steps, warmup=N or every=N"
    return ""


def is_kept(environ: Mapping[str, str], name: str, decided: Mapping[str, str]) -> bool:
    """Whether a variable stays as the user has it: not if it holds a number that no program could read.

    `decided` are the plan's variables that show GPUs. An empty value is as good as none unless it hides GPUs.
    """
    if name in COUNTS:
        return read_variable_count(environ, name, COUNTS[name]) is not None
    if name in BINDERS or name in MERGED or (name in VISIBLE_DEVICES[:2] and name in decided):
        return False
    return bool(environ[name]) or name in ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


def list_variables(request: Request, env: Mapping[str, str]) -> tuple[Variable, ...]:
    """All that the plan (`env`) and the configuration set for a rank, and what the user has."""
    found: dict[str, Variable] = {}
    for source, given in (("user", request.environ), ("configuration", request.configured)):
        for name, value in given.items():
            why = "binds threads a second time: see the warning" if name in BINDERS else "kept"
            found[name] = Variable(name, value, source, why if name in HONOURED else "")
    for name, value in env.items():
        reason = REASONS.get(name, "")
        if name in VISIBLE_DEVICES[:2]:
            reason = f"devices={request.devices}"
        old, before = request.environ.get(name, ""), ""
        if old and old != value:
            whose = "the configuration's" if name in request.configured else "the user's"
            parts = value.replace(",", ":").split(":")
            taken = all(part in parts for part in old.replace(",", ":").split(":"))
            before = f"with {whose} {old} in it" if taken else f"in place of {whose} {old}"
        found[name] = Variable(name, value, "plan", ", ".join(filter(None, [reason, before])))
    return tuple(found[name] for name in sorted(found))
