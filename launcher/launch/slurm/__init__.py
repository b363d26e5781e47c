"""SLURM: its options, its commands, and what they say."""
