"""Which nodes are bad: tests of nodes in pairs, as in section 6.1 of Hu et al. (NSDI 2024).

Rule: `pairing` decides who is tested with whom, and who is bad; `rates` which nodes are slow. Both are pure. `run` submits
one Slurm job for each pair and reads what its processes leave. Called by `evalspan check-nodes`. Start with `pairing.py`.
"""
