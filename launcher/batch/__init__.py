"""A job of SLURM's while it runs: its head on the first node, and a task on each."""
