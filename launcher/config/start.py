"""How a job starts: on which nodes, what starts its ranks there, and what it asks of a node."""

import re
import shutil
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from launcher.config.settings import SLURM_KINDS, MachineConfig, Settings, TorchrunConfig, refuse
from launcher.errors import MachineError, UsageError
from launcher.fields import show_value
from launcher.files import LARGEST, read_input
from launcher.plan.model import MAX_RANKS, Machine, Plan, Request, parse_machine
from launcher.plan.variables import HONOURED, VISIBLE_DEVICES, read_host
from launcher.protocol import LAUNCH_NIC, find_user_set
from launcher.runs.secrets import mask_variables

ENDPOINT = re.compile(r"(?P<host>\[[\w.:%-]+\]|[\w.:-]+):(?P<port>[0-9]{1,5})")
"""torchrun reads the last number of `::1:29500` as the port too."""
FIRST_SPECIAL_STEP = 0xFFFFFFF0
"""SLURM's batch script, the shell of `salloc` and such have step numbers from here on (slurm.h)."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """The chosen way to start, and why."""

    kind: str
    why: str
    min_nodes: int
    max_nodes: int
    endpoint: str = ""
    """HOST:PORT of the rendezvous; port 0 is any free one."""
    is_host: bool = False
    """This node serves the rendezvous. Said outright, since torchrun's own guess compares host names."""


def choose_cluster(config: Settings, environ: Mapping[str, str]) -> Cluster:
    """Decide where a job runs; raises UsageError, or MachineError if that cannot be had here."""
    kind, nodes, rank, endpoint = config.cluster.kind, config.nodes, config.node_rank, config.rdzv_endpoint
    kind, why = guess_kind(nodes, environ) if kind == "auto" else (kind, f"cluster={kind}")
    if kind == "allocation":
        return join_allocation(why, nodes, environ, config.cluster.spares)
    low, high = parse_nodes(nodes)
    if kind == "manual":
        if rank is None or not 0 <= rank < high:
            raise refuse("manual_rank", rank=rank, low=low, high=high, last=high - 1)
        if not endpoint or (port := parse_endpoint(endpoint)[1]) == 0:
            raise refuse("manual_endpoint", endpoint=endpoint)
        if rank == 0:  # which serves the rendezvous
            check_port_free(port)
        return Cluster("manual", f"node {rank}", low, high, endpoint, is_host=rank == 0)
    if rank is not None and "PET_NODE_RANK" not in environ:
        raise UsageError(f"node_rank={rank} goes with cluster=manual: add that, or leave node_rank out")
    if kind == "slurm":
        return Cluster("slurm", why, low, high)
    if low > 1 or (high > 1 and why == "cluster=local"):
        raise refuse("one_machine", MachineError, nodes=nodes)
    if endpoint:
        check_port_free(parse_endpoint(endpoint)[1])
    return Cluster("local", why, low, min(high, 1), endpoint or "localhost:0", is_host=True)


def guess_kind(nodes: object, environ: Mapping[str, str]) -> tuple[str, str]:
    """Choose for `cluster=auto`: the allocation that this is in, SLURM for several nodes, else here."""
    low, _ = parse_nodes(nodes)
    job = environ.get("SLURM_JOB_ID")
    shown = "one node" if nodes == "auto" else f"nodes={nodes}"
    if job and is_step_task(environ):
        step, tasks = f"{job}.{environ['SLURM_STEP_ID']}", environ.get("SLURM_STEP_NUM_TASKS", "1")
        more = f", which has {tasks}: each starts a job of its own, run launch without srun"
        return "local", f"{shown}, a task of SLURM step {step}{'' if tasks == '1' else more}"
    if job and shutil.which("srun", path=environ.get("PATH")):
        return "allocation", f"SLURM job {job}"
    if job:
        return "local", f"{shown}, on this node of SLURM job {job}, and no srun on PATH"
    if low > 1 and shutil.which("sbatch", path=environ.get("PATH")):
        return "slurm", f"nodes={nodes}"
    return "local", shown


def is_step_task(environ: Mapping[str, str]) -> bool:
    """Tell whether this process is a task of srun's, rather than a batch script or salloc's shell."""
    step = environ.get("SLURM_STEP_ID", "")
    return step.isdecimal() and int(step) < FIRST_SPECIAL_STEP


