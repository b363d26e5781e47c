"""The step of `agent=srun`, whose tasks are the ranks: what the head does on the first node."""
