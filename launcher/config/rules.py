"""What settings have to do with each other, with variables, and with where a job runs.

What a single setting takes stands with it in `launcher.config.settings`; what is said, in `errors.toml`. Of
errors, the first is raised; warnings are logged.
"""

import logging
import os
import re
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path, PurePath
from urllib.parse import urlsplit

from launcher.config.run_path import flatten
from launcher.config.settings import SLURM_KINDS, Settings, refuse, say
from launcher.config.start import DEVICE_VARIABLES, Cluster, parse_nproc
from launcher.fit.settings import LoraConfig
from launcher.plan.variables import (
    EXPANDABLE,
    KEYS,
    NEWEST,
    OLDEST,
    find_conflicts,
    find_fault,
    find_variable,
    is_kept,
    merge_settings,
    parse_settings,
    read_host,
    read_settings,
)
from launcher.protocol import LAUNCH_GC, LAUNCH_NUM_WORKERS
from launcher.runs.secrets import MASK, mask_text, mask_variables
from launcher.text import suggest

logger = logging.getLogger(__name__)

HOSTS = ("system", "tcmalloc", "jemalloc")
"""What can serve malloc: `allocator.host`."""
NODE_ORDERS = ("auto", "topology", "slurm")
MAX_NAME = 200
"""Bytes of a run's name, which is a folder's."""
JOBS = ("launch", "launch tune")
"""Commands that run a program."""
SAVING = {"launch topo": ("save", "image"), "launch tune": ("save",), "launch report": ("save",)}
"""Commands that write a file, and the keys that name it."""
OVERRULED = {
    LAUNCH_GC: ("gc", "gc.policy", "gc.warmup", "gc.every", "gc.log"),
    LAUNCH_NUM_WORKERS: ("dataloader", "dataloader.num_workers", "dataloader.workload"),
}
"""Variables of the user's, with the keys that they come over."""
CHECKED_ELSEWHERE = ("cluster.kind", "cluster.container", "cluster.container.image")
"""Keys of `cluster` that are no mistake here: a container is refused if there is no srun."""
CONTAINER_MARKS = ("/.dockerenv", "/run/.containerenv")
"""Files by which docker and podman mark a container."""
SYS_PTRACE = 19
"""Bit of the capability to trace any process: capabilities(7)."""
CHOSEN = ("allocator", f"allocator.{EXPANDABLE}")
"""Keys of a command line that ask for expandable segments by name."""


def _warn(rule: str, **values: object) -> None:
    logger.warning(say("warnings", rule, values))


def _raise_first(broken: Mapping[str, object], **values: object) -> None:
    """Raise UsageError for the first rule that is broken."""
    if rule := next((rule for rule, is_broken in broken.items() if is_broken), None):
        raise refuse(rule, **values)


def check(config: Settings, verb: str, given: Collection[str]) -> None:
    """Raise UsageError for the first values that a command cannot be meant to have.

    `given` are the keys that the command line sets.
    """
    is_job, parallel, fit = verb in JOBS, config.parallel, config.fit
    for key, value in flatten(asdict(config)).items() if is_job else ():
        for text in (key, *(value if isinstance(value, list) else [value])):
            if isinstance(text, str) and not _is_possible(text):
                raise refuse("character", text=key)
    for key, name in (("save", config.save), ("image", config.image)):
        if name is not None and key not in SAVING.get(verb, ()):
            raise refuse("file", verb=verb, key=key, name=name)
    host = read_host(config.allocator)
    broken = {
        "host": host not in HOSTS,
        "virtual_stages": parallel.virtual_stages > 1 and parallel.pp == 1,
        "targets": fit.lora.rank is not None and not fit.lora.targets,
        "rank": fit.lora.rank is None and fit.lora != LoraConfig(),
        "quantization": fit.lora.rank is None and fit.quantization != "none",
        "recompute": fit.recompute_modules and fit.checkpointing != "selective",
        "offload": fit.offload == "parameters" and str(parallel.zero) in ("0", "1", "2"),
    }
    _raise_first(broken, c=config, host=host, hosts=", ".join(HOSTS))
    if is_job:
        _check_job(config, given)


