"""Judges a job's memory before its submission, if what the nodes have is known; else its first node does."""

import math
from dataclasses import dataclass, replace

from launcher.config.request import load_snapshot, make_request
from launcher.config.settings import MachineConfig, Settings
from launcher.config.training import (
    find_fit_device,
    make_request_on,
    settle_job,
    settle_planned,
    settle_training,
)
from launcher.fit.gpus import GPU_TYPES, GpuType, find_gpu, split_words
from launcher.fit.training import Device, NodeResources, Training
from launcher.launch.job import JobSpec
from launcher.plan.model import Plan
from launcher.plan.planner import plan
from launcher.slurm.job_options import JobOptions, read_nproc
from launcher.slurm.notation import parse_gpus


def plan_snapshot(spec: JobSpec, chosen: JobOptions) -> Plan | None:
    """Return the plan of a node as `cluster.machine` or `machine` describes it; None if neither does."""
    config = spec.config
    snapshot = config.cluster.machine or config.machine.snapshot
    if snapshot is None:
        return None
    ranks, gpus = config.nproc_per_node, count_gpus(chosen)
    if gpus and ranks in ("auto", "gpu"):
        ranks = gpus
    there = replace(config, machine=MachineConfig("/", snapshot), nproc_per_node=ranks)
    machine = load_snapshot(snapshot)
    return plan(machine, make_request(there, spec.environ, machine))


def count_gpus(chosen: JobOptions) -> int | None:
    """Return the GPUs of a node that the job asks for; None if it leaves that to SLURM."""
    value = next((option.value for option in chosen.options if option.name == "gpus-per-node"), None)
    return parse_gpus("cluster.gpus_per_node", value).count if value else None


def judge_submission(spec: JobSpec, chosen: JobOptions) -> JobSpec:
    """Judge a job that is to be submitted, and return it without the model that then needs no judgement.

    `cluster.machine` says what the nodes have, or sinfo does by the types of their GPUs. Raises
    MachineError if the job is refused, UsageError for a snapshot that cannot be read.
    """
    if spec.fit_model is None:
        return spec
    if plan := plan_snapshot(spec, chosen):
        return judge_plan(spec, plan, spec.cluster.min_nodes)
    model, config = spec.fit_model, spec.config
    site = describe_site(config, chosen)
    if site is None:
        return spec

    def make_request_there(config: Settings) -> Training:
        device = find_fit_device(config.fit, [], 0) if config.fit.gpu else site.device
        shape = (site.ranks, spec.cluster.min_nodes)
        return make_request_on(config, model, device, site.node, shape=shape, is_bundled=spec.is_bundled)

    settled = settle_training(make_request_there, config, is_bundled=spec.is_bundled)
    return replace(settle_job(spec, settled), fit_model=None)


def judge_plan(spec: JobSpec, plan: Plan, nodes: int) -> JobSpec:
    """Judge a job whose nodes have this plan, and return it without the model that needs no more judgement.

    Raises MachineError if it cannot fit.
    """
    settled = settle_planned(
        spec.config,
        plan,
        spec.fit_model,
        nodes=nodes,
        is_bundled=spec.is_bundled,
        environ=spec.environ,
    )
    return replace(settle_job(spec, settled), fit_model=None)


@dataclass(frozen=True, slots=True)
class Site:
    """What the nodes of a partition have, as far as a job's memory depends on it."""

    device: Device
    node: NodeResources
    ranks: int
    """Of a node."""


def describe_site(config: Settings, chosen: JobOptions) -> Site | None:
    """Return what a job gets on each node by sinfo; None if the types of the GPUs do not tell.

    Of several types that the job may get, the one with most memory counts: nothing that could run is refused.
    """
    gpus = count_gpus(chosen) or 0
    fitting = [kind for kind in chosen.kinds if gpus and kind.count_gpus() >= gpus]
    types = [find_largest_gpu(name) for kind in fitting for name, _ in kind.gpus]
    known = [found for found in types if found]
    if not known or len(known) < len(types):
        return None
    largest = max(known, key=lambda found: found.memory_mib)
    ranks = read_nproc(config.nproc_per_node) or gpus
    kind = max(fitting, key=lambda kind: kind.memory_mib)
    share = gpus / kind.count_gpus()
    node = NodeResources(
        cores=max(1, math.floor(kind.cores * share)),
        memory_kib=math.floor(kind.memory_mib * share) << 10,
        num_workers=config.dataloader.num_workers,
        worker_gib=float(config.dataloader.worker_gib),
    )
    device = Device(largest.name, largest.memory_mib, nvlink_domain=largest.nvlink_domain)
    return Site(device, node, ranks)


def find_largest_gpu(name: str | None) -> GpuType | None:
    """Return the GPU that SLURM's type names, of several the largest: `h100` may be an H100 NVL."""
    if not name:
        return None
    words = split_words(name)
    found = [find_gpu(name), *(gpu for gpu in GPU_TYPES if words and words <= set(gpu.name.split()))]
    return max(filter(None, found), key=lambda one: one.memory_mib, default=None)
