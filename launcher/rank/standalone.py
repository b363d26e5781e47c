"""Plans the node for a `launch-rank` without a plan: every rank of the node comes to the same one.

Every rank's start pays for this, so imports count.
"""

from collections.abc import Mapping
from dataclasses import replace

from launcher.codec import to_plain
from launcher.cpulist import format_cpulist
from launcher.errors import LaunchError, UsageError
from launcher.plan.model import (
    MAX_RANKS,
    BindingConfig,
    Gpu,
    Machine,
    Plan,
    PlanWarning,
    RankPlan,
    Request,
    warn,
)
from launcher.plan.planner import plan
from launcher.plan.topology import build_topology
from launcher.plan.variables import (
    EXPANDABLE,
    HONOURED,
    VISIBLE_DEVICES,
    find_conflicts,
    merge_settings,
    read_host,
    read_settings,
)
from launcher.probe.machine import locate_malloc, probe
from launcher.protocol import LAUNCH_BINDING, find_user_set
from launcher.rank.affinity import find_node_cpus
from launcher.rank.entry import Identity, PlacementError, PlanEntry, read_number, select_entry

ALLOCATOR = read_settings(Request().allocator)
"""The allocator's settings if nobody has said which."""


def make_entry(identity: Identity, environ: dict[str, str], argv: list[str]) -> PlanEntry:
    """Plan this node, as every other rank on it does, and return this rank's entry; raises PlacementError.

    `argv` is the program's.
    """
    local_rank, ranks = identity.local_rank, identity.local_world_size
    own_cpus, cpus, problem = find_node_cpus(identity, environ)
    is_alone = bool(problem)
    binding = environ.get(LAUNCH_BINDING) or BindingConfig().policy
    if binding == "none":  # whoever bound this rank meant it
        is_alone = is_alone or cpus != own_cpus
        cpus, problem = own_cpus, ""
    try:
        request, warnings = Request(), list[PlanWarning]()
        # The allocator's settings that do not go with the program are left out, as `launch` does.
        conflicts = [*find_conflicts(merge_settings(ALLOCATOR, environ), argv, environ, contained=False)]
        if conflicts and EXPANDABLE not in merge_settings({}, environ):
            warnings = [warn("expandable", conflict=what) for what, _ in conflicts]
            request = replace(request, allocator={})
        request = replace(
            request,
            binding=BindingConfig(binding),
            # A rank that keeps its CPUs need not know how many it has beside it.
            nproc_per_node=ranks or (local_rank + 1 if is_alone else None),
            environ=find_user_set(environ, HONOURED),
            host_library=locate_malloc(read_host(request.allocator), environ, "/"),
        )
        if ranks and ranks > MAX_RANKS:
            raise UsageError(
                f"this node is said to have {ranks} ranks, and the most is {MAX_RANKS}: "
                "correct LOCAL_WORLD_SIZE, or the like of the launcher that started them"
            )
        # Only NVML knows MIG instances: if one is named, NVML is asked from the start.
        machine = probe("/", quick="MIG-" not in environ.get("CUDA_VISIBLE_DEVICES", ""))
        # The affinity is the kernel's own word, and needs no /proc.
        allowed = cpus & {cpu.id for cpu in machine.cpus}
        machine = replace(machine, allowed_cpus=allowed or machine.allowed_cpus)
        made = plan_rank(machine, request, local_rank, environ, alone=is_alone)
    except LaunchError as error:
        raise PlacementError(str(error)) from None
    entry = select_entry(identity, {"ranks": to_plain(made.ranks)}, "made here")
    entry.notes += [f"binding {binding}"] if binding != "exclusive" else []
    if cpus != own_cpus:
        entry.notes.append(f"bound to {format_cpulist(own_cpus)} before")
    entry.problems += [problem] if problem else []
    entry.advice += map(str, (*made.warnings, *warnings)) if local_rank == 0 else ()
    return entry


