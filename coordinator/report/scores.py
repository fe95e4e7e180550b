"""What one evaluation comes to: its scores, costs and failures, as one document that every view shows. Pure.

Rule: `Head` and `Ended` declare each of these facts once: `Summary`, `Report`, `Evaluation` and `Results` inherit them.
`coordinator.report.load_series` makes the document of an evaluation, of its results and report, and keeps it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import nan
from pathlib import PurePosixPath
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import ConfigDict, Field, PlainSerializer, PlainValidator

from coordinator.evaluation.records import EvaluationRecord, checkpoint_name
from evaljobs.contract.columns import BITS, DENSE
from evaljobs.contract.specs import Kept

# how two results differ in their modes, request digests and score keys; "": comparable, or without keys
Difference = Literal["", "mode", "requests", "score"]
SCORES = ConfigDict(allow_inf_nan=True, ser_json_inf_nan="constants")  # a score of lm-eval may be NaN


class ScoreValue(NamedTuple):
    """One value of lm-eval's results."""

    task: str  # or group
    metric: str  # such as "acc"
    filter: str  # of the answers, such as "strict-match"; "none": none
    value: float  # as lm-eval gives it
    stderr: float | None = None  # None: lm-eval gives none
    higher_is_better: bool = True  # as lm-eval says of the metric
    documents: int | None = None  # of a group: of all its tasks
    version: str = ""  # the task's own, as lm-eval gives it
    n_shot: int | None = None  # examples in each prompt
    keys: tuple[str, str] = ("", "")  # what was asked and score key; empty where results.json has none
    differs: Difference = ""  # in a series: how it was asked otherwise than at the checkpoint before

    @property
    def key(self) -> tuple[str, str, str]:
        """Unique within a suite."""
        return self.task, self.metric, self.filter

    @property
    def measure(self) -> str:
        """The metric, with the filter of the answers where there is one: "exact_match,strict-match"."""
        return measure_of(self.metric, self.filter)

    @property
    def name(self) -> str:
        """Readable and unique within a suite."""
        return f"{self.task}/{self.measure}"


def measure_of(metric: str, which: str) -> str:
    """A metric with the filter of the answers, where there is one."""
    return metric if which == "none" else f"{metric},{which}"


def _rows(value: Any) -> tuple[ScoreValue, ...]:
    if not isinstance(value, Mapping):
        return tuple(value)
    columns = {name: value[name] for name in ScoreValue._fields} if value else {}
    columns |= {"keys": map(tuple, columns["keys"])} if value else {}
    return tuple(map(ScoreValue._make, zip(*columns.values(), strict=True)))


def _columns(scores: Sequence[ScoreValue]) -> dict[str, Sequence[Any]]:
    return dict(zip(ScoreValue._fields, zip(*scores, strict=True), strict=False))


# in JSON a list for each field of a score, since thousands of records take longer to check
Scores = Annotated[tuple[ScoreValue, ...], PlainValidator(_rows), PlainSerializer(_columns, when_used="json")]


class Head(Kept):
    """Which evaluation it is."""

    evaluation_id: str  # names its folder in the work folder
    suite: str = ""  # its name
    checkpoint: str = ""  # the folder that training wrote, or the Hub's model
    step: int | None = None  # training step; None: not known
    mode: str = "exact"  # or "fast"
    not_asked: tuple[str, ...] = ()  # tasks of the suite whose turn it was not (`[[task]] every`)
    accepted_at: float = 0.0  # unix seconds

    @property
    def label(self) -> str:
        """Of the checkpoint: its step, or its folder's name."""
        return str(self.step) if self.step is not None else checkpoint_name(self.checkpoint)

    @property
    def head(self) -> dict[str, Any]:
        """These fields."""
        return {name: getattr(self, name) for name in Head.model_fields}

    @property
    def training(self) -> tuple[str, str, str]:
        """(folder of the checkpoints, suite, mode): the training that it belongs to."""
        return str(PurePosixPath(self.checkpoint).parent), self.suite, self.mode


class Ended(Head):
    """What it came to; nothing, and None, where that is not known."""

    model_config = SCORES

    # from acceptance to the last score, without `paused_seconds`; None: not known
    makespan_seconds: float | None = None
    paused_seconds: float = 0.0  # in which no coordinator ran the evaluation, and none of its jobs worked
    gpu_seconds: float | None = None  # that its jobs held GPUs; None: not known
    causes: Mapping[str, float] = Field(default_factory=dict)  # of these: cause -> seconds
    slot: str = "GPU"  # what these seconds are of, as of `gpu_use.slot_word`
    staged_bytes: int = 0  # of weights, and of request sets where a node keeps them
    scores: Scores = ()  # one for each task, metric and filter
    at_chance: bool = False  # each task scores as guessing would
    fell_to_chance: str = ""  # then: which earlier checkpoint of the training did not, in a sentence


class Evaluation(Ended):
    """The document of an evaluation, in `ended.json`; without scores while it runs."""

    written: tuple[int, int] = (0, 0)  # when results.json and report.json were, ns since 1970; 0: not there
    # running | done | failed | cancelled | stopped | parked | given up; failed: at least one task has no score; in a series
    # also open: it has not ended, and unreadable: its files are damaged
    status: str
    failed: Mapping[str, str] = Field(default_factory=dict)  # task -> its error
    died: Mapping[str, str] = Field(default_factory=dict)  # trial without an outcome -> the cluster's word
    groups: Mapping[str, tuple[str, ...]] = Field(
        default_factory=dict
    )  # group of the suite -> its leaf tasks
    cost: float | None = None  # gpu_seconds at the price that was given, in its currency

    def leaves_out(self, task: str) -> bool:
        """Whether a task or group without a score was not asked, and so has not failed."""
        return task in self.not_asked or (bool(self.not_asked) and self.status == "done")

    @property
    def ended_at(self) -> float:
        """Unix seconds of the last score."""
        return self.accepted_at + (self.makespan_seconds or 0.0) + self.paused_seconds

    def row(self) -> dict[str, Any]:
        """A checkpoint of a series, without its scores."""
        return {name: getattr(self, name) for name in COLUMNS}


