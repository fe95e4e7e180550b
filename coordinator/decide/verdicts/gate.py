"""Gates: rules for a checkpoint's scores relative to a baseline's, and their results. Pure.

Rule: "not worse by more than x" passes, or is a regression, only if the interval of the paired difference says so with the
rule's confidence; otherwise it is undecidable, and more documents would help. Each score passes on its own, since all must
pass; a regression of any fails, so that end of its interval is corrected for the number of the rule's scores (Bonferroni). A
score that the baseline has and the checkpoint lacks is missing, which is not a pass; a task whose turn it was not
(`[[task]] every`) is not asked, which is neither.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Annotated, Any, Literal

from pydantic import Field

from coordinator.base.words import format_score
from coordinator.decide.verdicts.paired import Paired, confidence_interval
from coordinator.errors import OperatorError
from evaljobs.contract.columns import DENSE, SUITE_MEAN
from evaljobs.contract.specs import Record

Outcome = Literal["pass", "regression", "missing", "undecidable", "not asked"]
WORST_FIRST: Sequence[Outcome] = ("regression", "missing", "undecidable", "not asked", "pass")
Tier = Literal["critical", "supporting", "advisory"]
Row = Mapping[str, Any]  # from a comparison, with verdicts
Drop = Annotated[float, Field(ge=0)] | None
TIER_PREFIX: Mapping[Tier, str] = {"critical": "", "supporting": "warning: ", "advisory": "advisory: "}


class Rule(Record):
    """Demands on the scores of one task or group."""

    task: Annotated[str, Field(min_length=1)]  # a task or group, or a glob of them
    metric: str | None = None  # such as "acc", or "exact_match,strict-match"; None: all of the task's
    max_drop: Drop = None  # largest allowed drop from the baseline, in the metric's unit
    max_relative_drop: Drop = None  # the same, as a fraction of the baseline's score
    confidence: Annotated[float, Field(gt=0.5, lt=1)] = 0.95  # of these drops, one-sided
    at_least: float | None = None  # limit on the score itself; an upper limit if lower is better
    min_documents: Annotated[int, Field(ge=1)] | None = None  # with fewer, the rule is undecidable
    tier: Tier = "critical"  # decides the outcome; "supporting" warns, "advisory" is only printed
    required: bool = False  # a missing score fails like a regression


class Policy(Record):
    """A policy file."""

    baseline: str = "previous"  # "previous" or "best" checkpoint of the training, or an evaluation's id
    rule: Annotated[tuple[Rule, ...], Field(min_length=1)]  # [[rule]], one or more


@dataclass(frozen=True, slots=True)
class Ruling:
    """Result of one rule for one score."""

    task: str
    metric: str
    outcome: Outcome
    why: str
    tier: Tier
    required: bool

    @property
    def line(self) -> str:
        mark = "" if self.outcome == "pass" else TIER_PREFIX[self.tier]
        score = f"{self.task} {self.metric.removesuffix(',none')}".rstrip()
        return f"{mark}{self.outcome}: {score}: {self.why}"

    @property
    def has_failed(self) -> bool:
        """Whether the checkpoint fails because of it; undecidable is not enough."""
        failed = self.outcome == "regression" or (self.outcome == "missing" and self.required)
        return failed and self.tier == "critical"


def is_named(rule: Rule, task: str, metric: str) -> bool:
    """Return whether the rule names this score. `metric`: including the filter of the answers, as "exact_match,strict-match"."""
    own, _, which = metric.partition(",")
    return fnmatchcase(task, rule.task) and rule.metric in (metric, own, *[None] * (which != DENSE))


def judge_rows(
    policy: Policy, rows: Sequence[Mapping[str, Any]], not_asked: Sequence[str] = ()
) -> list[Ruling]:
    """Return rulings in the order of the rules and rows. `rows`: a comparison with the baseline, with verdicts; `not_asked`:
    tasks of the checkpoint.

    Raise OperatorError for a rule that names no score of the baseline or checkpoint, or demands nothing.
    """
    found = []
    for rule in policy.rule:
        demands = (rule.max_drop, rule.max_relative_drop, rule.at_least, rule.min_documents)
        if all(demand is None for demand in demands) and not rule.required:
            known = "max_drop, max_relative_drop, at_least, min_documents or required"
            raise OperatorError(f"rule for {rule.task}: say {known}")
        named = [
            r
            for r in rows
            if is_named(rule, r["task"], r["metric"]) and (r["task"] == rule.task or not _is_suite_mean(r))
        ]
        rare = [task for task in not_asked if not named and fnmatchcase(task, rule.task)]
        for task in rare:
            why = "neither it nor the baseline was asked"
            found.append(Ruling(task, rule.metric or "", "not asked", why, rule.tier, rule.required))
        if not named and not rare:
            tasks = ", ".join(dict.fromkeys(str(r["task"]) for r in rows))
            raise OperatorError(
                f"rule for {' '.join(filter(None, (rule.task, rule.metric)))}: no such score; there are {tasks}"
            )
        present = sum(not _is_missing(r) for r in named)
        for row in named:
            outcome, why = _judged(rule, row, present)
            found.append(Ruling(row["task"], row["metric"], outcome, why, rule.tier, rule.required))
    return found


def outcome_of(rulings: Sequence[Ruling]) -> Outcome:
    """Return the worst outcome of the critical rules."""
    return min((r.outcome for r in rulings if r.tier == "critical"), key=WORST_FIRST.index, default="pass")


def _is_missing(row: Row) -> bool:
    """Return whether the checkpoint has no such score, or one that is not a number."""
    value = row["values"][-1]
    return value is None or not math.isfinite(value)


def _is_suite_mean(row: Mapping[str, Any]) -> bool:
    """Return whether this is the mean of a suite's own group. Globs skip it, since its tasks have no such metric to compare."""
    return bool(row["leaves"]) and row["metric"] == SUITE_MEAN