def _is_possible(text: str) -> bool:
    """Tell whether a text can be a path, an argument or a variable: without NUL, and in the encoding."""
    try:
        return b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:
        return False


def _check_job(config: Settings, given: Collection[str]) -> None:
    """Raise UsageError for the first values that no job can have, wherever it runs."""
    name, snapshot, notify = config.name or "", config.machine.snapshot, config.notify
    is_folder = name not in ("", ".", "..") and "/" not in name and name.isprintable()
    variable = next((name for name in config.env if not name or "=" in name), None)
    limits = {"torchrun.max_restarts": config.torchrun.max_restarts, "restarts": config.restarts}
    limit = next((key for key, number in limits.items() if number == 0), "")
    broken = {
        "variable": variable is not None,
        "name": config.name is not None and not (is_folder and len(os.fsencode(name)) <= MAX_NAME),
        "url": notify.url is not None and not _is_http(notify.url),  # it may hold a secret
        "ping_url": notify.ping_url is not None and not _is_http(notify.ping_url),
        "on_hang": limit and config.watch.enabled and config.watch.on_hang == "restart",
        "snapshot": snapshot and not config.dry_run,
    }
    shown = f"machine={Path(str(snapshot)).stem}" if "machine" in given else f"machine.snapshot={snapshot}"
    _raise_first(broken, c=config, variable=variable, longest=MAX_NAME, limit=limit, machine=shown)
    parse_nproc(config.nproc_per_node, 1)


def _is_http(url: str) -> bool:
    """Tell whether a text is an address for HTTP that a request can be made to."""
    try:
        parts = urlsplit(url)
        is_whole = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False
    return is_whole and url.isprintable() and " " not in url


def check_placed(config: Settings, cluster: Cluster) -> None:
    """Raise UsageError for the first setting of a job that does not go with where it runs."""
    own, is_slurms = config.cluster, cluster.kind in SLURM_KINDS
    broken = {
        "spares_here": own.spares and not is_slurms,
        "spares_elastic": own.spares and cluster.min_nodes != cluster.max_nodes,
        "spares_torchrun": own.spares and config.agent == "torchrun",
        "restarts": config.restarts is not None and config.torchrun.max_restarts is not None,
        "node_order": is_slurms
        and own.node_order not in NODE_ORDERS
        and not os.path.isfile(os.path.expanduser(own.node_order)),  # noqa: PTH111, PTH113 - no pathlib in what always runs
        "image": own.container.image and not is_slurms,
        "root": cluster.kind == "slurm" and config.machine.root != "/",
    }
    _raise_first(broken, c=config, at=cluster, orders=", ".join(NODE_ORDERS))
    # A secret's value, rather than an expansion, in lines that go into the submission script.
    lines = [("cluster.setup", line) for line in own.setup]
    lines += [(f"cluster.additional.{name}", f"--{name}={value}") for name, value in own.additional.items()]
    for key, line in lines if cluster.kind == "slurm" else ():
        masked = mask_text(line)
        hidden = line[len(masked.partition(MASK)[0]) :].lstrip("\"'")
        if masked != line and not hidden.startswith(("$", "`")):
            raise refuse("secret", key=key, masked=masked)


# Settings without effect, and variables that come over settings


def warn_job(config: Settings, cluster: Cluster, given: Collection[str]) -> None:
    """Say which of the command line's settings are SLURM's in a job that runs here, and which are secrets.

    `ps` shows these to everybody as long as `launch` stays.
    """
    keys = sorted(key for key in given if key.startswith("cluster.") and key not in CHECKED_ELSEWHERE)
    if keys and cluster.kind in ("local", "manual"):
        _warn("slurm", keys=", ".join(keys), at=cluster)
    stays = not config.dry_run and (cluster.kind != "slurm" or config.follow)
    names = [name for name in config.env if stays and not {"env", f"env.{name}"}.isdisjoint(given)]
    masked = mask_variables({name: str(config.env[name]) for name in names})
    if shown := [f"env.{name}" for name in names if masked[name] != str(config.env[name])]:
        _warn("visible", keys=", ".join(shown))


