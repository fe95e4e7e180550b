"""Everything that crosses a process: specs of jobs, outcomes of jobs, paths, and how files are
written.

Rule: records are versioned and strict; `paths.py` alone decides names on disk. Start with
`specs.py`.
"""
