"""How much memory of this machine new processes can have now."""

from dataclasses import dataclass, field

from launcher.plan.model import Machine
from launcher.probe.sysfs import Tree

USABLE = 0.95
"""Share of the free memory that may be used."""
LEAST_FREE = 0.03
"""Share of the memory that has to be free: below it, the kernel begins to swap or to kill."""
LEAST_FREE_KIB = 1 << 20
"""KiB that are enough in any case."""


def find_usable_memory(machine: Machine) -> int:
    """Return in KiB what all ranks together may use here: free memory, within the cgroup's limit.

    0 if it is unknown.
    """
    free, limit = read_available_memory(Tree())[0], machine.limits.memory_kib
    known = [kib for kib in (free, limit) if kib]
    return int(USABLE * min(known)) if known else 0


def read_available_memory(tree: Tree) -> tuple[int, int]:
    """Return in KiB what can be had without swapping, and all there is (proc_meminfo(5)); 0 if unknown."""
    text = tree.read("proc/meminfo") or ""
    rows = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    found = [rows.get(name, "").split() for name in ("MemAvailable", "MemTotal")]
    free, total = (int(words[0]) if words and words[0].isdigit() else 0 for words in found)
    return free, total


@dataclass(slots=True)
class MemoryGuard:
    """Tells when the machine's memory is about to run out."""

    tree: Tree = field(default_factory=Tree)

    def is_starved(self) -> bool:
        """Tell whether less is free than the machine needs."""
        free, total = read_available_memory(self.tree)
        return 0 < free < min(LEAST_FREE * total, LEAST_FREE_KIB)
