"""What settings have to do with each other, and with where a job runs.

What a single one takes stands with it in `launcher.config.settings`. Nothing here looks at a machine or
writes anything. Each rule gives what is wrong in a line; the first line is raised.
"""

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from urllib.parse import urlsplit

from launcher.config.run_path import flatten
from launcher.config.settings import SLURM_KINDS, LoraConfig, Settings, show_value
from launcher.config.start import Cluster, parse_nproc
from launcher.errors import UsageError
from launcher.plan.variables import KEYS, NEWEST, OLDEST, find_fault, read_host
from launcher.runs.secrets import MASK, mask_text
from launcher.text import suggest

HOSTS = ("system", "tcmalloc", "jemalloc")
"""What can serve malloc: `allocator.host`."""
NODE_ORDERS = ("auto", "topology", "slurm")
MAX_NAME = 200
"""Bytes of a run's name, which is a folder's."""
JOBS = ("launch", "launch tune")
"""Commands that run a program."""
SAVING = {"launch topo": ("save", "image"), "launch tune": ("save",), "launch report": ("save",)}
"""Commands that write a file, and the keys that name it."""


@dataclass(frozen=True, slots=True)
class Context:
    """A configuration and what counts for its checks."""

    config: Settings
    verb: str = "launch"
    """The command that was given."""
    given: frozenset[str] = frozenset()
    """Keys that the command line sets."""


def check(context: Context) -> None:
    """Raise UsageError for the first pair of values that the command cannot be meant to have."""
    is_job = context.verb in JOBS
    for key, value in flatten(asdict(context.config)).items() if is_job else ():
        for text in (key, *(value if isinstance(value, list) else [value])):
            if isinstance(text, str) and not is_possible(text):
                raise UsageError(f"{key!r} has a character that no path, argument or variable can have")
    _raise_first(_find_faults(context))
    if is_job:
        _raise_first(_find_job_faults(context))
        parse_nproc(context.config.nproc_per_node, 1)


def _raise_first(faults: Iterator[str]) -> None:
    if fault := next(faults, ""):
        raise UsageError(fault)


def is_possible(text: str) -> bool:
    """Tell whether a text can be a path, an argument or a variable: without NUL, and in the encoding."""
    try:
        return b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:
        return False


def _find_faults(context: Context) -> Iterator[str]:
    """Find what is wrong for whatever verb."""
    config = context.config
    for key, name in (("save", config.save), ("image", config.image)):
        if name is not None and key not in SAVING.get(context.verb, ()):
            yield f"`{context.verb}` writes no {key}={name}: ask for it with `launch topo {key}=…`"
    host = read_host(config.allocator)
    if host not in HOSTS:
        yield f"allocator.host={host}: choose from {', '.join(HOSTS)}"

    fit, parallel = config.fit, config.parallel
    if parallel.virtual_stages > 1 and parallel.pp == 1:
        yield (
            f"parallel.virtual_stages={parallel.virtual_stages} with parallel.pp=1: chunks are of pipeline"
            " stages, set parallel.pp, or leave it out"
        )
    if fit.lora.rank is not None and not fit.lora.targets:
        yield "fit.lora.targets=[] has no matrix: give some, or [all-linear]"
    if fit.lora.rank is None and fit.lora != LoraConfig():
        yield (
            f"fit.lora.targets={show_value(fit.lora.targets)} without fit.lora.rank: set a rank, such as"
            " fit.lora.rank=8"
        )
    if fit.lora.rank is None and fit.quantization != "none":
        yield (
            f"fit.quantization={fit.quantization} without fit.lora.rank: quantized weights are not trained,"
            " set fit.lora.rank=8 or another rank"
        )
    if fit.recompute_modules and fit.checkpointing != "selective":
        yield (
            f"fit.recompute_modules={show_value(fit.recompute_modules)} with"
            f" fit.checkpointing={fit.checkpointing}: set fit.checkpointing=selective, or leave it out"
        )
    if fit.offload == "parameters" and str(parallel.zero) in ("0", "1", "2"):
        yield (
            f"fit.offload=parameters with parallel.zero={parallel.zero}: weights are kept in CPU memory if"
            " they are sharded, set parallel.zero=3, or fit.offload=optimizer"
        )


def _find_job_faults(context: Context) -> Iterator[str]:
    """Find what is wrong for a job, wherever it runs."""
    config, given = context.config, context.given
    for name in config.env:
        if not name or "=" in name:
            yield f"env has a variable named {name!r}: give a name without ="
    name = config.name or ""
    is_folder = name not in ("", ".", "..") and "/" not in name and name.isprintable()
    if config.name is not None and not (is_folder and len(os.fsencode(name)) <= MAX_NAME):
        yield (
            f"name={name!r}: give a name without / of 1 to {MAX_NAME} bytes; runs_dir=DIR says where it goes"
        )
    for key, url in (("url", config.notify.url), ("ping_url", config.notify.ping_url)):
        if url is not None and not is_http(url):  # it may hold a secret
            yield f"notify.{key} is no address that begins with http:// or https://"
    limits = {"torchrun.max_restarts": config.torchrun.max_restarts, "restarts": config.restarts}
    zero = next((key for key, number in limits.items() if number == 0), "")
    if config.watch.enabled and config.watch.on_hang == "restart" and zero:
        yield (
            f"watch.on_hang=restart with {zero}=0: nothing is started again, give a number of at least 1, or"
            " leave it out for 3"
        )
    if config.machine.snapshot and not config.dry_run:
        snapshot = config.machine.snapshot
        shown = f"machine={Path(snapshot).stem}" if "machine" in given else f"machine.snapshot={snapshot}"
        yield (
            f"{shown} describes a machine, which can be planned for and not run on: see the plan with"
            " `launch plan` or dry_run=true, or leave it out to run on this machine"
        )


