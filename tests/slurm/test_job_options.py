"""What is said to a refusal of sbatch's, by its words alone; tests/slurm has the real ones."""

from pathlib import Path

import pytest

from launcher.slurm.job_options import explain_refusal, is_slurm_away
from launcher.slurm.resources import NodeKind
from launcher.slurm.sbatch_options import Option

OPTIONS = tuple(
    Option(name, value, f"cluster.{name.replace('-', '_')}")
    for name, value in {
        "partition": "long",
        "account": "me",
        "qos": "high",
        "time": "99-0",
        "nodes": "4",
        "gpus-per-node": "a100:4",
        "cpus-per-task": "64",
        "mem": "900G",
        "constraint": "ib",
        "nodelist": "n7",
        "exclude": "n8",
        "reservation": "r",
        "dependency": "afterok:1",
        "array": "0-9",
    }.items()
)
SMALL = NodeKind("main", True, 3, 16, 8, 64000, (("a100", 2),), "idle", 60.0, ("ib", "fast"))
LARGE = NodeKind("main", True, 1, 64, 32, 256000, (), "mixed", 60.0, ("ib",))
KINDS = (SMALL, LARGE, SMALL)
NODES = "the partition's nodes: 6 with 16 CPUs, 64000 MiB, gpu:a100:2; 1 with 64 CPUs, 256000 MiB, no GPUs"


