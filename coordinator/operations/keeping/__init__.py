"""Archiving, pruning and measuring ended evaluations. Start reading at `archive`.

Rule: the files of an evaluation are only changed under its journal's lock (`journal.exclude_coordinators`); killed at any step, an
evaluation stays readable. `retention` decides and is pure; `prune` and `housekeeping` act.
"""
