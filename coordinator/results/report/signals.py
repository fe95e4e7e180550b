"""Signal, noise, and cost of each task over a training, and the tasks that say nothing for their price.

Rule: of a task counts its first score that is no dense signal. Its GPU seconds are those of its shards, of the last checkpoints.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path, PurePath, PurePosixPath
from statistics import fmean
from typing import TYPE_CHECKING, Any

from coordinator.base.words import first_of
from coordinator.decide.verdicts.signal import ASKED_SHARE, NOISE_RATIO, Signal, asking_cadences, signal_of
from coordinator.errors import OperatorError
from coordinator.results.report.learning_curves import Curve, Series, make_series
from coordinator.results.report.load_series import find_series
from coordinator.results.report.measurements import Report
from coordinator.results.report.scores import Evaluation
from evaljobs.contract.columns import DENSE
from evaljobs.contract.names import ShardId
from evaljobs.contract.paths import EvaluationPaths
from evaljobs.contract.specs import CheckpointSpec, SuiteSpec

if TYPE_CHECKING:
    from rich.console import RenderableType

PRICED = 3  # checkpoints, the last ones, of which a task's seconds are the mean


def seconds_of(work_dir: Path, points: Sequence[Evaluation]) -> dict[str, float]:
    """Return GPU seconds of each leaf task's shards in an evaluation: the mean of the last ones that have a report."""
    found: dict[str, list[float]] = defaultdict(list)
    for point in [point for point in points if point.scores][-PRICED:]:
        with suppress(OSError, ValueError):
            file = EvaluationPaths(work_dir / point.evaluation_id).report
            spent: dict[str, float] = defaultdict(float)
            for shard in Report.model_validate_json(file.read_bytes()).shards:
                spent[ShardId.parse(shard.shard).task.partition("#")[0]] += shard.seconds
            for task, seconds in spent.items():
                found[task].append(seconds)
    return {task: fmean(each) for task, each in found.items()}


def auto_cadences(work_dir: Path, suite: SuiteSpec, checkpoint: CheckpointSpec) -> dict[str, int]:
    """Return at each how many checkpoints of its training to ask each task, by `signals_of`; a group as often as any of its
    leaf tasks.
    """
    try:
        points = find_series(work_dir, str(PurePath(checkpoint.announced).parent), suite.name, mixed=True)
    except OperatorError:
        return {}
    series = make_series(point for point in points if point.mode == (suite.mode or "exact"))
    every = {row["task"]: row["every"] for row in signals_of(series, seconds_of(work_dir, series.points))}
    leaves = {name: its for point in series.points for name, its in point.groups.items()}
    return {
        task.name: min((every.get(leaf, 1) for leaf in leaves.get(task.name, (task.name,))), default=1)
        for task in suite.tasks
    }


def signals_of(series: Series, seconds: Mapping[str, float]) -> list[dict[str, Any]]:
    """Return a row for each task, as in JSON: the largest ratio first, those without one last. `seconds`: from `seconds_of`.

    `every`: of `asking_cadences`, a value for the suite file's key of that name.
    """
    folders = {p.evaluation_id: str(PurePosixPath(p.checkpoint).parent) for p in series.points}
    groups = {name for point in series.points for name in point.groups}
    found: dict[tuple[str, str], tuple[Curve, Signal | None]] = {}
    for curve in series.curves:
        if curve.filter == DENSE or curve.task in groups or (curve.suite, curve.task) in found:
            continue
        trainings: dict[str, list[float]] = defaultdict(list)
        for point in curve.points:
            trainings[folders[point.evaluation_id]].append(point.value)
        found[curve.suite, curve.task] = curve, signal_of([*trainings.values()])
    rows = []
    for suite in dict.fromkeys(suite for suite, _ in found):
        of = {task: one for (name, task), one in found.items() if name == suite}
        often = asking_cadences({task: (signal, seconds.get(task, 0.0)) for task, (_, signal) in of.items()})
        for task, (curve, signal) in of.items():
            known = {"signal": None, "noise": None} if signal is None else signal._asdict()
            known |= {"ratio": signal and signal.ratio, "says_nothing": signal and signal.says_nothing}
            row = {"suite": suite, "task": task, "measure": curve.measure, "checkpoints": len(curve.points)}
            rows.append({**row, **known, "gpu_seconds": seconds.get(task), "every": often[task]})
    return sorted(rows, key=lambda row: -1.0 if row["ratio"] is None else row["ratio"], reverse=True)


def show_signals(rows: Sequence[Mapping[str, Any]], slot: str) -> Iterator[RenderableType]:
    """Yield parts to print: a row for each task, then what is spent on tasks that say nothing."""
    from coordinator.results.report.tables import Parts, Sheet  # noqa: PLC0415 (the daemon starts without rich)

    total = sum(row["gpu_seconds"] or 0.0 for row in rows)
    sheet = Sheet("Signal and noise", "score", "signal", "noise", "ratio", f"{slot} s", "share", "every")
    for row in rows:
        spent = row["gpu_seconds"]
        sheet.add(
            f"{row['task']}/{row['measure']}",
            *("-" if row[name] is None else f"{row[name]:.4f}" for name in ("signal", "noise")),
            "-" if row["ratio"] is None else f"{row['ratio']:.1f}",
            "-" if spent is None else f"{spent:.1f}",
            f"{spent / total:.1%}".replace("%", " %") if spent and total else "-",
            str(row["every"]),
            style="yellow" if row["says_nothing"] else "",
        )
    yield sheet
    yield ""
    silent = [row for row in rows if row["says_nothing"]]
    if silent:
        spent = sum(row["gpu_seconds"] or 0.0 for row in silent)
        share = f" and take {100 * spent / total:.0f} % of the {slot} seconds" if total else ""
        names = first_of([row["task"] for row in silent])
        yield Parts(
            f"{len(silent)} of {len(rows)} tasks say nothing here (ratio below {NOISE_RATIO:g}){share}: {names}"
        )
    if any(row["ratio"] is None for row in rows):
        yield Parts("no ratio: too few checkpoints, six in a training, or three in each of several")
    share = f"{ASKED_SHARE:.0%}".replace("%", " %")
    yield Parts(
        f"every: by signal for its price, for `every` in the suite file; all tasks then take {share} of these seconds"
    )
