"""Files written when an evaluation ends: results.json, report.json, and new observations for the priors.

Rule: `results.json` has lm-eval's own shape and is written last; it names failed entries, which have no score. An error in
the report or the priors is only a warning, so that scores are always written.
"""

from __future__ import annotations

import json
import logging
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import Field

from coordinator.base.isolate import isolate_errors, traceback_of
from coordinator.base.strict_json import replace_non_finite
from coordinator.base.words import first_of
from coordinator.decide.evaluation.events import AnyEvent
from coordinator.decide.evaluation.records import cut_on_disk
from coordinator.decide.evaluation.state import State
from coordinator.decide.planning.make_plan import BYTES_PER_PARAMETER, hardware_of
from coordinator.intake import request_sets
from coordinator.results.report.load_series import make_evaluation
from coordinator.results.report.measurements import Report, ShardSpan, make_report, without_measurements
from coordinator.results.report.scores import Evaluation
from coordinator.results.report.usage import judge_use
from coordinator.runtime.chance import at_chance, fell_to_chance
from coordinator.runtime.journal import read_events
from coordinator.runtime.reuse import REUSED
from coordinator.runtime.screens import screens_of
from coordinator.runtime.summary import halt_of, is_alive, last_sign, read_json, read_summary
from evaljobs.contract.archived_files import read_bytes
from evaljobs.contract.columns import DENSE
from evaljobs.contract.names import ShardId
from evaljobs.contract.paths import EvaluationPaths, batch_index_file, entry_manifest, request_set_manifest
from evaljobs.contract.specs import BatchIndex, RequestSetManifest
from evaljobs.contract.storage import FrameError, make_folder, read_frames, read_record, write_atomic
from evaljobs.judges.judgement import read_judgements
from evaljobs.lmeval.results import add_suite_groups, merge_results, merged_names
from evaljobs.lmeval.shown_inputs import CHANGING_DIGEST, FAILED_BUILD_FILE, merge_rows, rows_of_set
from priors.table import Observation, append_observations

log = logging.getLogger(__name__)


def shard_spans(state: State, paths: EvaluationPaths) -> list[ShardSpan]:
    """Return a span for every shard whose record counts, from the headers of the response files."""
    frames = (s.frame for s in state.shards.by_name.values() if s.frame is not None)
    counted = {(f.file, f.offset) for f in frames if not f.file.endswith(REUSED)}
    spans = []
    for file in sorted({name for name, _ in counted}):
        try:
            for reference, head in read_frames(paths.responses / file, 0):
                if (file, reference.offset) in counted:
                    spans.append(
                        ShardSpan(
                            shard=head.shard,
                            trial=head.trial,
                            started_at=head.started_at,
                            seconds=head.seconds,
                        )
                    )
        except (FrameError, FileNotFoundError) as error:
            log.warning("the report lacks the times of shards in %s: %s", file, error)
    return spans


def report_of(state: State, paths: EvaluationPaths, events: Iterable[AnyEvent] | None = None) -> Report:
    """Return the report of an evaluation from its folder as it is now."""
    spans = shard_spans(state, paths)
    made = make_report(
        state,
        read_events(paths.journal) if events is None else events,
        spans,
        time.time() if is_alive(paths) else last_sign(paths),
        _indexes(state, spans) if state.all_terminal else None,
    )
    if state.record.judge is None:
        return made
    entries = state.record.suite.tasks
    task_of = {m.name: m.task or entries[m.entry].name for m in state.scoring.metrics.values()}
    use = judge_use(state.record.judge, read_judgements(paths.judgements), task_of, state.evaluation_id)
    return made.model_copy(update={"judge": use})


def _indexes(state: State, spans: Iterable[ShardSpan]) -> dict[tuple[str, str], BatchIndex]:
    """Return the batches of these shards by leaf task and cut, as far as they can be read."""
    indexes = {}
    for task, cut in {(shard.task, shard.cut) for shard in (ShardId.parse(s.shard) for s in spans)}:
        folder = state.shards.leaves[task].planned.folder
        with suppress(OSError, ValueError):
            indexes[task, cut] = read_record(batch_index_file(folder, cut or state.batch_size), BatchIndex)
    return indexes


