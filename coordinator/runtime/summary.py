"""`Summary`: everything shown of one evaluation, in its `status.json`.

Rule: the journal remains the truth. A coordinator writes changed summaries of its evaluations at most every WRITE_SECONDS,
and at the end. Screens, pages, metrics and news read them and replay no journal. The summary of an ended evaluation is valid
while the journal has the length recorded at the end. `coordinator.runtime.make_summary` builds it from a state.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import Field, ValidationError

from coordinator.base.words import clock_time
from coordinator.decide.evaluation.records import JOURNAL_FORMAT, EvaluationRecord
from coordinator.results.report.load_series import load_documents
from coordinator.results.report.scores import (
    Ended,
    Evaluation,
    Head,
    Scores,
    ScoreValue,
    first_of_each,
    head_of,
    top_scores,
)
from coordinator.runtime.causes import cause_of_outcome, cause_of_trial, job_failures
from coordinator.runtime.work_lock import WorkLock
from coordinator.site.diagnosis.diagnose import diagnosis_in_words
from evaljobs.contract import archived_files
from evaljobs.contract.paths import EvaluationPaths, WorkPaths
from evaljobs.contract.specs import StateRecord
from evaljobs.contract.storage import find_record, write_atomic

SCHEMA_VERSION: Literal[3] = 3
WRITE_SECONDS = 5.0  # minimum between two writes of one evaluation's summary
SILENT_SECONDS = 90.0  # without a sign of its coordinator, after which an evaluation is "stopped"
MOST_BYTES = 64 * 1024  # of a summary
LIST_LIMITS = (200, 60, 20, 5)  # list lengths to try in turn if it would be larger
CUT_TEXT = 200  # characters of an error then
MAX_WARNINGS = 5  # of a summary: the last ones
PAUSED = "paused"  # a person lets it use no node
GIVEN_UP = "given up"  # only `retry` brings it back
NOTHING_FREE = "nothing that it could run on is free"
NO_SLOT = f"{NOTHING_FREE} (`evalspan status` says what is used)"
STOPPED_ADVICE = (
    "no process goes on with it: type the same `evalspan eval …` again, or start `evalspan daemon`"
)


class TimedNote(StateRecord):
    """Something that happens, such as "a trial is pending"; `at`: since or until when, in unix seconds; `why`: "" if unknown."""

    what: str
    at: float | None = None
    why: str = ""


class Task(StateRecord):
    """A task of the suite. `scores`: up to SCORES_SHOWN of a recently scored task, otherwise its main one."""

    name: str
    state: str  # to build | building requests | to infer | executing | scoring | scored | failed
    error: str = ""  # why it has no score
    scores: Scores = ()


class Lane(StateRecord):
    """What the trial of a lane does. `batch`: "3 of 10"; `task` and `batch` are "" if it has no shard."""

    lane: str
    doing: str
    task: str = ""
    batch: str = ""


class Node(StateRecord):
    """A node of an evaluation. `until`: unix seconds of the end of its current back-off, number `times`."""

    name: str
    status: str  # offered | staging | ready | back-off | withdrawn
    gpus: int = 0  # for its trials; 0 in back-off
    trials: int = 0  # living ones
    why: str = ""
    until: float | None = None
    times: int = 0


class Parked(StateRecord):
    """Why an evaluation cannot continue now. `cancelled`: reason of a cancellation that is pending until it resumes, or ""."""

    at: float  # unix seconds
    error: str
    until: float | None = None  # unix seconds of the next try; None: given up until `evalspan retry`
    cancelled: str = ""


class Summary(Ended):
    """One evaluation. Times ending in `_at` and `_until` are unix seconds, others seconds.

    Includes only the main score of each task or group, since thousands of summaries are read at once.
    """

    schema_version: Literal[3]  # summaries of other versions are rebuilt
    written_at: float
    journal_format: int = 0  # of another format than today's, only the end counts
    journal_bytes: int = 0  # at the end; 0 before

    converted_digest: str | None = None  # digest of the announced checkpoint, which names its converted copy
    priority: int = 0  # higher is served first
    ended_at: float | None = None

    phase: str = "running"  # as in `evaluation.state.Phase`
    stage: str = "unreadable"  # furthest in progress, in one or two words; "ended" or "cancelled" at the end
    cancelled: str = ""  # why a person ended it, or ""
    parked: Parked | None = None
    paused_at: float | None = None  # since when a person lets it use no node; None: it is not paused
    paused: str = ""  # the person's reason
    fault: str = ""  # why its journal cannot be read

    entries: int = 0  # tasks that are asked
    scored: int = 0  # entries with scores
    tasks: tuple[Task, ...] = ()  # of an ended evaluation: only those that failed
    shards: int = 0  # 0 before the plan is made
    shards_done: int = 0
    shards_quarantined: int = 0
    trials: int = 0  # living ones
    gpus: int = 0  # of trials whose jobs run
    lanes: tuple[Lane, ...] = ()  # of living trials; empty if more than MOST_LANES
    lanes_by_node: Mapping[
        str, Mapping[str, int]
    ] = {}  # then: the first nodes -> what their trials do -> trials
    nodes: tuple[Node, ...] = ()  # in use, prefetched to, in back-off or withdrawn
    nodes_by_status: Mapping[str, int] = Field(default_factory=dict)  # without those prefetched to
    jobs: Mapping[str, int] = Field(default_factory=dict)  # purpose -> pending or running jobs
    metric_jobs: int = 0  # total given to RQ
    metric_jobs_open: Mapping[str, int] = Field(
        default_factory=dict
    )  # kind and task -> those without an outcome

    done_at: float | None = None  # predicted time of the last score
    waits_until: float | None = None  # set while all nodes are in back-off, until the first returns
    waits: tuple[TimedNote, ...] = ()  # what it waits for, since `at`
    held: tuple[TimedNote, ...] = ()  # jobs that a limit keeps out; submitted again at `at`
    stragglers: Mapping[str, str] = Field(default_factory=dict)  # trial -> its slowdown as a sentence
    failed_jobs: Mapping[str, str] = Field(
        default_factory=dict
    )  # job or trial -> the last line of its error, including errors since overcome
    warnings: tuple[str, ...] = ()  # the last ones

    left_out: str = ""  # if it was shortened: where the rest is

    @property
    def errors(self) -> dict[str, str]:
        """Task -> why it has no score."""
        return {task.name: task.error for task in self.tasks if task.error}

    @property
    def result(self) -> str:
        """Outcome of an ended evaluation."""
        return "cancelled" if self.cancelled else "failed" if self.errors else "done"

    def like(self, other: Summary | None) -> bool:
        """Return whether both show the same, except for the time of writing and the prediction that moves with it."""
        if other is None:
            return False
        return self.model_copy(update={"written_at": other.written_at, "done_at": other.done_at}) == other

    @property
    def turn(self) -> tuple[float, float]:
        """Sort key of the order in which evaluations are served."""
        return -self.priority, self.accepted_at

    @property
    def main_scores(self) -> tuple[ScoreValue, ...]:
        """The main score of each task or group that has one."""
        return self.scores or first_of_each(score for task in self.tasks for score in task.scores)


class Halt(NamedTuple):
    """Why an evaluation does not progress. `word`: stopped | paused | parked | given up; `since`: unix seconds."""

    word: str
    since: float
    why: str

    @property
    def text(self) -> str:
        return f"{self.word} since {clock_time(self.since, time.time())}: {self.why}"


def halt_of(summary: Summary | None, paths: EvaluationPaths, *, held: bool | None = None) -> Halt | None:
    """Return why an open evaluation does not progress; None if it does. `held`: as in `is_alive`."""
    if summary is not None and (parked := summary.parked) is not None:
        return Halt(GIVEN_UP if parked.until is None else "parked", parked.at, parked.error)
    if summary is not None and summary.paused_at is not None:
        goes_on = f"`evalspan resume {summary.evaluation_id}` lets it go on"
        return Halt(PAUSED, summary.paused_at, f"{summary.paused}; {goes_on}")
    return None if is_alive(paths, held=held) else Halt("stopped", last_sign(paths), STOPPED_ADVICE)


def is_alive(paths: EvaluationPaths, *, held: bool | None = None) -> bool:
    """Return whether a coordinator is running this evaluation. `held`: a process holds the work folder; None: find out.

    The coordinator signs its journal every 10 s; one that hangs, or runs only other evaluations, does not. The lease records
    one moment by the coordinator's clock and by the file server's, so their clocks may differ.
    """
    work, ahead = WorkPaths(paths.root.parent), 0.0
    held = WorkLock(work.lock).held() if held is None else held
    with suppress(OSError):
        lease = work.lease.stat()
        ahead = lease.st_mtime - lease.st_ctime
    return held and time.time() + ahead - last_sign(paths) < SILENT_SECONDS


def last_sign(paths: EvaluationPaths) -> float:
    """Return when a coordinator last signed its journal, in unix seconds; now if storage is unavailable."""
    try:
        return paths.journal.stat().st_mtime
    except OSError:
        return time.time()


# --- the file --------------------------------------------------------------------------------------------------------


def write_summary(paths: EvaluationPaths, summary: Summary) -> bool:
    """Write a summary, unless its folder was removed. Return False if the disk refuses it; readers then use the journal."""
    try:
        if paths.root.is_dir():
            write_atomic(paths.status, as_json(fit_summary(summary)))
    except OSError:
        return False
    return True


def as_json(summary: Summary) -> bytes:
    return summary.model_dump_json(exclude_defaults=True).encode()


def fit_summary(summary: Summary) -> Summary:
    """Shorten the summary to MOST_BYTES: lists are cut, failed tasks stay first, and `left_out` names the complete files.

    For an ended evaluation only failed tasks are kept.
    """
    if summary.ended_at is not None:
        summary = summary.model_copy(update={"tasks": tuple(t for t in summary.tasks if t.error)})
    for most in LIST_LIMITS:
        if len(as_json(summary)) <= MOST_BYTES:
            break
        tasks = sorted(summary.tasks, key=lambda task: not task.error)[:most]
        summary = summary.model_copy(
            update={
                "tasks": tuple(t.model_copy(update={"error": t.error[:CUT_TEXT]}) for t in tasks),
                "lanes": summary.lanes[:most],
                "lanes_by_node": dict(list(summary.lanes_by_node.items())[:most]),
                "nodes": tuple(sorted(summary.nodes, key=lambda node: not node.why)[:most]),
                "scores": summary.scores[:most],
                "warnings": tuple(text[:CUT_TEXT] for text in summary.warnings),
                **{name: _first(getattr(summary, name), most) for name in ("stragglers", "failed_jobs")},
                "held": tuple(h.model_copy(update={"why": h.why[:CUT_TEXT]}) for h in summary.held[:most]),
                "waits": summary.waits[:most],
                "left_out": "results.json and report.json have all",
            }
        )
    return summary


def _first(texts: Mapping[str, str], most: int) -> dict[str, str]:
    return {name: text[:CUT_TEXT] for name, text in list(texts.items())[:most]}


def read_file(root: str) -> Summary | None:
    """Read the valid summary in the folder of an evaluation; None if there is none. Fast enough for thousands of folders."""
    try:
        file = os.open(f"{root}/status.json", os.O_RDONLY | os.O_CLOEXEC)
        try:
            found = Summary.model_validate_json(os.read(file, 2 * MOST_BYTES))
        finally:
            os.close(file)
        if found.ended_at is None:
            counts = found.journal_format == JOURNAL_FORMAT
        else:
            counts = found.journal_bytes == os.stat(f"{root}/journal.jsonl").st_size  # noqa: PTH116
    except (OSError, ValidationError):
        return None
    return found if counts and found.evaluation_id == root.rpartition("/")[2] else None


def read_summary(paths: EvaluationPaths) -> Summary | None:
    """Read the valid summary; None if only the journal is current, for instance since a retry."""
    return read_file(str(paths.root))


def read_ended_summary(paths: EvaluationPaths) -> Summary | None:
    """Return the summary of an evaluation if it has ended, otherwise None."""
    found = read_summary(paths)
    return None if found is None or found.ended_at is None else found


def read_evaluation(paths: EvaluationPaths) -> EvaluationRecord | None:
    """Read the record that an evaluation was accepted with; None if it cannot be read."""
    return find_record(paths.evaluation, EvaluationRecord)


def summary_of_record(paths: EvaluationPaths, fault: str) -> Summary:
    """Return a summary from `evaluation.json` alone if the journal cannot be read; `fault` says why."""
    record = read_evaluation(paths)
    known = {} if record is None else fields_of_record(record)
    known |= {"schema_version": SCHEMA_VERSION, "evaluation_id": paths.root.name}
    return Summary(written_at=time.time(), fault=fault, **known)


def fields_of_record(record: EvaluationRecord) -> dict[str, Any]:
    """Return the fields of a summary that the record determines."""
    return {
        **head_of(record),
        "schema_version": SCHEMA_VERSION,
        "journal_format": JOURNAL_FORMAT,
        "priority": record.priority,
        "entries": len(record.suite.tasks) - len(record.not_asked),
    }


# --- the end ---------------------------------------------------------------------------------------------------------


def with_document(summary: Summary, paths: EvaluationPaths) -> Summary:
    """Return the summary of an ended evaluation with the scores, costs and failures from its document and outcomes."""
    (found,) = load_documents(paths.root.parent, [summary])
    said = {name: getattr(found, name) for name in Ended.model_fields.keys() - Head.model_fields.keys()}
    words = {
        t: diagnosis_in_words(cause_of_trial(paths, t, word), f"its job ended: {word}")
        for t, word in found.died.items()
    }
    return summary.model_copy(
        update={
            **said,
            "phase": "ended",
            "stage": "cancelled" if summary.cancelled else "ended",
            "nodes": (),
            "scores": first_of_each(top_scores(found.scores, found.groups)),
            "failed_jobs": {**words, **failed_jobs(paths)},
        }
    )


def failed_jobs(paths: EvaluationPaths) -> dict[str, str]:
    """Return job or trial -> why it failed and its error line, from outcome files; includes retried ones."""
    return {
        name: diagnosis_in_words(cause_of_outcome(outcome), outcome.error)
        for name, outcome in job_failures(paths).items()
    }


def failed_job(paths: EvaluationPaths, made: Evaluation) -> str:
    """Return the job or trial that ended with an error of its tasks, otherwise any that failed; "" if none did."""
    found, said = job_failures(paths), made.failed.values()
    causes = [name for name, outcome in found.items() if any(outcome.error in error for error in said)]
    return next(reversed([*made.died, *found, *causes]), "")


def read_json(file: Path) -> dict[str, Any]:
    """Read a JSON object from a file, archived or not; empty if it is missing or storage is unavailable."""
    with suppress(OSError, ValueError):
        if isinstance(found := json.loads(archived_files.read_bytes(file)), dict):
            return found
    return {}
