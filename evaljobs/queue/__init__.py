"""The work queue of shards in Redis: claims, stealing, and the connection to the server.

Rule: each change of the queue is one Lua script, so no claim is half-made. Start with
`work_queue.py`.
"""
