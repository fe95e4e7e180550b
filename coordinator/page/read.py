"""Reads what a page shows: one evaluation, trainings, or evaluations beside each other.

Rule: a title, JSON data and packed blocks come out, and nothing is kept. `cli/pages.py` writes them to a file, `serve`
answers with them.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

from coordinator.allocation import cordons
from coordinator.base.version import version_text
from coordinator.config.schema import Config
from coordinator.errors import OperatorError
from coordinator.evaluation.events import AnyEvent
from coordinator.evaluation.state import State
from coordinator.page import evaluation, samples, training
from coordinator.report.columns import columns, sample_file, with_signals
from coordinator.report.comparisons import comparison, heads_of
from coordinator.report.learning_curves import Point
from coordinator.report.load_series import point_of
from coordinator.report.sampling import series_of
from coordinator.report.verdicts import MEANING, add_verdicts
from coordinator.runtime.finalize import results_in_files, results_of
from coordinator.runtime.journal import has_other_format, read_events
from coordinator.runtime.replay import find_evaluation
from coordinator.runtime.summaries import find_folder, find_record
from coordinator.runtime.summarise import summary_now
from coordinator.runtime.summary import Halt, Summary, ended, read_evaluation
from evaljobs.contract.folded import exists, open_file, read_bytes
from evaljobs.contract.paths import EvaluationPaths, WorkPaths

# fields of a summary in the list of evaluations
SUMMARY = {
    "evaluation_id", "suite", "step", "scored", "entries", "shards_done", "shards", "accepted_at",
}  # fmt: skip
MOST_LOGS = 12  # logs of failed jobs whose last lines a page holds
LAST_LINES = 30
LAST_BYTES = 20_000  # of a log, that are read


class Contents(NamedTuple):
    """Of one page. `blocks`: name -> gzip bytes."""

    title: str
    data: dict[str, Any]
    blocks: dict[str, bytes]


# (settings, name) -> an evaluation's state, folder and events
Find = Callable[[Config, str], tuple[State, EvaluationPaths, list[AnyEvent]]]


def of_evaluation(settings: Config, name: str, find: Find = find_evaluation) -> Contents:
    """One evaluation, also while it runs. OperatorError where there is none of that name, or several."""
    data, paths, results = evaluation_and_results(settings, name, find)
    files = _sample_files(paths, results).items()
    index, blocks = samples.blocks_of({task: _lines(file) for task, file in files})
    more = {"logs": _logs(paths, data["notes"]), "samples": index}
    return _made(data["report"]["evaluation_id"], data | more, blocks)


def of_work_folder(
    settings: Config, begun: Sequence[tuple[Summary, Halt | None]], ended: Sequence[Summary]
) -> Contents:
    """All evaluations of the work folder, the newest first, and their trainings. `begun`: those that have not ended."""
    every = [*((s, halt.text if halt else s.phase) for s, halt in begun), *((s, s.result) for s in ended)]
    count = Counter((str(Path(s.checkpoint).parent), s.suite) for s, _ in every)
    going = [s for s, halt in begun if halt is None]
    data = {
        "kind": "index",
        "running": len(going),
        "halted": len(begun) - len(going),
        "evaluations": [{**s.model_dump(include=SUMMARY), "status": status} for s, status in every],
        "standing": _standing(settings, going),
        "trainings": [[folder, suite, number] for (folder, suite), number in sorted(count.items())],
    }
    return _made(str(settings.work_dir), data)


def of_trainings(settings: Config, points: Sequence[Point]) -> Contents:
    """All checkpoints, by training and suite, with verdicts along each."""
    data = training.training_data(points, partial(series_of, settings=settings))
    return _made(", ".join(dict.fromkeys(t["name"] for t in data["trainings"])), data)


def of_comparison(
    settings: Config, names: Sequence[str], *, mixed: bool = False, dense: bool = False
) -> Contents:
    """Scores of all these evaluations; samples of the first and the last. OperatorError where one has no results."""
    points, rows, places = compared(settings, names, mixed=mixed, dense=dense)
    heads = heads_of(points)
    indexes: list[dict[str, Any]] = []
    blocks: dict[str, bytes] = {}
    for side, i in (("first", 0), ("last", -1)):
        lines = {task: _lines(file) for task, file in _sample_files(*places[i]).items()}
        index, packed = samples.blocks_of(lines, samples.MOST_BYTES // 2)
        indexes.append({row["task"]: {**row, "block": f"{side}-{row['block']}"} for row in index})
        blocks |= {f"{side}-{name}": block for name, block in packed.items()}
    first, last = indexes
    data = {
        "kind": "comparison",
        "heads": heads,
        "ids": [p.evaluation_id for p in points],
        "rows": rows,
        "verdicts": MEANING,
        "samples": [
            {**row, "blocks": [first[task]["block"], row["block"]]}
            for task, row in last.items()
            if task in first
        ],
    }
    return _made(" and ".join(heads), data, blocks)


def compared(
    settings: Config, names: Sequence[str], *, mixed: bool = False, dense: bool = False
) -> tuple[list[Point], list[dict[str, Any]], list[tuple[EvaluationPaths, dict[str, Any]]]]:
    """(points, rows of their scores with verdicts, folder and results.json of each) of evaluations.

    `mixed`: verdicts also between modes; `dense`: also of dense signals. OperatorError for one that has no results.
    """
    points, places, records = [], [], []
    for name in names:
        record, paths = find_record(settings, name)
        if not paths.results.exists():
            raise OperatorError(f"{record.evaluation_id} has no results yet")
        points.append(point_of(paths, record))
        records.append(record)
        results = json.loads(paths.results.read_text())
        places.append((paths, with_signals(paths, record, results) if dense else results))
    rows = comparison([results for _, results in places])
    columns_once = cache(lambda i, task: columns(places[i][0], records[i], task))
    add_verdicts(rows, columns_once, mixed=mixed)
    return points, rows, places


def evaluation_and_results(
    settings: Config, name: str, find: Find = find_evaluation
) -> tuple[dict[str, Any], EvaluationPaths, dict[str, Any]]:
    """(the page's data without samples and logs, its folder, its results)."""
    paths = find_folder(settings, name)
    standing: list[list[Any]] = []
    if ended(paths) is not None and (found := results_in_files(paths)) is not None:
        # of another journal format its events are not read: the page has no jobs and no notes
        events = [] if has_other_format(paths.journal) else list(read_events(paths.journal))
    else:
        state, paths, events = find(settings, paths.root.name)
        found = results_of(state, paths, events)
        if state.ended_at is None:
            standing = _standing(settings, [summary_now(state, paths, time.time())])
    record = read_evaluation(paths)
    raw = found.raw
    if record is not None:
        raw = with_signals(paths, record, raw, index="evalspan" in raw)
    data = evaluation.evaluation_data(found.report, events, raw, settings.gpu_hour_price, standing)
    return data, paths, raw


def _standing(settings: Config, summaries: Sequence[Summary]) -> list[list[Any]]:
    """How the nodes stand, and which are cordoned."""
    cordoned = cordons.read(WorkPaths(settings.work_dir).nodes, time.time())
    return evaluation.standing_of(summaries, cordoned)


def _made(title: str, data: Mapping[str, Any], blocks: Mapping[str, bytes] | None = None) -> Contents:
    version = version_text().removeprefix("evalspan ")
    return Contents(title, {**data, "made_at": time.time(), "version": version}, dict(blocks or {}))


def _sample_files(paths: EvaluationPaths, results: Mapping[str, Any]) -> dict[str, Path]:
    found = {task: sample_file(paths, task) for task in results.get("n-samples", {})}
    return {task: file for task, file in found.items() if file is not None}


def _lines(file: Path) -> Iterator[str]:
    with open_file(file) as lines:
        for line in lines:
            yield line.decode(errors="replace")


def _logs(paths: EvaluationPaths, notes: Sequence[evaluation.Note]) -> list[list[Any]]:
    """(job, the last lines of its log or else of its traceback, is it a log?) of jobs that ended badly."""
    found: dict[str, str] = {}
    for job in dict.fromkeys(note.about for note in notes if note.bad):
        for name in (job, job.removesuffix(".0")):
            text = _last_words(paths, name)
            if text is not None and text not in found.values() and len(found) < MOST_LOGS:
                found[name] = text
                break
    return [[name, text or "(it is empty)", exists(paths.log(name))] for name, text in found.items()]


def _last_words(paths: EvaluationPaths, job: str) -> str | None:
    log, outcome = paths.log(job), paths.outcome("failed", job)
    if exists(log):
        text = read_bytes(log)[-LAST_BYTES:].decode(errors="replace")
    elif exists(outcome):
        text = json.loads(read_bytes(outcome)).get("detail", "")[-LAST_BYTES:]
    else:
        return None
    return "\n".join(text.splitlines()[-LAST_LINES:])