def warn_overruled(environ: Mapping[str, str], given: Collection[str]) -> None:
    """Say which variables of the environment come over what the command line asks for."""
    over = {name: keys for name, keys in OVERRULED.items() if name in environ and is_kept(environ, name)}
    if name := find_variable(environ):
        over[name] = tuple(f"allocator.{key}" for key in parse_settings(environ[name]) or ())
    for name, keys in over.items():
        if lost := [key for key in keys if key in given]:
            _warn("overruled", name=name, value=environ[name], keys=", ".join(lost))


def warn_elsewhere(config: Settings, environ: Mapping[str, str]) -> None:
    """Say which variables of the environment do not count, since another machine is planned for.

    They name this machine's devices, as SLURM's CUDA_VISIBLE_DEVICES does in a job.
    """
    machine = PurePath(str(config.machine.snapshot)).stem
    for name in DEVICE_VARIABLES if config.machine.snapshot else ():
        if name in environ and name not in config.env:
            _warn("elsewhere", name=name, value=environ[name], machine=machine)


# The allocator's settings, against the program and the torch that the ranks have


def settle_allocator(
    config: Settings, words: Sequence[str], environ: Mapping[str, str], given: Collection[str]
) -> Settings:
    """Check the settings, warn of what is doubtful, and return a configuration without what is left out.

    Expandable segments that nobody asked for by name are left out if the program is known to fail or crawl
    with them, as it would not without us. `given` are the command line's keys. Raises UsageError.
    """
    settings = read_settings(config.allocator)
    # The ranks' torch is this one unless they have another Python.
    is_own = environ.get("PYTHON_EXEC", sys.executable) == sys.executable
    is_own = is_own and not config.cluster.container.image
    depends = any(name not in KEYS or KEYS[name][1] > OLDEST for name in settings)
    torch = None
    if is_own and depends:
        from launcher.runs.provenance import find_version  # 30 ms

        torch = find_version("torch")
    _check_allocator(settings, torch)
    merged = merge_settings(settings, environ)
    asked = not {*CHOSEN}.isdisjoint(given) or EXPANDABLE in merge_settings({}, environ)
    conflicts = [*find_conflicts(merged, words, environ, contained=_is_contained(config))]
    for what, remedy in conflicts:
        if asked:
            _warn("conflict_asked", what=what, remedy=remedy and f"{remedy}, or ")
        else:
            _warn("conflict", what=what, remedy=remedy and f"; {remedy} to have both")
    left_out = () if asked or not conflicts else (EXPANDABLE,)
    return replace(
        config, allocator={key: value for key, value in config.allocator.items() if key not in left_out}
    )


def _check_allocator(settings: Mapping[str, str], torch: str | None) -> None:
    """Warn of settings that only a later torch may know; raises UsageError for what torch refuses.

    `torch` is the version that the ranks have; None if that is not known.
    """
    found = re.match(r"(\d+)\.(\d+)", torch or "")  # 2.13.0+cpu, 2.13.0.dev20260701
    version = (int(found[1]), int(found[2])) if found else None
    known = [name for name, (_, since) in KEYS.items() if version is None or since <= max(version, OLDEST)]
    for name, value in settings.items():
        if name not in KEYS:
            near = suggest(name, known) or ":"
            if version and version <= NEWEST:
                raise refuse("allocator_unknown", name=name, near=near, torch=torch, known=", ".join(known))
            _warn("allocator_later", name=name, near=near, torch=torch or "(not installed here)")
        elif version and name not in known:
            since = ".".join(map(str, KEYS[name][1]))
            raise refuse("allocator_since", name=name, since=since, torch=torch)
        elif fault := find_fault(name, value):
            raise refuse("allocator_value", name=name, value=value, fault=fault)


def _is_contained(config: Settings) -> bool:
    """Tell whether the ranks run in a container that may not trace processes."""
    if config.cluster.container.image:
        return True
    if not any(Path(mark).exists() for mark in CONTAINER_MARKS):
        return False
    from launcher.probe.limits import read_capabilities
    from launcher.probe.sysfs import Tree

    return not read_capabilities(Tree()) >> SYS_PTRACE & 1
