"""Redis and RQ as the coordinator uses them: the embedded server, its files, the metric queue.

Rule: Redis holds no truth; whatever is lost there is filled again from the journal.
"""
