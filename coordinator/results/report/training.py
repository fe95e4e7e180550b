"""`Training`: statements about all checkpoints of a training: comparisons of the newest one, drops, means. Pure.

Rule: a training is the folder of its checkpoints, with one suite in one mode. Pages, terminal, JSON and news print this
record; none computes a verdict, a level or a mean. `coordinator.results.report.training_files` stores it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any, NamedTuple

from coordinator.base.words import first_of, format_score
from coordinator.results.report.learning_curves import MEAN, Curve, CurvePoint, Series, Worse, best_of
from coordinator.results.report.scores import SCORE_CONFIG
from evaljobs.contract.specs import Record, StateRecord

MOST_NAMED = 3  # scores per line


class Drop(Record):
    """A checkpoint that shows a score to be worse than it was."""

    evaluation_id: str
    label: str  # of the checkpoint: its step, or its folder's name
    task: str  # leaf task
    measure: str  # the metric, with the filter of the answers if there is one
    after: float  # the score there
    worse: Worse  # since which checkpoint, and the mean before

    @property
    def name(self) -> str:
        """As in the score."""
        return f"{self.task}/{self.measure}"

    @property
    def since(self) -> str:
        """When it began: "worse since 41000 (95 %: 40000 to 42000)"."""
        return f"worse since {self.worse.since} (95 %: {self.worse.low} to {self.worse.high})"

    @property
    def levels(self) -> str:
        return f"{format_score(self.worse.mean)} before, {format_score(self.after)} at {self.label}"

    @property
    def words(self) -> str:
        """With the levels: "worse since 41000 (95 %: 40000 to 42000): 0.6813 before, 0.5100 at 42000"."""
        return f"{self.since}: {self.levels}"


class Against(Record):
    """An evaluation compared with that of an earlier checkpoint, over their common documents."""

    evaluation_id: str  # of the earlier one
    label: str
    verdict: str  # of all tasks together: better | worse | no evidence | not comparable
    change: float | None = None  # of the mean over tasks
    reach: float | None = None  # wider half of its two-sided 95 % interval
    tasks: int = 0  # in that mean: tasks whose documents can be compared
    of: int = 0  # tasks that count for the mean
    why: str = ""  # why there is no comparison
    better: tuple[str, ...] = ()  # scores that are better on their own, corrected for their number
    worse: tuple[str, ...] = ()

    @property
    def telling(self) -> str:
        """The verdict if it is better or worse."""
        return self.verdict if self.verdict in ("better", "worse") else ""

    def words(self, *, best: bool) -> str:
        """Describe the comparison, to follow the evaluation's name. `best`: it is the best one before that."""
        name = f"{self.label}, the best one before it" if best else self.label
        alone = [f"{word}: {first_of(names, MOST_NAMED)}" for word, names in self.alone.items() if names]
        if self.change is None:
            return ", ".join([f"cannot be compared as a whole with {name}: {self.why}", *alone])
        count = f"{self.tasks} of {self.of}" if self.tasks < self.of else f"{self.tasks}"
        size = f"{self.change:+.4f} ± {self.reach:.4f} over {count} task{'s' * (self.tasks != 1)}"
        said = (
            "is no better and no worse than" if self.verdict == "no evidence" else f"is {self.verdict} than"
        )
        return f"{said} {name} ({', '.join([size, *alone])})"

    @property
    def alone(self) -> dict[str, tuple[str, ...]]:
        """Verdict -> scores that have it on their own."""
        return {"worse": self.worse, "better": self.better}


class Training(StateRecord):
    """The newest checkpoint, and all before it. Lists are in training order, drops begin with the latest one."""

    model_config = SCORE_CONFIG

    folder: str  # of the checkpoints
    suite: str
    mode: str = "exact"
    scored: tuple[tuple[str, str], ...] = ()  # (evaluation, label) of those with scores
    mean: tuple[float | None, ...] = ()  # mean of all tasks, for each of `scored`; None: a task is missing
    previous: Against | None = None  # the newest one against the one before it
    best: Against | None = None  # and against the one with the highest mean before it
    drops: tuple[Drop, ...] = ()
    judged: bool = False  # there are enough checkpoints to tell since when a score is worse
    horizon: int | None = None  # checkpoints for which drops are calibrated


