"""Builds request sets from lm-eval tasks, and converts checkpoints. Start with `build.py`."""
