"""The kernel's list notation for sets of CPUs and NUMA nodes, such as `0-3,8-11`.

Every rank imports this at its start, so it imports nothing itself.
"""


def parse_cpulist(text: str) -> frozenset[int]:
    """Read a cpulist as the kernel writes it; an empty text is the empty set.

    Source: the kernel's Documentation/admin-guide/cputopology. Raises ValueError for anything else, strides
    (`0-15:2/4`) among it.
    """
    numbers: set[int] = set()
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        low, dash, high = part.partition("-")
        first = int(low)
        last = int(high) if dash else first
        if not 0 <= first <= last < 1 << 20:
            raise ValueError(f"{part!r} is not a range of a cpulist")
        numbers.update(range(first, last + 1))
    return frozenset(numbers)


def format_cpulist(numbers: set[int] | frozenset[int]) -> str:
    """Write numbers as the kernel does, in ascending order: {0, 1, 2, 8} is `0-2,8`."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in runs)
