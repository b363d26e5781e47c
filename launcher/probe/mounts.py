"""The mount table as the process sees it: read only if the usual places do not suffice."""

from dataclasses import dataclass

from launcher.probe.sysfs import Tree


@dataclass(frozen=True, slots=True)
class Mount:
    """A line of /proc/self/mountinfo, as far as it matters here."""

    root: str
    """What of the file system is mounted: `/`, or a directory of it for a bind mount."""
    point: str
    """Where it is mounted."""
    kind: str
    """Type of the file system: `cgroup2`, `tmpfs`."""
    options: tuple[str, ...]
    """The file system's own options: version 1's controllers, a tmpfs's size."""


def list_mounts(tree: Tree) -> list[Mount]:
    """The mounts in their order, from mountinfo, else from `mounts`, which does not tell the roots."""
    text = tree.read("proc/self/mountinfo", lines=True)
    if text:
        found = [parse_mountinfo(line) for line in text.splitlines()]
    else:
        text = tree.read("proc/self/mounts", lines=True) or tree.read("proc/mounts", lines=True) or ""
        found = [parse_mounts(line) for line in text.splitlines()]
    return [mount for mount in found if mount]


def parse_mountinfo(line: str) -> Mount | None:
    """Read one line (proc_pid_mountinfo(5)); None for one that is none."""
    before, _, after = line.partition(" - ")
    head, tail = before.split(" "), after.split(" ")
    if len(head) < 6 or len(tail) < 3:
        return None
    return Mount(decode_octal(head[3]), decode_octal(head[4]), tail[0], tuple(tail[-1].split(",")))


def parse_mounts(line: str) -> Mount | None:
    """Read one line of `mounts` (fstab(5)); None for one that is none."""
    words = line.split(" ")
    return (
        Mount("/", decode_octal(words[1]), words[2], tuple(words[3].split(","))) if len(words) > 3 else None
    )


def decode_octal(text: str) -> str:
    """A path of the mount table, in which white space and backslashes are octal numbers."""
    head, *rest = text.split("\\")
    parts = [
        chr(int(part[:3], 8)) + part[3:]
        if len(part) > 2 and set(part[:3]) <= set("01234567")
        else f"\\{part}"
        for part in rest
    ]
    return head + "".join(parts)


def find_cgroup(tree: Tree, controller: str, version: int, path: str) -> tuple[str, str] | None:
    """Where a controller's hierarchy is mounted, and a cgroup's path below that; None if it is nowhere."""
    for mount in list_mounts(tree):
        if version == 2:
            is_it = mount.kind == "cgroup2"
        else:
            is_it = mount.kind == "cgroup" and controller in mount.options
        below = make_relative(path, mount.root) if is_it else None
        if below is not None:
            return mount.point.strip("/"), below
    return None


def make_relative(path: str, root: str) -> str | None:
    """A cgroup's path below a mount of `root`; None if it is not below that.

    Both are as the process's cgroup namespace shows them: what is outside of the namespace begins with
    `/..`, and then the names between are unknown, so that only the mount's top can be read.
    """
    inner, outer = ([part for part in text.split("/") if part] for text in (path, root))
    if inner[: len(outer)] == outer:
        below = inner[len(outer) :]
        return None if ".." in below else "".join(f"/{part}" for part in below)
    return "" if set(outer) == {".."} else None
