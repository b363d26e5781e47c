"""Limits of cgroups and mounts, as systems and containers of every kind show them."""

import os
import resource
from collections.abc import Mapping
from pathlib import Path

import pytest

from launcher.plan.model import Limits
from launcher.probe.limits import count_oom_kills, read_limits
from launcher.probe.sysfs import Tree

from .machine_trees import put

OWN, TOP, MOUNTS = "proc/self/cgroup", "sys/fs/cgroup", "proc/self/mountinfo"
V2 = {f"{TOP}/cgroup.controllers": "cpuset cpu io memory"}
NO_LIMIT = "9223372036854771712"
V1_OWN = "3:cpu,cpuacct:{0}\n4:memory:{0}\n1:name=systemd:/init.scope\n0::/init.scope"
V1_MOUNT = "36 35 0:31 {} {} rw,nosuid shared:9 - cgroup cgroup rw,{}"
V2_MOUNT = "36 35 0:31 {} {} rw,nosuid - cgroup2 cgroup2 rw,nsdelegate"


def read(root: Path, files: Mapping[str, str], *warnings: str) -> Limits:
    """Limits of a tree with these files; its warnings have the given parts."""
    for path, content in files.items():
        put(root, path, content)
    tree = Tree(root)
    limits = read_limits(tree)
    found = tree.list_warnings()
    assert len(found) == len(warnings), found
    assert all(part in text for part, text in zip(warnings, found, strict=True)), found
    return limits


def test_nothing_known(tmp_path: Path) -> None:
    assert read(tmp_path, {}) == Limits()


def test_tightest_of_the_ancestors(tmp_path: Path) -> None:
    job = f"{TOP}/system.slice/slurmstepd.scope/job_7"
    files = {
        OWN: "0::/system.slice/slurmstepd.scope/job_7/step_0/user/task_0",
        f"{job}/cpu.max": "1600000 100000",
        f"{job}/memory.max": str(64 << 30),
        f"{job}/step_0/cpu.max": "max 100000",
        f"{job}/step_0/memory.max": str(32 << 30),
        f"{job}/step_0/user/task_0/cpu.max": "2400000 100000",
        f"{job}/step_0/user/task_0/memory.max": "max",
        f"{TOP}/system.slice/memory.max": str(1 << 40),
        f"{TOP}/other/memory.max": "4096",
    }
    assert read(tmp_path, V2 | files) == Limits(cpus=16, memory_kib=32 << 20)


def test_part_of_a_cpu(tmp_path: Path) -> None:
    files = {OWN: "0::/a", f"{TOP}/a/cpu.max": "150000 100000"}
    assert read(tmp_path, V2 | files).cpus == 1.5


def test_namespace_of_a_container(tmp_path: Path) -> None:
    files = {OWN: "0::/", f"{TOP}/cpu.max": "400000 100000", f"{TOP}/memory.max": "1073741824"}
    assert read(tmp_path, V2 | files) == Limits(cpus=4, memory_kib=1 << 20)


def test_version_1(tmp_path: Path) -> None:
    files = {
        OWN: V1_OWN.format("/slurm/job_7"),
        f"{TOP}/cpu/slurm/job_7/cpu.cfs_quota_us": "200000",
        f"{TOP}/cpu/slurm/job_7/cpu.cfs_period_us": "50000",
        f"{TOP}/cpu/slurm/cpu.cfs_quota_us": "-1",
        f"{TOP}/cpu/slurm/cpu.cfs_period_us": "100000",
        f"{TOP}/memory/slurm/job_7/memory.limit_in_bytes": str(8 << 30),
        f"{TOP}/memory/slurm/memory.limit_in_bytes": NO_LIMIT,
        f"{TOP}/memory/memory.limit_in_bytes": NO_LIMIT,
    }
    assert read(tmp_path, files) == Limits(cpus=4, memory_kib=8 << 20)