def _judged(rule: Rule, row: Row, count: int) -> tuple[Outcome, str]:
    """Judge one score by the worst of a rule's demands. `count`: scores of the checkpoint that the rule names."""
    said: list[tuple[Outcome, str]] = []
    before, value, documents = row["values"][0], row["values"][-1], row["documents"][-1]
    if _is_missing(row):
        kept = "none" if before is None else format_score(before)
        if value is None and row["not_asked"][-1]:
            return "not asked", f"not its turn at this checkpoint; the baseline has {kept}"
        return "missing", f"{'no score' if value is None else value}; the baseline has {kept}"
    if rule.min_documents is not None:
        enough = documents is not None and documents >= rule.min_documents
        text = f"{documents or 'unknown'} documents of {rule.min_documents}"
        said.append(("pass" if enough else "undecidable", text))
    if rule.at_least is not None:
        holds = value >= rule.at_least if row["higher_is_better"] else value <= rule.at_least
        word = "least" if row["higher_is_better"] else "most"
        said.append(
            ("pass" if holds else "regression", f"{format_score(value)}, at {word} {rule.at_least:g}")
        )
    drops = [] if rule.max_drop is None else [rule.max_drop]
    if rule.max_relative_drop is not None and before is not None:
        drops.append(rule.max_relative_drop * abs(before))
    if drops or rule.max_relative_drop is not None:
        one = _difference(row)
        said.append(("undecidable", one) if isinstance(one, str) else _drop(one, min(drops), rule, count))
    worst: Outcome = min((one for one, _ in said), key=WORST_FIRST.index, default="pass")
    return worst, "; ".join(text for _, text in said) or format_score(value)


def _difference(row: Row) -> Paired | str:
    """Return how much better the score of a task or group is than the baseline's; or why that is unknown."""
    said = row["verdicts"][-1]
    if "why" in said:
        return f"not comparable: {said['why']}"
    one = Paired.of(said)
    return (
        one
        if row["higher_is_better"]
        else one._replace(difference=-one.difference, gained=one.lost, lost=one.gained)
    )


def _drop(one: Paired, limit: float, rule: Rule, count: int) -> tuple[Outcome, str]:
    """Judge a difference by its interval: the lower end passes, the upper one, corrected for `count` scores, fails."""
    low, high = (
        confidence_interval(one, rule.confidence)[0],
        confidence_interval(one, 1 - (1 - rule.confidence) / count)[1],
    )
    level = f"one-sided {100 * rule.confidence:g} %"
    level += f"; upper end: 1 of {count} scores, corrected" if count > 1 else ""
    text = f"{one.difference:+.4f}, from {low:+.4f} to {high:+.4f} ({level}), not below {-limit:+.4g}"
    return "pass" if low >= -limit else "regression" if high < -limit else "undecidable", text
