"""The daemon's intake: turns notices of checkpoints into evaluations; handles commands, stale checkpoints and pins.

Rule: a notice stays in the inbox until its evaluation is journalled or refused for good, so that a restarted daemon reads it
again. A checkpoint that is still being written is examined again until it is complete and has stopped changing. An error of
the checkpoint itself refuses it; while storage or the site is unavailable, it stays pending. A member's notice of something
that the settings do not allow is refused at once (`admission`). `evalspan daemon` calls `Service.tick`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Literal

from coordinator.base import clock
from coordinator.base.clock import Throttle
from coordinator.base.isolate import LoopGuard, isolate_errors, warn_once
from coordinator.base.words import one_line
from coordinator.decide.allocation.backlog import SeriesMember, stale_evaluations
from coordinator.decide.evaluation.footprint import gpu_need
from coordinator.decide.evaluation.records import EvaluationRecord
from coordinator.decide.evaluation.state import State
from coordinator.errors import EvalspanError, RetryError
from coordinator.hook import PIN_PREFIX, pin_text
from coordinator.intake import admission, from_settings
from coordinator.intake.admission import NotAdmittedError
from coordinator.intake.folder_watch import FolderWatch
from coordinator.intake.inbox import (
    Inbox,
    InboxFile,
    forget_refusals,
    gather_values,
    refuse_notice,
    remove_notice,
)
from coordinator.intake.pending import PendingCheckpoint, PendingWriter, may_pass
from coordinator.intake.resubmit import nothing_run
from coordinator.intake.work_folder import name_of
from coordinator.results.report.signals import auto_cadences
from coordinator.runtime import wiring
from coordinator.runtime.journal import Journal
from coordinator.runtime.loop import Coordinator
from coordinator.runtime.present_inputs import changed_since, record_as_of_now
from coordinator.runtime.summary import Summary, read_evaluation
from coordinator.site.cluster import ClusterError
from coordinator.site.cluster.slurm_rules import Hosting
from coordinator.site.config.schema import Config
from evaljobs.contract.paths import EvaluationPaths, WorkPaths

log = logging.getLogger(__name__)

# How long the files of a checkpoint must be complete and unchanged, if it was only found in a watched folder or was
# incomplete at the first look.
STABLE_SECONDS = 2.0
# After this time an incomplete checkpoint is refused. One that waits for storage or the site stays pending, but no longer
# keeps `--until-idle` running.
WAIT_SECONDS = 3600.0
LOOK_SECONDS = 1.0  # between two looks at the inbox
MOST_LOOKS = 100  # pending checkpoints examined per look, in turns
RULES_QUESTION = "the question for the site's rules"
RULES_SECONDS = 30.0  # between two questions for the site's rules after a failure


class Service:
    """The intake of one work folder. `tick` is called between two ticks of the coordinator."""

    def __init__(self, coordinator: Coordinator, config: Config) -> None:
        self.coordinator = coordinator
        self.config = config
        self.paths = coordinator.performer.site.paths
        self._pending: dict[tuple[str, str], PendingCheckpoint] = {}  # by `Notice.key`
        self._announced_at: dict[str, float] = {}  # evaluation accepted here, and open -> unix seconds
        self._writer = PendingWriter(self.paths.pending)
        self._throttle = Throttle()
        self._inbox = Inbox(self.paths)
        self._suite_files = admission.suite_files(config.watch)
        watched = [(str(f), config.watch.suite or "default") for f in config.watch.folders]
        self._watch = FolderWatch(self.paths, watched, any_format=config.checkpoint.convert is not None)
        # pins of an earlier daemon: the first tick removes those no longer needed
        self._pinned: set[str] = {str(pin) for pin in map(_pin, _records(self.paths)) if _is_there(pin)}
        self._series: dict[str, SeriesMember] = {}  # evaluations that are not over
        self._hosting: Hosting | None = None
        self._no_rules: ClusterError | EvalspanError = EvalspanError("the site's rules are not known yet")
        self._guard = LoopGuard(log)

    @property
    def waiting(self) -> bool:
        """Whether a checkpoint is pending, other than for longer than WAIT_SECONDS."""
        return any(clock.now() - each.since < WAIT_SECONDS for each in self._pending.values())

    @property
    def pending_count(self) -> int:
        return len(self._pending)

    def tick(self) -> None:
        now = clock.now()
        if not self._throttle.due("look", LOOK_SECONDS, now):
            return
        performer = self.coordinator.performer
        self._inputs = from_settings.inputs_for(performer.site, performer.lm_eval_version)
        self._guard("watched folders", self._watch.look)
        files = self._inbox.look()
        self._guard("commands", self.coordinator.obey, files)  # before what was submitted after them
        self._know(files, now)
        for each in sorted(self._pending.values(), key=lambda each: each.looked_at)[:MOST_LOOKS]:
            each.looked_at = now
            with isolate_errors(partial(self._unexpected, each, now)):
                if not self._lacks_lm_eval(each):
                    self._examine(each, now)
        self._guard("stale checkpoints", self._drop_stale)
        self._guard("pins", self._pins)
        self._guard(str(self.paths.pending), self._writer.write, self._pending.values())

    def _know(self, files: Sequence[InboxFile], now: float) -> None:
        """Update the pending checkpoints from the inbox: drop withdrawn ones, refuse malformed ones."""
        found: dict[tuple[str, str], list[InboxFile]] = {}
        for file in files:
            if file.notice.command != "evaluate":
                continue
            if file.wrong:
                self._refuse(PendingCheckpoint(now, [file]), file.wrong, now)
            else:
                found.setdefault(file.notice.key, []).append(file)
        known, self._pending = self._pending, {}
        for key, theirs in found.items():
            self._pending[key] = known.get(key) or PendingCheckpoint(now, theirs)
            self._pending[key].files = theirs

    # --- pending checkpoints -----------------------------------------------------------------------------------------

    def _unexpected(self, each: PendingCheckpoint, now: float, error: Exception) -> None:
        log.error("%s", each.notice.checkpoint, exc_info=error)
        self._refuse(each, f"an error in evalspan, see the daemon's log: {error!r}", now)

    def _lacks_lm_eval(self, each: PendingCheckpoint) -> bool:
        """Return True, and leave the checkpoint pending, if lm-eval does not answer: no evaluation could begin."""
        try:
            self.coordinator.performer.lm_eval_version()
        except EvalspanError as error:
            each.wait(str(error))
            return True
        return False

    def _examine(self, each: PendingCheckpoint, now: float) -> None:
        try:
            record = self._record(each)
        except (EvalspanError, OSError, ValueError) as error:
            each.signature = ""
            member = each.member
            closed = _closed_to_us(error) if member else ""
            why = closed or " ".join(str(error).split())
            # it may be incomplete, or its suite file may be being edited
            young = now - each.since < WAIT_SECONDS
            passing = may_pass(error) or (young and admission.may_exist(each.notice.checkpoint))
            if passing and not isinstance(error, NotAdmittedError) and not closed:
                each.wait(why)
            else:
                self._refuse(each, f"{member}: {why}" if member else why, now)
            return
        # else: announced after it was saved, and complete at the first look
        if not each.announced or each.why:
            if record.checkpoint.digest != each.signature:
                each.signature, each.stable_since = record.checkpoint.digest, now
                return
            if now - each.stable_since < STABLE_SECONDS:
                return
        self._accept(record, each)

    def _record(self, each: PendingCheckpoint) -> EvaluationRecord:
        notice, watch, own = each.notice, self.config.watch, not each.member
        suite = admission.admitted_suite(notice, watch, self._suite_files, own=own)
        if not own:
            admission.check_place(notice.checkpoint, watch)
        record = from_settings.evaluation_record(
            self.config,
            notice.checkpoint,
            suite,
            self._inputs,
            priority=notice.priority,
            step=notice.step,
            final=notice.final,
            cadences=auto_cadences,
        )
        return record_as_of_now(record, self.coordinator.performer.site)

    def _accept(self, record: EvaluationRecord, each: PendingCheckpoint) -> None:
        """Accept a good checkpoint; it stays pending while storage or the site is unavailable."""
        paths, evaluations = self.paths.evaluation(record.evaluation_id), self.coordinator.evaluations
        try:
            rules = self._rules()  # first, since each look ends here while the site is unavailable
            begun = Journal.begun(paths.journal)
            if not begun and (why := gpu_need(record).refusal(self.coordinator.offers.nodes or rules.listed)):
                self._refuse(each, why, clock.now())
                return
            if not begun and (said := changed_since(record, self.coordinator.performer.site)):
                log.info("%s", said)
            gather_values(each.files, paths)
            running = evaluations.accept_or_wait(wiring.cluster_with_site(record, rules, self.config))
            if running is not None and running.state.ended_at is not None:
                log.info("%s: %s", record.evaluation_id, nothing_run(running.state))
            if running is not None and record.priority > running.state.record.priority:  # never lowered
                evaluations.prioritize(record.evaluation_id, record.priority)
        except (OSError, ClusterError, EvalspanError) as error:
            each.wait(str(error))
            return
        if not begun:
            self._announced_at[record.evaluation_id] = each.since
        forget_refusals(self.paths, each.notice)
        for file in each.files:
            remove_notice(file)
        self._pending.pop(each.notice.key, None)

    def announced_at(self, ended: Iterable[Summary]) -> dict[str, float]:
        """When the checkpoints of these evaluations were announced, in unix seconds; asked for once, at their end. Of one that an
        earlier daemon accepted, when that was.
        """
        return {
            end.evaluation_id: self._announced_at.pop(end.evaluation_id, end.accepted_at) for end in ended
        }

    def _rules(self) -> Hosting:
        """Return the site's rules, asked for once; after a failure, such as a wrong partition, again after RULES_SECONDS."""
        calls = self.coordinator.calls
        if self._hosting is None and (
            calls.asking(RULES_QUESTION) or self._throttle.due("rules", RULES_SECONDS, clock.now())
        ):
            call = calls.ask(
                RULES_QUESTION, lambda: wiring.site_hosting(self.config, self.coordinator.cluster)
            )
            try:
                if call is None:
                    raise RetryError("the cluster has not yet answered the query for the site's rules")
                self._hosting = call.result()
            except (ClusterError, EvalspanError) as error:
                self._no_rules = error
        if self._hosting is None:
            raise self._no_rules
        return self._hosting

    def _refuse(self, each: PendingCheckpoint, why: str, now: float) -> None:
        try:
            for file in each.files:
                refuse_notice(file, why, now)
        except OSError as error:  # a full disk: the next look tries again
            warn_once(log, one_line(f"{self.paths.inbox}/refused cannot be written: {error}"))
            return
        log.warning("%s is not evaluated: %s", each.notice.checkpoint, why)
        if self._pending.get(each.notice.key) is each:
            del self._pending[each.notice.key]

    # --- housekeeping -----------------------------------------------------------------------------------

    def _drop_stale(self) -> None:
        if self.config.backlog == "all":
            return
        self._series |= {
            i: _seen(r.state.record, _phase(r.state))
            for i, r in self.coordinator.evaluations.running.items()
            if not r.state.record.rescores
        }
        there = {record.evaluation_id for record in self.coordinator.evaluations.records()}
        for evaluation_id in self._series.keys() - there:  # ended, given up or removed
            del self._series[evaluation_id]
        for evaluation_id, why in stale_evaluations(self._series.values()).items():
            # a full disk, or a parked evaluation: cancelled at a later look
            with contextlib.suppress(OSError, KeyError):
                self.coordinator.evaluations.cancel(evaluation_id, why)

    def _pins(self) -> None:
        """Keep a marker file in each checkpoint that is still needed; training checks it with `hook.pinned`."""
        wanted = {str(_pin(record)) for record in self.coordinator.evaluations.records()}
        for pin in wanted - self._pinned:
            with contextlib.suppress(OSError):  # a read-only checkpoint cannot be pinned
                _leave_pin(Path(pin))
        for pin in self._pinned - wanted:
            with contextlib.suppress(OSError):
                Path(pin).unlink()
        self._pinned = wanted


