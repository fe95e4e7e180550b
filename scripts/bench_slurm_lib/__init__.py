"""portfolio63 in small on a Slurm of this machine: evalspan beside two ways in which others run the same work.

Rule: all three run the same drawn seconds on the same nodes, one after the other; what a run costs besides (Slurm's own
delays, starting processes) is left in.
"""