@pytest.fixture(autouse=True)
def nothing_to_ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for commands, the only one on PATH."""
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path


def write_command(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / name).chmod(0o755)


@pytest.mark.parametrize(
    ("complaint", "told"),
    [
        ("Invalid partition name specified",
         " (cluster.partition: --partition=long): choose cluster.partition from main, urgent"),
        ("Requested time limit is invalid (missing or exceeds some limit)", " (cluster.time: --time=99-0): "
         "change cluster.time, or leave it out"),
        ("Requested reservation is invalid",
         " (cluster.reservation: --reservation=r): change cluster.reservation, or leave it out"),
        ("Invalid feature specification",
         " (cluster.constraint: --constraint=ib): the partition's nodes have the features fast, ib"),
        ("Invalid node name specified", " (cluster.nodelist: --nodelist=n7, cluster.exclude: --exclude=n8): "
         "change cluster.nodelist or cluster.exclude, or leave it out"),
        ("Job dependency problem",
         " (cluster.dependency: --dependency=afterok:1): change cluster.dependency, or leave it out"),
        ("Memory required by task is not available", f" (cluster.mem: --mem=900G): {NODES}"),
        ("Requested node count exceeds it: CPU count per node can not be satisfied",
         f" (cluster.cpus_per_task: --cpus-per-task=64): {NODES}"),
        ("Invalid generic resource (gres) specification",
         f" (cluster.gpus_per_node: --gpus-per-node=a100:4): {NODES}"),
        ("Invalid number of nodes (-N 4-2)", f" (cluster.nodes: --nodes=4, cluster.nodelist: --nodelist=n7): "
         f"{NODES}"),
        ("Node count specification invalid", f" (cluster.nodes: --nodes=4): {NODES}"),
        ("sbatch: unrecognized option '--mem'", f" (cluster.mem: --mem=900G): {NODES}"),
        ("invalid --no-such specification", ": change --no-such, or leave it out"),
        ("Access/permission denied", ": change cluster.* accordingly; dry_run=true shows the script"),
    ],
)  # fmt: skip
def test_the_values_and_what_there_is(complaint: str, told: str) -> None:
    assert str(explain_refusal(complaint, OPTIONS, ("main", "urgent"), KINDS)) == complaint + told


def test_the_configuration_that_no_node_has() -> None:
    error = str(explain_refusal("Requested node configuration is not available", OPTIONS, (), KINDS))
    for name in ("nodes", "gpus-per-node", "cpus-per-task", "mem", "constraint", "nodelist", "exclude"):
        assert f": --{name}=" in error
    assert "--time" not in error and error.endswith(NODES)


@pytest.mark.parametrize(
    ("complaint", "fix"),
    [
        ("Invalid partition name specified", "change cluster.partition, or leave it out"),
        ("Invalid feature specification", "change cluster.constraint, or leave it out"),
        ("Memory required by task is not available", "change cluster.mem, or leave it out"),
    ],
)
def test_where_nothing_is_known_of_the_cluster(complaint: str, fix: str) -> None:
    assert str(explain_refusal(complaint, OPTIONS, (), ())).endswith(f": {fix}")


def test_nodes_without_features() -> None:
    plain = NodeKind("main", True, 1, 4, 2, 1000, ((None, 1),), "idle", 60.0, ())
    error = str(explain_refusal("Invalid feature specification", OPTIONS, (), (plain,)))
    assert error.endswith("the partition's nodes have no features: leave cluster.constraint out")
    error = str(explain_refusal("Memory required by task is not available", OPTIONS, (), (plain,)))
    assert error.endswith("the partition's nodes: 1 with 4 CPUs, 1000 MiB, gpu:1")


@pytest.mark.parametrize("complaint", ["Invalid account or account/partition combination", "Invalid qos"])
def test_accounts_that_accounting_knows(complaint: str, nothing_to_ask: Path) -> None:
    error = str(explain_refusal(complaint, OPTIONS, (), ()))
    assert error.endswith("to what you may use (`sacctmgr show assoc user=$USER`)")
    write_command(nothing_to_ask, "sacctmgr", "printf 'ours||normal\\nlab|gpu|\\nlab|gpu|\\n'")
    error = str(explain_refusal(complaint, OPTIONS, (), ()))
    assert error.endswith(": yours are lab in partition gpu; ours with QOS normal")
    write_command(nothing_to_ask, "sacctmgr", "")
    assert "sacctmgr show assoc" in str(explain_refusal(complaint, OPTIONS, (), ()))


def test_an_array_that_is_too_large(nothing_to_ask: Path) -> None:
    complaint = "Invalid job array specification"
    error = str(explain_refusal(complaint, OPTIONS, (), ()))
    assert error.endswith("make the sweep smaller: SLURM's limit is MaxArraySize (`scontrol show config`)")
    lines = "JobCompType = x\\nMaxArraySize            = 1001\\n"
    write_command(nothing_to_ask, "scontrol", f"printf '{lines}'")
    error = str(explain_refusal(complaint, OPTIONS, (), ()))
    assert error.endswith("smaller: SLURM takes 1000 jobs in one array here (MaxArraySize=1001)")
    write_command(nothing_to_ask, "scontrol", "printf 'MaxArraySize = (null)\\n'")
    assert "SLURM's limit is" in str(explain_refusal(complaint, OPTIONS, (), ()))


@pytest.mark.parametrize(
    "complaint",
    [
        "sbatch: error: Batch job submission failed: Unable to contact slurm controller (connect failure)",
        "sinfo: fatal: Unable to process configuration file",
        "sbatch: Protocol authentication error",
        "sinfo did not answer in 60 s",
        "sinfo: fatal: Could not establish a configuration source",
        'sbatch: slurm_set_addr: Unable to resolve "head"; Unable to establish control machine address',
    ],
)
def test_no_command_can_do_anything(complaint: str) -> None:
    assert is_slurm_away(complaint)
    error = str(explain_refusal(complaint, OPTIONS, ("main",), KINDS))
    assert error == f"{complaint}: is slurmctld up (`scontrol ping`)? Nothing was submitted"
    assert not is_slurm_away("Invalid partition name specified")


FOREIGN = "'foo' can't be reached now, or it is an invalid entry for --cluster. Use 'sacctmgr list clusters'"


@pytest.mark.parametrize(
    ("complaint", "environ", "told"),
    [
        (
            "Invalid --time specification",
            {"SBATCH_TIMELIMIT": "abc"},
            " (SBATCH_TIMELIMIT=abc): change SBATCH_TIMELIMIT, or unset it",
        ),
        ("Invalid --time specification", {}, ": change --time, or leave it out"),
        (FOREIGN, {"SLURM_CLUSTERS": "foo"}, " (SLURM_CLUSTERS=foo): change SLURM_CLUSTERS, or unset it"),
        ("Invalid qos specification", {"SBATCH_QOS": "x", "SBATCH_TIMELIMIT": "1"}, " (SBATCH_QOS=x): set "),
    ],
)
def test_a_variable_that_nobody_gave_on_the_command_line_is_named(
    complaint: str, environ: dict[str, str], told: str, nothing_to_ask: Path
) -> None:
    error = str(explain_refusal(complaint, (), (), (), environ))
    assert error.startswith(complaint + told), error


def test_a_value_of_the_command_line_comes_before_the_variable() -> None:
    options = (Option("time", "1", "cluster.time"),)
    error = str(explain_refusal("Invalid --time specification", options, (), (), {"SBATCH_TIMELIMIT": "abc"}))
    assert error.endswith(" (cluster.time: --time=1): change cluster.time, or leave it out")


def test_another_cluster_that_is_not_there() -> None:
    options = (Option("clusters", "foo", "cluster.additional.clusters"),)
    error = str(explain_refusal(FOREIGN, options, (), ()))
    assert error.endswith("--clusters=foo): change cluster.additional.clusters, or leave it out")
