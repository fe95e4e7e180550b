"""`Summary`: all that is shown of one evaluation, in its `status.json`.

Rule: the journal stays the truth. A coordinator writes the summary of what it runs where it has changed, at most every
WRITE_SECONDS, and at the end. Screens, pages, metrics and news read it and replay no journal. That of an ended evaluation
counts while the journal has the length that it had at the end. `coordinator.runtime.summarise` makes it from a state.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import Field, ValidationError

from coordinator.base.words import clock_time
from coordinator.diagnosis.verdict import in_words
from coordinator.evaluation.records import JOURNAL_FORMAT, EvaluationRecord
from coordinator.report.gpu_use import slot_word
from coordinator.report.learning_curves import SCORES, ScoreValue, scores_of
from coordinator.runtime.causes import failures, of_outcome, of_trial
from coordinator.runtime.work_lock import WorkLock
from evaljobs.contract import folded
from evaljobs.contract.paths import EvaluationPaths, WorkPaths
from evaljobs.contract.specs import Kept
from evaljobs.contract.storage import write_atomic

SCHEMA_VERSION: Literal[2] = 2
WRITE_SECONDS = 5.0  # least between two writes of one evaluation's summary
SILENT_SECONDS = 90.0  # without a sign of its coordinator: then an evaluation reads "stopped"
MOST_BYTES = 64 * 1024  # of a summary
CUTS = (200, 60, 20, 5)  # members that its lists keep where it would be larger: the first that suffices
CUT_TEXT = 200  # characters of an error then
WARNINGS = 5  # of a summary: the last ones
CAUSES = ("infer", "imports", "load", "warm", "dump", "wait", "other")  # of GPU seconds: fields of `GpuUse`
GIVEN_UP = "given up"  # only `retry` brings it back
NOTHING_FREE = "nothing that it could run on is free"
NO_SLOT = f"{NOTHING_FREE} (`evalspan status` says what is used)"
STOPPED = "no process goes on with it: type the same `evalspan eval …` again, or start `evalspan daemon`"


class Timed(Kept):
    """What happens, such as "a trial is pending"; `at`: since or until when, in unix seconds; `why`: "" where unknown."""

    what: str
    at: float | None = None
    why: str = ""


class Task(Kept):
    """A task of the suite. `scores`: up to SCORES_SHOWN of a task scored lately, else its main one."""

    model_config = SCORES

    name: str
    state: str  # to build | building requests | to infer | executing | scoring | scored | failed
    error: str = ""  # why it has no score
    scores: tuple[ScoreValue, ...] = ()


class Lane(Kept):
    """What the trial of a lane does. `batch`: "3 of 10"; `task` and `batch` are "" where it has no shard."""

    lane: str
    doing: str
    task: str = ""
    batch: str = ""


class Node(Kept):
    """A node of an evaluation. `until`: unix seconds of the end of its back-off, the `times`th."""

    name: str
    status: str  # offered | staging | ready | back-off | withdrawn
    gpus: int = 0  # for its trials; 0 in back-off
    trials: int = 0  # that live
    why: str = ""
    until: float | None = None
    times: int = 0


class Parked(Kept):
    """Why an evaluation cannot go on now. `cancelled`: the reason of a cancellation that waits for its return, or ""."""

    at: float  # unix seconds
    error: str
    until: float | None = None  # unix seconds of the next try; None: given up until `evalspan retry`
    cancelled: str = ""


class Summary(Kept):
    """One evaluation. Times ending in `_at` and `_until` are unix seconds, others seconds."""

    model_config = SCORES

    schema_version: Literal[2]  # one of another version is made anew
    evaluation_id: str
    written_at: float
    journal_format: int = 0  # of an evaluation of which this is another one than today's, only the end counts
    journal_bytes: int = 0  # at the end; 0 before

    suite: str = ""
    mode: str = "exact"
    step: int | None = None
    checkpoint: str = ""  # the folder that training wrote
    converted_digest: str | None = None  # of the announced checkpoint: names its converted copy
    priority: int = 0  # higher is served first
    accepted_at: float = 0.0
    ended_at: float | None = None

    phase: str = "running"  # of `evaluation.state.Phase`
    stage: str = "unreadable"  # the furthest under way, in one or two words; "ended", "cancelled" at the end
    cancelled: str = ""  # why a person ended it, or ""
    parked: Parked | None = None
    fault: str = ""  # why its journal cannot be read

    entries: int = 0  # tasks of the suite
    scored: int = 0  # of these, those that have their scores
    tasks: tuple[Task, ...] = ()  # in the file of one that has ended: those that failed
    shards: int = 0  # 0 before the plan is made
    shards_done: int = 0
    shards_quarantined: int = 0
    trials: int = 0  # that live
    gpus: int = 0  # of trials whose jobs run
    lanes: tuple[Lane, ...] = ()  # of living trials; () where there are more than MOST_LANES
    lanes_by_node: Mapping[
        str, Mapping[str, int]
    ] = {}  # then: the first nodes -> what their trials do -> trials
    nodes: tuple[Node, ...] = ()  # in use, prefetched to, in back-off or withdrawn
    nodes_by_status: Mapping[str, int] = Field(default_factory=dict)  # without those prefetched to
    jobs: Mapping[str, int] = Field(default_factory=dict)  # purpose -> jobs in the cluster's queue or running
    metric_jobs: int = 0  # given to RQ in all
    metric_jobs_open: Mapping[str, int] = Field(
        default_factory=dict
    )  # kind and task -> those without an outcome

    done_at: float | None = None  # predicted time of the last score
    waits_until: float | None = None  # while all nodes are in back-off: the first returns
    waits: tuple[Timed, ...] = ()  # for what it waits, since `at`
    held: tuple[Timed, ...] = ()  # jobs that Slurm does not take yet; submitted again at `at`
    stragglers: Mapping[str, str] = Field(default_factory=dict)  # trial -> how slow it is, in words
    failed_jobs: Mapping[str, str] = Field(
        default_factory=dict
    )  # job or trial -> the last line of its error; mended ones included
    warnings: tuple[str, ...] = ()  # the last ones

    # at the end, of results.json and report.json; None: not known
    scores: tuple[ScoreValue, ...] = ()  # the main one of each task or group
    makespan_seconds: float | None = None  # from acceptance to the last score, without pauses
    gpu_seconds: Mapping[str, float] = Field(default_factory=dict)  # cause -> GPU seconds
    slot: str = "GPU"  # what these seconds are of
    staged_bytes: int = 0
    at_chance: bool = False  # each task scores as guessing would
    fell_to_chance: str = ""  # then: which earlier checkpoint of the training did not, in a sentence

    left_out: str = ""  # where it was cut: what has the rest

    @property
    def errors(self) -> dict[str, str]:
        """Task -> why it has no score."""
        return {task.name: task.error for task in self.tasks if task.error}

    @property
    def result(self) -> str:
        """Of one that has ended."""
        return "cancelled" if self.cancelled else "failed" if self.errors else "done"

    def like(self, other: Summary | None) -> bool:
        """Do both show the same? The time of writing and a prediction that moves with it do not count."""
        if other is None:
            return False
        return self.model_copy(update={"written_at": other.written_at, "done_at": other.done_at}) == other

    @property
    def turn(self) -> tuple[float, float]:
        """Evaluations are served in this order."""
        return -self.priority, self.accepted_at

    @property
    def main_scores(self) -> tuple[ScoreValue, ...]:
        """The main score of each task or group that has one."""
        return self.scores or first_of_each(score for task in self.tasks for score in task.scores)


class Halt(NamedTuple):
    """Why an evaluation does not go on. `word`: stopped | parked | given up; `since`: unix seconds."""

    word: str
    since: float
    why: str

    @property
    def text(self) -> str:
        return f"{self.word} since {clock_time(self.since, time.time())}: {self.why}"


def halt_of(summary: Summary | None, paths: EvaluationPaths, *, held: bool | None = None) -> Halt | None:
    """Of an evaluation that has not ended; None where it goes on. `held` as of `is_alive`."""
    if summary is not None and (parked := summary.parked) is not None:
        return Halt(GIVEN_UP if parked.until is None else "parked", parked.at, parked.error)
    return None if is_alive(paths, held=held) else Halt("stopped", last_sign(paths), STOPPED)


def is_alive(paths: EvaluationPaths, *, held: bool | None = None) -> bool:
    """Does a coordinator run it? `held`: a process holds the work folder; None: it is asked here.

    Its coordinator signs its journal every 10 s: a process that hangs, or that runs other evaluations alone, does not. Both
    times of its lease are of one moment, by its clock and by the file server's: so its clock may differ from ours.
    """
    work, ahead = WorkPaths(paths.root.parent), 0.0
    held = WorkLock(work.lock).held() if held is None else held
    with suppress(OSError):
        lease = work.lease.stat()
        ahead = lease.st_mtime - lease.st_ctime
    return held and time.time() + ahead - last_sign(paths) < SILENT_SECONDS


def last_sign(paths: EvaluationPaths) -> float:
    """When a coordinator signed its journal last, in unix seconds; now where storage is away."""
    try:
        return paths.journal.stat().st_mtime
    except OSError:
        return time.time()


# --- the file --------------------------------------------------------------------------------------------------------


def write_summary(paths: EvaluationPaths, summary: Summary) -> bool:
    """Write it, unless its folder was removed. False where the disk refuses it: readers use the journal then."""
    try:
        if paths.root.is_dir():
            write_atomic(paths.status, as_json(fitted(summary)))
    except OSError:
        return False
    return True


def as_json(summary: Summary) -> bytes:
    return summary.model_dump_json(exclude_defaults=True).encode()


def fitted(summary: Summary) -> Summary:
    """The summary in at most MOST_BYTES: lists are cut, tasks that failed stay first, and `left_out` says what has all.

    Of one that has ended, only the tasks that failed are kept.
    """
    if summary.ended_at is not None:
        summary = summary.model_copy(update={"tasks": tuple(t for t in summary.tasks if t.error)})
    for most in CUTS:
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


def read_summary(paths: EvaluationPaths) -> Summary | None:
    """The summary of its file, or of its other files where it has ended in another journal format.

    None where only its journal says how it stands; also where a retry was journalled since.
    """
    return read_file(str(paths.root)) or _of_files(paths)


def read_file(root: str) -> Summary | None:
    """The valid summary in the folder of an evaluation; None without one. For thousands: no paths, no buffers."""
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


def ended(paths: EvaluationPaths) -> Summary | None:
    """The summary of an evaluation that has ended; None of any other."""
    found = read_summary(paths)
    return None if found is None or found.ended_at is None else found


def read_evaluation(paths: EvaluationPaths) -> EvaluationRecord | None:
    """The record that an evaluation was accepted with; None where it cannot be read."""
    try:
        return EvaluationRecord.model_validate_json(paths.evaluation.read_bytes())
    except (OSError, ValidationError):
        return None


def of_record(paths: EvaluationPaths, fault: str) -> Summary:
    """What `evaluation.json` says alone, where the journal cannot be read: `fault` says why."""
    record = read_evaluation(paths)
    known = {} if record is None else known_by(record)
    known |= {"schema_version": SCHEMA_VERSION, "evaluation_id": paths.root.name}
    return Summary(written_at=time.time(), fault=fault, **known)


def known_by(record: EvaluationRecord) -> dict[str, Any]:
    """Fields of a summary that the record gives."""
    return {
        "schema_version": SCHEMA_VERSION,
        "journal_format": JOURNAL_FORMAT,
        "evaluation_id": record.evaluation_id,
        "suite": record.suite.name,
        "mode": record.suite.mode or "exact",
        "step": record.checkpoint.step,
        "checkpoint": record.checkpoint.announced,
        "priority": record.priority,
        "accepted_at": record.accepted_at,
        "entries": len(record.suite.tasks),
    }


def _of_files(paths: EvaluationPaths) -> Summary | None:
    """Of an evaluation that has ended under an earlier version, from its files; None of any other."""
    try:
        size = paths.journal.stat().st_size
    except OSError:  # another folder of the work folder
        return None
    from coordinator.runtime.journal import has_other_format  # noqa: PLC0415 (few evaluations need the state machine)

    before = read_json(paths.status)
    if before.get("what") != "ended" or before.get("journal_bytes") != size:
        before = {}
    if not before:
        lines = paths.journal.read_bytes() if has_other_format(paths.journal) else b""
        if lines.rfind(b'"kind":"results-written"') <= lines.rfind(b'"kind":"retry-asked"'):
            return None
    try:
        return _of_earlier(paths, before, size)
    except (AttributeError, KeyError, TypeError, ValueError) as error:  # files that a person has changed
        return of_record(paths, f"its report or results cannot be read: {error!r}")


def _of_earlier(paths: EvaluationPaths, before: Mapping[str, Any], size: int) -> Summary:
    """`before`: its status.json of an earlier version, or empty; `size`: bytes of its journal."""
    report, results = read_json(paths.report), read_json(paths.results)
    failed, shards = results.get("failed", {}), len(report.get("shards", ()))
    known = {
        "ended_at": (paths.results if results else paths.journal).stat().st_mtime,
        "cancelled": "on request" if report.get("status") == "cancelled" else "",
        "shards": shards,
        "shards_done": shards,
        "scored": sum(entry["status"] == "scored" for entry in report.get("entries", ())),
        "warnings": report.get("warnings", ())[-WARNINGS:],
        "converted_digest": None,
    }
    tasks = [Task(name=name, state="failed", error=why) for name, why in before.get("errors", failed).items()]
    known = {name: before.get(name, value) for name, value in known.items()}
    known |= {"journal_bytes": size, "tasks": tuple(tasks), "warnings": tuple(known["warnings"])}
    found = of_record(paths, "").model_copy(update=known)
    return with_costs(found, paths)


# --- the end ---------------------------------------------------------------------------------------------------------


def with_costs(summary: Summary, paths: EvaluationPaths) -> Summary:
    """The summary of one that has ended, with what its results, report and outcomes say of scores, costs and failures."""
    report, gpus = read_json(paths.report), read_json(paths.report).get("gpus", ())
    results = read_json(paths.results)
    said = results.get("evalspan", {})
    return summary.model_copy(
        update={
            "phase": "ended",
            "nodes": (),
            "stage": "cancelled" if summary.cancelled else "ended",
            "scores": first_of_each(groups_or_tasks(results)),
            "at_chance": said.get("at_chance", False),
            "fell_to_chance": said.get("fell_to_chance", ""),
            "failed_jobs": {
                **{
                    t: in_words(of_trial(paths, t, word), f"its job ended: {word}")
                    for t, word in died(paths).items()
                },
                **failed_jobs(paths),
            },
            "makespan_seconds": report.get(
                "makespan_seconds", (summary.ended_at or 0.0) - summary.accepted_at
            ),
            "gpu_seconds": {c: sum(g.get(c, 0.0) * max(1, g["gpus"]) for g in gpus) for c in CAUSES}
            if gpus
            else {},
            "slot": slot_word(gpu.get("device", "") for gpu in gpus),
            "staged_bytes": report.get("staged_bytes", 0),
        }
    )


def died(paths: EvaluationPaths) -> dict[str, str]:
    """Trials that died without an outcome -> the cluster's word, which stands in the report in capitals."""
    gpus = read_json(paths.report).get("gpus", ())
    return {gpu["trial"]: gpu["ended"] for gpu in gpus if gpu["ended"].isupper()}


