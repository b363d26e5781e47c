"""Jobs on their way to SLURM: what they ask for, their run directories, sbatch."""
