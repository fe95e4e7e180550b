"""Turns request sets, priors and free lanes into a plan: shards, lanes, order, metric workers. Pure, but for `make_plan`,
which reads request sets and priors.

Start with `make_plan.py`; `planner.py` explains the packing.
"""
