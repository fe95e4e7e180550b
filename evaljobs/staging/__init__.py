"""Staging of a checkpoint's weights into one node's memory: the copy, the lease on it, and its clearing.

Rule: a file under `/dev/shm` is only touched after checking its owner and its lock. Start with `precursor.py`.
"""