def merged_results(state: State, scores: Mapping[int, Any], unread: Mapping[str, str]) -> dict[str, Any]:
    """Merge lm-eval's results of all scored entries, and list the failed entries and unscored items with their reasons.
    `scores`, `unread`: from `scores_in`.
    """
    failed = {e.name: e.error for e in state.entries if e.status == "failed"} | dict(unread)
    results = merge_results(list(scores.values()))
    add_suite_groups(results, [(task.name, task.group) for task in state.record.suite.tasks], scores)
    if "config" in results:
        # tasks are scored by a model without batches; lm-eval's key gives the batch size of inference
        results["config"] |= {"batch_size": state.batch_size}
    if failed:
        results["failed"] = failed
    unscored = {e.name: dict(e.unscored) for e in state.entries if e.status == "scored" and e.unscored}
    if unscored:
        results["unscored"] = unscored
    return results


def scores_in(state: State) -> tuple[dict[int, Any], dict[str, str]]:
    """Return the scores of scored entries by index, and the names of entries whose file cannot be read, with the reason."""
    scores: dict[int, Any] = {}
    unread: dict[str, str] = {}
    for entry in (e for e in state.entries if e.status == "scored"):
        try:
            scores[entry.index] = json.loads(read_bytes(Path(entry.result_file)))
        except (FileNotFoundError, ValueError) as error:
            unread[entry.name] = f"its scores in {entry.result_file} cannot be read (any more): {error}"
    return scores, unread


def learnt_observations(state: State, report: Report) -> list[Observation]:
    """Return observations of each leaf task that ran completely: GPU and metric seconds against its tokens."""
    seconds: dict[str, float] = defaultdict(float)
    for span in report.shards:
        seconds[ShardId.parse(span.shard).task] += span.seconds
    loads = [g.imports + g.load + g.warm + g.other for g in report.gpus if g.load > 0]
    metrics = _metric_seconds(state, report)
    rows = []
    for name, leaf in state.shards.leaves.items():
        if leaf.todo or name not in seconds:
            continue
        cut = cut_on_disk(leaf.planned.cut, state.batch_size)
        manifest, index = request_sets.read_request_sets({name: leaf.planned.folder}, {name: cut})[name]
        metric, together = metrics[name]
        rows.append(
            Observation(
                task=leaf.planned.task,
                key=manifest.key,
                model_parameters=state.record.checkpoint.bytes // BYTES_PER_PARAMETER,
                hardware=hardware_of(state.nodes.by_name.values()),
                engine=state.record.model.engine,
                batch_size=index.batch_size,
                mode=state.record.suite.computes,
                prefill_tokens=sum(index.prefill_tokens),
                generated_tokens=sum(index.generated_tokens),
                documents=manifest.documents,
                batches=len(index.prefill_tokens),
                inference_seconds=seconds[name],
                metric_seconds=metric,
                together=together,
                load_seconds=min(loads) if loads else None,
                at=report.accepted_at,
            )
        )
    return rows


def _metric_seconds(state: State, report: Report) -> dict[str, tuple[float, int]]:
    """Return metric seconds per leaf task (0 without a score), and how many tasks share its job, divided by documents."""
    jobs: dict[str, dict[str, int]] = defaultdict(dict)
    for name, leaf in state.shards.leaves.items():
        entry = state.entries[leaf.planned.entry]
        if entry.status == "scored":
            job = leaf.planned.task if leaf.planned.executes else entry.name
            jobs[job][name] = leaf.planned.documents
    found = dict.fromkeys(state.shards.leaves, (0.0, 1))
    for job, members in jobs.items():
        each = report.metric_seconds.get(job, 0.0) / max(1, sum(members.values()))
        found |= {name: (each * documents, len(members)) for name, documents in members.items()}
    return found


def make_report_or_none(state: State, paths: EvaluationPaths) -> Report | None:
    """Write and return the report; None, with a warning, if it cannot be made. Raise OSError if the disk refuses it."""
    with isolate_errors(partial(_no_report, state, paths)):
        report = report_of(state, paths)
        write_atomic(paths.report, report.model_dump_json(indent=1).encode())
        return report
    return None


def _no_report(state: State, paths: EvaluationPaths, error: Exception) -> None:
    if isinstance(error, OSError):
        raise error
    paths.report.unlink(missing_ok=True)  # a report from before a retry shows other scores
    _warn(state, f"there is no new report: {type(error).__name__}: {error}", error)


