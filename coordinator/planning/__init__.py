"""Turns request sets, priors and free lanes into a plan: shards, lanes, order, metric workers. Pure.

Start with `make_plan.py`; the theory of the packing stands in `planner.py`.
"""
