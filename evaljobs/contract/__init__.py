"""Data exchanged between processes: specs of jobs, their outcomes, paths, and how files are written.

Rule: records are versioned and strict; names on disk are only in `paths.py`. Start with `specs.py`.
"""