def plan_rank(
    machine: Machine, request: Request, local_rank: int, environ: Mapping[str, str], *, alone: bool
) -> Plan:
    """Plan the node, or this rank's part if it cannot know its peers' CPUs or does not see their GPUs."""
    made = plan(machine, request)
    if local_rank >= len(made.ranks):
        return made
    warnings: tuple[PlanWarning, ...] = ()
    gpu = made.ranks[local_rank].gpu
    # What --gpus-per-task and --gpu-bind of SLURM hide from one another's tasks. What SLURM has hidden from
    # an agent that has started the ranks is not the job's.
    is_task = "SLURM_STEP_ID" in environ and "TORCHELASTIC_RUN_ID" not in environ
    total, count = read_number(environ, "SLURM_GPUS_ON_NODE") if is_task else 0, len(made.ranks)
    if gpu and len({rank.gpu for rank in made.ranks}) < min(total, count):
        # SLURM_STEP_GPUS holds the task's own by SLURM's numbers for the node (minor numbers of the device
        # files) even if a device cgroup makes CUDA_VISIBLE_DEVICES count from 0 again. Tried with 22.05.
        position = read_number(environ, "SLURM_STEP_GPUS", total)
        made = plan_own_gpu(machine, request, local_rank, gpu, position if position < total else None)
        warnings = (warn("hidden_gpus", ranks=count, gpus=total),)
    if alone:
        made = plan_own_cpus(machine, request, made.ranks[local_rank])
    return replace(made, warnings=(*made.warnings, *warnings))


def plan_own_gpu(machine: Machine, request: Request, local_rank: int, own: Gpu, position: int | None) -> Plan:
    """Plan a rank that sees its own GPU alone; `position` is that GPU's number on the node, if known.

    With a position, the rank takes the placement of its GPU, whatever the order of ranks. Else every rank
    takes the cores that it would have if all GPUs were next to its own: a small share, but no other's. If
    there are fewer cores than ranks, they share those.
    """
    count = request.nproc_per_node or 1
    alike = forget_devices(request)
    if position is not None and count == len(machine.gpus):
        made = plan(machine, alike)
        mine = made.ranks[position]
    else:
        topology = build_topology(machine)
        cores = sum(len(topology.cores[node]) for node in topology.find_local_nodes(own))
        if alike.binding.policy == "exclusive" and cores < count:
            alike = replace(alike, binding=BindingConfig("numa"))
        made = plan(replace(machine, gpus=tuple(replace(own, index=at) for at in range(count))), alike)
        mine = replace(made.ranks[local_rank], gpu=own)
    ranks = (*made.ranks[:local_rank], replace(mine, local_rank=local_rank), *made.ranks[local_rank + 1 :])
    return replace(made, ranks=ranks)


def plan_own_cpus(machine: Machine, request: Request, rank: RankPlan) -> Plan:
    """Plan a rank on all of its own CPUs: its memory, threads and workers; GPU and NIC stay."""
    nodes = {cpu.node for cpu in machine.cpus if cpu.id in machine.allowed_cpus}
    binding = "none" if len(nodes) > 1 or request.binding.policy == "none" else "exclusive"
    island = replace(
        machine,
        gpus=(rank.gpu,) if rank.gpu else (),
        nics=tuple(nic for nic in machine.nics if nic.name == rank.nic),
    )
    own = plan(
        island, replace(forget_devices(request), nproc_per_node=1, binding=BindingConfig(binding))
    ).ranks[0]
    cpus = machine.allowed_cpus
    shown = {name: value for name, value in rank.env if name in VISIBLE_DEVICES}
    env = tuple(sorted({**dict(own.env), **shown}.items()))
    mine = replace(own, local_rank=rank.local_rank, gpu=rank.gpu, cpus=cpus, worker_cpus=cpus, env=env)
    return Plan(machine, (mine,), tuple(warn("machine", text=text) for text in machine.warnings))


def forget_devices(request: Request) -> Request:
    """Return the request without the variables that choose devices: these have done their work."""
    kept = {name: value for name, value in request.environ.items() if name not in VISIBLE_DEVICES}
    return replace(request, environ=kept)
