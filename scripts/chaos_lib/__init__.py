"""Faults struck at seeded moments of whole evaluations on a development cluster, and what must hold after each.

Rule: a fault happens to the real thing (a process, a file, a command of the user's PATH, a daemon of Slurm), and only by
means that this package started or made itself. It does not know: what the coordinator is made of.
"""