def training_title(folder: str, suite: str, mode: str) -> str:
    """Return a training's name on screens."""
    name = "/".join(PurePosixPath(folder).parts[-2:])
    return f"{name}, {suite}" + (f", {mode} mode" if mode != "exact" else "")


def drops_of(curve: Curve) -> list[Drop]:
    """Return drops in training order."""
    known = {"task": curve.task, "measure": curve.measure}
    return [
        Drop(evaluation_id=p.evaluation_id, label=p.label, after=p.value, worse=p.worse, **known)
        for p in curve.points
        if p.worse
    ]


def training_of(series: Series, against: Callable[[str, str], Mapping[str, Any]]) -> Training:
    """Return the training of a series. `against`: (evaluation, an earlier one) -> fields of `Against` from documents."""
    points = series.points
    scored = [p for p in points if p.scores]
    labels = {p.evaluation_id: p.label for curve in series.curves for p in curve.points}
    mean = mean_points(series)
    drops = [drop for curve in series.curves for drop in drops_of(curve)]
    order = {p.evaluation_id: i for i, p in enumerate(points)}
    drops.sort(key=lambda drop: -order[drop.evaluation_id])

    def against_one(other: str) -> Against:
        return Against(evaluation_id=other, label=labels[other], **against(scored[-1].evaluation_id, other))

    previous = against_one(scored[-2].evaluation_id) if len(scored) > 1 else None
    earlier = [mean[p.evaluation_id] for p in scored[:-1] if p.evaluation_id in mean]
    best = best_of(earlier, higher_is_better=True).evaluation_id if earlier else ""
    return Training(
        **dict(zip(("folder", "suite", "mode"), points[-1].training, strict=True)),
        scored=tuple((p.evaluation_id, labels[p.evaluation_id]) for p in scored),
        mean=tuple(mean[p.evaluation_id].value if p.evaluation_id in mean else None for p in scored),
        previous=previous,
        best=previous if previous and best == previous.evaluation_id else against_one(best) if best else None,
        drops=tuple(drops),
        judged=any(p.yardstick is not None for curve in series.curves for p in curve.points),
        horizon=series.horizon,
    )


def mean_points(series: Series) -> dict[str, CurvePoint]:
    """Return evaluation -> the mean of all its tasks; for a suite with a single score that counts, that score."""
    whole = [c for c in series.means if c.task == MEAN] or [c for c in series.curves if c.is_share]
    return {p.evaluation_id: p for p in whole[0].points} if whole else {}


class Clause(NamedTuple):
    """Part of a statement about a training. `verdict`: better | worse | ""; `compared`: (earlier evaluation, newest one)."""

    text: str
    verdict: str = ""
    compared: tuple[str, str] | tuple[()] = ()


def clause_against(name: str, evaluation: str, against: Against, *, best: bool = False) -> Clause:
    """Describe how an evaluation, called `name`, compares with an earlier one."""
    said = f"{name} {against.words(best=best)}"
    return Clause(said, against.telling, (against.evaluation_id, evaluation))


def training_sentence(training: Training, others: Sequence[str] = ()) -> str:
    """Describe the state of a training in a sentence. `others`: descriptions of its evaluations that are not done."""
    return "; ".join([*(clause.text for clause in training_clauses(training)), *others])


def training_clauses(training: Training) -> Iterator[Clause]:
    """Yield the state of a training: its newest checkpoint against the previous and the best one, then drops along it."""
    if not training.scored:
        is_screen = training.mode == "screen"
        yield Clause("screens have verdicts, no scores" if is_screen else "no checkpoint has scores yet")
        return
    evaluation, newest = training.scored[-1]
    previous, best = training.previous, training.best
    if previous is None:
        yield Clause(f"{newest} is the first checkpoint with scores")
        return
    yield clause_against(newest, evaluation, previous, best=best == previous)
    if best and best != previous:
        yield clause_against("it", evaluation, best, best=True)
    if training.drops:
        some = [f"{d.name} since {d.worse.since} ({d.levels})" for d in training.drops]
        count = len({d.name for d in training.drops})
        said = f"{count} score{'s are' if count > 1 else ' is'} worse: {first_of(some, MOST_NAMED)}"
        yield Clause(said, "worse")
    elif training.judged:
        yield Clause("no score is worse than before")
