"""What runs beside the evaluations: checks of the site and of nodes, news, metrics, retention, and supervised trainings.

Rule: uses `runtime` and `results`; an evaluation goes on without any of it. Start at `doctor/findings.py`.
"""