COLUMNS = (
    "evaluation_id", "suite", "checkpoint", "step", "status", "mode", "accepted_at", "makespan_seconds", "paused_seconds",
    "gpu_seconds", "slot", "cost", "not_asked",
)  # fmt: skip


def head_of(record: EvaluationRecord) -> dict[str, Any]:
    """The fields of `Head`."""
    return {
        "evaluation_id": record.evaluation_id,
        "suite": record.suite.name,
        "checkpoint": record.checkpoint.announced,
        "step": record.checkpoint.step,
        "mode": record.suite.mode or "exact",
        "not_asked": record.not_asked,
        "accepted_at": record.accepted_at,
    }


def with_signals(results: Mapping[str, Any]) -> dict[str, Any]:
    """results.json with the dense signals of its leaf tasks as "dense", which `scores_of` reads."""
    return {**results, "dense": dict(sorted(results.get("evalspan", {}).get("signals", {}).items()))}


def scores_of(results: Mapping[str, Any]) -> tuple[ScoreValue, ...]:
    """The numbers in lm-eval's results, in its order; aliases and texts are left out. Behind them those of `with_signals`."""
    versions, shots = results.get("versions", {}), results.get("n-shot", {})
    better: Mapping[str, Any] = results.get("higher_is_better", {})
    found = []
    tables = {**results.get("results", {}), **results.get("groups", {})}
    for task, values in (*tables.items(), *results.get("dense", {}).items()):
        facts = {
            "documents": values.get("n", _documents(results, task)),
            "version": "" if versions.get(task) is None else str(versions[task]),
            "n_shot": shots[task] if isinstance(shots.get(task), int) else None,
            "keys": keys_of(results, task),
        }
        for key, number in values.items():
            metric, _, which = key.partition(",")
            value = nan if number is None else number  # as results.json has it
            if not which or metric.endswith("_stderr") or not isinstance(value, int | float):
                continue
            error = values.get(f"{metric}_stderr,{which}")
            stderr = float(error) if isinstance(error, int | float) else None
            higher = metric != BITS if which == DENSE else better.get(task, {}).get(metric) in (None, True)
            found.append(ScoreValue(task, metric, which, float(value), stderr, higher, **facts))
    return tuple(found)


def _documents(results: Mapping[str, Any], task: str) -> int | None:
    """Documents of a task, or of all tasks of a group; None where lm-eval does not say."""
    counts = [
        results.get("n-samples", {}).get(leaf, {}).get("effective")
        for leaf in set(_leaves(results.get("group_subtasks", {}), task, frozenset()))
    ]
    known = [count for count in counts if isinstance(count, int)]
    return sum(known) if known and len(known) == len(counts) else None


def keys_of(results: Mapping[str, Any], task: str) -> tuple[str, str]:
    """(what was asked, score key) of a task, or of all tasks of a group; "" where results.json has none."""
    keys = results.get("evalspan", {}).get("keys", {})
    leaves = sorted(set(_leaves(results.get("group_subtasks", {}), task, frozenset())))
    if not leaves or any(leaf not in keys for leaf in leaves):
        return "", ""
    asked, score = ([keys[leaf].get(kind, "") for leaf in leaves] for kind in ("asks", "score"))
    if len(leaves) > 1:
        asked, score = ([hashlib.sha256("".join(part).encode()).hexdigest()] for part in (asked, score))
    return asked[0], score[0]


def groups_of(results: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """Each group of results -> its leaf tasks, sorted."""
    groups = results.get("group_subtasks", {})
    return {
        group: tuple(sorted({*_leaves(groups, group, frozenset())}))
        for group, members in groups.items()
        if members
    }


def _leaves(groups: Mapping[str, Any], name: str, seen: frozenset[str]) -> Iterator[str]:
    members = groups.get(name) or ()
    if not members or name in seen:
        yield name
        return
    for member in members:
        yield from _leaves(groups, member, seen | {name})


def difference(before: tuple[str, str], after: tuple[str, str]) -> Difference:
    """What differs between two pairs of keys; nothing where one is unknown."""
    if before[0] and after[0] and before[0] != after[0]:
        return "requests"
    if before[1] and after[1] and before[1] != after[1]:
        return "score"
    return ""


def top_groups(groups: Mapping[str, Sequence[str]]) -> dict[str, Sequence[str]]:
    """Groups whose tasks are not all in a larger one. `groups`: as of `groups_of`."""
    return {
        group: members
        for group, members in groups.items()
        if not any({*members} < {*others} for others in groups.values())
    }


def top_scores(scores: Sequence[ScoreValue], groups: Mapping[str, Sequence[str]]) -> list[ScoreValue]:
    """Of the tasks that are in no group with a score, then of groups that are in no larger one."""
    scored = {score.task for score in scores}
    known = {group: members for group, members in groups.items() if group in scored}
    below = {task for members in known.values() for task in members}
    top = top_groups(known)
    alone = [s for s in scores if s.task not in below and s.task not in known]
    return [*alone, *(s for s in scores if s.task in top)]


def first_of_each(scores: Iterable[ScoreValue]) -> tuple[ScoreValue, ...]:
    """The main metric of each task: the first that lm-eval lists for it."""
    found: dict[str, ScoreValue] = {}
    for score in scores:
        found.setdefault(score.task, score)
    return tuple(found.values())
