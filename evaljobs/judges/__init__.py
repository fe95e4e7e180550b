"""Answers judged by a model behind an OpenAI-compatible endpoint.

Rule: a question is a value (`records`), a paid answer is a file (`kept`), Redis holds the limits
that all workers share (`caps`), one request is one function (`endpoint`), and `asking` joins them.
Start with `asking.py`.
"""