def add_to_priors(state: State, report: Report, observations: Path) -> None:
    """Add observations to the priors; an error is only a warning."""
    with isolate_errors(lambda error: _warn(state, f"the priors learn nothing of it: {error}", error)):
        make_folder(observations.parent)
        append_observations(observations, learnt_observations(state, report))


def _warn(state: State, what: str, error: Exception) -> None:
    log.warning("%s: %s", state.evaluation_id, what, exc_info=traceback_of(error))


def keys_of(state: State, scores: Mapping[int, Any]) -> dict[str, dict[str, str]]:
    """Return leaf task, named as in `merged_results` -> its request digest and score key, if its request sets exist."""
    keys: dict[str, dict[str, str]] = {}
    alias = dict(zip(scores, merged_names(list(scores.values())), strict=True))
    for entry in sorted(state.entries, key=lambda e: e.index not in scores):
        for task, name in entry.leaves.items():
            with suppress(OSError, ValueError):
                manifest = read_record(request_set_manifest(entry.sets[task]), RequestSetManifest)
                said = {"requests": manifest.key, "asks": manifest.asks, "score": manifest.score_key}
                keys.setdefault(alias.get(entry.index, {}).get(task, name), said)
    return keys


def _signals(scores: Sequence[Any]) -> dict[str, dict[str, float]]:
    """Return leaf task, named as in `merged_results` -> its dense signals."""
    return {
        alias[task]: found
        for score, alias in zip(scores, merged_names(scores), strict=True)
        for task, found in score.get("signals", {}).items()
    }


def shown_inputs_of(state: State, scores: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, str]]:
    """Return what the builds and the scoring of this evaluation used: "build" and "score" -> rows of `shown_inputs`.

    A failed task whose request sets were dropped as wrong gets a row that nothing equals; one whose build failed gets what
    that build read.
    """
    built, dropped = {}, {}
    for place in {place for entry in state.entries for place in entry.sets.values()}:
        with suppress(OSError, ValueError):
            manifest = read_record(request_set_manifest(place), RequestSetManifest)
            folder = Path(place).parent
            built[folder, manifest.shown] = rows_of_set(folder, manifest.shown) or {}
    for entry in state.entries:
        if entry.status == "failed" and entry.sets and not entry_manifest(entry.folder).exists():
            dropped[str(entry_manifest(entry.folder))] = CHANGING_DIGEST
        if entry.status == "failed" and not entry.sets:
            built[Path(entry.folder), FAILED_BUILD_FILE] = rows_of_set(entry.folder, FAILED_BUILD_FILE) or {}
    scored = [score.get("shown") or {} for score in scores]
    return {"build": merge_rows([*built.values(), dropped]), "score": merge_rows(scored)}


def write_results(
    state: State, paths: EvaluationPaths, failed: Mapping[int, str], observations: Path
) -> None:
    """Write the report first and the results last: an existing results.json means that the evaluation is over."""
    scores, unread = scores_in(state)
    results, signals = merged_results(state, scores, unread), _signals([*scores.values()])
    by_chance = not failed and at_chance(results, signals)
    fell = fell_to_chance(state.record, paths) if by_chance else ""
    if fell:
        state.warnings.append(fell)
    report = make_report_or_none(state, paths)
    if report is not None:
        add_to_priors(state, report, observations)
    before: dict[str, Any] = {}  # a retry finds no request sets of pruned tasks
    with suppress(OSError, ValueError):
        before = json.loads(paths.results.read_bytes())["evalspan"]["keys"]
    made = report or without_measurements(state, "")
    screened = [e.screened for e in state.entries if e.status == "scored" and e.screened is not None]
    results["evalspan"] = {
        "evaluation_id": state.evaluation_id,
        "checkpoint": state.record.checkpoint.announced,
        "checkpoint_digest": state.record.checkpoint.digest,
        "checkpoint_content": state.nodes.content,
        "step": state.record.checkpoint.step,
        "suite": state.record.suite.name,
        "status": made.status,
        "batch_size": state.batch_size,
        "mode": made.mode,
        "token_budget": made.token_budget,
        "cuts": made.cuts,
        "makespan_seconds": None if report is None else report.makespan_seconds,
        "paused_seconds": None if report is None else report.paused_seconds,
        "failed_entries": sorted(failed),
        "keys": before | keys_of(state, scores),
        "shown": shown_inputs_of(state, scores.values()),
        "responses_from": dict(state.plan.reused),
        "parent": state.record.rescores or None,
        **({"screen": screens_of(state.record, screened)} if state.record.screening is not None else {}),
        "signals": signals,
        "at_chance": by_chance,
        "fell_to_chance": fell,
    }
    write_atomic(paths.results, json.dumps(replace_non_finite(results), indent=2, default=str).encode())


