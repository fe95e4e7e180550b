"""Small helpers that every room may use: clock, throttle, commands, signals, process identity, isolation of errors.

Rule: a module here imports no other room.
"""
