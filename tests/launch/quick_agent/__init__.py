"""A folder for PYTHONPATH: `torch.distributed.run` of a torch that has nothing else."""
