"""Reads the contents of a page: one evaluation, trainings, or a comparison of evaluations.

Rule: returns a title, JSON data and packed blocks, and keeps nothing. `interface/cli/series.py` writes them to a file, `serve` answers
with them.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from coordinator.base.version import version_text
from coordinator.decide.allocation import cordons
from coordinator.decide.evaluation.events import AnyEvent
from coordinator.decide.evaluation.state import State
from coordinator.errors import EvalspanError
from coordinator.interface.page import evaluation, index, samples
from coordinator.results.report import training_files
from coordinator.results.report.comparisons import heads_of
from coordinator.results.report.load_series import is_folder, load_documents
from coordinator.results.report.pairs import compare_evaluations
from coordinator.results.report.row_verdicts import VERDICTS_NOTE, name_of, overall_of
from coordinator.results.report.scores import Head, scores_of, with_signals
from coordinator.results.report.stored_documents import read_documents as documents_of
from coordinator.results.report.stored_documents import sample_file
from coordinator.results.report.training import Against, clause_against
from coordinator.runtime.finalize import results_in_files, results_of
from coordinator.runtime.journal import has_other_format, read_events
from coordinator.runtime.known_evaluations import Summaries, find_folder, find_record
from coordinator.runtime.make_summary import summary_now
from coordinator.runtime.replay import find_evaluation
from coordinator.runtime.summary import Halt, Summary, halt_of, read_ended_summary, read_json
from coordinator.site.config.schema import Config
from evaljobs.contract.archived_files import file_exists, open_file, read_bytes
from evaljobs.contract.paths import EvaluationPaths, WorkPaths

MOST_BEFORE = 60  # earlier checkpoints whose scores a page shows
MOST_LOGS = 12  # logs of failed jobs whose last lines a page shows
LAST_LINES = 30
LAST_BYTES = 20_000  # read from a log


class PageContents(NamedTuple):
    """Contents of one page. `blocks`: name -> gzip bytes."""

    title: str
    data: dict[str, Any]
    blocks: dict[str, bytes]


# (settings, name) -> an evaluation's state, folder and events
Find = Callable[[Config, str], tuple[State, EvaluationPaths, list[AnyEvent]]]


def evaluation_contents(
    settings: Config, name: str, find: Find = find_evaluation, every: Sequence[Summary] | None = None
) -> PageContents:
    """Return the page of one evaluation, even while it runs. Raise OperatorError if the name matches none, or several.

    `every`: summaries of the work folder's evaluations; None: read them here.
    """
    if every is None:
        summaries = Summaries(settings)
        summaries.look(0.0)
        every = [*summaries.open, *summaries.ended]
    data, paths, results = evaluation_and_results(settings, name, find)
    lines = {task: _lines(file) for task, file in _sample_files(paths, results).items()}
    listed, blocks = samples.blocks_of(
        lines, kind_of=lambda task: samples.SampleKind(later=_later(results, task))
    )
    more = {
        "logs": _logs(paths, data["notes"]),
        "samples": listed,
        **_beside(settings, paths.root.name, results, every),
    }
    return _made(data["report"]["evaluation_id"], data | more, blocks)


def _beside(
    settings: Config, name: str, results: Mapping[str, Any], every: Sequence[Summary]
) -> dict[str, Any]:
    """Return the evaluation's training: its checkpoints, scores of earlier ones, and how this one's have changed."""
    one = next((s for s in every if s.evaluation_id == name), None)
    if one is None:
        return {"training": None}
    alike = [s for s in every if s.training == one.training and s.checkpoint != one.checkpoint]
    members = index.in_order([*alike, one])
    at = members.index(one)
    scored = [s for s in alike if s.ended_at and s.scores]
    ids = [s.evaluation_id for s in (*scored, one) if s.ended_at and s.scores]
    before = index.in_order([*scored, one])
    scored = before[: before.index(one)][-MOST_BEFORE:]
    known = [
        {score.name: float(f"{score.value:.4g}") for score in document.scores}
        for document in load_documents(settings.work_dir, scored)
    ]
    standing = training_files.find_training(settings, one.training, ids) if ids else None
    last = scored[-1] if scored and one.ended_at is not None else None
    found, whole = _changes(settings, last.evaluation_id, name) if last else ({}, None)
    against = None
    if last and whole:
        earlier = Against(evaluation_id=last.evaluation_id, label=last.label, **whole)
        against = clause_against(one.label, name, earlier)._asdict()
    about = {
        "standing": standing and index.training_as_shown(standing),
        "against": against,
        "folder": one.training[0],
        "suite": one.suite,
        "at": at,
        "points": [[s.evaluation_id, s.label] for s in members],
        "before": [scored[-1].evaluation_id, scored[-1].label] if scored else None,
        "first": scored[0].label if scored else "",
        "scores": {s.name: [values.get(s.name) for values in known] for s in scores_of(results)},
        "changes": found,
    }
    return {"training": about}


def _changes(
    settings: Config, before: str, after: str
) -> tuple[dict[str, dict[str, Any]], dict[str, Any] | None]:
    """Return the result of `compare`: (score name -> change, wider half of its two-sided 95 % interval, verdict, and its
    text; the fields of `Against`). Empty and None if one of both evaluations cannot be read.
    """
    with suppress(EvalspanError, LookupError, OSError, TypeError, ValueError):
        rows = compare_evaluations(settings.work_dir, [before, after])[1]
        found = {}
        for row in rows:
            said = row["verdicts"][-1]
            found[name_of(row)] = {"change": row["change"]} | {
                k: said.get(k) for k in ("reach", "verdict", "words")
            }
        return found, training_files.against_of(rows)
    return {}, None


def work_folder_contents(
    settings: Config,
    begun: Sequence[tuple[Summary, Halt | None]],
    ended: Sequence[Summary],
    find: index.Find,
) -> PageContents:
    """Return the page of all evaluations of the work folder and their trainings. `begun`: open evaluations."""
    found = index.index_data(begun, ended, find, time.time())
    going = [s for s, halt in begun if halt is None]
    return _made(str(settings.work_dir), found | {"standing": _standing(settings, going)})


def trainings_contents(
    settings: Config, heads: Sequence[Head], selector: str, *, dense: bool = False
) -> PageContents:
    """Return the page of checkpoints, by training, with verdicts. `selector`: the name that selected them."""
    whole, each = is_folder(selector), training_files.by_training(heads).values()
    made = [training_files.judge_training(settings, of, whole=whole, scores=False) for of in each]
    data = index.training_data((standing, series.shown(dense=dense)) for standing, series in made)
    return _made(", ".join(dict.fromkeys(t["name"] for t in data["trainings"])), data)


def comparison_contents(
    settings: Config, names: Sequence[str], *, mixed: bool = False, dense: bool = False
) -> PageContents:
    """Return the page with scores of all these evaluations, and samples of the first and the last. Raise OperatorError."""
    ids = [find_record(settings, name)[0].evaluation_id for name in names]
    points, rows = compare_evaluations(settings.work_dir, ids, mixed=mixed, dense=dense)
    folders = [EvaluationPaths(settings.work_dir / name) for name in ids]
    places = [(paths, read_json(paths.results)) for paths in folders]
    heads = heads_of(points)
    indexes: list[dict[str, Any]] = []
    blocks: dict[str, bytes] = {}

    @cache
    def kind_of(task: str) -> samples.SampleKind:
        return samples.SampleKind(_flipped(places[0][0], places[-1][0], task), _later(places[-1][1], task))

    for side, i in (("first", 0), ("last", -1)):
        lines = {task: _lines(file) for task, file in _sample_files(*places[i]).items()}
        listed, packed = samples.blocks_of(lines, samples.MOST_BYTES // 2, kind_of)
        indexes.append({row["task"]: {**row, "block": f"{side}-{row['block']}"} for row in listed})
        blocks |= {f"{side}-{name}": block for name, block in packed.items()}
    first, last = indexes
    data = {
        "kind": "comparison",
        "heads": heads,
        "ids": [p.evaluation_id for p in points],
        "rows": rows,
        "overall": overall_of(rows),
        "verdicts": VERDICTS_NOTE,
        "samples": [
            {**row, "blocks": [first[task]["block"], row["block"]]}
            for task, row in last.items()
            if task in first
        ],
    }
    return _made(" and ".join(heads), data, blocks)


def _flipped(before: EvaluationPaths, after: EvaluationPaths, task: str) -> set[int]:
    import numpy as np  # noqa: PLC0415 (other commands start without it)

    first, last = (documents_of(paths).of(task) for paths in (before, after))
    if first is None or last is None:
        return set()
    ids, ours, theirs = np.intersect1d(first["doc_id"], last["doc_id"], return_indices=True)
    names = {n for n in first.keys() & last.keys() if "," in n}
    differ = [~np.isclose(first[n][ours], last[n][theirs], rtol=0, atol=0, equal_nan=True) for n in names]
    return set(ids[np.logical_or.reduce(differ)].tolist()) if differ else set()


def _later(results: Mapping[str, Any], task: str) -> str:
    """Return the field of a conversation's document with the messages after the first one; "" for any other task."""
    metadata = (results.get("configs", {}).get(task) or {}).get("metadata")
    return str(metadata.get("follow_up") or "") if isinstance(metadata, Mapping) else ""


