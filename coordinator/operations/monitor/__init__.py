"""Tasks of a daemon beside its loop: Prometheus metrics, notifications by a command or a webhook, trackers and checks.

Rule: nothing here blocks the loop. The loop hands over plain values; one thread answers scrapes, another sends notifications.
Start at `daemon_services.py`.
"""
