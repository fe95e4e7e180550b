"""The engine and the metrics of the bench: they hold a GPU, or a CPU slot, for the seconds that were drawn.

Rule: a request's text is its seconds; a metric's seconds stand in `metrics.json` of the folder in $BENCH_SLURM. What a
trial takes to start counts into its load, as in the portfolio's own figure. Imports no torch and no lm-eval.
It does not know: shards, queues, who runs it.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from evaljobs.contract.outcomes import Executed, Scored
from evaljobs.contract.paths import EvaluationPaths, slug
from evaljobs.contract.specs import ExecuteSpec, ModelOptions, ScoreSpec
from evaljobs.contract.storage import write_atomic, write_outcome
from evaljobs.lmeval.batches import Batch
from evaljobs.trial.engine import Loaded

FOLDER = "BENCH_SLURM"
SLOW = (
    "BENCH_SLOW"  # "NODE/GPU:TIMES": that one takes so many times as long; for whoever looks for stragglers
)


def load(
    _model_path: str,
    options: ModelOptions,
    _batch_size: int | str,
    *,
    phase: Callable[[str], None] = lambda _phase: None,
) -> Loaded:
    """`evaljobs.trial.engine.load`: ready `load_seconds` after this process began."""
    phase("load")
    began, seconds = time.monotonic(), float(options.model_args["load_seconds"])
    time.sleep(max(0.0, seconds - _age_seconds()))
    return Loaded(
        lm=None, devices="synthetic", gpus=1, import_seconds=0.0, load_seconds=time.monotonic() - began
    )


def _age_seconds() -> float:
    """How long ago this process began: starttime is in ticks since boot."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


def seed_batch(_seed: int, _key: str, _number: int) -> None:
    """`evaljobs.trial.engine.seed_batch`: nothing is drawn here."""


def run_batch(_lm: Any, batch: Batch) -> list[tuple[int, Any]]:
    """`evaljobs.trial.engine.run_batch`: hold the GPU for the seconds that the requests say."""
    time.sleep(_times() * sum(float(piece.context) for piece in batch.pieces))  # type: ignore[arg-type]
    return [(piece.index, "") for piece in batch.pieces]


def _times() -> float:
    gpu, _, times = os.environ.get(SLOW, "").partition(":")
    here = f"{os.environ.get('SLURMD_NODENAME')}/{os.environ.get('SLURM_JOB_GPUS')}"
    return float(times) if gpu == here else 1.0


# --- metrics ---------------------------------------------------------------------------------------------------------


def warm() -> None:
    """`evaljobs.scoring.score.warm`: nothing is imported."""


def perform(spec: ExecuteSpec | ScoreSpec) -> Executed | Scored:
    """`evaljobs.scoring.score.perform`: hold a CPU slot; a judge's jobs one at a time."""
    folder = Path(os.environ[FOLDER])
    metrics = json.loads((folder / "metrics.json").read_text())
    started = time.monotonic()
    paths = EvaluationPaths(spec.evaluation_dir)
    outcome: Executed | Scored
    if isinstance(spec, ExecuteSpec):
        metric = metrics[spec.task]
        with _turn(folder / f"judge-{slug(spec.task)}") if metric["alone"] else contextlib.nullcontext():
            started = time.monotonic()  # a turn that is waited for is nobody's work
            time.sleep(metric["seconds"] * len(spec.documents) / metric["docs"])
        outcome = Executed(
            name=spec.name, task=spec.task, documents=len(spec.documents), programs=0, seconds=0.0
        )
    else:
        (task,) = spec.request_sets
        if not metrics[task]["executes"]:  # what an execute set's programs took is behind us
            time.sleep(metrics[task]["seconds"])
        place = paths.scores / f"{spec.entry:03d}-{slug(task)}.json"
        write_atomic(place, json.dumps({"results": {task: {"alias": task}}}).encode())
        outcome = Scored(name=spec.name, entry=spec.entry, result_file=str(place), seconds=0.0)
    outcome = outcome.model_copy(update={"seconds": time.monotonic() - started})
    write_outcome(paths, outcome)
    return outcome


@contextlib.contextmanager
def _turn(place: Path) -> Iterator[None]:
    with place.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
