"""What squeue says, on a real cluster."""

from dataclasses import replace

import pytest

from launcher.slurm.commands import JobState, ask_queue
from tests.slurm.cluster.conftest import Sandbox

pytestmark = pytest.mark.slurm
QUIET = ("--parsable", "--output=/dev/null", "--nodes=1")


@pytest.fixture
def queue(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> Sandbox:
    """The session's cluster, as this process's own."""
    monkeypatch.setenv("SLURM_CONF", str(sandbox.conf))
    return sandbox


def submit(cluster: Sandbox, *options: str, wrap: str = "exec sleep 300") -> str:
    return cluster.run("sbatch", *QUIET, *options, f"--wrap={wrap}").strip()


def test_pending_running_and_ended_jobs(queue: Sandbox) -> None:
    held, runs = submit(queue, "--hold"), submit(queue, "--nodes=2")
    failed, killed = submit(queue, wrap="exit 3"), submit(queue, wrap="kill -9 $$")
    queue.wait(runs, "RUNNING")
    queue.wait(failed, "FAILED")
    queue.wait(killed, "FAILED")
    jobs = ask_queue([held, runs, failed, killed, "999999"])
    start, nodes = jobs[runs].start, jobs[runs].nodelist
    assert start.startswith("20")
    assert replace(jobs[held], end_time=None) == JobState(held, "PENDING", "JobHeldUser", "main", 1)
    expected = JobState(runs, "RUNNING", "", "main", 2, nodes, start)
    assert replace(jobs[runs], end_time=None) == expected
    assert nodes.startswith("n[")
    assert (jobs[failed].state, jobs[failed].exit_code) == ("FAILED", 3)
    assert (jobs[killed].state, jobs[killed].exit_code) == ("FAILED", 137)
    assert set(jobs) == {held, runs, failed, killed}
    assert ask_queue(["999998", "999999", "999998_3"]) == ask_queue(["999998"]) == ask_queue([]) == {}
    queue.run("scancel", held, runs)
    queue.wait(runs, "CANCELLED")
    assert ask_queue([runs])[runs].state == "CANCELLED"


def test_members_of_an_array_each_have_a_row(queue: Sandbox) -> None:
    array = submit(queue, "--array=0-5%2")
    queue.wait(f"{array}_0", "RUNNING")
    jobs = ask_queue([array])
    assert set(jobs) == {f"{array}_{n}" for n in range(6)}
    waits = [job for job in jobs.values() if job.state == "PENDING"]
    assert len(waits) == 4 and {job.reason for job in waits} == {"JobArrayTaskLimit"}
    some = [f"{array}_1", f"{array}_5"]
    assert set(ask_queue(some)) == set(some)
    queue.run("scancel", f"{array}_5")
    assert f"{array}_5" not in ask_queue([array]), "SLURM forgets a member that never began at once"
    queue.run("scancel", array)


def test_how_the_user_likes_these_commands_changes_nothing(
    queue: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id = submit(queue, "--hold", "--job-name=a | b", "--comment=x|y")
    before = ask_queue([job_id])
    variables = {"SQUEUE_FORMAT": "%i", "SQUEUE_STATES": "RUNNING", "SQUEUE_USERS": "nobody"}
    variables |= {"SQUEUE_PARTITION": "urgent", "SLURM_TIME_FORMAT": "relative", "LC_ALL": "de_DE.UTF-8"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert before and ask_queue([job_id]) == before
    queue.run("scancel", job_id)