def _closed_to_us(error: Exception) -> str:
    """Return why the daemon's user may not read a checkpoint or suite; "" for another error."""
    cause = error if isinstance(error, OSError) else error.__cause__
    if not isinstance(cause, PermissionError):
        return ""
    return (
        f"{name_of(os.geteuid())}, as whom the daemon runs, may not read {cause.filename}: let the group read it and "
        "enter its folders"
    )


def _is_there(place: Path) -> bool:
    """Return whether a place exists; False also if access is denied, where `Path.exists` raises."""
    return os.path.exists(place)  # noqa: PTH110


def _records(paths: WorkPaths) -> Iterator[EvaluationRecord]:
    """Yield the records of all evaluations of this work folder that this version can read."""
    for file in paths.root.glob("*/evaluation.json"):
        if (record := read_evaluation(EvaluationPaths(file.parent))) is not None:
            yield record


def _pin(record: EvaluationRecord) -> Path:
    return Path(record.checkpoint.announced) / f"{PIN_PREFIX}{record.evaluation_id}"


def _leave_pin(pin: Path) -> None:
    """Write a pin, replacing anything of that name without following it, since others may write there. Raise OSError."""
    pin.unlink(missing_ok=True)
    descriptor = os.open(pin, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    with open(descriptor, "w", encoding="utf-8") as file:  # noqa: PTH123 (a descriptor)
        file.write(pin_text(pin.parent))


def _phase(state: State) -> Literal["waiting", "started", "over"]:
    if state.ended_at is not None or state.ending.cancelled:
        return "over"
    # a prefetch is not a start; an evaluation that a person retried or paused is never dropped as stale
    kept = state.ending.retried or state.nodes.paused_at is not None
    started = kept or any(n.lanes for n in state.nodes.by_name.values())
    return "started" if started else "waiting"


def _seen(record: EvaluationRecord, phase: Literal["waiting", "started", "over"]) -> SeriesMember:
    step = record.checkpoint.step
    return SeriesMember(
        evaluation_id=record.evaluation_id,
        series=json.dumps([str(Path(record.checkpoint.announced).parent), record.suite.name]),
        order=(record.accepted_at if step is None else float(step), record.accepted_at),
        phase=phase,
    )
