"""Plans from request sets, priors and free lanes: shards, lanes, order, metric workers. Pure: reads no file.

Start with `make_plan.py`; `planner.py` explains the packing.
"""
