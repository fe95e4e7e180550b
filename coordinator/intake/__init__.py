"""Everything before an evaluation exists: notices, pending checkpoints, suites, validation.

Rule: input that would fail is refused here, before anything is written or submitted. Start with `validate.py`.
"""