@pytest.mark.parametrize("none", [NO_LIMIT, "9223372036854710272", "-1", str(1 << 63)])
def test_version_1_without_a_limit(none: str, tmp_path: Path) -> None:
    files = {
        OWN: V1_OWN.format("/"),
        f"{TOP}/memory/memory.limit_in_bytes": none,
        f"{TOP}/cpu/cpu.cfs_quota_us": "-1",
        f"{TOP}/cpu/cpu.cfs_period_us": "100000",
    }
    assert read(tmp_path, files) == Limits()


def test_version_1_of_a_container_that_sees_the_hosts_names(tmp_path: Path) -> None:
    """Docker without a cgroup namespace: the mount's top is the container's own cgroup."""
    files = {
        OWN: V1_OWN.format("/docker/abc"),
        MOUNTS: "\n".join(
            V1_MOUNT.format("/docker/abc", f"/{TOP}/{name}", name) for name in ("cpu,cpuacct", "memory")
        ),
        f"{TOP}/cpu,cpuacct/cpu.cfs_quota_us": "300000",
        f"{TOP}/cpu,cpuacct/cpu.cfs_period_us": "100000",
        f"{TOP}/memory/memory.limit_in_bytes": "1048576",
    }
    assert read(tmp_path, files) == Limits(cpus=3, memory_kib=1024)


def test_child_of_such_a_container(tmp_path: Path) -> None:
    files = {
        OWN: "4:memory:/docker/abc/job/step",
        MOUNTS: V1_MOUNT.format("/docker/abc", f"/{TOP}/memory", "memory"),
        f"{TOP}/memory/memory.limit_in_bytes": "4194304",
        f"{TOP}/memory/job/memory.limit_in_bytes": "2097152",
    }
    assert read(tmp_path, files).memory_kib == 2048


def test_controller_by_a_link_beside_its_mount(tmp_path: Path) -> None:
    (tmp_path / TOP / "cpu,cpuacct").mkdir(parents=True)
    (tmp_path / TOP / "cpu").symlink_to("cpu,cpuacct")
    files = {
        OWN: V1_OWN.format("/"),
        f"{TOP}/cpu,cpuacct/cpu.cfs_quota_us": "100000",
        f"{TOP}/cpu,cpuacct/cpu.cfs_period_us": "100000",
    }
    assert read(tmp_path, files).cpus == 1


def test_hybrid_takes_each_controller_where_it_is(tmp_path: Path) -> None:
    files = {
        OWN: "3:cpu,cpuacct:/job\n0::/job",
        f"{TOP}/cpu/job/cpu.cfs_quota_us": "200000",
        f"{TOP}/cpu/job/cpu.cfs_period_us": "100000",
        f"{TOP}/unified/cgroup.controllers": "memory",
        f"{TOP}/unified/job/memory.max": "2097152",
        f"{TOP}/unified/job/cpu.max": "100000 100000",
    }
    assert read(tmp_path, files) == Limits(cpus=2, memory_kib=2048)


def test_hierarchies_mounted_elsewhere(tmp_path: Path) -> None:
    files = {
        OWN: "4:memory:/job\n0::/x y",
        MOUNTS: "20 1 0:5 / /proc rw - proc proc rw\nnonsense\n"
        + V1_MOUNT.format("/", "/cgroup/memory", "memory")
        + "\n"
        + V2_MOUNT.format("/", "/cg\\040roups"),
        "cgroup/memory/job/memory.limit_in_bytes": "1048576",
        "cg roups/x y/cpu.max": "50000 100000",
    }
    assert read(tmp_path, files) == Limits(cpus=0.5, memory_kib=1024)


def test_mount_table_longer_than_a_read_of_other_files(tmp_path: Path) -> None:
    overlay = "99 35 0:40 / /var/lib/docker/{} rw - overlay overlay rw,lowerdir=" + "l" * 900
    lines = [overlay.format(n) for n in range(200)]
    files = {
        OWN: "0::/job",
        MOUNTS: "\n".join([*lines, V2_MOUNT.format("/", "/cgroup")]),
        "cgroup/job/memory.max": "1048576",
    }
    assert read(tmp_path, files).memory_kib == 1024


