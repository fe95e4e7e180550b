"""What a daemon does beside its loop: Prometheus metrics, news by a command or a webhook, and others' trackers and checks.

Rule: nothing here is in the loop's way. The loop hands over plain values; a thread of its own answers scrapes, another
one sends news. Start at `watch.py`.
"""