def evaluation_and_results(
    settings: Config, name: str, find: Find = find_evaluation
) -> tuple[dict[str, Any], EvaluationPaths, dict[str, Any]]:
    """Return (the page's data without samples and logs, its folder, its results)."""
    paths = find_folder(settings, name)
    standing: list[list[Any]] = []
    summary = read_ended_summary(paths)
    if summary is not None and (found := results_in_files(paths)) is not None:
        # events of another journal format are not read: the page then has no jobs and no notes
        events = [] if has_other_format(paths.journal) else list(read_events(paths.journal))
    else:
        state, paths, events = find(settings, paths.root.name)
        found = results_of(state, paths, events)
        summary = summary_now(state, paths, time.time())
        if state.ended_at is None:
            standing = _standing(settings, [summary])
    raw = with_signals(found.raw)
    data = evaluation.evaluation_data(found.report, events, raw, settings.gpu_hour_price, standing)
    halt = halt_of(summary, paths) if summary.ended_at is None else None
    data["head"] = index.standing_in_words(summary, halt, time.time())
    data["waits"] = [f"{w.what}{f' ({w.why})' if w.why else ''}" for w in summary.waits]
    return data, paths, raw


def _standing(settings: Config, summaries: Sequence[Summary]) -> list[list[Any]]:
    cordoned = cordons.read_cordons(WorkPaths(settings.work_dir).nodes, time.time())
    return evaluation.standing_of(summaries, cordoned)


