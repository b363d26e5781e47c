"""A real SLURM of several nodes on one machine, to try things on and for the tests."""
