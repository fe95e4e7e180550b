"""Small helpers that every room may use: clock, signals, process identity, isolation of failures.

Rule: a module here imports no other room.
"""
