"""Checks of the site before the first evaluation: `evalspan doctor`, and the refusal of folders that nodes cannot see.

Rule: a finding says what was checked, what was found, and what to type. `collect` reads and measures, with small jobs on
nodes (`node_jobs`), and fills in `facts`. `findings` has the table, `limit_findings` that of accounting limits; both are
pure. Start with `findings.py`.
"""
