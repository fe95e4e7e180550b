"""What becomes of evaluations that have ended: archived, pruned, counted. Start reading at `archive`.

Rule: the files of an evaluation are changed only under its journal's lock (`journal.alone`), and killed at any step an
evaluation stays readable. `retention` decides and is pure; `prune` and `housekeeping` act.
"""
