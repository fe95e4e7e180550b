"""Faults on whole evaluations of a real Slurm: `site` is the world, `faults` the table, `campaign` what strikes and judges.

Rule: a fault happens to the real thing (a process, a file, a command of the user's PATH, a daemon of Slurm), and only to
what this package started or made itself.
"""
