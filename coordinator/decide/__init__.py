"""All decisions about evaluations: the state machine, plans, and the division of free GPUs.

Rule: pure. No clock, process or queue; `runtime` carries the decisions out. Start at `evaluation/step.py`.
"""
