"""Why a job failed: logs, dumps and Slurm's state -> the failure that began it. Pure: only reads its own table of rules.

Rule: only `rules.toml` names reasons, owners and patterns. No reason is better than a wrong one, and a user's error is never
charged to a node. Start at `diagnose.py`; `log.py` reads a log within bounded memory.
"""
