"""Engines: a checkpoint that is loaded and answers batches, behind one protocol.

Rule: `trial` and `shard_runner` know the protocol alone. What lm-eval's model class can do stays
lm-eval's. Start with `protocol.py`; `loading.py` chooses the engine.
"""
