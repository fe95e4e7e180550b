"""The part of evalspan that runs on nodes: request building, staging, trials, scoring, the sandbox.

Rule: no module here imports `coordinator`. A job is `python -m evaljobs VERB SPEC.json`; start with `__main__.py`.
"""
