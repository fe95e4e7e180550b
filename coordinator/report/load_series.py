"""Finds the evaluations of one training in a work folder and reads their results.

Rule: of an evaluation that has ended it reads `point.json`, which it makes of `evaluation.json`, `results.json` and
`report.json` where these have changed. It replays no journal: a thousand checkpoints are a thousand small files.
"""

from __future__ import annotations

import fnmatch
import json
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from coordinator.base.words import first_of
from coordinator.errors import OperatorError
from coordinator.evaluation.records import EvaluationRecord
from coordinator.intake import places
from coordinator.report.columns import with_signals
from coordinator.report.gpu_use import slot_word
from coordinator.report.learning_curves import Point, groups_of, scores_of
from coordinator.report.measurements import Report
from evaljobs.contract.columns import DENSE
from evaljobs.contract.paths import EvaluationPaths
from evaljobs.contract.specs import Kept
from evaljobs.contract.storage import read_record, write_atomic

log = logging.getLogger(__name__)


class PointFile(Kept):
    """`point.json`: an evaluation's point, while its results and report are those that it was made of."""

    written: tuple[int, int]  # when results.json and report.json were, ns since 1970; 0: it is not there
    point: Point  # with the dense signals of results.json


def matcher(selector: str) -> Callable[[str], bool]:
    """Whether a checkpoint is one of `selector`: a glob of checkpoint folders, or the folder that holds them."""
    place = Path(selector).expanduser()
    absolute = str(place if place.is_absolute() else Path.cwd() / place)
    parents = {absolute, str(Path(absolute).resolve())}

    def matches(checkpoint: str) -> bool:
        return (
            checkpoint.rpartition("/")[0] in parents
            or any(fnmatch.fnmatchcase(checkpoint, p) for p in parents)
            or fnmatch.fnmatchcase(checkpoint, selector)
        )

    return matches


def is_folder(selector: str) -> bool:
    """Does it name the folder that holds a training's checkpoints, and so all of them?"""
    return not set("*?[") & set(selector)


def _evaluations(
    work_dir: Path, selector: str, suite: str | None
) -> Iterator[tuple[EvaluationPaths, Point | EvaluationRecord, str]]:
    """(folder, point where it is kept, else record, the checkpoint that was selected) of those of suite `suite`, where given."""
    matches = matcher(selector)
    for file in sorted(work_dir.glob("*/evaluation.json")):
        paths = EvaluationPaths(file.parent)
        known: Point | EvaluationRecord | None = _kept(paths)
        if known is None:
            try:
                known = EvaluationRecord.model_validate_json(file.read_bytes())
            except (OSError, ValidationError) as error:
                log.warning("%s is skipped: %s", file, str(error).splitlines()[0])
                continue
        if isinstance(known, Point):
            name, place = known.suite, known.checkpoint
        else:
            name, place = known.suite.name, known.checkpoint.announced
        if suite not in (None, name):
            continue
        if not matches(place):
            place = next(filter(matches, places.read(paths)), "")
        if place:
            yield paths, known, place


def _named(work_dir: Path, selector: str) -> Iterator[tuple[str, str]]:
    """(suite, checkpoint) of each evaluation that `selector` names."""
    for _, known, place in _evaluations(work_dir, selector, None):
        yield known.suite if isinstance(known, Point) else known.suite.name, place


def _kept(paths: EvaluationPaths) -> Point | None:
    try:
        found = read_record(paths.point, PointFile)
    except (OSError, ValidationError):
        return None
    return found.point if found.written == _written(paths) else None


def _written(paths: EvaluationPaths) -> tuple[int, int]:
    def at(file: Path) -> int:
        try:
            return file.stat().st_mtime_ns
        except OSError:
            return 0

    return at(paths.results), at(paths.report)


def point_of(paths: EvaluationPaths, record: EvaluationRecord, *, dense: bool | None = False) -> Point:
    """The point of one evaluation as its files stand now. `dense`: with dense signals; None: with those of results.json."""
    known = _known(record)
    if not paths.results.exists():
        return Point(status="open", **known)
    try:
        results = json.loads(paths.results.read_bytes())
        if dense is not False:
            results = with_signals(paths, record, results, index=bool(dense))
        known |= {"scores": scores_of(results), "groups": groups_of(results)}
        if not paths.report.exists():  # none could be made: its times and costs are not known
            status = results.get("evalspan", {}).get("status", "failed" if results.get("failed") else "done")
            return Point(status=status, **known)
        report = Report.model_validate_json(paths.report.read_bytes())
    except (OSError, ValueError) as error:
        raise OperatorError(
            f"{paths.root}: its report or results cannot be read: {error} (without a report.json, scores are shown and "
            "costs are not: move a damaged one away)"
        ) from error
    measured = report.model_dump(include={"status", "makespan_seconds", "paused_seconds", "gpu_seconds"})
    slot = slot_word(gpu.device for gpu in report.gpus)
    return Point(**known | measured, slot=slot)


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
    """Points of all evaluations that `selector` names, each under the checkpoint's folder that was selected."""
    found = []
    for paths, known, place in _evaluations(work_dir, selector, suite):
        point = known if isinstance(known, Point) else _made(paths, known)
        if dense and point.scores:
            with suppress(OperatorError):
                record = read_record(paths.evaluation, EvaluationRecord)
                point = point_of(paths, record, dense=True)
        scores = point.scores if dense is not False else tuple(s for s in point.scores if s.filter != DENSE)
        found.append(point.model_copy(update={"checkpoint": place, "scores": scores}))
    return found


def _made(paths: EvaluationPaths, record: EvaluationRecord) -> Point:
    """A point, which is kept where the evaluation has ended."""
    written = _written(paths)
    try:
        point = point_of(paths, record, dense=None)
    except OperatorError as error:  # one damaged file hides no other checkpoint
        log.warning("%s", error)
        return Point(status="unreadable", **_known(record))
    if point.status != "open":
        with suppress(OSError):  # another user's folder, or a full disk
            write_atomic(paths.point, PointFile(written=written, point=point).model_dump_json().encode())
    return point


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
        suites = {name for name, _ in _named(work_dir, selector)}
        if suites:
            raise OperatorError(
                f"none of these evaluations is of suite {suite!r} (there are: {first_of(sorted(suites))})"
            )
        parents = {str(Path(place).parent) for _, place in _named(work_dir, "*")}
        known = first_of(sorted(parents)) or "none"
        below = any(map(matcher(selector), parents))
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
