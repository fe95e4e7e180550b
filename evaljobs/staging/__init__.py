"""Weights from shared storage into a node's memory, the lease on that memory, and its clearing.

Rule: a file under `/dev/shm` is only touched after its owner and its lock were checked. Start with `precursor.py`.
"""
