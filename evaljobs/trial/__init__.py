"""A trial: one model load on k GPUs that runs shards and writes their responses.

Rule: a trial builds no requests and runs no tests. Start with `trial.py`.
"""
