"""SLURM: submission, the job's first node, each node's task, attempts and requeue, following a job."""
