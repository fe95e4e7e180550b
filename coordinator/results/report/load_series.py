"""Lookup of the evaluations of one training in a work folder, and their documents.

Rule: `ended.json` is derived from `evaluation.json`, `results.json` and `report.json` at the end, and whenever these have
changed. No journal is replayed: a thousand checkpoints are a thousand small files.
"""

from __future__ import annotations

import fnmatch
import json
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import from_json

from coordinator.base.words import first_of
from coordinator.decide.evaluation.records import EvaluationRecord
from coordinator.errors import OperatorError
from coordinator.intake import places
from coordinator.results.report.measurements import Report
from coordinator.results.report.scores import (
    Evaluation,
    Head,
    groups_of,
    head_of,
    scores_of,
    screened_in,
    with_signals,
)
from coordinator.results.report.usage import CAUSES, slot_word
from evaljobs.contract.paths import EvaluationPaths, expand_home
from evaljobs.contract.storage import read_record, write_atomic

log = logging.getLogger(__name__)


def checkpoint_matcher(selector: str) -> Callable[[str], bool]:
    """Return a predicate for checkpoints of `selector`: a glob of checkpoint folders, or the folder that contains them."""
    place = expand_home(selector)
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
    """Return whether it names the folder that contains a training's checkpoints, and thus all of them."""
    return not set("*?[") & set(selector)


def _heads(work_dir: Path, selector: str) -> Iterator[Head]:
    """Yield heads of the evaluations that `selector` names, each under the checkpoint folder that was selected."""
    matches = checkpoint_matcher(selector)
    for file in sorted(work_dir.glob("*/evaluation.json")):
        try:
            head = Head(**head_of(read_record(file, EvaluationRecord)))
        except (OSError, ValidationError) as error:
            log.warning("%s is skipped: %s", file, str(error).splitlines()[0])
            continue
        if matches(head.checkpoint):
            yield head
        elif place := next(filter(matches, places.read_places(EvaluationPaths(file.parent))), ""):
            yield head.model_copy(update={"checkpoint": place})


def written_at(paths: EvaluationPaths) -> tuple[int, int]:
    """Return when results.json and report.json were written, ns since 1970; 0: missing."""

    def at(file: Path) -> int:
        try:
            return file.stat().st_mtime_ns
        except OSError:
            return 0

    return at(paths.results), at(paths.report)


def make_evaluation(head: Mapping[str, Any], results: Mapping[str, Any], report: Report | None) -> Evaluation:
    """The document. `head`: of `head_of`; `results`: results.json; `report`: None where none could be made."""
    said = results.get("evalspan", {})
    known = {name: said[name] for name in ("at_chance", "fell_to_chance") if name in said}
    known |= {"scores": scores_of(with_signals(results)), "groups": groups_of(results)}
    known |= {"failed": results.get("failed", {}), "screened": screened_in(results)}
    if report is None:
        status = said.get("status", "failed" if known["failed"] else "done")
        return Evaluation(status=status, **head, **known)
    if report.makespan_seconds is not None:
        known |= {"paused_seconds": report.paused_seconds, "gpu_seconds": report.gpu_seconds}
    gpus = report.gpus
    return Evaluation(
        status=report.status,
        makespan_seconds=report.makespan_seconds,
        causes={cause: sum(getattr(g, cause) * max(1, g.gpus) for g in gpus) for cause in CAUSES}
        if gpus
        else {},
        slot=slot_word(gpu.device for gpu in gpus),
        staged_bytes=report.staged_bytes,
        died={gpu.trial: gpu.ended for gpu in gpus if gpu.ended.isupper()},
        **head,
        **known,
    )


def read_document(paths: EvaluationPaths) -> Evaluation:
    """Return the document of an evaluation from its current files; that of an ended one is stored.

    Raise OperatorError if its results or report are damaged.
    """
    now = written_at(paths)
    with suppress(OSError, ValueError):
        found = Evaluation.model_validate(from_json(paths.ended.read_bytes()))  # faster than from its text
        if found.written == now:
            return found
    try:
        head = head_of(read_record(paths.evaluation, EvaluationRecord))
        if not now[0]:
            return Evaluation(status="open", **head)
        report = Report.model_validate_json(paths.report.read_bytes()) if now[1] else None
        made = make_evaluation(head, json.loads(paths.results.read_bytes()), report)
    except (OSError, ValueError) as error:
        raise OperatorError(
            f"{paths.root}: its report or results cannot be read: {error} (without a report.json, scores are shown and "
            "costs are not: move the damaged file away)"
        ) from error
    made = made.model_copy(update={"written": now})
    with suppress(OSError):  # another user's folder, or a full disk
        write_atomic(paths.ended, made.model_dump_json().encode())
    return made


def load_documents(work_dir: Path, heads: Iterable[Head]) -> list[Evaluation]:
    """Return the document of each, under the checkpoint folder of `heads`; a damaged one does not hide the others."""
    found = []
    for head in heads:
        try:
            made = read_document(EvaluationPaths(work_dir / head.evaluation_id))
        except OperatorError as error:
            log.warning("%s", error)
            made = Evaluation(status="unreadable", **head.head)
        found.append(made.model_copy(update={"checkpoint": head.checkpoint}))
    return found


def find_series(
    work_dir: Path, selector: str, suite: str | None = None, *, mixed: bool = False
) -> list[Evaluation]:
    """Return documents of all evaluations that `selector` names. Raise OperatorError like `find_heads`."""
    return load_documents(work_dir, find_heads(work_dir, selector, suite, mixed=mixed))


def find_heads(work_dir: Path, selector: str, suite: str | None = None, *, mixed: bool = False) -> list[Head]:
    """Return all evaluations that `selector` names, of suite `suite` if given.

    Raise OperatorError if there are none, or if a suite's evaluations have different modes and are not to be `mixed`.
    """
    every = list(_heads(work_dir, selector))
    found = [head for head in every if suite in (None, head.suite)]
    if not found:
        if every:
            known = first_of(sorted({head.suite for head in every}))
            raise OperatorError(f"none of these evaluations is of suite {suite!r} (there are: {known})")
        parents = {str(Path(head.checkpoint).parent) for head in _heads(work_dir, "*")}
        known = first_of(sorted(parents)) or "none"
        below = any(map(checkpoint_matcher(selector), parents))
        hint = f"try '{selector.rstrip('/')}/*'; " if below else ""
        raise OperatorError(
            f"no evaluation in {work_dir} is of a checkpoint in {selector!r} ({hint}checkpoints are in: {known}; "
            "`evalspan status` lists all evaluations)"
        )
    if not mixed:
        _refuse_modes(found)
    return found


def _refuse_modes(heads: Sequence[Head]) -> None:
    for suite in dict.fromkeys(h.suite for h in heads):
        count = Counter(h.mode for h in heads if h.suite == suite)
        if len(count) > 1:
            said = " and ".join(f"{number} in mode {mode}" for mode, number in sorted(count.items()))
            raise OperatorError(
                f"evaluations of suite {suite} there are {said}, and modes give different digits: name those of one mode by a "
                "glob of their checkpoints, or say --mixed to have both on one curve, with a mark where the mode changes"
            )
