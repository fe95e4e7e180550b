"""The data of a work folder's front page (trainings, the newest first, and evaluations), and of pages over checkpoints. Pure.

Rule: statements about a training's scores come from its `Training`; those about running or failed evaluations from their
summaries.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any, NamedTuple

from coordinator.base.words import by_reason, format_estimate
from coordinator.results.report.learning_curves import MEAN, Curve, Series, groups_now
from coordinator.results.report.row_verdicts import SERIES_NOTE
from coordinator.results.report.scores import top_groups
from coordinator.results.report.training import Training, drops_of, training_clauses
from coordinator.results.report.training_files import Key
from coordinator.runtime.summary import Halt, Summary

# fields of a summary in the list of evaluations
SUMMARY_FIELDS = {
    "evaluation_id", "suite", "step", "scored", "entries", "shards_done", "shards", "accepted_at", "makespan_seconds", "gpu_seconds",
    "slot",
}  # fmt: skip
MOST_LINES = 12  # of a sparkline; with more scores it shows the mean
Find = Callable[[Key, Sequence[Summary]], Training | None]
"""(training, its evaluations with scores) -> its comparison; None: unknown so far."""


def in_order(summaries: Iterable[Summary]) -> list[Summary]:
    """Return these evaluations of one training by checkpoint, the latest for each."""
    latest = {s.checkpoint: s for s in sorted(summaries, key=lambda s: s.accepted_at)}
    return sorted(latest.values(), key=lambda s: (s.step is None, s.step or 0, s.accepted_at))


def standing_in_words(summary: Summary, halt: Halt | None, now: float) -> tuple[str, str]:
    """Return (done | failed | cancelled | stopped | running, the same as `status` describes it)."""
    if halt is not None:
        return "stopped", halt.text
    if summary.ended_at is not None:
        missed = summary.entries - summary.scored
        failed = f"failed: {missed} task{'s' * (missed != 1)}"
        said = failed if summary.result == "failed" and missed else summary.fell_to_chance or summary.result
        return summary.result, said
    done = f", {100 * summary.shards_done // summary.shards} %" if summary.shards else ""
    known = summary.done_at is not None and summary.trials
    left = f", {format_estimate(max((summary.done_at or 0.0) - now, 0.0))} left" if known else ""
    return "running", f"{summary.stage}{done}{left}"


class TrainingStanding(NamedTuple):
    """A training according to its summaries, in order of its checkpoints; the latest evaluation for each checkpoint."""

    key: Key
    members: Sequence[Summary]
    scored: Sequence[Summary]  # those with scores: of a checkpoint, perhaps an earlier one
    stands: Mapping[str, tuple[str, str]]  # evaluation -> from `standing_in_words`
    training: Training | None  # None: not yet compared

    @property
    def others(self) -> list[str]:
        """Describe evaluations that are not done, the latest first."""
        apart = {s.label: text for s, (word, text) in self._apart() if word != "cancelled"}
        return [f"{labels} {text}" for labels, text in by_reason(apart).items()]

    @property
    def states(self) -> list[list[str]]:
        """The same for pages: (evaluation, label, word, text)."""
        return [[s.evaluation_id, s.label, *said] for s, said in self._apart()]

    def _apart(self) -> Iterator[tuple[Summary, tuple[str, str]]]:
        for summary in reversed(self.members):
            if (said := self.stands[summary.evaluation_id]) != ("done", "done"):
                yield summary, said

    @property
    def accepted_at(self) -> float:
        return max(s.accepted_at for s in self.members)


def trainings_of(
    every: Iterable[tuple[Summary, Halt | None]], find: Find, now: float, most: int | None = None
) -> list[TrainingStanding]:
    """Return the first `most` trainings, that with the newest evaluation first."""
    groups: dict[Key, list[tuple[Summary, Halt | None]]] = defaultdict(list)
    for summary, halt in every:
        groups[summary.training].append((summary, halt))
    newest_first = sorted(groups, key=lambda key: -max(s.accepted_at for s, _ in groups[key]))
    made = []
    for key in newest_first[:most]:
        stands = {s.evaluation_id: standing_in_words(s, halt, now) for s, halt in groups[key]}
        members = in_order(s for s, _ in groups[key])
        scored = in_order(s for s, _ in groups[key] if s.ended_at is not None and s.scores)
        made.append(TrainingStanding(key, members, scored, stands, find(key, scored) if scored else None))
    return made


def index_data(
    begun: Sequence[tuple[Summary, Halt | None]], ended: Sequence[Summary], find: Find, now: float
) -> dict[str, Any]:
    """Return the front page's data. `begun`: open evaluations, oldest first; `ended`: newest first."""
    every = [*begun, *((s, None) for s in ended)]
    found = trainings_of(every, find, now)
    stands = {s.evaluation_id: standing_in_words(s, halt, now) for s, halt in every}
    names = short_names([one.key[0] for one in found])
    going = sum(halt is None for _, halt in begun)
    return {
        "kind": "index",
        "running": going,
        "halted": len(begun) - going,
        "evaluations": [
            s.model_dump(include=SUMMARY_FIELDS)
            | {"folder": s.training[0]}
            | dict(zip(("word", "status"), stands[s.evaluation_id], strict=True))
            for s, _ in every
        ],
        "trainings": [_card(one, names[one.key[0]]) for one in found],
    }


