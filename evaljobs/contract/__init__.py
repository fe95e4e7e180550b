"""Everything that crosses a process: specs of jobs, outcomes of jobs, paths, and how files are written.

Rule: records are versioned and strict; each name on disk is decided in `paths.py`. Start with `specs.py`.
"""
