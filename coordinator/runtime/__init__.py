"""The running process: loop, journals, effects, and what the loop detects on disk, in Slurm and in Redis.

Rule: append the event to the journal, then call `evaluation.step`, then carry out the actions. Start with `loop.py`
(all evaluations) and `runner.py` (one evaluation).
"""
