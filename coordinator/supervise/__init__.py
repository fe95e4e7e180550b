"""Training that comes back: a command is started again after failures that another start can help, from its newest complete checkpoint.

Rule: it acts on the training that it started, and on nothing else. What it decides is one line with its reason. Start at
`decisions`.
"""
