"""Filters and metrics of the test tasks."""

from __future__ import annotations

import evaluate

# as lm-eval's own humaneval does: load the metric, and try it, when the task is read
code_eval = evaluate.load("code_eval")
code_eval.compute(references=["assert f(1)"], predictions=[["def f(x): return x"]], k=[1])


def pass_at_k(references: list[str], predictions: list[list[str]], k: int | list[int]) -> dict[str, float]:
    scores, _ = code_eval.compute(
        references=references, predictions=predictions, k=[k] if isinstance(k, int) else k
    )
    return dict(scores)


def with_prompt(resps: list[list[str]], docs: list[dict]) -> list[list[str]]:
    return [
        [doc["prompt"] + answer.replace("\n", " ") for answer in answers]
        for answers, doc in zip(resps, docs, strict=True)
    ]
