"""The environment that sbatch, and with it the job, gets."""

import pytest

from launcher.slurm.slurm_environ import clean_for_sbatch

PLAIN = {"PATH": "/bin", "HOME": "/home/me", "SLURM_CONF": "/etc/x", "RANKING": "1", "MASTER_ADDR": "head"}


@pytest.mark.parametrize(
    "name",
    [
        "SBATCH_EXPORT",
        "SBATCH_GET_USER_ENV",
        "SBATCH_OUTPUT",
        "SBATCH_JOB_NAME",
        "SBATCH_WAIT",
        "SBATCH_ARRAY_INX",
        "SBATCH_NO_REQUEUE",
        "SBATCH_SIGNAL",
        "SBATCH_GPUS_PER_TASK",
        "SBATCH_TIMELIMIT",
        "SBATCH_MEM_PER_CPU",
        "SBATCH_CPUS_PER_GPU",
        "SBATCH_PARTITION",
        "SBATCH_REQ_SWITCH",
        "SLURM_HINT",
        "SLURM_EXIT_ERROR",
        "SRUN_CPUS_PER_TASK",
        "SALLOC_PARTITION",
        "LAUNCH_RECORD_DIR",
        "LAUNCH_RUN_DIR",
        "LAUNCH_RUN_ID",
        "LAUNCH_SECRETS",
    ],
)
def test_what_contradicts_goes(name: str) -> None:
    options = ("time", "mem", "cpus-per-task", "partition", "switches")
    assert clean_for_sbatch({**PLAIN, name: "1"}, options) == PLAIN


@pytest.mark.parametrize(
    "name",
    [
        "SBATCH_ACCOUNT",
        "SBATCH_PARTITION",
        "SBATCH_TIMELIMIT",
        "SBATCH_RESERVATION",
        "SBATCH_WCKEY",
        "SBATCH_GRES",
    ],
)
def test_defaults_for_what_is_not_set_stay(name: str) -> None:
    assert clean_for_sbatch({**PLAIN, name: "nvme:1"}, ("nodes", "gpus-per-node")) == {
        **PLAIN,
        name: "nvme:1",
    }


def test_gpus_among_generic_resources_contradict() -> None:
    environ = {**PLAIN, "SBATCH_GRES": "gpu:4"}
    assert clean_for_sbatch(environ, ("gpus-per-node",)) == PLAIN
    assert clean_for_sbatch(environ, ("nodes",)) == environ


def test_nothing_of_an_enclosing_job_stays() -> None:
    job = {
        "SLURM_JOB_ID": "7",
        "SLURM_NTASKS": "8",
        "SLURM_CPUS_PER_TASK": "2",
        "SLURM_MEM_PER_NODE": "1000",
        "SLURM_TRES_PER_TASK": "cpu=2",
        "CUDA_VISIBLE_DEVICES": "0,1",
        "TORCHELASTIC_RUN_ID": "x",
        "RANK": "0",
        "PMIX_RANK": "0",
    }
    outside = {name: value for name, value in PLAIN.items() if name != "MASTER_ADDR"}
    assert clean_for_sbatch({**PLAIN, **job}, ()) == outside


def test_devices_that_the_user_chose_stay() -> None:
    environ = {**PLAIN, "CUDA_VISIBLE_DEVICES": "0"}
    assert clean_for_sbatch(environ, ()) == environ


def test_devices_that_an_enclosing_rank_has_do_not() -> None:
    rank = {"TORCHELASTIC_RUN_ID": "x", "CUDA_VISIBLE_DEVICES": "GPU-7"}
    assert clean_for_sbatch({**PLAIN, **rank}, ()).keys() == PLAIN.keys() - {"MASTER_ADDR"}
