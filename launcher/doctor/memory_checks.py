"""Memory: its size against the GPUs', NUMA settings of the kernel, huge pages, swap."""

from collections.abc import Iterator

from launcher.doctor.finding import Case, Finding, report_ok, report_unchecked
from launcher.text import format_size

MEMORY = "memory"
SWAPPED = 64 << 10
"""Swap in KiB that any machine may have in use."""


def judge_size(case: Case) -> Iterator[Finding]:
    """Memory of the job against the sum of its GPUs' (a rule of the Machine Learning Engineering book)."""
    machine = case.machine
    normal = sum(node.memory_kib for node in machine.nodes if node.normal) or machine.memory_kib
    limit = machine.limits.memory_kib
    size = min(normal, limit) if limit is not None else normal
    said = f"{format_size(size)} of main memory" + (" (the cgroup's limit)" if size == limit else "")
    sizes = [gpu.memory_mib for gpu in case.gpus]
    if not sizes or not size:
        yield (
            report_ok(MEMORY, f"{said}, no GPUs")
            if size
            else report_unchecked(case, MEMORY, "size", "unknown")
        )
    elif not all(sizes):
        yield report_unchecked(case, MEMORY, f"{said} against the GPUs'", "the GPUs' memory is not known")
    elif size >= sum(sizes) << 10:
        yield report_ok(MEMORY, f"{said}, {format_size(sum(sizes) << 10)} on the GPUs")
    else:
        yield Finding(
            "warning",
            MEMORY,
            f"{said}, less than the {format_size(sum(sizes) << 10)} of the job's {len(sizes)} GPUs",
            "checkpoints, offload and DataLoader workers can need as much as the GPUs hold",
            "ask for more (SLURM: --mem=0 is the node's all; docker: --memory)",
        )


def judge_balancing(case: Case) -> Iterator[Finding]:
    """Settings of the kernel that move or reclaim memory between NUMA nodes.

    Source: the kernel's Documentation/admin-guide/sysctl/kernel.rst ("If the target workload is already
    bound to NUMA nodes then this feature should be disabled") and vm.rst.
    """
    balancing, reclaim = case.health.numa_balancing, case.health.zone_reclaim
    if sum(node.normal and node.memory_kib > 0 for node in case.machine.nodes) < 2:
        yield report_ok(MEMORY, "one NUMA node with memory: nothing to balance")
        return
    if balancing is None:
        yield report_unchecked(case, MEMORY, "NUMA balancing", "the kernel shows no such setting")
    elif balancing:
        yield Finding(
            "warning",
            MEMORY,
            f"automatic NUMA balancing is on (kernel.numa_balancing={balancing})",
            "the kernel stops ranks to scan their memory and takes page faults to see who uses it, though "
            "the plan has put it in its place",
            "sudo sysctl kernel.numa_balancing=0, and the same in /etc/sysctl.d",
        )
    if reclaim:
        yield Finding(
            "warning",
            MEMORY,
            f"vm.zone_reclaim_mode={reclaim}",
            "where a node is full, allocations wait for its page cache to be dropped rather than take memory "
            "next door, and cached training data is lost",
            "sudo sysctl vm.zone_reclaim_mode=0, and the same in /etc/sysctl.d",
        )
    if balancing == 0 and not reclaim:
        yield report_ok(MEMORY, "automatic NUMA balancing and zone reclaim are off")


def judge_hugepages(case: Case) -> Iterator[Finding]:
    """Transparent huge pages, and memory that is set aside as huge pages.

    Source: the kernel's Documentation/admin-guide/mm/transhuge.rst and hugetlbpage.rst.
    """
    idle = sum(pool.free * pool.size_kib for pool in case.health.hugepages or ())
    found = [*find_reserved(case, idle), *find_transparent(case)]
    yield from found
    if not case.health.transparent:
        yield report_unchecked(case, MEMORY, "transparent huge pages", "the kernel shows no such setting")
    elif not found:
        kept = f"{format_size(idle)} reserved" if idle else "none reserved"
        yield report_ok(MEMORY, f"transparent huge pages {case.health.transparent}, {kept}")


def find_reserved(case: Case, idle: int) -> Iterator[Finding]:
    """A twentieth of the memory or more that is reserved and not in use."""
    if idle and idle * 20 >= case.machine.memory_kib:
        yield Finding(
            "warning",
            MEMORY,
            f"{format_size(idle)} are reserved as huge pages that nobody uses",
            "only programs that ask for hugetlb pages can use them: to a training job they are missing",
            "sudo sysctl vm.nr_hugepages=0, or boot without hugepages=",
        )


def find_transparent(case: Case) -> Iterator[Finding]:
    """Settings of transparent huge pages that are unusual."""
    folder = "/sys/kernel/mm/transparent_hugepage"
    if case.health.transparent == "never":
        yield Finding(
            "note",
            MEMORY,
            "transparent huge pages are off (never)",
            "large tensors in main memory cost more page faults and TLB misses",
            f"echo madvise | sudo tee {folder}/enabled",
        )
    elif case.health.transparent and case.health.defrag == "always":
        yield Finding(
            "note",
            MEMORY,
            f"transparent huge pages are on ({case.health.transparent}) with defrag=always",
            "a page fault may wait until memory is compacted, at another time on each rank",
            f"echo madvise | sudo tee {folder}/defrag",
        )


def judge_swap(case: Case) -> Iterator[Finding]:
    """Swap in use."""
    used, eager = case.health.swap_kib, case.health.swappiness
    if used is None:
        yield report_unchecked(case, MEMORY, "swap", "proc/meminfo does not show it")
    elif used <= SWAPPED:
        yield report_ok(MEMORY, "no swap in use")
    else:
        setting = "" if eager is None else f" (vm.swappiness={eager})"
        yield Finding(
            "note",
            MEMORY,
            f"{format_size(used)} of swap are in use{setting}",
            "a rank that touches a page there waits for the disk, and all others wait for it",
            "find what fills the memory (`ps --sort=-rss -eo rss,comm | head`); sudo sysctl vm.swappiness=1",
        )
