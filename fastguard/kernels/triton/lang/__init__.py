"""The kernels themselves, written in Triton's language, and nothing else."""
