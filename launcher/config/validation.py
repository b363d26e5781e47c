"""The checks of a configuration's values, in the order in which they are made; all of them raise UsageError.

None of them looks at a machine or writes anything.
"""

import math
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from urllib.parse import urlsplit

from launcher.config.allocator_options import HOSTS, read_host
from launcher.config.cluster import Cluster
from launcher.config.request import make_request, parse_nproc
from launcher.config.search_path import Sources
from launcher.config.settings import (
    SLURM_KINDS,
    FitConfig,
    ParallelConfig,
    PreflightConfig,
    Settings,
    list_choices,
)
from launcher.errors import UsageError
from launcher.plan.planner import check_request
from launcher.runs.secrets import MASK, mask_text

MIN_INTERVAL, MAX_INTERVAL = 0.5, 3600.0
"""Seconds between two reports of a node."""
MAX_WORKERS = 1024
"""DataLoader workers of a rank: more than a node has cores; a slip of the finger must not be planned."""
MAX_BATCH = 1 << 24
"""Largest micro-batch that a search may come to."""
TUNE_OPTION = re.compile(r"-[A-Za-z]|--[A-Za-z][\w.-]*=?|(?:\+{1,2})?[A-Za-z_][\w./-]*=|program\.\w+")
"""An option of a program, a key of Hydra's with its `=`, or a key of the section `program`."""
NODE_ORDERS = ("auto", "topology", "slurm")
MAX_SPARES = 1000
"""Spare nodes: more is a slip of the finger."""
MAX_NAME = 200
"""Bytes of a run's name, which is a folder's."""
VERBS_OF_KEYS = {"rank": "launch logs` and `launch watch", "yes": "launch cancel` and `launch tune"}
"""Keys that a run has no use for; a file may hold them, since it is read for all verbs."""


@dataclass(frozen=True, slots=True)
class Context:
    """A configuration and what counts for its checks."""

    config: Settings
    verb: str = "launch"
    """The command that was given."""
    given: frozenset[str] = frozenset()
    """Keys that the command line sets."""
    sources: Sources | None = None
    """The configuration's files."""


def validate(context: Context, checks: Sequence[Callable[[Context], None]]) -> None:
    """Make checks in their order; raises UsageError at the first that fails."""
    for check in checks:
        check(context)


def validate_placed(context: Context, cluster: Cluster) -> None:
    """Make the checks that depend on where the job runs; raises UsageError at the first that fails."""
    for check in CLUSTER_CHECKS:
        check(context, cluster)


def check_texts(context: Context) -> None:
    """Refuse a text that can be no path, argument or variable: with NUL, or not in the encoding."""
    for text in list_texts(asdict(context.config)):
        try:
            possible = b"\0" not in os.fsencode(text)
        except UnicodeEncodeError:
            possible = False
        if not possible:
            raise UsageError(f"{text!r} has a character that no path, argument or variable can have")


def list_texts(value: object) -> Iterator[str]:
    """Give all texts in a tree of mappings and lists."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from list_texts(key)
            yield from list_texts(item)
    elif isinstance(value, list):
        for item in value:
            yield from list_texts(item)


def check_variables(context: Context) -> None:
    """Refuse a name that no variable of the environment can have."""
    for name in context.config.env:
        if not name or "=" in name:
            raise UsageError(f"env has a variable named {name!r}: give a name without =")


def check_choices(context: Context) -> None:
    """Refuse a word that is not one of those that the schema has for a setting."""
    if context.config.agent == "srun":
        raise UsageError(
            "agent=srun: launch does not start ranks by srun: write `srun launch-rank PROGRAM` in your job"
            " script, or leave agent out"
        )
    for key, value, choices in list_choices(context.config):
        for word in value if isinstance(value, list) else [value]:
            check_choice(key, word, choices)


def check_name(context: Context) -> None:
    """Refuse a run's name that cannot be the name of a folder."""
    name = context.config.name
    if name is None:
        return
    if name in ("", ".", "..") or "/" in name or len(os.fsencode(name)) > MAX_NAME or not name.isprintable():
        raise UsageError(
            f"name={name!r}: give a name without / of 1 to {MAX_NAME} bytes; runs_dir=DIR says where it goes"
        )


