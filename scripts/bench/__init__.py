"""The benches, one module a command (scripts/bench_X runs bench.X); `harness` has what they share.

Rule: a bench measures and returns a dictionary; every figure was measured on this machine, now. Start with `hook`.
"""
