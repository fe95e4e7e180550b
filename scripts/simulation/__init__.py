"""Simulates plans and baseline policies on a cluster: `scripts/simulate`. Start with `simulate.py`.

Rule: run times are drawn from a seed that is an argument.
"""
