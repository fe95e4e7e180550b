"""A real Slurm of several nodes on one machine, for development and tests.

Rule: standard library only; nothing on the host is changed but one folder, one entry in `/run/evalspan-dev`
and one ordinary account. Every mount lives in a namespace that dies with its processes.
"""
