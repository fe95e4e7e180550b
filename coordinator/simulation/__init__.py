"""Plans and baselines played through on a simulated cluster: `evalspan plan` and `evalspan simulate`.

Rule: drawn run times come from a seed that is an argument. Start with `simulate.py`.
"""
