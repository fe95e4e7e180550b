"""The running process: loop, journals, effects, and what the loop detects on disk, in Slurm and in Redis.

Rule: call `evaluation.step` with the event, append the event and its intents to the journal, then perform the
actions. Start with `loop.py` (all evaluations) and `runner.py` (one evaluation).
"""
