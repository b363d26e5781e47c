"""The program that the shim becomes: reports what the kernel says of this process and of its memory.

It asks the kernel by the files in /proc rather than by the calls that the shim uses.
"""

import mmap
import os

HALF = 8 << 20
"""Bytes touched from the rank's own CPUs, and again from CPUs that are far from its memory."""
PAGE = 4096


def main() -> None:
    """Print the report as one line, a Python literal: importing json takes a third of a second in a guest."""
    status = read_status()
    affinity = sorted(os.sched_getaffinity(0))
    memory = mmap.mmap(-1, 2 * HALF, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    touch(memory, 0)
    policy, home = read_mapping()
    # Fresh pages are on the CPU's own node without any policy: from elsewhere, the policy alone counts.
    far = {int(cpu) for cpu in os.environ["LAB_FAR_CPUS"].split()}
    if far:
        os.sched_setaffinity(0, far)
        touch(memory, HALF)
    report = {
        "pid": os.getpid(),
        "affinity": affinity,
        "cpus_allowed": status["Cpus_allowed_list"],
        "policy": policy,
        "home": home,
        "far": subtract(read_mapping()[1], home) if far else None,
        "env": dict(os.environ),
    }
    print(repr(report), flush=True)


def read_status() -> dict[str, str]:
    """The fields of /proc/self/status."""
    lines = (line.partition(":") for line in read_lines("/proc/self/status"))
    return {name: value.strip() for name, _, value in lines}


def read_lines(path: str) -> list[str]:
    """The lines of a file."""
    with open(path, encoding="ascii") as file:  # noqa: PTH123  # pathlib costs as much as json
        return file.readlines()


def touch(memory: mmap.mmap, start: int) -> None:
    """Write to every page of a half."""
    for offset in range(start, start + HALF, PAGE):
        memory[offset] = 1


def read_mapping() -> tuple[str, dict[str, int]]:
    """Policy, and pages by NUMA node, of the mapping with the most anonymous pages, which is ours."""
    words = max((line.split() for line in read_lines("/proc/self/numa_maps")), key=count_anonymous)
    nodes = (word[1:].split("=") for word in words[2:] if word[0] == "N" and word[1].isdecimal())
    return words[1], {node: int(count) for node, count in nodes}


def count_anonymous(words: list[str]) -> int:
    """Anonymous pages of a line of numa_maps."""
    return sum(int(word[5:]) for word in words if word.startswith("anon="))


def subtract(after: dict[str, int], before: dict[str, int]) -> dict[str, int]:
    """Pages that came since, by NUMA node."""
    change = {node: count - before.get(node, 0) for node, count in after.items()}
    return {node: count for node, count in change.items() if count}


if __name__ == "__main__":
    main()
