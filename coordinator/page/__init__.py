"""One HTML file to look at: an evaluation, a training's series, or two evaluations beside each other.

Rule: the file holds all that it shows and loads nothing. `evaluation`, `training`, `index` and `samples` make its
data, `html` the file; `assets/` is plain JavaScript without a build step, and shows text as text only.
Start at `html.py`, then `assets/base.js`.
"""