def check_workers(context: Context) -> None:
    """Refuse a number of DataLoader workers that no rank can have."""
    number = context.config.dataloader.num_workers
    if not 0 <= number <= MAX_WORKERS:
        raise UsageError(
            f"dataloader.num_workers={number}: give a number of at least 0 and at most {MAX_WORKERS}"
        )


def check_progress(context: Context) -> None:
    """Refuse an empty pattern."""
    paths = context.config.progress.paths
    if not all(paths):
        raise UsageError(f"progress.paths={','.join(paths)}: an entry is empty, leave it out")


def check_numbers(context: Context) -> None:
    """Refuse numbers that are too small."""
    config = context.config
    check_minimum("logs.tail", config.logs.tail, 1)
    check_minimum("torchrun.shutdown_timeout", config.torchrun.shutdown_timeout, 0)
    check_minimum("torchrun.max_restarts", config.torchrun.max_restarts or 0, 0)
    check_minimum("restarts", config.restarts or 0, 0)


def check_requeue(context: Context) -> None:
    """Refuse limits and exit codes of `cluster.requeue` that mean nothing."""
    policy = context.config.cluster.requeue
    for name, number in asdict(policy).items():
        if isinstance(number, int):
            check_minimum(f"cluster.requeue.{name}", number, 1 if name == "limit" else 0)
    odd = [code for code in policy.exit_codes if not 0 < code < 256]
    if odd:
        raise UsageError(
            f"cluster.requeue.exit_codes={policy.exit_codes}: {odd[0]} is no exit code of a failure, give"
            " numbers from 1 to 255"
        )


def check_own_machine(context: Context) -> None:
    """Refuse a run with a snapshot: its plan has to be that of the machine it runs on."""
    snapshot = context.config.machine.snapshot
    if snapshot and not context.config.dry_run:
        is_option = "machine" in context.given
        given = f"machine={Path(snapshot).stem}" if is_option else f"machine.snapshot={snapshot}"
        raise UsageError(
            f"{given} describes a machine, which can be planned for and not run on: see the plan with"
            " `launch plan` or dry_run=true, or leave it out to run on this machine"
        )


def check_gc(context: Context) -> None:
    """Refuse steps of garbage collection that mean nothing."""
    check_minimum("gc.warmup", context.config.gc.warmup, 0)
    check_minimum("gc.every", context.config.gc.every, 0)


def check_host(context: Context) -> None:
    """Refuse an unknown malloc."""
    check_choice("allocator.host", read_host(context.config.allocator), HOSTS)


def check_placement(context: Context) -> None:
    """Refuse values that no node could plan, before a job waits in a queue with them."""
    check_request(make_request(context.config, {}))


SAVING = (("launch tune", "save"), ("launch report", "save"))
"""Verbs beside `topo` that write a file, and the key that names it."""


def check_output_files(context: Context) -> None:
    """Refuse a file that other verbs write."""
    config, verb = context.config, context.verb
    for key, name in (("save", config.save), ("image", config.image)):
        if name is not None and (verb, key) not in SAVING:
            raise UsageError(f"`{verb}` writes no {key}={name}: ask for it with `launch topo {key}=…`")


def check_verb_keys(context: Context) -> None:
    """Refuse another verb's key on the command line of a run."""
    for key, verb in VERBS_OF_KEYS.items():
        value = getattr(context.config, key)
        if key in context.given and value is not None and value is not False:
            shown = str(value).lower()
            raise UsageError(f"{key}={shown} is for `{verb}`, and has no use for a run: leave it out")


def check_tune(context: Context) -> None:
    """Refuse settings of a search that mean nothing."""
    tune = context.config.tune
    check_minimum("tune.steps", tune.steps, 8)
    if not 1 <= tune.max_batch <= MAX_BATCH:
        raise UsageError(f"tune.max_batch={tune.max_batch}: give a number from 1 to {MAX_BATCH}")
    if tune.option is not None and not TUNE_OPTION.fullmatch(tune.option):
        raise UsageError(
            f"tune.option={tune.option!r}: give the program's option for its micro-batch, as --batch-size,"
            " -b, train.batch_size= or program.batch_size"
        )
    for key, value in (("seconds", tune.seconds), ("timeout", tune.timeout)):
        if not value > 0:
            raise UsageError(f"tune.{key}={value:g}: give seconds, more than 0")


