"""Why a job failed: logs, dumps and Slurm's word -> the failure that began it. Pure: reads its own table of rules alone.

Rule: `rules.toml` alone names reasons, owners and patterns. No reason is better than a wrong one, and an error of a user is
never charged to a node. Start at `verdict.py`; `log.py` reads a log within bounded memory.
"""
