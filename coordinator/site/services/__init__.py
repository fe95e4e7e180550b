"""Redis and RQ for the coordinator: the embedded server, its files, the metric queue.

Rule: Redis holds no truth; whatever is lost there is restored from the journal.
"""
