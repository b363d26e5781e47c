"""The cluster's own part of the machine's cgroups of version 1, where SLURM constrains jobs.

Every controller's hierarchy is mounted in the cluster's folder (HIERARCHIES) and gets one group for the
cluster, which is bound where SLURM looks for a hierarchy (CgroupMountpoint). SLURM names its groups after the
node alone (`/slurm_n0`): without that, clusters beside one another would share them.
"""

import contextlib
import ctypes
import os
from collections.abc import Iterator
from pathlib import Path

from sandboxed.cluster import Cluster
from sandboxed.commands import wait_until
from sandboxed.errors import SandboxError

CONTROLLERS = ("memory", "cpuset", "devices", "freezer", "cpuacct")
"""All that SLURM's cgroup/v1 uses; memory comes first, since version 2 holds it where both are in use."""
HIERARCHIES = "hierarchies"
MS_BIND = 4096
MNT_DETACH = 2


def make_groups(cluster: Cluster) -> None:
    """Mount the controllers and make the cluster's groups; raises SandboxError that names the obstacle."""
    if os.geteuid():
        raise SandboxError("only root can mount cgroups")
    for controller in CONTROLLERS:
        try:
            make_group(cluster, controller)
        except OSError as error:
            reason = f"the controller {controller} cannot be used as version 1 ({error.strerror})"
            raise SandboxError(reason + explain_version(controller)) from None


def make_group(cluster: Cluster, controller: str) -> None:
    """Make the cluster's group of one controller; raises OSError."""
    whole, part = find_points(cluster, controller)
    for point in (whole, part):
        point.mkdir(parents=True, exist_ok=True, mode=0o700)
    mount("cgroup", whole, "cgroup", 0, name_hierarchy(controller))
    group = whole / cluster.cgroup
    group.mkdir()
    if controller == "cpuset":  # a new one has neither, and takes no process
        for name in ("cpuset.cpus", "cpuset.mems"):
            (group / name).write_bytes((whole / name).read_bytes())
    mount(str(group), part, "", MS_BIND, "")


def drop_groups(cluster: Cluster) -> None:
    """Remove the cluster's groups, whose processes have ended, and unmount what make_groups has mounted.

    It takes up what an earlier call, or an interrupted make_groups, has left.
    """
    if not cluster.cgroup:
        return
    for controller in CONTROLLERS:
        whole, part = find_points(cluster, controller)
        if part.is_mount():
            unmount(part)
        if whole.is_mount():
            remove_tree(cluster, whole / cluster.cgroup)
            unmount(whole)


def remove_groups(cluster: Cluster, node: str) -> None:
    """Remove the groups of a node on which nothing runs any more; raises SandboxError.

    A machine that crashes has none either when it comes back: counters of theirs, such as oom_kill, would
    be taken for those of the job's next attempt there.
    """
    if not cluster.cgroup:
        return
    for controller in CONTROLLERS:
        remove_tree(cluster, find_points(cluster, controller)[1] / f"slurm_{node}")


def remove_tree(cluster: Cluster, group: Path) -> None:
    """Remove a group and those below; the kernel needs a moment once their processes are gone."""

    def sweep() -> bool:
        for path in sorted((group, *list_below(group)), key=lambda path: -len(path.parts)):
            try:
                path.rmdir()
            except FileNotFoundError:
                continue
            except OSError:
                return False
        return True

    wait_until(f"cgroup {group} to be empty", sweep, cluster)


def list_below(group: Path) -> list[Path]:
    """Return all groups below one; none if that is not there."""
    return [Path(path, name) for path, names, _ in os.walk(group) for name in names]


def list_tracked(cluster: Cluster, node: str) -> list[Path]:
    """Return the groups by which SLURM tracks the processes of a node's jobs."""
    return list_below(find_points(cluster, "freezer")[1] / f"slurm_{node}") if cluster.cgroup else []


def list_members(cluster: Cluster) -> Iterator[tuple[int, str]]:
    """Yield the processes of jobs, each with its node, wherever their parents are."""
    for node in cluster.names:
        for group in list_tracked(cluster, node):
            try:
                numbers = (group / "cgroup.procs").read_text(encoding="ascii").split()
            except OSError:  # removed meanwhile
                continue
            yield from ((int(number), node) for number in numbers)


def thaw_jobs(cluster: Cluster, node: str) -> None:
    """Let a node's suspended jobs go on: a frozen process does not even die of SIGKILL."""
    for group in list_tracked(cluster, node):
        with contextlib.suppress(OSError):  # removed meanwhile
            (group / "freezer.state").write_text("THAWED", encoding="ascii")


def has_swap_limit(cluster: Cluster) -> bool:
    """Whether the kernel counts swap for groups (not with swapaccount=0)."""
    return Path(cluster.cgroups, "memory", "memory.memsw.limit_in_bytes").exists()


def find_points(cluster: Cluster, controller: str) -> tuple[Path, Path]:
    """Return where a controller's hierarchy is mounted, and where the cluster's group of it is."""
    return Path(cluster.path(HIERARCHIES), controller), Path(cluster.cgroups, controller)


def name_hierarchy(controller: str) -> str:
    """Return the controllers that share a hierarchy with one, which only mount together: `cpu,cpuacct`."""
    for line in Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines():
        names = line.split(":")[1]
        if controller in names.split(","):
            return names
    return controller


def explain_version(controller: str) -> str:
    """Say that version 2 has a controller, where it does."""
    try:
        held = Path("/sys/fs/cgroup/cgroup.controllers").read_text(encoding="ascii").split()
    except OSError:
        return ""
    return ", version 2 has it" if controller in held else ""


def mount(source: str, target: Path, kind: str, flags: int, options: str) -> None:
    """Mount a filesystem by the system call of that name; raises OSError."""
    words = (source.encode(), bytes(target), kind.encode(), ctypes.c_ulong(flags), options.encode())
    if ctypes.CDLL(None, use_errno=True).mount(*words):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def unmount(target: Path) -> None:
    """Unmount a filesystem, also one that holds somebody's working directory; raises SandboxError."""
    if ctypes.CDLL(None, use_errno=True).umount2(bytes(target), MNT_DETACH):
        raise SandboxError(f"{target} cannot be unmounted ({os.strerror(ctypes.get_errno())})")
