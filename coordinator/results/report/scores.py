"""The document of one evaluation, shown by every view: its scores, costs and failures. Pure.

Rule: `Head` and `Ended` declare each of these facts once: `Summary`, `Report`, `Evaluation` and `Results` inherit them.
`coordinator.results.report.load_series` builds the document of an evaluation from its results and report, and stores it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import nan
from pathlib import PurePosixPath
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import ConfigDict, Field, PlainSerializer, PlainValidator

from coordinator.decide.evaluation.records import EvaluationRecord, ScreenScore, checkpoint_name
from evaljobs.contract.columns import BITS, DENSE
from evaljobs.contract.specs import StateRecord

# how two results differ in their modes, request digests and score keys; "": comparable, or without keys
Difference = Literal["", "mode", "requests", "score"]
SCORE_CONFIG = ConfigDict(allow_inf_nan=True, ser_json_inf_nan="constants")  # a score of lm-eval may be NaN


class ScoreValue(NamedTuple):
    """One value of lm-eval's results."""

    task: str  # or group
    metric: str  # such as "acc"
    filter: str  # of the answers, such as "strict-match", or "none"
    value: float  # from lm-eval
    stderr: float | None = None  # None: lm-eval gives none
    higher_is_better: bool = True  # from the metric in lm-eval
    documents: int | None = None  # of a group: total of its tasks
    version: str = ""  # the task's own, from lm-eval
    n_shot: int | None = None  # examples in each prompt
    keys: tuple[str, str] = ("", "")  # digest of the requests and score key; empty if results.json has none
    differs: Difference = ""  # in a series: the difference from the previous checkpoint

    @property
    def key(self) -> tuple[str, str, str]:
        """Unique within a suite."""
        return self.task, self.metric, self.filter

    @property
    def measure(self) -> str:
        """The metric, with the filter of the answers if there is one: "exact_match,strict-match"."""
        return measure_of(self.metric, self.filter)

    @property
    def name(self) -> str:
        """Readable and unique within a suite."""
        return f"{self.task}/{self.measure}"


def measure_of(metric: str, which: str) -> str:
    """Return a metric with the filter of the answers, if there is one."""
    return metric if which == "none" else f"{metric},{which}"


def _rows(value: Any) -> tuple[ScoreValue, ...]:
    if not isinstance(value, Mapping):
        return tuple(value)
    columns = {name: value[name] for name in ScoreValue._fields} if value else {}
    columns |= {"keys": map(tuple, columns["keys"])} if value else {}
    return tuple(map(ScoreValue._make, zip(*columns.values(), strict=True)))


def _columns(scores: Sequence[ScoreValue]) -> dict[str, Sequence[Any]]:
    return dict(zip(ScoreValue._fields, zip(*scores, strict=True), strict=False))


# in JSON a list for each field of a score, since thousands of records take longer to validate
Scores = Annotated[tuple[ScoreValue, ...], PlainValidator(_rows), PlainSerializer(_columns, when_used="json")]


class Head(StateRecord):
    """Identity of an evaluation."""

    evaluation_id: str  # names its folder in the work folder
    suite: str = ""  # name
    checkpoint: str = ""  # the folder that training wrote, or the Hub's model
    step: int | None = None  # None: unknown
    mode: str = "exact"  # or "fast"
    not_asked: tuple[str, ...] = ()  # tasks of the suite whose turn it was not (`[[task]] every`)
    accepted_at: float = 0.0  # unix seconds

    @property
    def label(self) -> str:
        """Label of the checkpoint: its step, or its folder's name."""
        return str(self.step) if self.step is not None else checkpoint_name(self.checkpoint)

    @property
    def head(self) -> dict[str, Any]:
        """These fields."""
        return {name: getattr(self, name) for name in Head.model_fields}

    @property
    def training(self) -> tuple[str, str, str]:
        """The training that it belongs to: (folder of the checkpoints, suite, mode)."""
        return str(PurePosixPath(self.checkpoint).parent), self.suite, self.mode


class Ended(Head):
    """Outcome of an evaluation; empty or None if unknown."""

    model_config = SCORE_CONFIG

    # from acceptance to the last score, without `paused_seconds`; None: unknown
    makespan_seconds: float | None = None
    paused_seconds: float = 0.0  # without a coordinator and without any of its jobs working
    gpu_seconds: float | None = None  # held by its jobs; None: unknown
    causes: Mapping[str, float] = Field(default_factory=dict)  # part of these: cause -> seconds
    slot: str = "GPU"  # unit of these seconds, from `usage.slot_word`
    staged_bytes: int = 0  # of weights, and of request sets if a node keeps them
    scores: Scores = ()  # one per task, metric and filter
    screened: tuple[ScreenScore, ...] = ()  # in screen mode, instead of scores
    at_chance: bool = False  # every task scores at chance
    fell_to_chance: str = ""  # then: a sentence on the earlier checkpoint of the training that did not


