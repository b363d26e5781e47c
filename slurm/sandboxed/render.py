"""The files that SLURM reads: slurm.conf(5), gres.conf(5), cgroup.conf(5), slurmdbd.conf(5)."""

import socket

from sandboxed.cluster import Cluster

SLURM_CONF = """\
ClusterName=sandbox
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
SlurmUser={user}
SlurmdUser={user}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/slurmd-%n.log
SlurmdParameters=config_overrides
SchedulerParameters=bf_interval=1,sched_interval=1
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
DefMemPerCPU={memory_per_cpu}
MpiDefault=none
MailProg=/bin/true
ReturnToService=2
MessageTimeout=7
SlurmdTimeout={slurmd_timeout}
KillWait={kill_wait}
MinJobAge=3600
GresTypes=gpu
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
"""
TRACKING = """\
ProctrackType=proctrack/pgid
TaskPlugin=task/none
"""
CGROUPS = """\
ProctrackType=proctrack/cgroup
TaskPlugin=task/cgroup,task/affinity
JobAcctGatherType=jobacct_gather/cgroup
"""
CGROUP_CONF = """\
CgroupPlugin=cgroup/v1
CgroupMountpoint={mountpoint}
ConstrainCores=yes
ConstrainRAMSpace=yes
ConstrainSwapSpace={swap}
ConstrainDevices=yes
"""
PREEMPT_SIGNAL = "SlurmctldParameters=preempt_send_user_signal\n"
"""The name that every version knows; from 23.02 it is also PreemptParameters=send_user_signal."""
ACCOUNTING = """\
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=127.0.0.1
AccountingStoragePort={port}
AccountingStoragePass={folder}/munge.socket
"""
PARTITIONS = """\
PartitionName=main Nodes={nodes} Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime={grace_time}
PartitionName=urgent Nodes={nodes} MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
"""
DBD_CONF = """\
AuthType=auth/munge
AuthInfo={folder}/munge.socket
DbdHost=localhost
DbdAddr=127.0.0.1
DbdPort={port}
SlurmUser={user}
PidFile={folder}/slurmdbd.pid
LogFile={folder}/log/slurmdbd.log
StorageType=accounting_storage/mysql
StorageHost=localhost
StorageUser=slurm
StorageLoc=slurm
"""


def render_slurm_conf(cluster: Cluster, user: str) -> str:
    """Two partitions: `main`, and `urgent`, whose jobs requeue those of `main`.

    cred_expire is the time that a requeued job waits before it can start again, and MinJobAge the time that
    squeue and scontrol know an ended one.
    """
    host = socket.gethostname()
    parts = [
        SLURM_CONF.format(
            host=host,
            port=cluster.ports[0],
            folder=cluster.folder,
            user=user,
            kill_wait=cluster.kill_wait,
            slurmd_timeout=cluster.slurmd_timeout,
            memory_per_cpu=max(1, cluster.memory_mib // cluster.cpus),
        )
    ]
    parts.append(CGROUPS if cluster.cgroup else TRACKING)
    if cluster.preempt_signal:
        parts.append(PREEMPT_SIGNAL)
    if cluster.accounting:
        parts.append(ACCOUNTING.format(port=cluster.ports[1], folder=cluster.folder))
    if cluster.switches:
        parts.append("TopologyPlugin=topology/tree\n")
    for name, port in zip(cluster.names, cluster.ports[2:], strict=True):
        parts.append(render_node(cluster, name, host, port))
    parts.append(PARTITIONS.format(nodes=",".join(cluster.names), grace_time=cluster.grace_time))
    return "".join(parts)


def render_node(cluster: Cluster, name: str, host: str, port: int) -> str:
    """One node's line."""
    sockets, threads = (1, 1) if cluster.cpus % 4 else (2, 2)
    cores = cluster.cpus // sockets // threads
    gres = f" Gres=gpu:{cluster.gpus}" if cluster.gpus else ""
    return (
        f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} Sockets={sockets} "
        f"CoresPerSocket={cores} ThreadsPerCore={threads} RealMemory={cluster.memory_mib} "
        f"Feature=sandbox{gres}\n"
    )


def render_topology_conf(cluster: Cluster) -> str:
    """Switches s0, s1, … with the nodes in turn (n0 on s0, n1 on s1), below `top`: not SLURM's own order."""
    leaves = [f"s{number}" for number in range(cluster.switches)]
    lines = [
        f"SwitchName={leaf} Nodes={','.join(cluster.names[number :: cluster.switches])}\n"
        for number, leaf in enumerate(leaves)
    ]
    return "".join([*lines, f"SwitchName=top Switches={','.join(leaves)}\n"])


def render_gres_conf(cluster: Cluster) -> str:
    """The nodes' GPUs, which are device files that nothing is behind."""
    if not cluster.gpus:
        return ""
    files = f"{cluster.folder}/gpus/nvidia[0-{cluster.gpus - 1}]"
    return "".join(f"NodeName={name} Name=gpu File={files}\n" for name in cluster.names)


def render_cgroup_conf(cluster: Cluster, version: tuple[int, int], swap: bool) -> str:
    """Constrain memory, cores and devices; `swap` says whether the kernel can limit that as well.

    Without cgroups, keep slurmd from them, which it sets up at its start through systemd, also where nothing
    uses them: `disabled` came with 24.05; before, the plugin for version 1 does nothing until it is used.
    """
    if cluster.cgroup:
        return CGROUP_CONF.format(mountpoint=cluster.cgroups, swap="yes" if swap else "no")
    return f"CgroupPlugin={'disabled' if version >= (24, 5) else 'cgroup/v1'}\n"


def render_dbd_conf(cluster: Cluster, user: str) -> str:
    """The accounting daemon's; its database is reached by a socket in the folder, the user's alone."""
    return DBD_CONF.format(folder=cluster.folder, port=cluster.ports[1], user=user)
