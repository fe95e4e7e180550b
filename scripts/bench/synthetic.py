"""The engine and the metrics of a bench: they hold a GPU, or a CPU slot, for given seconds.

    python -m bench.synthetic -m evaljobs VERB …

Rule: nothing but the engine and the metric module is replaced, and in jobs of REAL checkpoints nothing; staging, claims,
heartbeats, dumps and RQ are the real ones. `bench.json` in $BENCH_FOLDER says what to do. A request's text is its seconds. What a trial takes to start counts
into its load. A precursor holds its node's link for the seconds that one reader takes. Imports no torch and no lm-eval.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from evaljobs.contract.outcomes import Executed, Scored
from evaljobs.contract.paths import EvaluationPaths, slug
from evaljobs.contract.specs import ExecuteSpec, ModelOptions, ScoreSpec
from evaljobs.contract.storage import write_atomic, write_outcome
from evaljobs.lmeval.batches import Batch
from evaljobs.trial.engines.protocol import Loaded, Usage

FOLDER = "BENCH_FOLDER"
GIVEN = "bench.json"  # in that folder
REAL = "real-"  # how the name of a checkpoint begins that is evaluated by lm-eval


@functools.cache
def given() -> dict[str, Any]:
    """What `bench.json` says: load_seconds, storage_seconds, trials_each, metrics."""
    return dict(json.loads((Path(os.environ[FOLDER]) / GIVEN).read_text()))


class SyntheticEngine:
    """An engine that holds its GPU for the seconds that are given; see `evaljobs.trial.engines.protocol`."""

    def __init__(self, load_seconds: float) -> None:
        self.loaded = Loaded(devices="synthetic", gpus=1, import_seconds=0.0, load_seconds=load_seconds)
        self.usage = Usage()
        self.model = self.tokenizer = None

    def warm_up(self) -> float:
        return 0.0

    def answers(
        self, batches: Sequence[Batch], _seeds: Sequence[int], tick: Callable[[int], None]
    ) -> list[tuple[int, Any]]:
        for done, batch in enumerate(batches):
            tick(done)
            time.sleep(sum(float(piece.context) for piece in batch.pieces))  # type: ignore[arg-type]
        return [(piece.index, "") for batch in batches for piece in batch.pieces]

    def close(self) -> None:
        """Nothing was started."""


def load(
    _model_path: str,
    _options: ModelOptions,
    _batch_size: int | str,
    *,
    phase: Callable[[str], None] = lambda _phase: None,
    **_more: Any,
) -> SyntheticEngine:
    """`evaljobs.trial.engines.loading.load_engine`: ready `load_seconds` after this process began (in ticks since boot)."""
    phase("load")
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    began = time.monotonic()
    time.sleep(max(0.0, given().get("load_seconds", 0.0) - age))
    return SyntheticEngine(time.monotonic() - began)


# --- metrics ---------------------------------------------------------------------------------------------------------


def import_for_jobs() -> None:
    """As `evaljobs.scoring.score.import_for_jobs`: nothing is imported."""


def perform_metric_job(spec: ExecuteSpec | ScoreSpec) -> Executed | Scored:
    """`evaljobs.scoring.score.perform_metric_job`: hold a CPU slot; a judge's jobs one at a time."""
    task = spec.task if isinstance(spec, ExecuteSpec) else next(iter(spec.request_sets))
    metric, paths = given()["metrics"][task], EvaluationPaths(spec.evaluation_dir)
    outcome: Executed | Scored
    if isinstance(spec, ExecuteSpec):
        with _turn(task) if metric["alone"] else contextlib.nullcontext():
            started = time.monotonic()  # the wait for a turn is no work
            time.sleep(metric["seconds"] * len(spec.documents) / metric["docs"])
        made = {"task": task, "documents": len(spec.documents), "programs": 0}
        outcome = Executed(name=spec.name, seconds=time.monotonic() - started, **made)
    else:
        started = time.monotonic()
        # those of execute jobs have passed already
        time.sleep(0.0 if metric["executes"] else metric["seconds"])
        place = paths.scores / f"{spec.entry:03d}-{slug(task)}.json"
        write_atomic(place, json.dumps({"results": {task: {"alias": task}}}).encode())
        made = {"entry": spec.entry, "result_file": str(place)}
        outcome = Scored(name=spec.name, seconds=time.monotonic() - started, **made)
    write_outcome(paths, outcome)
    return outcome


@contextlib.contextmanager
def _turn(task: str) -> Iterator[None]:
    with (Path(os.environ[FOLDER]) / f"judge-{slug(task)}").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


if __name__ == "__main__":  # run a verb of evaljobs with this module's parts in it
    match None if any(REAL in word for word in sys.argv[4:]) else sys.argv[3]:
        case "trial":
            from evaljobs.trial.engines import loading

            loading.load_engine = load  # type: ignore[assignment]
        case "worker":
            sys.modules["evaljobs.scoring.score"] = sys.modules[__name__]
        case "stage":
            time.sleep(given().get("storage_seconds", 0.0))
    from evaljobs.__main__ import exit_process, main

    exit_process(main(sys.argv[3:]))
