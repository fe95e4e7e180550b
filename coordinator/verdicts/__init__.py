"""Is one checkpoint better than another? Statistics of scores over the same documents. Pure.

Rule: distribution functions are scipy's, which is imported where it is needed. Start at `paired.py`.
"""
