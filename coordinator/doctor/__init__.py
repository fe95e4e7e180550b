"""Checks of the site before an evaluation meets it: `evalspan doctor`.

Rule: each finding names what was checked, what was seen, and what to type. Start with `doctor.py`.
"""