# --- as a value, for `coordinator.api` ----------------------------------------------------------------------

SCORE_COLUMNS = (
    "task", "filter", "metric", "value", "stderr", "documents", "n_shot", "version", "higher_is_better",
)  # fmt: skip


MOST_SCORES = 4  # shown in the repr of results


class Results(Evaluation):
    """Scores and costs of an evaluation so far.

    `scores` has a row for each task, metric and filter with a value; `rows()` returns them flat.
    """

    folder: Path  # contains results.json, samples, logs and the journal
    note: str = ""  # set by `evaluate`: why nothing was run
    changed: str = (
        ""  # set by `evaluate`: what has changed since the last evaluation of this checkpoint and suite
    )
    report: Report = Field(exclude=True, repr=False)  # where the time went
    raw: dict[str, Any] = Field(exclude=True, repr=False)  # results.json, in lm-eval's shape
    gpu_hour_price: float | None = Field(default=None, exclude=True, repr=False)  # from the current settings

    def __repr__(self) -> str:
        scores = first_of([f"{score.name} {score.value:.4f}" for score in self.scores], MOST_SCORES)
        return f"<Results {self.evaluation_id}: {self.status}{f'; {scores}' if scores else ''}>"

    __str__ = __repr__

    @property
    def complete(self) -> bool:
        """Whether every task has its score and every item counts."""
        return self.status == "done" and not self.raw.get("unscored")

    def rows(self) -> list[dict[str, Any]]:
        """Return a flat row per score, like `series`."""
        return rows_of(self)


def results_of(state: State, paths: EvaluationPaths, events: Sequence[AnyEvent] | None = None) -> Results:
    """Return the results of an evaluation. `events`: of the journal, if already read. An ended one is read from its files as
    far as possible.

    If no report can be made, a warning says why, and the costs are None.
    """
    over = state.ended_at is not None
    if over and (found := results_in_files(paths)) is not None:
        return found
    why: list[Exception] = []
    report = None
    with isolate_errors(why.append):
        report = report_of(state, paths, events)
    if report is None:
        report = without_measurements(state, f"{type(why[0]).__name__}: {why[0]}")
    said = ""
    if not over and (halt := halt_of(read_summary(paths), paths)):
        report, said = report.model_copy(update={"status": halt.word}), halt.text
    # while an evaluation is retried, results.json is that of its last end
    raw = read_json(paths.results) if over else {}
    if over and not raw and paths.results.exists():
        said = f"{paths.results} cannot be read; these scores are those of its tasks' own files"
    report = report.model_copy(update={"warnings": (*filter(None, [said]), *report.warnings)})
    return _results(report, raw or merged_results(state, *scores_in(state)), paths)


def results_in_files(paths: EvaluationPaths) -> Results | None:
    """Return results of an ended evaluation from report.json and results.json alone; None if one cannot be read."""
    try:
        report = Report.model_validate_json(paths.report.read_bytes())
        return _results(report, json.loads(paths.results.read_bytes()), paths)
    except (OSError, ValueError):
        return None


def _results(report: Report, raw: dict[str, Any], paths: EvaluationPaths) -> Results:
    known = dict(make_evaluation(report.head, raw, report))
    known["scores"] = tuple(score for score in known["scores"] if score.filter != DENSE)
    return Results(**known, folder=paths.root, report=report, raw=raw)


def rows_of(made: Evaluation) -> list[dict[str, Any]]:
    """Return a flat row per score, or one row without a score if there is none."""
    head, tail = (
        {name: getattr(made, name) for name in names}
        for names in (
            ("evaluation_id", "suite", "step", "checkpoint", "status"),
            ("makespan_seconds", "paused_seconds", "gpu_seconds", "mode"),
        )
    )
    scores = [{name: getattr(score, name) for name in SCORE_COLUMNS} for score in made.scores]
    return [{**head, **score, **tail} for score in scores or [dict.fromkeys(SCORE_COLUMNS)]]
