"""Decides which nodes and GPUs each evaluation may use. Pure: no clock, files or processes.

`demand` says what an evaluation can use, `allocate` divides the free GPUs and picks nodes
that stage weights before their GPUs are free, `cordons` holds the nodes that an operator withdrew.
Start with `allocate.py`.
"""
