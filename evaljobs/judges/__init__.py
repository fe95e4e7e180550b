"""Answers judged by a model behind an OpenAI-compatible endpoint.

Rule: what is asked is a value (`records`), an answer that was paid for is a file (`kept`), what all workers together
may ask and spend is decided in Redis (`caps`), one request is one function (`endpoint`), and `asking` ties them.
It does not know: which task asks, or what it makes of the replies.
"""
