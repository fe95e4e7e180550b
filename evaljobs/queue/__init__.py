"""The work queue of shards in Redis: claims, leases, stealing, and the connection to the server.

Rule: each change of the queue is one Lua script, so that two trials never hold one shard. Start with `work_queue.py`.
"""
