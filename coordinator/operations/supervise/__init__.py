"""Supervised training: a command is restarted after failures that a restart can fix, from its newest complete checkpoint.

Rule: it only acts on the training that it started. Each decision is one line with its reason. Start at `decisions`.
"""
