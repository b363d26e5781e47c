"""The policy for garbage collection in the ranks, and its text: `synchronized,warmup=30,every=50,log`."""

from dataclasses import dataclass

GC_POLICIES = {
    "synchronized": ("warmup", "every"),
    "disabled": ("every",),
    "frozen": ("warmup",),
    "default": (),
}
"""The policies, and the steps that each one uses."""
MAX_DIGITS = 9


@dataclass(frozen=True, slots=True)
class GcPolicy:
    """What the ranks do about garbage; steps are those of the optimizer."""

    name: str = "synchronized"
    """A key of GC_POLICIES; `default` leaves the collector to Python."""
    warmup: int = 30
    """Steps after which objects are frozen."""
    every: int = 50
    """Steps from one collection to the next, on all ranks at the same step; 0 is never."""
    log: bool = False
    """Each rank reports its collections on stderr."""


def render_gc_policy(policy: GcPolicy) -> str:
    """Return the text for LAUNCH_GC, with the steps that the policy uses."""
    steps = {"warmup": policy.warmup, "every": policy.every}
    options = [f"{name}={steps[name]}" for name in GC_POLICIES[policy.name]]
    return ",".join([policy.name, *options, *(["log"] if policy.log else [])])


def parse_gc_policy(text: str) -> GcPolicy:
    """Read what `render_gc_policy` writes, and what users write in its form; raises ValueError.

    The hook in the rank's interpreter has a parser of its own, and a test compares the two.
    """
    name, *options = text.split(",")
    if name not in GC_POLICIES:
        raise ValueError(f"there is no policy {name!r}")
    steps = {"warmup": GcPolicy().warmup, "every": GcPolicy().every}
    for option in options:
        key, _, value = option.partition("=")
        if option == "log":
            continue
        if key not in steps or not value.isascii() or not value.isdigit() or len(value) > MAX_DIGITS:
            raise ValueError(f"{option!r} is neither log nor a number of steps, warmup=N or every=N")
        steps[key] = int(value)
    return GcPolicy(name, steps["warmup"], steps["every"], "log" in options)
