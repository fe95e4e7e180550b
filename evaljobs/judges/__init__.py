"""Answers judged by a model behind an OpenAI-compatible endpoint.

Rule: a question is a value (`judgement`), and a paid answer is a file (`kept`). Start with `asking`.
"""
