"""Responses to scores: programs are executed, tasks are scored, by RQ workers on CPUs.

Rule: no score from part of a task. Start with `score.py`; `worker.py` is the process that runs the jobs.
"""
