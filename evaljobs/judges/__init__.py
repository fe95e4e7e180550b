"""Answers judged by a model behind an OpenAI-compatible endpoint.

Rule: a question is a value (`records`), a paid answer is a file (`kept`), and one request is one
function (`endpoint`). Redis holds the limits that all workers share (`caps`). Start with `asking`.
"""
