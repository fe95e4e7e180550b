"""Filters and metrics of the test tasks."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import evaluate

from evaljobs.lmeval.conversations import turn_answers

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


def hostile(doc: dict[str, str], results: list[str]) -> dict[str, float]:
    """Kills its process on one question (HOSTILE=worker: its parent), hangs on another."""
    number = int(doc["number"])
    if number == 2 and "HOSTILE" in os.environ:
        parent = Path(f"/proc/{os.getppid()}/cmdline").read_bytes().split(b"\0")
        if os.environ["HOSTILE"] == "worker" and b"evaljobs" in parent and b"worker" in parent:
            os.kill(os.getppid(), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)
    if number == 5 and "HOSTILE" in os.environ:
        while True:
            try:
                time.sleep(3600)
            except Exception:  # noqa: BLE001 (as real ones do)
                return {"letters": -1.0}
    return {"letters": float(len(results[0]))}


def letters_by_turn(doc: dict[str, object], results: list[object]) -> dict[str, float]:
    said = turn_answers(results[0])
    assert len(said) == 1 + len(doc["next"])
    return {"letters": float(len("".join(said)))}
