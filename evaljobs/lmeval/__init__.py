"""Code that touches lm-eval's internals: running its tasks, hooks, replayed answers, batches.

Rule: prompts, tokens and scores come from lm-eval's own code. Start with `run.py`.
"""
