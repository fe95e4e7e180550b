"""Runs programs written by models, each in isolation, and returns a verdict for each.

Rule: usable separately, with the standard library only. `records` has its values, `levels` finds the isolation that holds
here, `code_eval` has the interface of Hugging Face `evaluate`, `isolation/` runs a program with its test in one isolated
process. Start reading at `run`.
"""
