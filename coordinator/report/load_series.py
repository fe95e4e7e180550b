"""Finds the evaluations of one training in a work folder and reads their results.

Rule: reads `evaluation.json`, `places.json` of copied checkpoints and, where the evaluation has ended,
`results.json` and `report.json`. It replays no journal: a thousand checkpoints are a thousand small
files.
"""

from __future__ import annotations

import fnmatch
import json
import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from coordinator.base.words import first_of
from coordinator.errors import OperatorError
from coordinator.evaluation.records import EvaluationRecord
from coordinator.intake import places
from coordinator.report.columns import with_signals
from coordinator.report.learning_curves import Point, scores_of
from coordinator.report.measurements import Report
from evaljobs.contract.paths import EvaluationPaths

log = logging.getLogger(__name__)


def in_series(checkpoint: str, selector: str) -> bool:
    """Does `selector`, a glob of checkpoint folders or the folder that holds them, match?"""
    place = Path(selector).expanduser()
    absolute = str(place if place.is_absolute() else Path.cwd() / place)
    parents = {absolute, str(Path(absolute).resolve())}
    return (
        str(Path(checkpoint).parent) in parents
        or any(fnmatch.fnmatchcase(checkpoint, p) for p in parents)
        or fnmatch.fnmatchcase(checkpoint, selector)
    )


def records(
    work_dir: Path, selector: str, suite: str | None
) -> Iterator[tuple[EvaluationPaths, EvaluationRecord]]:
    """Evaluations whose checkpoint, or a copy of it, `selector` names, of suite `suite` where given.

    The record names the folder that was selected.
    """
    for file in sorted(work_dir.glob("*/evaluation.json")):
        try:
            record = EvaluationRecord.model_validate_json(file.read_bytes())
        except (OSError, ValidationError) as error:
            log.warning("%s is skipped: %s", file, str(error).splitlines()[0])
            continue
        paths = EvaluationPaths(file.parent)
        if suite not in (None, record.suite.name):
            continue
        if in_series(record.checkpoint.announced, selector):
            yield paths, record
        elif place := next((p for p in places.read(paths) if in_series(p, selector)), ""):
            checkpoint = record.checkpoint.model_copy(update={"source": place, "converted_from": None})
            yield paths, record.model_copy(update={"checkpoint": checkpoint})


def point_of(paths: EvaluationPaths, record: EvaluationRecord, *, dense: bool | None = False) -> Point:
    """The point of one evaluation as its files stand now. `dense`: with dense signals; None: with those of results.json."""
    known = _known(record)
    if not paths.results.exists():
        return Point(status="open", **known)
    try:
        results = json.loads(paths.results.read_bytes())
        if dense is not False:
            results = with_signals(paths, record, results, index=bool(dense))
        if not paths.report.exists():  # none could be made: its times and costs are not known
            status = results.get("evalspan", {}).get("status", "failed" if results.get("failed") else "done")
            return Point(status=status, scores=scores_of(results), **known)
        report = Report.model_validate_json(paths.report.read_bytes())
    except (OSError, ValueError) as error:
        raise OperatorError(
            f"{paths.root}: its report or results cannot be read: {error} (without a report.json, scores are shown and "
            "costs are not: move a damaged one away)"
        ) from error
    measured = report.model_dump(include={"status", "makespan_seconds", "paused_seconds", "gpu_seconds"})
    return Point(scores=scores_of(results), **known | measured)


def _known(record: EvaluationRecord) -> dict[str, Any]:
    return {
        "evaluation_id": record.evaluation_id,
        "suite": record.suite.name,
        "checkpoint": record.checkpoint.announced,
        "step": record.checkpoint.step,
        "mode": record.suite.mode or "exact",
        "accepted_at": record.accepted_at,
    }


def points(
    work_dir: Path, selector: str, suite: str | None = None, *, dense: bool | None = False
) -> list[Point]:
    """Points of all evaluations that `selector` names."""
    found = []
    for paths, record in records(work_dir, selector, suite):
        try:
            found.append(point_of(paths, record, dense=dense))
        except OperatorError as error:  # one damaged file hides no other checkpoint
            log.warning("%s", error)
            found.append(Point(status="unreadable", **_known(record)))
    return found


def find_series(
    work_dir: Path,
    selector: str,
    suite: str | None = None,
    *,
    mixed: bool = False,
    dense: bool | None = False,
) -> list[Point]:
    """Points of all evaluations that `selector` names.

    OperatorError where there is none, or where a suite's evaluations have different modes and are not
    to be `mixed`.
    """
    found = points(work_dir, selector, suite, dense=dense)
    if not found:
        suites = {r.suite.name for _, r in records(work_dir, selector, None)}
        if suites:
            raise OperatorError(
                f"none of these evaluations is of suite {suite!r} (there are: {first_of(sorted(suites))})"
            )
        parents = {str(Path(r.checkpoint.announced).parent) for _, r in records(work_dir, "*", None)}
        known = first_of(sorted(parents)) or "none"
        below = any(in_series(parent, selector) for parent in parents)
        hint = f"try '{selector.rstrip('/')}/*'; " if below else ""
        raise OperatorError(
            f"no evaluation in {work_dir} is of a checkpoint in {selector!r} ({hint}checkpoints are in: {known}; "
            "`evalspan status` lists all evaluations)"
        )
    if not mixed:
        _refuse_modes(found)
    return found


def _refuse_modes(points: Sequence[Point]) -> None:
    for suite in dict.fromkeys(p.suite for p in points):
        count = Counter(p.mode for p in points if p.suite == suite)
        if len(count) > 1:
            said = " and ".join(f"{number} in mode {mode}" for mode, number in sorted(count.items()))
            raise OperatorError(
                f"evaluations of suite {suite} there are {said}, and modes give different digits: name those of one mode by a "
                "glob of their checkpoints, or say --mixed to have both on one curve, with a mark where the mode changes"
            )
