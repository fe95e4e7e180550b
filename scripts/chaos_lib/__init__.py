"""Three campaigns of faults: `evaluations`, `storm` (a daemon) and `metrics` (jobs off the GPUs); `campaign` has what they share.

Rule: a fault happens to the real thing (a process, a file, a command of the user's PATH, a daemon of Slurm), and only to
what this package started or made itself.
"""