@pytest.mark.parametrize(
    ("own", "mounted", "kib"),
    [
        ("/../..", "/", None),
        ("/..", "/", None),
        ("/../../x", "/", None),
        ("/", "/", 1024),
        ("/../..", "/../..", 1024),
        ("/../../x", "/../..", 1024),
    ],
)
def test_only_what_is_above_the_process_limits_it(
    own: str, mounted: str, kib: int | None, tmp_path: Path
) -> None:
    """A process can be outside of its cgroup namespace, whose mount is then not above it."""
    files = {OWN: f"0::{own}", MOUNTS: V2_MOUNT.format(mounted, f"/{TOP}"), f"{TOP}/memory.max": "1048576"}
    assert read(tmp_path, V2 | files).memory_kib == kib


def test_path_out_of_the_hierarchy_is_never_read(tmp_path: Path) -> None:
    files = {OWN: "0::/../../../secret", "secret/memory.max": "1048576", f"{TOP}/memory.max": "4096"}
    assert read(tmp_path, V2 | files) == Limits()


def test_mount_point_out_of_the_root_is_never_read(tmp_path: Path) -> None:
    put(tmp_path, "outside/memory.max", "1048576")
    files = {OWN: "0::/", MOUNTS: V2_MOUNT.format("/", "/../outside")}
    assert read(tmp_path / "root", files) == Limits()


def test_link_out_of_the_root_is_never_read(tmp_path: Path) -> None:
    put(tmp_path, "outside/memory.limit_in_bytes", "1048576")
    (tmp_path / "root" / TOP).mkdir(parents=True)
    (tmp_path / "root" / TOP / "memory").symlink_to(tmp_path / "outside")
    assert read(tmp_path / "root", {OWN: "4:memory:/"}) == Limits()


@pytest.mark.parametrize(
    ("path", "root", "below"),
    [
        ("/a/b", "/", "/a/b"),
        ("/a/b", "/a", "/b"),
        ("/a", "/a", ""),
        ("/ab", "/a", None),
        ("/", "/a", None),
        ("/../x", "/..", "/x"),
        ("/../../x", "/..", None),
        ("/", "/..", ""),
        ("/a", "/../..", ""),
        ("/../x", "/../y", None),
    ],
)
def test_path_below_a_mount(path: str, root: str, below: str | None, tmp_path: Path) -> None:
    place = r"/cg\040ro\134\011"
    files = {
        OWN: f"0::{path}",
        MOUNTS: V2_MOUNT.format(root, place),
        f"cg ro\\\t{below or ''}/memory.max": "1048576",
        "cg ro\\\t/other/memory.max": "1",
    }
    assert read(tmp_path, files).memory_kib == (None if below is None else 1024)


@pytest.mark.parametrize("quota", ["lots", "100000", "100000 0", "0 100000", "1 -1", "100000 x", "-5 100000"])
def test_quota_that_is_none_is_told(quota: str, tmp_path: Path) -> None:
    files = {OWN: "0::/a", f"{TOP}/a/cpu.max": quota, f"{TOP}/a/memory.max": "1048576"}
    limits = read(tmp_path, V2 | files, f"CPU quota of cgroup /{TOP}/a is '{quota}': taken as no limit")
    assert limits == Limits(memory_kib=1024)


@pytest.mark.parametrize("size", ["lots", "0", "-5", "1e9", "9" * 30])
def test_size_that_is_none_is_told(size: str, tmp_path: Path) -> None:
    files = {OWN: "4:memory:/a", f"{TOP}/memory/a/memory.limit_in_bytes": size}
    assert read(tmp_path, files, f"memory limit of cgroup /{TOP}/memory/a is '{size}'") == Limits()


