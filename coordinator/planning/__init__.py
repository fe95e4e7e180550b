"""Turns request sets, priors and free lanes into a plan: shards, lanes, order, metric workers. Pure: reads no file.

Start with `make_plan.py`; `planner.py` explains the packing.
"""
