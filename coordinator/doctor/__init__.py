"""Checks of the site before the first evaluation: `evalspan doctor`, and the refusal of folders that nodes cannot see.

Rule: a finding names what was checked, what was seen, and what to type. `collect` reads and measures, with small jobs on
nodes (`node_jobs`), and fills in `facts`. `findings` holds the table, those of accounting limits are in `limit_findings`;
both are pure. Start with `findings.py`.
"""
