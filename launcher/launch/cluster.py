"""Where a job runs: on this machine, or as one node of a job that is started by hand on each."""

from collections.abc import Mapping
from dataclasses import dataclass

from launcher.errors import MachineError, UsageError
from launcher.launch.torchrun import check_port_free, parse_endpoint, parse_nodes

KINDS = ("auto", "local", "manual")


@dataclass(frozen=True, slots=True)
class Cluster:
    """The chosen way to start, and why."""

    kind: str
    why: str
    min_nodes: int
    max_nodes: int
    endpoint: str
    """HOST:PORT of the rendezvous; port 0 is any free one."""
    is_host: bool
    """This node serves the rendezvous. Said outright, since torchrun's own guess compares host names."""


def choose_cluster(
    kind: str, nodes: object, node_rank: int | None, endpoint: str | None, environ: Mapping[str, str]
) -> Cluster:
    """Decide where the job runs; raises UsageError, or MachineError where that cannot be had here."""
    if kind not in KINDS:
        raise UsageError(f"cluster.kind={kind}: choose from {', '.join(KINDS)}")
    low, high = parse_nodes(nodes)
    if kind == "manual":
        return join_manual(low, high, node_rank, endpoint)
    if node_rank is not None and "PET_NODE_RANK" not in environ:
        raise UsageError(f"node_rank={node_rank} goes with cluster=manual: add that, or leave node_rank out")
    if low > 1 or (high > 1 and kind == "local"):
        raise MachineError(explain_nodes(kind, nodes, environ))
    why = f"nodes={nodes}" if kind == "auto" else "cluster=local"
    if kind == "auto" and "SLURM_JOB_ID" in environ:
        why += f", on this node of SLURM job {environ['SLURM_JOB_ID']}"
    if endpoint:
        check_port_free(parse_endpoint(endpoint)[1])
    return Cluster("local", why, low, min(high, 1), endpoint or "localhost:0", is_host=True)


def join_manual(low: int, high: int, node_rank: int | None, endpoint: str | None) -> Cluster:
    """Start one node of a job by hand; the node with rank 0 serves the rendezvous."""
    if node_rank is None or not 0 <= node_rank < high:
        raise UsageError(
            f"node_rank={node_rank}: cluster=manual with nodes={low}:{high} needs this node's number,"
            f" node_rank=0 to node_rank={high - 1}"
        )
    if not endpoint:
        raise UsageError(
            "cluster=manual needs rdzv_endpoint=HOST:PORT, an address of the node with node_rank=0"
        )
    _, port = parse_endpoint(endpoint)
    if port == 0:
        raise UsageError(f"rdzv_endpoint={endpoint}: the other nodes need to know the port, give one above 0")
    if node_rank == 0:
        check_port_free(port)
    return Cluster("manual", f"node {node_rank}", low, high, endpoint, is_host=node_rank == 0)


def explain_nodes(kind: str, nodes: object, environ: Mapping[str, str]) -> str:
    """Say why several nodes cannot be had, and how to get them."""
    by_hand = "cluster=manual node_rank=N rdzv_endpoint=HOST:PORT"
    if "SLURM_JOB_ID" in environ:
        each = by_hand.replace("=N ", "=$SLURM_NODEID ")
        return (
            f"nodes={nodes} on {kind}: this version does not start SLURM steps by itself; in this allocation,"
            f" run `srun --nodes={nodes} --ntasks-per-node=1 bash -c 'launch nodes={nodes} {each} …'`"
        )
    return (
        f"nodes={nodes} on {kind}: this is one machine, and this version does not submit to SLURM;"
        f" run launch on every node with {by_hand}, or set nodes=1"
    )


def pet_overrides(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the overrides that torchrun's `PET_*` variables stand for, as the Kubeflow trainer sets them.

    Those that torchrun reads by itself (`PET_RDZV_BACKEND`, `PET_MAX_RESTARTS` and so on) are left to it.
    """
    found = {}
    nodes = environ.get("PET_NNODES", "")
    if nodes:
        found["nodes"] = nodes
    if environ.get("PET_NPROC_PER_NODE"):
        found["nproc_per_node"] = environ["PET_NPROC_PER_NODE"]
    if nodes.rpartition(":")[2] in ("", "1"):
        return found
    found["cluster"] = "manual"
    found["node_rank"] = environ.get("PET_NODE_RANK", "0")
    address, port = environ.get("PET_MASTER_ADDR"), environ.get("PET_MASTER_PORT", "29500")
    endpoint = environ.get("PET_RDZV_ENDPOINT") or (f"{address}:{port}" if address else "")
    if endpoint:
        found["rdzv_endpoint"] = endpoint
    return found
