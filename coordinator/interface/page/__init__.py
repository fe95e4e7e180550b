"""One HTML file to view: an evaluation, a training's series, or a comparison of evaluations.

Rule: the file contains everything it shows and loads nothing. `evaluation`, `training`, `index` and `samples` make its data,
`html` the file; `assets/` is plain JavaScript without a build step, and shows text as text only. Start at `html.py`, then
`coordinator/interface/page/assets/base.js`.
"""
