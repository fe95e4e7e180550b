"""Everything that touches the internals of lm-eval: running its tasks, hooks, replayed answers, batches.

Rule: prompts, tokens and scores come from lm-eval's own code. Start with `run.py`.
"""
