"""Summaries of evaluations as the screens of `status`, `watch`, `eval` and the daemon get them."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from typing import Any

from rich.console import Console, RenderableType

from coordinator.cli.screen.board import board, screen
from coordinator.cli.screen.standing import Shown, in_turn
from coordinator.report.learning_curves import ScoreValue
from coordinator.runtime.summary import Lane, Summary, Task

NOW = 1_700_000_000.0
LONG_ID = "step-1000-of-a-training-with-a-long-name-core-1a2b3c4d"


def score(task: str, value: float = 0.25, metric: str = "acc") -> ScoreValue:
    return ScoreValue(task=task, metric=metric, filter="none", value=value, stderr=0.01)


def running(name: str = "step-1000-mini-00001000", *, trials: int = 3, **more: Any) -> Summary:
    """In the middle: one task scored, one to infer, a trial that is pending, others at work on nodes of eight lanes."""
    doing = Lane(lane="", doing="inferring", task="hellaswag", batch="3 of 9")
    lanes = [doing.model_copy(update={"lane": f"n{1 + i // 8}/{i % 8}"}) for i in range(1, trials)]
    known: dict[str, Any] = {
        "suite": "mini", "step": 1000, "checkpoint": "/runs/a/step-1000", "accepted_at": NOW - 60, "stage": "inference",
        "entries": 2, "scored": 1, "shards": 12, "shards_done": 5, "trials": trials, "done_at": NOW + 40.2,
        "lanes": (Lane(lane="n1/0", doing="pending"), *lanes),
        "metric_jobs": 4, "metric_jobs_open": {"execute code": 2, "score add": 1},
        "tasks": (
            Task(name="add", state="scored", scores=(score("add", metric="exact_match"),)),
            Task(name="a_task_with_a_rather_long_name", state="to infer"),
        ),
    }  # fmt: skip
    return Summary(schema_version=2, evaluation_id=name, written_at=NOW, **{**known, **more})


def ended(name: str = "step-900-core-00000000", **more: Any) -> Summary:
    known: dict[str, Any] = {
        "suite": "core", "step": 900, "stage": "ended", "scored": 4, "entries": 4, "trials": 0, "lanes": (), "tasks": (),
        "accepted_at": NOW - 7200, "ended_at": NOW - 3600, "makespan_seconds": 61.5, "metric_jobs_open": {},
        "scores": tuple(score(task) for task in ("hellaswag", "arc_challenge", "winogrande", "mmlu")),
    }  # fmt: skip
    return running(name, **{**known, **more})


def printed(width: int, *parts: RenderableType, terminal: bool = True) -> str:
    """As a terminal of that width shows it, without styles; else as a pipe gets it."""
    out = io.StringIO()
    console = Console(file=out, width=width, force_terminal=terminal, color_system=None)
    for part in parts:
        console.print(part, overflow="ignore", crop=False)
    return re.sub(r"\x1b\[[0-9;]*m", "", out.getvalue())


def listed(width: int, *found: Shown, whole: bool = False, now: float = NOW) -> str:
    """As `status` prints it."""
    return printed(width, *board(found, now, whole=whole))


def drawn(
    width: int, *runs: Shown, over: Sequence[Shown] = (), below: Sequence[Any] = (), height: int | None = None
) -> str:
    """As `watch` draws it."""
    found = in_turn([*runs], [one.summary for one in runs])
    console = Console(file=io.StringIO(), width=width, color_system=None)
    return printed(width, screen(console, found, over, below, NOW, height))
