"""One job inside a guest: what the machine leaves it, and what it asks for."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Scenario:
    """A job and its limits; the host writes it, the guest sets it up, and the host judges what came out."""

    name: str
    binding: str = "exclusive"
    nproc_per_node: int | None = None
    environ: dict[str, str] = field(default_factory=dict)
    """The user's variables."""
    cpus: str = ""
    """`cpuset.cpus` of the job's cgroup; empty for all."""
    mems: str = ""
    """`cpuset.mems` of the job's cgroup; empty for all."""
    quota: float | None = None
    """CPU time that the cgroup leaves, in CPUs."""
    memory_mib: int | None = None
    """Memory limit of the cgroup."""
    offline: tuple[int, ...] = ()
    """CPUs that are taken offline while the job runs."""
    deny_mempolicy: bool = False
    """A seccomp filter refuses the calls for memory policies with EPERM, as Docker's does."""
    deny_gpus: tuple[int, ...] = ()
    """GPUs whose device nodes the device controller refuses to the job (cgroup v1)."""
    alone: bool = False
    """Start the ranks a second time without LAUNCH_PLAN: each plans for itself."""

    @property
    def in_cgroup(self) -> bool:
        """Whether the job has a cgroup of its own."""
        return bool(self.cpus or self.mems or self.quota or self.memory_mib or self.deny_gpus)
