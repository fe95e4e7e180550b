"""The engine and the metrics of a bench: they hold a GPU, or a CPU slot, for given seconds, and may answer from a table.

    python -m bench.synthetic -m evaljobs VERB …

Rule: nothing but the engine and, where metrics are given, the metric module is replaced; staging, claims,
heartbeats, dumps and RQ are the real ones. `bench.json` in $BENCH_FOLDER says what to do. Without `answers` a request's text
is its seconds; with them each request takes `seconds` of its kind. What a trial takes to start counts into its load. A
precursor holds its node's link for the seconds that one reader takes. Imports no torch and no lm-eval.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
import os
import sys
import time
import zlib
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
SLOW = "BENCH_SLOW"  # "NODE/GPU:TIMES": that GPU takes so many times as long, as a straggler does


@functools.cache
def given() -> dict[str, Any]:
    """What `bench.json` says: storage_seconds, metrics; or seconds and answers."""
    return dict(json.loads((Path(os.environ[FOLDER]) / "bench.json").read_text()))


class SyntheticEngine:
    """An engine that holds its GPU for the seconds that are given; see `evaljobs.trial.engines.protocol`."""

    def __init__(self, load_seconds: float) -> None:
        self.loaded = Loaded(devices="synthetic", gpus=1, import_seconds=0.0, load_seconds=load_seconds)
        self.usage = Usage()

    def warm_up(self) -> float:
        return 0.0

    def answers(
        self, batches: Sequence[Batch], _seeds: Sequence[int], tick: Callable[[int], None]
    ) -> list[tuple[int, Any]]:
        pairs: list[tuple[int, Any]] = []
        for done, batch in enumerate(batches):
            tick(done)
            pairs += answer(batch)
        return pairs

    def close(self) -> None:
        """Nothing was started."""


def load(
    _model_path: str,
    options: ModelOptions,
    _batch_size: int | str,
    *,
    phase: Callable[[str], None] = lambda _phase: None,
    **_more: Any,
) -> SyntheticEngine:
    """`evaljobs.trial.engines.loading.load`: ready `load_seconds` after this process began."""
    phase("load")
    began, seconds = time.monotonic(), float(options.model_args.get("load_seconds", 0))
    time.sleep(max(0.0, seconds - _age_seconds()))
    return SyntheticEngine(time.monotonic() - began)


def _age_seconds() -> float:
    """How long ago this process began: starttime is in ticks since boot."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


def answer(batch: Batch) -> list[tuple[int, Any]]:
    """Hold the GPU for the seconds that are given, then answer."""
    if "answers" not in given():
        time.sleep(_times() * sum(float(piece.context) for piece in batch.pieces))  # type: ignore[arg-type]
        return [(piece.index, "") for piece in batch.pieces]
    generates = batch.kind == "generate_until"
    time.sleep(given()["seconds"]["generate" if generates else "likelihood"] * len(batch.pieces))
    if generates:
        return [(p.index, given()["answers"].get(p.context, "an answer")) for p in batch.pieces]
    noise = [zlib.crc32(repr((p.context, p.continuation)).encode()) / 2**32 for p in batch.pieces]
    if batch.kind == "loglikelihood":
        return [(p.index, [-x, False]) for p, x in zip(batch.pieces, noise, strict=True)]
    return [(p.index, -x if batch.text else [p.window, -x]) for p, x in zip(batch.pieces, noise, strict=True)]


def _times() -> float:
    gpu, _, times = os.environ.get(SLOW, "").partition(":")
    here = f"{os.environ.get('SLURMD_NODENAME')}/{os.environ.get('SLURM_JOB_GPUS')}"
    return float(times) if gpu == here else 1.0


# --- metrics ---------------------------------------------------------------------------------------------------------


def warm() -> None:
    """`evaljobs.scoring.score.warm`: nothing is imported."""


def perform(spec: ExecuteSpec | ScoreSpec) -> Executed | Scored:
    """`evaljobs.scoring.score.perform`: hold a CPU slot; a judge's jobs one at a time."""
    metrics = given()["metrics"]
    started = time.monotonic()
    paths = EvaluationPaths(spec.evaluation_dir)
    outcome: Executed | Scored
    if isinstance(spec, ExecuteSpec):
        metric = metrics[spec.task]
        with _turn(spec.task) if metric["alone"] else contextlib.nullcontext():
            started = time.monotonic()  # the wait for a turn is no work
            time.sleep(metric["seconds"] * len(spec.documents) / metric["docs"])
        made = {"task": spec.task, "documents": len(spec.documents), "programs": 0}
        outcome = Executed(name=spec.name, seconds=time.monotonic() - started, **made)
    else:
        (task,) = spec.request_sets
        if not metrics[task]["executes"]:  # else the execute jobs took the seconds already
            time.sleep(metrics[task]["seconds"])
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


def main() -> None:
    """Run a verb of evaljobs with this module's parts in it."""
    verb = sys.argv[3]
    if verb == "trial":
        from evaljobs.trial.engines import loading  # noqa: PLC0415

        loading.load = load  # type: ignore[assignment]
    elif verb == "worker" and "metrics" in given():
        sys.modules["evaljobs.scoring.score"] = sys.modules[__name__]
    elif verb == "stage":
        time.sleep(given().get("storage_seconds", 0.0))
    from evaljobs.__main__ import main as evaljobs_main  # noqa: PLC0415

    sys.exit(evaljobs_main(sys.argv[3:]))


if __name__ == "__main__":
    main()
