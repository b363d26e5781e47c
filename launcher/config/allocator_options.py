"""The allocator's settings as configured: checked against a torch, and written as the ranks get them."""

import re
from collections.abc import Iterable, Iterator, Mapping

from launcher.errors import UsageError
from launcher.plan.allocator import (
    KNOWN,
    NEWEST,
    OLDEST,
    SPLIT,
    Version,
    find_fault,
    find_variable,
    list_known_keys,
    parse_settings,
)

HOSTS = ("system", "tcmalloc", "jemalloc")
"""What can serve malloc: `allocator.host`."""


def check_settings(settings: Mapping[str, str], torch: str | None) -> Iterator[str]:
    """Tell what is doubtful of the configuration's settings; raises UsageError for what torch refuses.

    `torch` is the version that the ranks have; None if that is not known.
    """
    version = parse_version(torch)
    for name, value in settings.items():
        if name not in KNOWN:
            text = f"there is no allocator.{name}{suggest_key(name, version)}"
            if version and version <= NEWEST:
                raise UsageError(f"{text} torch {torch} knows {', '.join(list_known_keys(version))}")
            yield f"{text} torch {torch or '(not installed here)'} may know it"
            if parse_settings(f"{name}:{value}") != {name: value}:
                raise UsageError(
                    f"allocator.{name}={value}: no value of the allocator's, which has a `:` in lists alone"
                )
            continue
        if lack := describe_lack(name, version):
            if version:
                raise UsageError(
                    f"allocator.{name} {lack}, and {torch} is installed: update torch, or leave it out"
                )
            yield f"allocator.{name} {lack}, and none is installed here to compare with"
        if fault := find_fault(name, settings, version):
            raise UsageError(f"allocator.{name}={value}: give {fault}")


def doubt_variable(environ: Mapping[str, str], torch: str | None) -> Iterator[str]:
    """Warn of a variable of the user's that torch would refuse: the job would fail without us as well."""
    name = find_variable(environ)
    if not name:
        return
    version = parse_version(torch)
    settings = parse_settings(environ[name])
    if settings is None:
        faults: Iterable[str] = ["it is not KEY:VALUE,KEY:VALUE"]
    else:
        faults = (fault for key in settings if (fault := describe_fault(key, settings, version)))
    for fault in faults:
        yield (
            f"{name}={environ[name]}, set by the user: {fault}; torch refuses it at the first use of CUDA, on"
            " every rank: correct or unset it"
        )


def describe_fault(key: str, settings: Mapping[str, str], version: Version | None) -> str:
    """Say what is wrong with one of the user's settings; empty if it is valid."""
    if key not in KNOWN:
        # A torch that is newer than the table, or not known, may have it.
        return (
            f"there is no {key}{suggest_key(key, version)}".rstrip(":")
            if version and version <= NEWEST
            else ""
        )
    if version and (lack := describe_lack(key, version)):
        return f"{key} {lack}"
    fault = find_fault(key, settings, version)
    return f"{key} takes {fault}" if fault else ""


def describe_lack(name: str, version: Version | None) -> str:
    """Say from which torch on there is a setting; empty if this one has it."""
    since = KNOWN[name].since
    return f"came with torch {since[0]}.{since[1]}" if since > max(version or OLDEST, OLDEST) else ""


def suggest_key(name: str, version: Version | None) -> str:
    """Return `: did you mean …?` if a setting has a similar name, else `:`."""
    from difflib import get_close_matches

    near = get_close_matches(name, list_known_keys(version), n=1, cutoff=0.6)
    return f": did you mean {near[0]}?" if near else ":"


def depends_on_version(names: Iterable[str]) -> bool:
    """Tell whether the version counts for these settings; to look it up takes 30 ms."""
    return any(name not in KNOWN or name in SPLIT or KNOWN[name].since > OLDEST for name in names)


def read_torch_version() -> str | None:
    """Return the installed torch's version by its metadata; None if there is none."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("torch")
    except PackageNotFoundError:
        return None


def parse_version(torch: str | None) -> Version | None:
    """Return the release that a version is of: `2.13.0+cpu` and `2.13.0.dev20260701` are 2.13."""
    match = re.match(r"(\d+)\.(\d+)", torch or "")
    return (int(match[1]), int(match[2])) if match else None
