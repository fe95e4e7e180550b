"""Hugging Face `evaluate`'s code_eval metric, with verdicts from the caller.

Rule: `compute` has the arguments and results of `evaluate.load("code_eval").compute`
(evaluate/metrics/code_eval/code_eval.py, 0.4), which lm-eval's HumanEval and MBPP tasks call. The
caller's `run` returns the verdicts: `run_programs`, a look-up of earlier ones by `Program.id` (a
`program_key`), or both. Called from `scoring`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from evaljobs.sandbox.records import Program, Verdict, program_key

CodeEvalResults = dict[int, list[tuple[int, dict[str, Any]]]]


@dataclass(frozen=True, slots=True)
class CodeEval:
    """The metric. `run` takes the distinct programs of a call and returns their verdicts, in the same order."""

    run: Callable[[list[Program]], Iterable[Verdict]]

    def compute(
        self,
        references: Sequence[str] | None = None,
        predictions: Sequence[Sequence[str]] | None = None,
        k: Sequence[int] = (1, 10, 100),
        num_workers: int = 4,  # noqa: ARG002  (part of the interface; the runner decides)
        timeout: float = 3.0,
    ) -> tuple[dict[str, Any], CodeEvalResults]:
        """Compute pass@k of the candidates against their tests, and each candidate's result.

        `references[i]` is test text that runs after each of `predictions[i]`, whole programs; `timeout` is seconds per
        candidate. Returns ({"pass@k": mean over tasks}, for each k that all tasks have samples for) and {task: [(candidate,
        {"task_id", "passed", "result", "completion_id"})]}.
        """
        tasks = [
            [plain_program(candidate, test, timeout) for candidate in texts]
            for test, texts in zip(references or (), predictions or (), strict=False)
        ]
        distinct = {program.id: program for programs in tasks for program in programs}
        verdicts = {v.id: v for v in self.run(list(distinct.values()))}
        results = {
            task: [(number, _record(task, number, verdicts[p.id])) for number, p in enumerate(programs)]
            for task, programs in enumerate(tasks)
        }
        return pass_at_k(results, k), results


def _record(task: int, number: int, verdict: Verdict) -> dict[str, Any]:
    words = {"pass": "passed", "timeout": "timed out"}
    return {
        "task_id": task,
        "passed": verdict.verdict == "pass",
        "result": words.get(verdict.verdict, f"failed: {verdict.reason or verdict.verdict}"),
        "completion_id": number,
    }


def plain_program(candidate: str, reference: str, timeout: float = 3.0) -> Program:
    """Return a candidate and the test text that runs after it, under their key."""
    key = program_key(candidate, reference, timeout)
    return Program(id=key, code=candidate, test=reference, timeout_seconds=timeout)


def pass_at_k(results: CodeEvalResults, k: Sequence[int]) -> dict[str, Any]:
    """Return {"pass@k": mean over tasks} for each k for which every task has enough samples."""
    import numpy as np  # noqa: PLC0415  (the sandbox itself needs the standard library alone)

    tasks = [results[task] for task in sorted(results)]
    total = np.array([len(task) for task in tasks])
    correct = np.array([sum(record["passed"] for _, record in task) for task in tasks])
    return {
        f"pass@{n}": estimate_pass_at_k(total, correct, n).mean()
        for n in k
        if len(total) and (total >= n).all()
    }


def estimate_pass_at_k(num_samples: Any, num_correct: Any, k: int) -> Any:
    """Return the unbiased pass@k of each task, 1 - C(n-c, k) / C(n, k) (Chen et al. 2021, arXiv:2107.03374).

    Operations are in the order of evaluate's code, so that the last digit agrees.
    """
    import numpy as np  # noqa: PLC0415

    def estimator(n: int, c: int) -> float:
        if n - c < k:
            return 1.0
        return float(1.0 - np.prod(1.0 - k / np.arange(n - c + 1, n + 1)))

    return np.array([estimator(int(n), int(c)) for n, c in zip(num_samples, num_correct, strict=True)])
