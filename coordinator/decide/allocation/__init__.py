"""Decides which nodes and GPUs each evaluation may use. Pure: no clock, files or processes.

`demand` computes what an evaluation can use, `allocate` divides the free GPUs and picks nodes for prefetches, `cordons` keeps
the nodes that an operator withdrew. Start with `allocate.py`.
"""
