"""Many evaluations on a daemon of one development cluster: `scripts/bench_daemon --scale`.

Rule: the daemon, Slurm, Redis, staging, claims, dumps and RQ are the real ones; engine and metrics are bench_slurm_lib's.
"""
