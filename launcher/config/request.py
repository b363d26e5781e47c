"""What a configuration asks of a node's placement: the fields of a Request that do not depend on the node."""

from launcher.config.allocator_options import read_host, render_allocator
from launcher.config.schema import GcConfig, LaunchConfig
from launcher.config.validation import check_choice, check_least
from launcher.plan.rules import COLLECTORS


def describe_wishes(config: LaunchConfig) -> dict[str, object]:
    """Return fields of a Request by their names, as JSON values; raises UsageError."""
    loader = config.dataloader
    return {
        "binding": config.binding.policy,
        "strict": config.binding.strict,
        "reserve_cores": config.binding.reserve_cores,
        "nic": config.binding.nic,
        "devices": config.devices,
        "workload": loader.workload,
        "num_workers": loader.num_workers,
        "worker_gib": float(loader.worker_gib),
        "worker_shm_mib": float(loader.worker_shm_mib),
        "loader_default": loader.default,
        "measured": loader.measured,
        "gc": render_gc(config.gc),
        "allocator": render_allocator(config.allocator),
        "host_allocator": read_host(config.allocator),
    }


def check_wishes(config: LaunchConfig) -> None:
    """Raise UsageError for values that no plan could take, before a job waits in a queue with them."""
    from launcher.plan.model import Request
    from launcher.plan.planner import check_request

    check_request(Request(**describe_wishes(config)))  # type: ignore[arg-type]  # values by their names


def render_gc(gc: GcConfig) -> str:
    """Return the policy as LAUNCH_GC has it: `synchronized,warmup=30,every=50`; raises UsageError."""
    check_choice("gc.policy", gc.policy, COLLECTORS)
    check_least("gc.warmup", gc.warmup, 0)
    check_least("gc.every", gc.every, 0)
    used = {"synchronized": ("warmup", "every"), "disabled": ("every",), "frozen": ("warmup",)}
    words = [f"{name}={getattr(gc, name)}" for name in used.get(gc.policy, ())]
    return ",".join([gc.policy, *words, *(["log"] if gc.log else [])])
