"""The coordinator: accepts checkpoints, plans their evaluation, submits the jobs and reports the scores.

Rule: a room imports only rooms below it (the layers are in pyproject.toml); no module imports model code. Start with
`runtime/loop.py` (what runs) and `decide/evaluation/step.py` (what is decided).
"""
