"""Engines: loaded checkpoints that answer batches, behind one protocol.

Rule: `trial` and `shard_runner` only know the protocol. lm-eval's model class does everything it can. Start with
`protocol.py`; `loading.py` chooses the engine.
"""
