"""What a person, a script or a browser sees: commands and the live screen (`cli`), and pages (`page`).

Rule: the top group. It decides nothing and computes no score; nothing imports it. Start at `cli/app.py`.
"""
