"""The code metric of `quickstart_humaneval`: pass@k of completed functions.

Rule: the metric of lm-eval's `humaneval`, but its checker is loaded at the first score. Reading the
task, building its requests and generating therefore run no program and need no hub.
`evaluate.load("code_eval")` is evalspan's executor in an evalspan job; under plain `lm_eval` it is
the hub's metric, which needs HF_ALLOW_CODE_EVAL=1 and a network.
"""

from __future__ import annotations

from typing import Any

import evaluate


def pass_at_k(references: list[str], predictions: list[list[str]], k: int | list[int]) -> dict[str, float]:
    """pass@k of one document: `predictions[0]` are its programs, `references[0]` the test that is
    appended.

    Returns e.g. {"pass@1": 1.0}; the unbiased estimator of Chen et al. 2021 (arXiv 2107.03374).
    """
    checker = evaluate.load("code_eval")
    ks = [k] if isinstance(k, int) else k
    scores, _ = checker.compute(references=references, predictions=predictions, k=ks)
    return dict(scores)


def build_predictions(resps: list[list[str]], docs: list[dict[str, Any]]) -> list[list[str]]:
    """Programs: each document's prompt with each of its responses."""
    return [[doc["prompt"] + answer for answer in answers] for answers, doc in zip(resps, docs, strict=True)]
