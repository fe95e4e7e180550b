"""A gate: rules that a checkpoint's scores must hold against a baseline's, and what each rule says. Pure.

Rule: "not worse by more than x" passes, or is a regression, only where the interval of the paired difference says so with
the rule's confidence; between both it is undecidable, and more documents would tell.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Annotated, Any, Literal

from pydantic import Field

from coordinator.errors import OperatorError
from evaljobs.contract.columns import DENSE, SUITE_MEAN
from evaljobs.contract.specs import Record

Outcome = Literal["pass", "regression", "undecidable"]
WORST: Sequence[Outcome] = ("regression", "undecidable", "pass")


class Rule(Record):
    """What the scores of one task or group must hold."""

    task: Annotated[str, Field(min_length=1)]  # a task or group, or a glob of them
    metric: str | None = None  # such as "acc", or "exact_match,strict-match"; None: each of the task's
    max_drop: Annotated[float, Field(ge=0)] | None = (
        None  # not worse than the baseline by more, in the metric's unit
    )
    confidence: Annotated[float, Field(gt=0.5, lt=1)] = 0.95  # of max_drop, one-sided
    at_least: float | None = None  # the score itself; at most, where lower is better
    min_documents: Annotated[int, Field(ge=1)] | None = None  # with fewer the rule is undecidable


class Policy(Record):
    """A policy file."""

    baseline: str = "previous"  # "previous" or "best" checkpoint of the training, or an evaluation's id
    rule: Annotated[tuple[Rule, ...], Field(min_length=1)]  # [[rule]], one or more


@dataclass(frozen=True, slots=True)
class Ruling:
    """What one rule says of one score."""

    task: str
    metric: str
    outcome: Outcome
    why: str

    @property
    def line(self) -> str:
        return f"{self.outcome}: {self.task} {self.metric.removesuffix(',none')}: {self.why}"


def is_named(rule: Rule, task: str, metric: str) -> bool:
    """Does the rule name this score? `metric`: with the filter of the answers, as "exact_match,strict-match"."""
    own, _, which = metric.partition(",")
    return fnmatchcase(task, rule.task) and rule.metric in (metric, own, *[None] * (which != DENSE))


def judge(policy: Policy, rows: Sequence[Mapping[str, Any]]) -> list[Ruling]:
    """Rulings in the order of the rules and rows. `rows`: of a comparison with the baseline, with verdicts.

    OperatorError for a rule that names no score of the checkpoint, or demands nothing.
    """
    found = []
    for rule in policy.rule:
        if rule.max_drop is None and rule.at_least is None and rule.min_documents is None:
            raise OperatorError(f"rule for {rule.task}: say max_drop, at_least or min_documents")
        named = [
            r
            for r in rows
            if r["values"][-1] is not None
            and is_named(rule, r["task"], r["metric"])
            and (r["task"] == rule.task or not _is_suite_mean(r))
        ]
        if not named:
            tasks = ", ".join(dict.fromkeys(str(r["task"]) for r in rows))
            raise OperatorError(
                f"rule for {' '.join(filter(None, (rule.task, rule.metric)))}: no such score; there are {tasks}"
            )
        found += [_ruling(rule, row, rows) for row in named]
    return found


def outcome_of(rulings: Sequence[Ruling]) -> Outcome:
    """The worst one."""
    return min((r.outcome for r in rulings), key=WORST.index)


def _is_suite_mean(row: Mapping[str, Any]) -> bool:
    """Is it the mean of a suite's own group? A glob leaves it out: its tasks have no such metric to be compared by."""
    return bool(row["leaves"]) and row["metric"] == SUITE_MEAN


def _ruling(rule: Rule, row: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> Ruling:
    said: list[tuple[Outcome, str]] = []
    value, higher, documents = row["values"][-1], row["higher_is_better"], row["documents"][-1]
    if rule.min_documents is not None:
        enough = documents is not None and documents >= rule.min_documents
        said.append(
            (
                "pass" if enough else "undecidable",
                f"{documents or 'unknown'} documents of {rule.min_documents}",
            )
        )
    if rule.at_least is not None:
        holds = value >= rule.at_least if higher else value <= rule.at_least
        word = "least" if higher else "most"
        said.append(("pass" if holds else "regression", f"{value:.4f}, at {word} {rule.at_least:g}"))
    if rule.max_drop is not None:
        said.append(_drop(rule, row, rows))
    outcome = min((one for one, _ in said), key=WORST.index)
    return Ruling(row["task"], row["metric"], outcome, "; ".join(text for _, text in said))


def _drop(rule: Rule, row: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> tuple[Outcome, str]:
    """Of `max_drop`: by the difference, its error and degrees of freedom, of a group over all documents of its tasks."""
    from scipy import stats  # noqa: PLC0415

    assert rule.max_drop is not None
    if _is_suite_mean(row):
        return "undecidable", "the mean of a suite's group: only at_least can be asked of it"
    members = row["leaves"] or [row["task"]]
    parts = [r["verdicts"][-1] for r in rows if r["task"] in members and r["metric"] == row["metric"]]
    if len(parts) < len(members) or any("why" in part for part in parts):
        why = next((part["why"] for part in parts if "why" in part), "a task of it has no such score")
        return "undecidable", f"not comparable: {why}"
    count = sum(part["documents"] for part in parts)
    sign = 1 if row["higher_is_better"] else -1
    change = sign * sum(part["difference"] * part["documents"] for part in parts) / count
    error = math.sqrt(sum((part["stderr"] * part["documents"] / count) ** 2 for part in parts))
    degrees = sum((part["clusters"] or part["documents"]) - 1 for part in parts)
    reach = float(stats.t(degrees).ppf(rule.confidence)) * error
    if row["leaves"] and abs(change - sign * (row["values"][-1] - row["values"][0])) > 1e-6:
        return "undecidable", "its score is no mean over the documents of its tasks"
    text = f"{change:+.4f} ± {reach:.4f}, not below {-rule.max_drop:+g}"
    if change - reach >= -rule.max_drop:
        return "pass", text
    return ("regression" if change + reach < -rule.max_drop else "undecidable"), text
