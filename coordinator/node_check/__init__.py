"""Which nodes are bad: tests of nodes in pairs, as in section 6.1 of Hu et al. (NSDI 2024).

Rule: `pairing`, which is pure, decides who is tested with whom, and which nodes are bad. `run` submits one Slurm job for each
pair and reads what its processes leave. Start with `pairing.py`.
"""
