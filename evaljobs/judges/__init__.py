"""Answers judged by a model behind an OpenAI-compatible endpoint.

Rule: a question is a value, and a paid answer is a file (`judgement`). Start with `asking`.
"""
