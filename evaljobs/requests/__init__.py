"""Builds request sets from lm-eval tasks, and converts checkpoints. CPU work only. Start with
`build.py`.
"""