def join_allocation(why: str, nodes: object, environ: Mapping[str, str], spares: int) -> Cluster:
    """Return a cluster of the nodes of the SLURM job around this; raises MachineError if there is none.

    With `nodes=auto` all nodes but the spare ones have ranks.
    """
    if "SLURM_JOB_ID" not in environ:
        raise refuse("no_allocation", MachineError)
    check_command("srun", why, environ)
    have = int(environ.get("SLURM_JOB_NUM_NODES") or environ.get("SLURM_NNODES") or 1)
    low, high = (max(have - spares, 1),) * 2 if nodes == "auto" else parse_nodes(nodes)
    if low > have or (spares and high + spares > have):
        job = environ["SLURM_JOB_ID"]
        raise refuse("small_allocation", MachineError, nodes=nodes, spares=spares, job=job, have=have)
    return Cluster("allocation", why, low, min(high, have))


def check_command(name: str, why: str, environ: Mapping[str, str]) -> None:
    """Raise MachineError if one of SLURM's commands is not there."""
    if not shutil.which(name, path=environ.get("PATH")):
        raise refuse("no_slurm", MachineError, why=why, name=name)


def pet_overrides(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the overrides that torchrun's `PET_*` variables stand for, as the Kubeflow trainer sets them.

    Those that torchrun reads by itself (`PET_RDZV_BACKEND`, `PET_MAX_RESTARTS` and so on) are left to it.
    """
    nodes = environ.get("PET_NNODES", "")
    found = {"nodes": nodes or None, "nproc_per_node": environ.get("PET_NPROC_PER_NODE") or None}
    if nodes.rpartition(":")[2] not in ("", "1"):
        address, port = environ.get("PET_MASTER_ADDR"), environ.get("PET_MASTER_PORT", "29500")
        endpoint = environ.get("PET_RDZV_ENDPOINT") or (f"{address}:{port}" if address else None)
        found |= {"cluster": "manual", "node_rank": environ.get("PET_NODE_RANK", "0")}
        found["rdzv_endpoint"] = endpoint
    return {key: value for key, value in found.items() if value is not None}


def parse_nodes(text: object) -> tuple[int, int]:
    """Read `nodes`: a number, or `min:max`; `auto` is one where nothing else says more. Raises UsageError."""
    match = re.fullmatch(r"([0-9]{1,7})(?::([0-9]{1,7}))?", "1" if text == "auto" else str(text))
    low, high = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= low <= high:
        raise UsageError(f"nodes={show_value(text)}: give a number of at least 1, or min:max as in nodes=2:4")
    return low, high


def parse_endpoint(text: str) -> tuple[str, int]:
    """Read HOST:PORT, also `[::1]:29500`; raises UsageError."""
    match = ENDPOINT.fullmatch(text)
    if not match or not int(match["port"]) < 1 << 16:
        raise refuse("endpoint", text=text)
    return match["host"].strip("[]"), int(match["port"])


def check_port_free(port: int) -> None:
    """Raise MachineError if another process listens on a port that this host is to serve.

    torchrun itself would take that for a rendezvous that is already up, and wait for it until its timeout.
    """
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    try:
        socket.create_server(("", port), family=family, dualstack_ipv6=both).close()
    except OSError as error:
        raise refuse("port", MachineError, port=port, error=error) from None


CHANNEL = ("input", "i", "error", "e")
"""Options of srun that lead the lines elsewhere by which the nodes agree on their start."""
SHARED = ("shutdown_timeout",)
"""Options of `torchrun` that `launch` itself has a use for."""
PET_TAKEN = (
    *("PET_NNODES", "PET_NPROC_PER_NODE", "PET_NODE_RANK"),
    *("PET_MODULE", "PET_RUN_PATH", "PET_NO_PYTHON", "PET_STANDALONE"),
)
"""Variables for torchrun that `launch` reads itself, or decides; the others ask torchrun for something."""
TIMER, HEALTH = ("TORCHELASTIC_ENABLE_FILE_TIMER", "1"), "TORCHELASTIC_HEALTH_CHECK_PORT"
"""Variables for services of torchrun's agent: a watchdog of the ranks, a port that tells of its health."""


@dataclass(frozen=True, slots=True)
class AgentChoice:
    """What starts the ranks, and why."""

    kind: str
    """`direct` or `torchrun`."""
    why: str


def choose_agent(config: Settings, cluster: Cluster, environ: Mapping[str, str]) -> AgentChoice:
    """Decide what starts a job's ranks; raises UsageError if that cannot do what else is asked for."""
    if config.agent == "torchrun":
        return AgentChoice("torchrun", "agent=torchrun")
    asked = "agent=direct" if config.agent == "direct" else ""
    if config.cluster.spares:
        asked = asked or f"cluster.spares={config.cluster.spares}"
    needed = find_torchrun_need(config, cluster, environ)
    if asked and needed:
        raise refuse("needs_torchrun", asked=asked, needed=needed)
    if needed:
        return AgentChoice("torchrun", needed)
    return AgentChoice("direct", asked or "a fixed number of nodes")


def find_torchrun_need(config: Settings, cluster: Cluster, environ: Mapping[str, str]) -> str:
    """Return the setting for which the ranks need torchrun's agent; empty if there is none."""
    if cluster.kind == "manual":
        return "cluster=manual"
    if cluster.min_nodes < cluster.max_nodes:
        return f"nodes={cluster.min_nodes}:{cluster.max_nodes}"
    leading = [name for name in config.cluster.srun if name in CHANNEL]
    if leading and cluster.kind in SLURM_KINDS:
        return f"cluster.srun.{leading[0]}"
    defaults = asdict(TorchrunConfig())
    for name, value in asdict(config.torchrun).items():
        if name not in SHARED and value != defaults[name]:
            return f"torchrun.{name}={value}"
    for name, value in environ.items():
        is_option = name.startswith("PET_") and name not in PET_TAKEN
        if value and (is_option or name == HEALTH or (name, value) == TIMER):
            return f"{name}={value}"
    return ""


DEVICE_VARIABLES = (*VISIBLE_DEVICES, LAUNCH_NIC, "NCCL_IB_HCA")
"""Variables that name devices of this machine, which a snapshot does not have."""
LIBRARY_PREFIXES = (
    *("CUDA_", "GLOO_", "GOMP_", "HSA_", "KMP_", "MALLOC_", "MKL_", "NCCL_", "OMP_", "OPENBLAS_", "PYTORCH_"),
    *("TORCH_", "TORCHINDUCTOR_", "TRITON_", "UCX_"),
)
"""Beginnings of the variables that set how PyTorch and the libraries below it behave."""
LOCATION_SUFFIXES = ("_VERSION", "_HOME", "_ROOT", "_ARCH_LIST", "_PATH")
"""Endings of the variables by which images and modules give the paths of libraries."""


def plan_node(config: Settings, environ: Mapping[str, str], caches: str = "") -> Plan:
    """Plan this node, or the machine that the configuration names; raises UsageError or MachineError.

    `environ` is the user's environment with `env.*` over it. `caches` is a folder on the node for the
    compilers' caches, if they are not to have their own.
    """
    from launcher.plan.planner import plan
    from launcher.probe.machine import locate_malloc

    machine, library = read_machine(config.machine), None
    if config.machine.snapshot:
        environ = {k: v for k, v in environ.items() if k not in DEVICE_VARIABLES or k in config.env}
    else:
        library = locate_malloc(read_host(config.allocator), environ, config.machine.root)
    names = (
        name
        for name in sorted(environ)
        if name.startswith(LIBRARY_PREFIXES) and not name.endswith(LOCATION_SUFFIXES)
    )
    libraries = mask_variables({name: environ[name] for name in names if name not in HONOURED})
    request = Request(
        nproc_per_node=parse_nproc(config.nproc_per_node, len(machine.allowed_cpus)),
        devices=config.devices,
        binding=config.binding,
        dataloader=config.dataloader,
        gc=config.gc,
        allocator=config.allocator,
        host_library=library,
        caches=caches,
        environ=find_user_set(environ, HONOURED) | libraries,
        configured=mask_variables(config.env),
    )
    return plan(machine, request)


def read_machine(config: MachineConfig) -> Machine:
    """Return the machine below `machine.root`, or what `launch topo save=FILE` or `launch plan format=json`
    wrote; raises UsageError or MachineError.
    """
    if (path := config.snapshot) is None:
        from launcher.probe.machine import probe

        return probe(config.root)
    if config.root != "/":
        raise refuse("two_machines", path=path, root=config.root)
    try:
        return parse_machine(read_input(path, LARGEST).decode("utf-8-sig"))
    except UsageError as error:
        raise UsageError(f"machine.snapshot={path}: {error}") from None
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", "") or error
        raise refuse("snapshot_file", path=path, why=why) from None


def parse_nproc(text: object, cpus: int) -> int | None:
    """Read `nproc_per_node`, also torchrun's words for it; None is `auto`. Raises UsageError."""
    if text in ("auto", "gpu"):
        return None
    if text == "cpu":
        return cpus
    number = int(str(text)) if re.fullmatch("[0-9]{1,9}", str(text)) else 0
    if not 1 <= number <= MAX_RANKS:
        raise refuse("nproc", text=show_value(text), most=MAX_RANKS)
    return number
