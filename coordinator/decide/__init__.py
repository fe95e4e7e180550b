"""All decisions about evaluations: the state machine, plans, the division of free GPUs, and whether a
checkpoint is better.

Rule: pure. No clock, process or queue; `runtime` carries the decisions out. Start at `evaluation/step.py`.
"""
