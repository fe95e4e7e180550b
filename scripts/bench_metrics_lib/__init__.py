"""The CPU's tail after the last GPU: real builds, staging, queues, workers, sandbox and scores; only the model is a table.

Rule: what a GPU would do is a sleep and an answer from a file; all else is evalspan's own.
"""
