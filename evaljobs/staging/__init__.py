"""Staging of a checkpoint's weights into one node's memory: the copy, the lease on it, and its clearing.

Rule: a file under `/dev/shm` is touched only after its owner and its lock were checked. Start with `precursor.py`.
"""