def check_fit_values(context: Context) -> None:
    """Refuse values of `parallel` and `fit` that mean nothing."""
    config = context.config
    if (config.fit, config.parallel) != (FitConfig(), ParallelConfig()):
        from launcher.config.fit_validation import check_fit_settings

        check_fit_settings(config)


def check_preflight(context: Context) -> None:
    """Refuse values of `preflight` that mean nothing."""
    preflight = context.config.preflight
    if preflight != PreflightConfig():
        from launcher.config.preflight_validation import check_preflight_settings

        check_preflight_settings(preflight)


def check_restarts(context: Context, _cluster: Cluster) -> None:
    """Refuse two numbers of restarts."""
    restarts, other = context.config.restarts, context.config.torchrun.max_restarts
    if restarts is not None and other is not None:
        raise UsageError(
            f"restarts={restarts} and torchrun.max_restarts={other} are the same setting: leave one out"
        )


def check_spares(context: Context, cluster: Cluster) -> None:
    """Refuse spare nodes if nothing of launch could put them in the place of others."""
    spares, agent = context.config.cluster.spares, context.config.agent
    if not spares:
        return
    if not 0 < spares <= MAX_SPARES:
        raise UsageError(f"cluster.spares={spares}: give a number from 0 to {MAX_SPARES}")
    shown = f"cluster.spares={spares}"
    if cluster.kind not in SLURM_KINDS:
        raise UsageError(
            f"{shown}, but SLURM does not start the nodes ({cluster.why}): set cluster=slurm, or leave it out"
        )
    if cluster.min_nodes != cluster.max_nodes:
        raise UsageError(
            f"{shown} with nodes={cluster.min_nodes}:{cluster.max_nodes}: an elastic job goes on with fewer"
            f" nodes, and has no use for spare ones: set nodes={cluster.max_nodes}, or leave them out"
        )
    if agent == "torchrun":
        raise UsageError(
            f"{shown} with agent={agent}, which does not replace a node: leave agent out, or cluster.spares"
        )


def check_node_order(context: Context, cluster: Cluster) -> None:
    """Refuse an order of the nodes that is neither a word that is known nor a file."""
    order = context.config.cluster.node_order
    if order in NODE_ORDERS or cluster.kind not in SLURM_KINDS:
        return
    if not os.path.isfile(os.path.expanduser(order)):  # noqa: PTH111, PTH113 - no pathlib in what always runs
        raise UsageError(
            f"cluster.node_order={order}: choose from {', '.join(NODE_ORDERS)}, or give a file that has a"
            " node on each line"
        )


def check_container(context: Context, cluster: Cluster) -> None:
    """Refuse a container if no srun starts the ranks in it."""
    container = context.config.cluster.container
    if container.image and cluster.kind not in ("slurm", "allocation"):
        raise UsageError(
            f"cluster.container.image={container.image}, but the ranks run here ({cluster.why}): set"
            " cluster=slurm, or start launch in the container"
        )


def check_times(context: Context, cluster: Cluster) -> None:
    """Refuse a time of `cluster`, or `nodes`, that a file has without quotes.

    YAML 1.1 reads `10:00:00` as the number 36000, to base 60, which SLURM would take for minutes.
    """
    if cluster.kind != "slurm" or context.sources is None:
        return
    config = context.config
    values = {"nodes": config.nodes, "time": config.cluster.time, **config.cluster.additional}
    suspects = {key: str(value) for key, value in values.items() if str(value).isdecimal()}
    if suspects:
        from launcher.config.yaml_files import check_quoted

        check_quoted(context.sources.list_files("cluster"), suspects)


def check_ranks(context: Context, cluster: Cluster) -> None:
    """Refuse a number of ranks that means nothing, before a job waits in a queue with it."""
    if cluster.kind == "slurm":
        parse_nproc(context.config.nproc_per_node, 1)


def check_script_secrets(context: Context, cluster: Cluster) -> None:
    """Refuse a secret's value, rather than an expansion, in lines that go into the submission script."""
    own = context.config.cluster
    lines = [("cluster.setup", line) for line in own.setup]
    lines += [(f"cluster.additional.{name}", f"--{name}={value}") for name, value in own.additional.items()]
    for key, line in lines if cluster.kind == "slurm" else ():
        masked = mask_text(line)
        hidden = line[len(masked.partition(MASK)[0]) :].lstrip("\"'")
        if masked != line and not hidden.startswith(("$", "`")):
            raise UsageError(
                f"{key} has a secret, {masked}, which would stand in submission.sh: set env.NAME=VALUE,"
                " which is written nowhere"
            )


