"""Finds bad nodes by tests in pairs, as in section 6.1 of Hu et al. (NSDI 2024).

Rule: `pairing`, which is pure, decides which nodes are tested together, and which are bad. `run` submits one Slurm job per
pair and reads the records of its processes. Start with `pairing.py`.
"""
