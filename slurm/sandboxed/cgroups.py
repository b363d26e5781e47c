"""The cluster's own part of the machine's cgroups of version 1, where SLURM constrains jobs.

Every controller's hierarchy is mounted in the cluster's folder (`hierarchies`) and gets one group for the
cluster, which is bound where SLURM looks for a hierarchy (CgroupMountpoint). SLURM names its groups after the
node alone (`/slurm_n0`): without that, clusters beside one another would share them.
"""

import contextlib
import ctypes
import os
from collections.abc import Iterator
from pathlib import Path

from sandboxed.cluster import Cluster, SandboxError

CONTROLLERS = ("memory", "cpuset", "devices", "freezer", "cpuacct")
"""All that SLURM's cgroup/v1 uses; memory comes first, since version 2 holds it where both are in use."""
MS_BIND = 4096
MNT_DETACH = 2


def make_groups(cluster: Cluster) -> None:
    """Mount the controllers and make the cluster's groups; raises SandboxError that names the obstacle."""
    if os.geteuid():
        raise SandboxError("only root can mount cgroups")
    version_2 = Path("/sys/fs/cgroup/cgroup.controllers")
    lines = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    for controller in CONTROLLERS:
        whole, part = _find_points(cluster, controller)
        group = whole / cluster.cgroup
        # Controllers that share a hierarchy only mount together: `cpu,cpuacct`.
        shared = (names for line in lines if controller in (names := line.split(":")[1]).split(","))
        try:
            for point in (whole, part):
                point.mkdir(parents=True, exist_ok=True, mode=0o700)
            _mount("cgroup", whole, "cgroup", 0, next(shared, controller))
            group.mkdir()
            if controller == "cpuset":  # a new one has neither, and takes no process
                for name in ("cpuset.cpus", "cpuset.mems"):
                    (group / name).write_bytes((whole / name).read_bytes())
            _mount(str(group), part, "", MS_BIND, "")
        except OSError as error:
            reason = f"the controller {controller} cannot be used as version 1 ({error.strerror})"
            if version_2.exists() and controller in version_2.read_text(encoding="ascii").split():
                reason += ", version 2 has it"
            raise SandboxError(reason) from None


def drop_groups(cluster: Cluster) -> None:
    """Remove the cluster's groups, whose processes have ended, and unmount what make_groups has mounted.

    It takes up what an earlier call, or an interrupted make_groups, has left.
    """
    for controller in CONTROLLERS if cluster.cgroup else ():
        whole, part = _find_points(cluster, controller)
        if part.is_mount():
            _unmount(part)
        if whole.is_mount():
            _remove_tree(cluster, whole / cluster.cgroup)
            _unmount(whole)


def remove_groups(cluster: Cluster, node: str) -> None:
    """Remove the groups of a node on which nothing runs any more; raises SandboxError.

    A machine that crashes has none either when it comes back: counters of theirs, such as oom_kill, would
    be taken for those of the job's next attempt there.
    """
    for controller in CONTROLLERS if cluster.cgroup else ():
        _remove_tree(cluster, _find_points(cluster, controller)[1] / f"slurm_{node}")


def list_members(cluster: Cluster) -> Iterator[tuple[int, str]]:
    """Yield the processes of jobs, each with its node, wherever their parents are."""
    for node in cluster.names:
        for group in _list_tracked(cluster, node):
            with contextlib.suppress(OSError):  # removed meanwhile
                numbers = (group / "cgroup.procs").read_text(encoding="ascii").split()
                yield from ((int(number), node) for number in numbers)


def thaw_jobs(cluster: Cluster, node: str) -> None:
    """Let a node's suspended jobs go on: a frozen process does not even die of SIGKILL."""
    for group in _list_tracked(cluster, node):
        with contextlib.suppress(OSError):  # removed meanwhile
            (group / "freezer.state").write_text("THAWED", encoding="ascii")


def has_swap_limit(cluster: Cluster) -> bool:
    """Whether the kernel counts swap for groups (not with swapaccount=0)."""
    return cluster.path("cgroup", "memory", "memory.memsw.limit_in_bytes").exists()


def _list_tracked(cluster: Cluster, node: str) -> list[Path]:
    """Return the groups by which SLURM tracks the processes of a node's jobs."""
    return _list_below(_find_points(cluster, "freezer")[1] / f"slurm_{node}") if cluster.cgroup else []


def _list_below(group: Path) -> list[Path]:
    """Return all groups below one, parents first; none if that is not there."""
    return [Path(path, name) for path, names, _ in os.walk(group) for name in names]


def _remove_tree(cluster: Cluster, group: Path) -> None:
    """Remove a group and those below; the kernel needs a moment once their processes are gone."""

    def sweep() -> bool:
        for path in reversed([group, *_list_below(group)]):
            with contextlib.suppress(OSError):
                path.rmdir()
        return not group.exists()

    cluster.wait_until(f"cgroup {group} to be empty", sweep)


def _find_points(cluster: Cluster, controller: str) -> tuple[Path, Path]:
    """Return where a controller's hierarchy is mounted, and where the cluster's group of it is."""
    return cluster.path("hierarchies", controller), cluster.path("cgroup", controller)


def _mount(source: str, target: Path, kind: str, flags: int, options: str) -> None:
    """Mount a filesystem by the system call of that name; raises OSError."""
    words = (source.encode(), bytes(target), kind.encode(), ctypes.c_ulong(flags), options.encode())
    if ctypes.CDLL(None, use_errno=True).mount(*words):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _unmount(target: Path) -> None:
    """Unmount a filesystem, also one that holds somebody's working directory; raises SandboxError."""
    if ctypes.CDLL(None, use_errno=True).umount2(bytes(target), MNT_DETACH):
        raise SandboxError(f"{target} cannot be unmounted ({os.strerror(ctypes.get_errno())})")