def is_http(url: str) -> bool:
    """Tell whether a text is an address for HTTP that a request can be made to."""
    try:
        parts = urlsplit(url)
        is_whole = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False
    return is_whole and url.isprintable() and " " not in url


def check_placed(context: Context, cluster: Cluster) -> None:
    """Raise UsageError for the first setting of a job that does not go with where it runs."""
    _raise_first(_find_placed_faults(context, cluster))


def _find_placed_faults(context: Context, cluster: Cluster) -> Iterator[str]:
    config, own = context.config, context.config.cluster
    is_slurms = cluster.kind in SLURM_KINDS
    # Spare nodes that nothing of launch could put in the place of others.
    shown, nodes = f"cluster.spares={own.spares}", cluster.max_nodes
    if own.spares and not is_slurms:
        yield (
            f"{shown}, but SLURM does not start the nodes ({cluster.why}): set cluster=slurm, or leave it out"
        )
    if own.spares and cluster.min_nodes != nodes:
        yield (
            f"{shown} with nodes={cluster.min_nodes}:{nodes}: an elastic job goes on with fewer nodes, and"
            f" has no use for spare ones: set nodes={nodes}, or leave them out"
        )
    if own.spares and config.agent == "torchrun":
        yield (
            f"{shown} with agent=torchrun, which does not replace a node: leave agent out, or cluster.spares"
        )
    # What the place of a job makes no use of, or what is too many.
    if config.restarts is not None and config.torchrun.max_restarts is not None:
        yield (
            f"restarts={config.restarts} and torchrun.max_restarts={config.torchrun.max_restarts} are the"
            " same setting: leave one out"
        )
    is_word = own.node_order in NODE_ORDERS
    if is_slurms and not is_word and not os.path.isfile(os.path.expanduser(own.node_order)):  # noqa: PTH111, PTH113 - no pathlib in what always runs
        yield (
            f"cluster.node_order={own.node_order}: choose from {', '.join(NODE_ORDERS)}, or give a file that"
            " has a node on each line"
        )
    if own.container.image and not is_slurms:
        yield (
            f"cluster.container.image={own.container.image}, but the ranks run here ({cluster.why}): set"
            " cluster=slurm, or start launch in the container"
        )
    if cluster.kind == "slurm" and config.machine.root != "/":
        yield (
            f"machine.root={config.machine.root} is of this machine, and the job plans its own nodes: leave"
            " it out, or set cluster=local"
        )
    # A secret's value, rather than an expansion, in lines that go into the submission script.
    lines = [("cluster.setup", line) for line in own.setup]
    lines += [(f"cluster.additional.{name}", f"--{name}={value}") for name, value in own.additional.items()]
    for key, line in lines if cluster.kind == "slurm" else ():
        masked = mask_text(line)
        hidden = line[len(masked.partition(MASK)[0]) :].lstrip("\"'")
        if masked != line and not hidden.startswith(("$", "`")):
            yield (
                f"{key} has a secret, {masked}, which would stand in submission.sh: set env.NAME=VALUE,"
                " which is written nowhere"
            )


# The allocator's settings, against the torch that the ranks have


def check_allocator(settings: Mapping[str, str], torch: str | None) -> Iterator[str]:
    """Tell which of the configuration's settings only a later torch may know; raises UsageError for what
    torch refuses.

    `torch` is the version that the ranks have; None if that is not known.
    """
    found = re.match(r"(\d+)\.(\d+)", torch or "")  # 2.13.0+cpu, 2.13.0.dev20260701
    version = (int(found[1]), int(found[2])) if found else None
    known = [name for name, (_, since) in KEYS.items() if version is None or since <= max(version, OLDEST)]
    for name, value in settings.items():
        if name not in KEYS:
            text = f"there is no allocator.{name}{suggest(name, known) or ':'}"
            if version and version <= NEWEST:
                raise UsageError(f"{text} torch {torch} knows {', '.join(known)}")
            yield f"{text} torch {torch or '(not installed here)'} may know it"
            continue
        since = KEYS[name][1]
        if version and name not in known:
            raise UsageError(
                f"allocator.{name} came with torch {since[0]}.{since[1]}, and {torch} is installed: update"
                " torch, or leave it out"
            )
        if fault := find_fault(name, value):
            raise UsageError(f"allocator.{name}={value}: give {fault}")


def read_torch_version() -> str | None:
    """Return the installed torch's version by its metadata, which takes 30 ms; None if there is none."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("torch")
    except PackageNotFoundError:
        return None
