"""The plan of a submitted job's nodes, if a snapshot says what they are."""

from dataclasses import replace

from launcher.config.request import load_snapshot, make_request
from launcher.config.settings import MachineConfig, Settings
from launcher.launch.job import JobSpec
from launcher.plan.model import Plan
from launcher.slurm.job_options import JobOptions
from launcher.slurm.notation import parse_gpus


def plan_snapshot(spec: JobSpec, chosen: JobOptions) -> Plan | None:
    """Return the plan of a node as `cluster.machine` or `machine` describes it; None if neither does."""
    from launcher.plan.planner import plan

    config = spec.config
    snapshot = config.cluster.machine or config.machine.snapshot
    if snapshot is None:
        return None
    there = describe_there(config, snapshot, count_gpus(chosen))
    machine = load_snapshot(snapshot)
    return plan(machine, make_request(there, spec.environ, machine))


def describe_there(config: Settings, snapshot: str, gpus: int | None) -> Settings:
    """Return the configuration of a node of a submitted job; `gpus` are those it asks for."""
    ranks = gpus if gpus and config.nproc_per_node in ("auto", "gpu") else config.nproc_per_node
    return replace(config, machine=MachineConfig("/", snapshot), nproc_per_node=ranks)


def count_gpus(chosen: JobOptions) -> int | None:
    """Return the GPUs of a node that the job asks for; None if it leaves that to SLURM."""
    value = next((option.value for option in chosen.options if option.name == "gpus-per-node"), None)
    return parse_gpus("cluster.gpus_per_node", value).count if value else None