def test_version_1_quota_without_a_period_is_told(tmp_path: Path) -> None:
    files = {OWN: "3:cpu:/a", f"{TOP}/cpu/a/cpu.cfs_quota_us": "100000"}
    assert read(tmp_path, files, "CPU quota of cgroup") == Limits()


@pytest.mark.parametrize(
    "text", ["", "garbage", "0:", "0::", "0::relative", "::/a", "0::/a\0b", f"0::/{'a/' * 9000}"]
)
def test_cgroup_file_that_is_none(text: str, tmp_path: Path) -> None:
    assert read(tmp_path, V2 | {OWN: text}) == Limits()


@pytest.mark.parametrize(
    ("option", "kib"),
    [
        ("size=65536k", 65536),
        ("size=64m", 65536),
        ("size=2g", 2 << 20),
        ("size=1048576", 1024),
        ("mode=755", None),
        ("size=", None),
        ("size=50%", None),
        ("size=k", None),
    ],
)
@pytest.mark.parametrize("path", ["proc/self/mounts", "proc/mounts", MOUNTS])
def test_size_of_shm_by_its_mount_option(path: str, option: str, kib: int | None, tmp_path: Path) -> None:
    line = f"shm /dev/shm tmpfs rw,nosuid,{option} 0 0"
    if path == MOUNTS:
        line = f"40 30 0:50 / /dev/shm rw,nosuid - tmpfs shm rw,{option}"
    other = line.replace("/dev/shm", "/run").replace(option, "size=1k")
    assert read(tmp_path, {path: f"{other}\n{line}\n{other}"}).shm_kib == kib


def test_last_mount_on_shm_hides_the_others(tmp_path: Path) -> None:
    lines = "a /dev/shm tmpfs size=1k 0 0\nb /dev/shm tmpfs size=2k 0 0"
    assert read(tmp_path, {"proc/self/mounts": lines}).shm_kib == 2


@pytest.mark.parametrize(
    ("limits", "files"),
    [("1024 524288", 524288), ("1024 unlimited", None), ("1024", None), ("1024 many", None), ("4 -1", None)],
)
def test_files_are_those_of_the_hard_limit(limits: str, files: int | None, tmp_path: Path) -> None:
    lines = f"Max processes 7 9 processes\nMax open files            {limits} files\n"
    if limits == "1024":
        lines = lines.replace(" files\n", "\n")
    assert read(tmp_path, {"proc/self/limits": lines}) == Limits(files=files)


def test_this_machines_files_are_the_kernels_own_word() -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    assert read_limits(Tree()).files == (None if hard == resource.RLIM_INFINITY else hard)


def test_this_machines_shm_is_what_it_holds() -> None:
    if not Path("/dev/shm").is_dir():
        pytest.skip("this machine has no /dev/shm")
    found = os.statvfs("/dev/shm")
    assert read_limits(Tree()).shm_kib == found.f_blocks * found.f_frsize // 1024


@pytest.mark.parametrize(
    ("own", "path", "text", "count"),
    [
        ("0::/job/task", "job/task/memory.events", "low 0\noom 4\noom_kill 3\noom_group_kill 0", 3),
        ("0::/job/task", "job/memory.events", "oom_kill 3", 0),  # another task's
        ("4:memory:/job", "memory/job/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 2", 2),
        ("4:memory:/job", "memory/job/memory.oom_control", "oom_kill_disable 0\nunder_oom 0", 0),
        ("4:memory:/job", "memory/job/memory.oom_control", "oom_kill many", 0),
        ("4:memory:/job", "memory/other", "", 0),
        ("", "nothing", "", 0),
    ],
)
def test_processes_that_the_kernel_has_killed(
    own: str, path: str, text: str, count: int, tmp_path: Path
) -> None:
    for name, content in {**V2, OWN: own, f"{TOP}/{path}": text}.items():
        put(tmp_path, name, content)
    assert count_oom_kills(Tree(tmp_path)) == count