def check_root(context: Context, cluster: Cluster) -> None:
    """Refuse another root for a job that plans its own nodes."""
    root = context.config.machine.root
    if cluster.kind == "slurm" and root != "/":
        raise UsageError(
            f"machine.root={root} is of this machine, and the job plans its own nodes: leave it out, or set"
            " cluster=local"
        )


def check_notify(context: Context) -> None:
    """Refuse addresses to which nothing can be posted, without showing them."""
    notify = context.config.notify
    for key, url in (("url", notify.url), ("ping_url", notify.ping_url)):
        if url is not None and not is_http(url):
            raise UsageError(f"notify.{key} is no address that begins with http:// or https://")
    if notify.ping_interval < 1:
        raise UsageError(f"notify.ping_interval={notify.ping_interval:g}: give at least 1 (seconds)")


def is_http(url: str) -> bool:
    """Tell whether a text is an address for HTTP that a request can be made to."""
    try:
        parts = urlsplit(url)
        is_whole = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False
    return is_whole and url.isprintable() and " " not in url


def check_watch(context: Context) -> None:
    """Refuse settings of `watch` that mean nothing."""
    watch = context.config.watch
    seconds = watch.hang_seconds
    is_number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
    if seconds != "auto" and not (is_number and 1 <= seconds < math.inf):
        raise UsageError(f"watch.hang_seconds={seconds}: give a number of seconds of at least 1, or auto")
    for key, value, least in (
        ("interval", watch.interval, MIN_INTERVAL),
        ("metrics_interval", watch.metrics_interval, 0),
    ):
        if not least <= value <= MAX_INTERVAL:
            raise UsageError(f"watch.{key}={value:g}: give seconds from {least:g} to {MAX_INTERVAL:g}")
    port = watch.prometheus_port
    if port is not None and not 0 <= port < 1 << 16:
        raise UsageError(f"watch.prometheus_port={port}: give a port from 1 to 65535, or 0 for any free one")
    if watch.textfile == "":
        raise UsageError("watch.textfile is empty: give a folder, or leave it out")
    limits = {
        "torchrun.max_restarts": context.config.torchrun.max_restarts,
        "restarts": context.config.restarts,
    }
    zero = next((name for name, number in limits.items() if number == 0), "")
    if watch.enabled and watch.on_hang == "restart" and zero:
        raise UsageError(
            f"watch.on_hang=restart with {zero}=0: nothing is started anew, give a number of at least 1, or"
            " leave it out for 3"
        )


def check_choice(key: str, value: str, choices: Sequence[str]) -> None:
    """Raise UsageError for a value that is not one of the choices."""
    if value not in choices:
        raise UsageError(f"{key}={value}: choose from {', '.join(choices)}")


def check_minimum(key: str, value: int, minimum: int) -> None:
    """Raise UsageError for a number that is too small."""
    if value < minimum:
        raise UsageError(f"{key}={value}: give a number of at least {minimum}")


PLAN_CHECKS = (
    check_output_files,
    check_choices,
    check_workers,
    check_gc,
    check_host,
    check_fit_values,
    check_preflight,
)
"""For a verb that plans a node; the planner checks what is its own."""
TOPO_CHECKS = (check_texts, check_choices, check_workers, check_gc, check_host)
"""For `launch topo`, which writes files."""
JOB_CHECKS = (
    check_texts,
    check_variables,
    check_choices,
    check_name,
    check_workers,
    check_progress,
    check_numbers,
    check_requeue,
    check_notify,
    check_watch,
    check_own_machine,
    check_gc,
    check_host,
    check_fit_values,
    check_preflight,
    check_placement,
    check_output_files,
)
"""For what runs a program."""
RUN_CHECKS = (*JOB_CHECKS, check_verb_keys)
"""For `launch` without a verb."""
TUNE_CHECKS = (check_tune, *JOB_CHECKS)
"""For `launch tune`."""
CLUSTER_CHECKS = (
    check_restarts,
    check_spares,
    check_node_order,
    check_container,
    check_times,
    check_ranks,
    check_script_secrets,
    check_root,
)
"""For what runs a program, once it is known where it runs."""
