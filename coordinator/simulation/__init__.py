"""Simulates plans and baseline policies on a cluster, for `evalspan plan` and `evalspan simulate`.

Rule: run times are drawn from a seed that is an argument. Start with `simulate.py`.
"""