def _made(title: str, data: Mapping[str, Any], blocks: Mapping[str, bytes] | None = None) -> PageContents:
    version = version_text().removeprefix("evalspan ")
    return PageContents(title, {**data, "made_at": time.time(), "version": version}, dict(blocks or {}))


def _sample_files(paths: EvaluationPaths, results: Mapping[str, Any]) -> dict[str, Path]:
    found = {task: sample_file(paths, task) for task in results.get("n-samples", {})}
    return {task: file for task, file in found.items() if file is not None}


def _lines(file: Path) -> Iterator[str]:
    with open_file(file) as lines:
        for line in lines:
            yield line.decode(errors="replace")


def _logs(paths: EvaluationPaths, notes: Sequence[evaluation.Note]) -> list[list[Any]]:
    """Return (job, last lines of its log or traceback, whether it is a log) of jobs that ended badly."""
    found: dict[str, str] = {}
    for job in dict.fromkeys(note.about for note in notes if note.bad):
        for name in (job, job.removesuffix(".0")):
            text = _last_words(paths, name)
            if text is not None and text not in found.values() and len(found) < MOST_LOGS:
                found[name] = text
                break
    return [[name, text or "(it is empty)", file_exists(paths.log(name))] for name, text in found.items()]


def _last_words(paths: EvaluationPaths, job: str) -> str | None:
    log, outcome = paths.log(job), paths.outcome("failed", job)
    if file_exists(log):
        text = read_bytes(log)[-LAST_BYTES:].decode(errors="replace")
    elif file_exists(outcome):
        text = json.loads(read_bytes(outcome)).get("detail", "")[-LAST_BYTES:]
    else:
        return None
    return "\n".join(text.splitlines()[-LAST_LINES:])
