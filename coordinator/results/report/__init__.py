"""Makespan, scores, learning curves and comparisons, from the files of evaluations.

Rule: `measurements`, `pauses` and `learning_curves` are pure; the other modules read files or draw. Start
with `measurements.py`.
"""
