"""Reads the small text files of sysfs and procfs below one root, and notes what is odd in them.

Plain descriptors and string paths: pathlib costs more than the system calls, and `launch-rank` reads
some hundred files at each rank's start.
"""

import os

from launcher.cpulist import format_cpulist, parse_cpulist

FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
"""O_NONBLOCK: a pipe in a copied tree must not hang the start."""
PAGE = 4096
"""The kernel gives a cpulist in reads of at most a page (kernfs)."""
SIZE_LIMIT = 1 << 16
"""Bytes read of a file at most; the longest cpulist of 8192 CPUs has 40 KB."""
NUMBER_LIMIT = 1 << 16
"""No kernel has CPU or node numbers from here on: such a list is garbage."""
HEX = frozenset("0123456789abcdefABCDEF")
MASKS = {
    "cpulist": "cpumap", "thread_siblings_list": "thread_siblings", "core_cpus_list": "core_cpus",
    "shared_cpu_list": "shared_cpu_map", "local_cpulist": "local_cpus",
}  # fmt: skip
"""Files with the same CPUs in hexadecimal: captures by hwloc-gather-topology have these alone."""


class Tree:
    """The files below a root directory, with the oddities met in them."""

    __slots__ = ("_oddities", "prefix")

    def __init__(self, root: str | os.PathLike[str] = "/") -> None:
        real = os.path.realpath(root)
        self.prefix = "" if real == "/" else real
        self._oddities: dict[str, tuple[str, set[int | str]]] = {}

    @property
    def is_real(self) -> bool:
        """Whether this is the machine itself rather than a written-out one."""
        return not self.prefix

    def read(self, path: str, *, lines: bool = False) -> str | None:
        """Text of a file without the white space around it; None if it cannot be read.

        `lines` is for a file that procfs gives in reads of whole lines, such as `mounts`.
        """
        try:
            handle = os.open(f"{self.prefix}/{path}", FLAGS)
        except (OSError, ValueError):  # ValueError: a name that was read from a file, with a NUL in it.
            return None
        try:
            data = chunk = os.read(handle, PAGE)
            limit = SIZE_LIMIT << 4 if lines else SIZE_LIMIT
            while (len(chunk) == PAGE or (lines and chunk)) and len(data) < limit:
                chunk = os.read(handle, PAGE)
                data += chunk
        except OSError:
            return None
        finally:
            os.close(handle)
        # Many captures by hwloc-gather-topology have a NUL after each file's text.
        return data.removesuffix(b"\n\0").decode("utf-8", "replace").strip()

    def read_int(self, path: str) -> int | None:
        """A file's whole number; None if there is none."""
        try:
            return int(self.read(path) or "")
        except ValueError:
            return None

    def read_list(self, path: str) -> frozenset[int] | None:
        """A file's cpulist, without one the mask beside it; None if it cannot be read or is none."""
        text = self.read(path)
        if text is not None:
            return parse_list(text)
        folder, slash, name = path.rpartition("/")
        return parse_mask(self.read(f"{folder}{slash}{MASKS[name]}")) if name in MASKS else None

    def read_fields(self, path: str) -> dict[str, str]:
        """A file's `name: value` lines; none if it cannot be read."""
        lines = (line.partition(":") for line in (self.read(path) or "").splitlines())
        return {name.strip(): value.strip() for name, colon, value in lines if colon}

    def read_mem_total(self, path: str) -> int | None:
        """MemTotal in KiB of a meminfo file, the machine's or a node's."""
        words = (self.read(path) or "").partition("MemTotal:")[2].split()
        return int(words[0]) if words and words[0].isdecimal() and len(words[0]) < 20 else None

    def list_directory(self, path: str) -> list[str]:
        """Names in a directory, sorted; none if it cannot be read."""
        try:
            return sorted(os.listdir(f"{self.prefix}/{path}"))
        except (OSError, ValueError):
            return []

    def has(self, path: str) -> bool:
        """Whether a file, directory or device of this name is there."""
        return os.path.exists(f"{self.prefix}/{path}")

    def resolve_links(self, path: str) -> str | None:
        """A path with its links followed; None if they lead out of the root, as sysfs's own never do."""
        try:
            real = os.path.realpath(f"{self.prefix}/{path}")
        except (OSError, ValueError):
            return None
        return real[len(self.prefix) + 1 :] if real.startswith(f"{self.prefix}/") else None

    def list_numbers(self, path: str, stem: str) -> list[int]:
        """The N of a directory's entries that are named stem + N, in ascending order."""
        names = self.list_directory(path)
        tails = (name.removeprefix(stem) for name in names if name.startswith(stem))
        return sorted(int(tail) for tail in tails if tail.isascii() and tail.isdecimal() and len(tail) < 6)

    def add_warning(self, text: str, *items: int | str, path: str = "", value: str | None = None) -> None:
        """Add a warning; notes of one text become one, with all `{items}` and the first `{value}`.

        The value is the content of `path` if one is named.
        """
        if text not in self._oddities:
            self._oddities[text] = (quote_content(self.read(path) if path else value), set())
        self._oddities[text][1].update(items)

    def list_warnings(self) -> tuple[str, ...]:
        """The notes as warnings, in the order of their first time."""
        return tuple(
            text.format(items=join_items(items), value=value)
            for text, (value, items) in self._oddities.items()
        )


def parse_list(text: str) -> frozenset[int] | None:
    """A cpulist's numbers; None if it is none."""
    try:
        numbers = parse_cpulist(text)
    except ValueError:
        return None
    return numbers if max(numbers, default=0) < NUMBER_LIMIT else None


def parse_mask(text: str | None) -> frozenset[int] | None:
    """The numbers of a mask as the kernel prints it, words of 32 bits from the highest: `1,0000000f`."""
    words = text.split(",") if text else []
    if not words or not all(0 < len(word) <= 8 and set(word) <= HEX for word in words):
        return None
    values = enumerate(int(word, 16) for word in reversed(words))
    numbers = [32 * at + bit for at, value in values if value for bit in range(32) if value >> bit & 1]
    return frozenset(numbers) if max(numbers, default=0) < NUMBER_LIMIT else None


def parse_unsigned(text: str | None) -> int | None:
    """A whole number without a sign, as the kernel prints it in decimal; None for any other text."""
    return int(text) if text and text.isascii() and text.isdecimal() and len(text) <= 20 else None


def quote_content(text: str | None) -> str:
    """A file's content as part of a sentence; `repr` keeps control characters from terminals."""
    if text is None:
        return "missing"
    return repr(text if len(text) <= 40 else f"{text[:40]}…") if text else "empty"


def join_items(items: set[int | str]) -> str:
    """Numbers as a cpulist, then names."""
    numbers = format_cpulist({item for item in items if isinstance(item, int)})
    return ", ".join(filter(None, (numbers, *sorted(item for item in items if isinstance(item, str)))))