def failed_jobs(paths: EvaluationPaths) -> dict[str, str]:
    """Job or trial -> why it failed and its error line, by their outcome files; retried ones included."""
    return {name: in_words(of_outcome(outcome), outcome.error) for name, outcome in failures(paths).items()}


def failed_job(paths: EvaluationPaths, errors: Iterable[str]) -> str:
    """Return the job or trial that ended with one of these errors of tasks, else any that failed; "" where none did."""
    found, said = failures(paths), list(errors)
    causes = [name for name, outcome in found.items() if any(outcome.error in error for error in said)]
    return next(reversed([*died(paths), *found, *causes]), "")


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object in a file, archived or not; empty where it is not there, or storage is away for a moment."""
    with suppress(OSError, ValueError):
        if isinstance(found := json.loads(folded.read_bytes(file)), dict):
            return found
    return {}


def groups_or_tasks(results: Mapping[str, Any]) -> tuple[ScoreValue, ...]:
    """Values of groups, and of the tasks that no group holds, in lm-eval's results."""
    groups: Mapping[str, Any] = results.get("groups") or {}
    if not groups:
        return scores_of(results)
    below = {name for members in (results.get("group_subtasks") or {}).values() for name in members}
    top = {g: values for g, values in groups.items() if g not in below}
    alone = {t: v for t, v in (results.get("results") or {}).items() if t not in below and t not in groups}
    return scores_of({**results, "results": alone, "groups": top or groups})


def first_of_each(scores: Iterable[ScoreValue]) -> tuple[ScoreValue, ...]:
    """The main metric of each task: the first that lm-eval lists for it."""
    found: dict[str, ScoreValue] = {}
    for score in scores:
        found.setdefault(score.task, score)
    return tuple(found.values())