def _card(one: TrainingStanding, name: str) -> dict[str, Any]:
    """Return a training's card. `lines`: name -> values over `scored`, checkpoints with scores; `states`: of the others."""
    folder, suite, mode = one.key
    training = one.training
    copied = [i for i, _ in training.scored if i not in one.stands] if training else []
    return {
        "folder": folder,
        "name": name,
        "suite": suite,
        "mode": mode,
        "checkpoints": len(one.members) + len(copied),
        "scored": training.scored if training else [],
        "lines": _lines(one.scored, training) if training else {},
        "standing": training_as_shown(training) if training else None,
        "gpu_seconds": sum(s.gpu_seconds or 0.0 for s in one.members),
        "slot": one.members[-1].slot,
        "states": one.states,
        "accepted_at": one.accepted_at,
    }


def _lines(scored: Sequence[Summary], training: Training) -> dict[str, Sequence[float | None]]:
    """Return the mean, and if they are few the main scores for which higher is better: one per group or task."""
    values = {s.evaluation_id: {v.task: v.value for v in s.main_scores if v.higher_is_better} for s in scored}
    names = list(values.get(training.scored[-1][0], {}))
    if len(names) > MOST_LINES:
        return {MEAN: training.mean}
    lines: dict[str, Sequence[float | None]]
    lines = {name: [values.get(i, {}).get(name) for i, _ in training.scored] for name in names}
    return {MEAN: training.mean, **lines} if len(names) > 1 else lines


# --- the page over checkpoints: learning curves, tasks by checkpoints, costs -----------------------------------------


POINT_FIELDS = (
    "evaluation_id", "label", "step", "status", "mode", "accepted_at", "makespan_seconds", "gpu_seconds", "slot", "cost",
)  # fmt: skip


def training_data(found: Iterable[tuple[Training, Series]]) -> dict[str, Any]:
    """Return the data of a page over checkpoints. `found`: trainings, and their series with verdicts."""
    made = sorted(found, key=lambda one: (one[0].folder, one[0].suite, one[0].mode))
    names = short_names([training.folder for training, _ in made])
    return {"kind": "training", "trainings": [_training(names[t.folder], t, series) for t, series in made]}


def training_as_shown(training: Training) -> dict[str, Any]:
    """Return a training's state for pages: clauses and drops."""
    drops = [{"name": d.name, "words": d.words, "evaluation": d.evaluation_id} for d in training.drops]
    return {
        "clauses": [clause._asdict() for clause in training_clauses(training)],
        "drops": drops,
        "judged": training.judged,
    }


def short_names(folders: Sequence[str]) -> dict[str, str]:
    """Return folder -> the shortest unique end of its path, with at least two components."""
    folders = list(dict.fromkeys(folders))
    for length in range(2, max((len(PurePosixPath(f).parts) for f in folders), default=1) + 1):
        ends = {f: "/".join(PurePosixPath(f).parts[-length:]) for f in folders}
        if len(set(ends.values())) == len(folders):
            return ends
    return {f: f for f in folders}


def _training(name: str, training: Training, series: Series) -> dict[str, Any]:
    places = {point.evaluation_id: i for i, point in enumerate(series.points)}
    return {
        "name": name,
        "folder": training.folder,
        "suite": training.suite if training.mode == "exact" else f"{training.suite}, {training.mode} mode",
        **training_as_shown(training),
        "superseded": series.superseded,
        "along": SERIES_NOTE.format(horizon=series.horizon),
        "points": [{name: getattr(point, name) for name in POINT_FIELDS} for point in series.points],
        "curves": [_columns(curve, places) for curve in (*series.means, *series.curves)],
        "groups": list(top_groups(groups_now(series.points)).items()),
    }


def _columns(curve: Curve, places: Mapping[str, int]) -> dict[str, Any]:
    """Return the columns of a curve. `at`: indices of its points in the training, None: all; `marks`: index on the curve ->
    "!" shows a drop, "~" is not comparable, "↓" begins a drop; `drops`: with indices on the curve; `documents`: one number if
    all are equal.
    """
    at, documents = [places[p.evaluation_id] for p in curve.points], [p.documents for p in curve.points]
    place = {p.label: i for i, p in enumerate(curve.points)}
    drops = [
        {
            "at": place[drop.label],
            "since": place[drop.worse.since],
            "before": _short(drop.worse.mean, 6),
            "after": _short(drop.after, 6),
            "words": drop.words,
        }
        for drop in drops_of(curve)
    ]
    begun = {drop["since"] for drop in drops}
    marks = [
        "!" if p.worse else "~" if p.differs else "↓" if i in begun else ""
        for i, p in enumerate(curve.points)
    ]
    return {
        "task": curve.task,
        "measure": curve.measure,
        "up": curve.higher_is_better,
        "at": None if at == list(range(len(places))) else at,
        "value": [_short(p.value, 6) for p in curve.points],
        "stderr": [_short(p.stderr) for p in curve.points],
        "marks": {i: mark for i, mark in enumerate(marks) if mark},
        "yardstick": [_short(p.yardstick) for p in curve.points],
        "mean": [_short(p.mean_before) for p in curve.points],
        "drops": drops,
        "best": curve.points.index(curve.best),
        "documents": documents[0] if len({*documents}) == 1 else documents,
    }


def _short(value: float | None, digits: int = 4) -> float | None:
    return None if value is None else float(f"{value:.{digits}g}")
