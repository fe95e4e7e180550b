"""What a daemon tells the outside: Prometheus metrics, and news by a command or a webhook.

Rule: nothing here is in the loop's way. The loop hands over plain values; a thread of its own answers scrapes, another
one sends news. Start at `metrics.py`.
"""
