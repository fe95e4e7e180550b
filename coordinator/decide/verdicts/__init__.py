"""Statistics for comparing two checkpoints' scores over the same documents. Pure.

Rule: distribution functions are scipy's, imported where needed. Start at `paired.py`.
"""
