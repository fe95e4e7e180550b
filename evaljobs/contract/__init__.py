"""What crosses processes: specs of jobs, their outcomes, paths, and how files are written.

Rule: records are versioned and strict; names on disk are in `paths.py` alone. Start with
`specs.py`.
"""
