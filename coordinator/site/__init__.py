"""The site as the coordinator knows it: settings, Slurm or local jobs, Redis and RQ, and what logs say of failures.

Rule: knows no evaluation. Start at `cluster/__init__.py`.
"""