class Evaluation(Ended):
    """The document of an evaluation, in `ended.json`; without scores while it runs."""

    written: tuple[int, int] = (0, 0)  # mtimes of results.json and report.json, ns since 1970; 0: missing
    # running | done | failed | cancelled | stopped | parked | given up; failed: at least one task has no score; in a series
    # also open (not ended) and unreadable (damaged files)
    status: str
    failed: Mapping[str, str] = Field(default_factory=dict)  # task -> its error
    # trial without an outcome -> the cluster's end state
    died: Mapping[str, str] = Field(default_factory=dict)
    groups: Mapping[str, tuple[str, ...]] = Field(
        default_factory=dict
    )  # group of the suite -> its leaf tasks
    cost: float | None = None  # gpu_seconds at the given price, in its currency

    def leaves_out(self, task: str) -> bool:
        """Whether a task or group without a score was not asked, and so has not failed."""
        return task in self.not_asked or (bool(self.not_asked) and self.status == "done")

    @property
    def ended_at(self) -> float:
        """Unix seconds of the last score."""
        return self.accepted_at + (self.makespan_seconds or 0.0) + self.paused_seconds

    def row(self) -> dict[str, Any]:
        """Return a checkpoint of a series, without its scores."""
        return {name: getattr(self, name) for name in COLUMNS}


COLUMNS = (
    "evaluation_id", "suite", "checkpoint", "step", "status", "mode", "accepted_at", "makespan_seconds", "paused_seconds",
    "gpu_seconds", "slot", "cost", "not_asked",
)  # fmt: skip


def head_of(record: EvaluationRecord) -> dict[str, Any]:
    """Return the fields of `Head`."""
    return {
        "evaluation_id": record.evaluation_id,
        "suite": record.suite.name,
        "checkpoint": record.checkpoint.announced,
        "step": record.checkpoint.step,
        "mode": record.suite.mode or "exact",
        "not_asked": record.not_asked,
        "accepted_at": record.accepted_at,
    }


def screen_in(results: Mapping[str, Any]) -> dict[str, Any]:
    """Return what results.json says of a screen under a key of its own: {"screen": …}; nothing of other evaluations."""
    said = results.get("evalspan", {})
    return {"screen": said["screen"]} if "screen" in said else {}


def screened_in(results: Mapping[str, Any]) -> tuple[ScreenScore, ...]:
    """Return the estimates of a screen evaluation in its results.json."""
    tasks = screen_in(results).get("screen", {}).get("tasks", ())
    return tuple(ScreenScore(**one) for one in tasks)


def with_signals(results: Mapping[str, Any]) -> dict[str, Any]:
    """Return results.json with the dense signals of its leaf tasks as "dense", which `scores_of` reads."""
    return {**results, "dense": dict(sorted(results.get("evalspan", {}).get("signals", {}).items()))}


def scores_of(results: Mapping[str, Any]) -> tuple[ScoreValue, ...]:
    """Return the numbers in lm-eval's results, in its order, without aliases and texts; then those of `with_signals`."""
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
            value = nan if number is None else number  # as in results.json
            if not which or metric.endswith("_stderr") or not isinstance(value, int | float):
                continue
            error = values.get(f"{metric}_stderr,{which}")
            stderr = float(error) if isinstance(error, int | float) else None
            higher = metric != BITS if which == DENSE else better.get(task, {}).get(metric) in (None, True)
            found.append(ScoreValue(task, metric, which, float(value), stderr, higher, **facts))
    return tuple(found)


def _documents(results: Mapping[str, Any], task: str) -> int | None:
    """Return the documents of a task, or of all tasks of a group; None if unknown."""
    counts = [
        results.get("n-samples", {}).get(leaf, {}).get("effective")
        for leaf in set(_leaves(results.get("group_subtasks", {}), task, frozenset()))
    ]
    known = [count for count in counts if isinstance(count, int)]
    return sum(known) if known and len(known) == len(counts) else None


def keys_of(results: Mapping[str, Any], task: str) -> tuple[str, str]:
    """Return (digest of the requests, score key) of a task, or of all tasks of a group; "" if results.json has none."""
    keys = results.get("evalspan", {}).get("keys", {})
    leaves = sorted(set(_leaves(results.get("group_subtasks", {}), task, frozenset())))
    if not leaves or any(leaf not in keys for leaf in leaves):
        return "", ""
    asked, score = ([keys[leaf].get(kind, "") for leaf in leaves] for kind in ("asks", "score"))
    if len(leaves) > 1:
        asked, score = ([hashlib.sha256("".join(part).encode()).hexdigest()] for part in (asked, score))
    return asked[0], score[0]


def groups_of(results: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """Return each group of results -> its leaf tasks, sorted."""
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


def key_difference(before: tuple[str, str], after: tuple[str, str]) -> Difference:
    """Return what differs between two pairs of keys; "" if one is unknown."""
    if before[0] and after[0] and before[0] != after[0]:
        return "requests"
    if before[1] and after[1] and before[1] != after[1]:
        return "score"
    return ""


def top_groups(groups: Mapping[str, Sequence[str]]) -> dict[str, Sequence[str]]:
    """Return groups whose tasks are not all in a larger one. `groups`: as from `groups_of`."""
    return {
        group: members
        for group, members in groups.items()
        if not any({*members} < {*others} for others in groups.values())
    }


def top_scores(scores: Sequence[ScoreValue], groups: Mapping[str, Sequence[str]]) -> list[ScoreValue]:
    """Return scores of tasks that are in no group with a score, then of top-level groups."""
    scored = {score.task for score in scores}
    known = {group: members for group, members in groups.items() if group in scored}
    below = {task for members in known.values() for task in members}
    top = top_groups(known)
    alone = [s for s in scores if s.task not in below and s.task not in known]
    return [*alone, *(s for s in scores if s.task in top)]


def first_of_each(scores: Iterable[ScoreValue]) -> tuple[ScoreValue, ...]:
    """Return the main metric of each task: the first that lm-eval lists for it."""
    found: dict[str, ScoreValue] = {}
    for score in scores:
        found.setdefault(score.task, score)
    return tuple(found.values())
