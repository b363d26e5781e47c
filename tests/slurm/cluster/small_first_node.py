"""`python -m tests.slurm.cluster.small_first_node RUN_DIR` in a job script: a first node without torch.

It starts one task of `small_task` on each node, and ends the attempt as the real one does.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from launcher.runs.node_records import read_nodes
from launcher.runs.run_directory import open_run_dir
from launcher.slurm.attempt_end import StepReport
from launcher.slurm.attempt_lifecycle import AttemptRefusedError, end_attempt, prepare_for_kill, start_attempt
from launcher.slurm.job_request import read_job_request
from launcher.slurm.notation import expand_hosts
from launcher.slurm.slurm_environ import clean_for_step
from launcher.text import set_up_logging

set_up_logging()
run = open_run_dir(Path(sys.argv[1]), None)
hosts = expand_hosts(os.environ["SLURM_JOB_NODELIST"])
got: list[tuple[int, float]] = []
for number in (signal.SIGTERM, signal.SIGUSR2):
    signal.signal(number, lambda found, _: got.append((found, time.time())))
try:
    attempt = start_attempt(read_job_request(run.path, os.environ), run, os.environ, hosts)
except AttemptRefusedError as error:
    sys.stderr.write(f"launch: error: {error}\n")
    sys.exit(error.exit_code)
(run.path / "logs" / str(run.first_attempt)).mkdir(mode=0o700)
environ = {**clean_for_step(os.environ), "RUN_DIR": str(run.path), "ATTEMPT": str(run.first_attempt)}
words = (
    "srun",
    "--ntasks-per-node=1",
    "--overlap",
    "--mpi=none",
    "--kill-on-bad-exit=1",
    "--quiet",
    f"-N{len(hosts)}",
)
said = (run.path / "srun.err").open("w+")
step = subprocess.Popen(
    [*words, sys.executable, "-m", "tests.slurm.cluster.small_task"],
    env=environ,
    stderr=said,
    start_new_session=True,
)
while step.poll() is None:
    if any(number == signal.SIGTERM for number, _ in got):
        prepare_for_kill(attempt)
        step.send_signal(signal.SIGTERM)
        step.wait()
    elif got:
        step.send_signal(signal.SIGUSR2)
        step.wait()
    time.sleep(0.05)
said.seek(0)
records = tuple(read_nodes(run.path, run.first_attempt))
missing = tuple(host for host in hosts if host not in {record.host for record in records})
checkpointed = any(number == signal.SIGUSR2 for number, _ in got)
end = StepReport(step.returncode, records, missing, tuple(got), checkpointed, tuple(said.read().splitlines()))
sys.exit(end_attempt(attempt, end))
