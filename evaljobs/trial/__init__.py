"""A trial: one model load on k GPUs that runs shards and writes their responses.

Rule: a trial builds no requests and executes no programs. Start with `trial.py`.
"""
