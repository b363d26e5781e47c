"""Reads the small text files of sysfs and procfs below one root, and notes what is odd in them.

Plain descriptors and string paths: pathlib costs more than the system calls, and `launch-rank` reads
some hundred files at each rank's start.
"""

import os
import re

from launcher.cpulist import format_cpulist, parse_cpulist

FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
"""O_NONBLOCK: a pipe in a copied tree must not hang the start."""
PAGE = 4096
"""The kernel gives a cpulist in reads of at most a page (kernfs)."""
SIZE_LIMIT = 1 << 20
"""Bytes read of a file at most; /proc/stat of hundreds of CPUs has some ten KB."""
NUMBER_LIMIT = 1 << 16
"""No kernel has CPU or node numbers from here on: such a list is garbage."""
NAME_LIMIT = (1 << 22) + 1
"""No directory has names with numbers from here on: the highest PID (PID_MAX_LIMIT)."""
MEMINFO = re.compile(r"(\w+):\s*(\d{1,19})\b", re.ASCII)
PCI = "sys/bus/pci/devices/"
ADDRESS = re.compile(
    r"([0-9a-f]{1,8}):([0-9a-f]{1,2}):([01]?[0-9a-f])(?:\.([0-7]))?", re.ASCII | re.IGNORECASE
)
"""Domain, bus, device, function, as sysfs, /proc/driver/nvidia or NVML write them."""


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

    def read(self, path: str) -> str | None:
        """Text of a file without the white space around it; None if it cannot be read."""
        try:
            handle = os.open(f"{self.prefix}/{path}", FLAGS)
        except (OSError, ValueError):  # ValueError: a name that was read from a file, with a NUL in it.
            return None
        try:
            data = chunk = os.read(handle, PAGE)
            while len(chunk) == PAGE and len(data) < SIZE_LIMIT:
                chunk = os.read(handle, PAGE)
                data += chunk
        except OSError:
            return None
        finally:
            os.close(handle)
        return data.decode("utf-8", "replace").strip()

    def read_number(self, path: str) -> int | None:
        """A file's whole number, as `parse_number` has it."""
        return parse_number(self.read(path))

    def read_list(self, path: str) -> frozenset[int] | None:
        """A file's cpulist; None if it cannot be read or is none."""
        text = self.read(path)
        return None if text is None else parse_list(text)

    def read_fields(self, path: str) -> dict[str, str]:
        """A file's `name: value` lines; none if it cannot be read."""
        lines = (line.partition(":") for line in (self.read(path) or "").splitlines())
        return {name.strip(): value.strip() for name, colon, value in lines if colon}

    def read_meminfo(self, path: str = "proc/meminfo") -> dict[str, int]:
        """The sizes in KiB of a meminfo file, the machine's or a NUMA node's, by name: `MemTotal`."""
        return {name: int(digits) for name, digits in MEMINFO.findall(self.read(path) or "")}

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
        """A path with its links followed; None if they lead nowhere, or out of the root."""
        try:
            real = os.path.realpath(f"{self.prefix}/{path}", strict=True)
        except (OSError, ValueError):
            return None
        return real[len(self.prefix) + 1 :] if real.startswith(f"{self.prefix}/") else None

    def list_numbers(self, path: str, stem: str) -> list[int]:
        """The N of a directory's entries that are named stem + N, in ascending order."""
        names = (name for name in self.list_directory(path) if name.startswith(stem))
        numbers = (parse_number(name.removeprefix(stem)) for name in names)
        return sorted(number for number in numbers if number is not None and number < NAME_LIMIT)

    def add_warning(self, text: str, *items: int | str, value: str | None = None) -> None:
        """Add a warning; notes of one text become one, with all `{items}` and the first `{value}`."""
        self._oddities.setdefault(text, (quote_content(value), set()))[1].update(items)

    def list_warnings(self) -> tuple[str, ...]:
        """The notes as warnings, in the order of their first time."""
        warnings = []
        for text, (value, items) in self._oddities.items():
            numbers = format_cpulist({item for item in items if isinstance(item, int)})
            names = sorted(item for item in items if isinstance(item, str))
            warnings.append(text.format(items=", ".join(filter(None, (numbers, *names))), value=value))
        return tuple(warnings)


def parse_list(text: str) -> frozenset[int] | None:
    """A cpulist's numbers; None if it is none."""
    try:
        numbers = parse_cpulist(text)
    except ValueError:
        return None
    return numbers if max(numbers, default=0) < NUMBER_LIMIT else None


def parse_number(text: str | None) -> int | None:
    """A whole number as the kernel prints it, in decimal and without a sign; None for any other text."""
    return int(text) if text and text.isascii() and text.isdecimal() and len(text) <= 20 else None


def quote_content(text: str | None) -> str:
    """A file's content as part of a sentence; `repr` keeps control characters from terminals."""
    if text is None:
        return "missing"
    return repr(text if len(text) <= 40 else f"{text[:40]}…") if text else "empty"


def normalise_pci(text: str) -> str | None:
    """An address in sysfs form; None for a text that is none."""
    found = ADDRESS.fullmatch(text)
    return format_pci(*(int(digits or "0", 16) for digits in found.groups())) if found else None


def format_pci(domain: int, bus: int, device: int, function: int = 0) -> str:
    """Write an address as sysfs does: `0000:07:00.0`."""
    return f"{domain:04x}:{bus:02x}:{device:02x}.{function:x}"


def split_path(real: str) -> tuple[str, ...]:
    """The PCI part of a device's real path in sysfs: the host bridge, each bridge, the device itself.

    The host bridge may be below others (ACPI, VMBus, a platform device), and something that is no PCI
    device (an auxiliary device) may be below the last. Empty if the path has no PCI device.
    """
    parts = real.split("/") if real.isascii() and real.isprintable() else []
    while parts and normalise_pci(parts[-1]) is None:
        parts.pop()
    tops = [at for at, part in enumerate(parts) if part.startswith("pci") and ":" in part]
    return tuple(parts[tops[0] :] if tops else parts[-1:])
