"""One evaluation in the loop: its journal, its state, and the new files in its folder.

Rule: observe -> step -> log -> perform, and nothing else changes the state. Outcome files and response records are
the truth; Redis only says where to look sooner. `coordinator.runtime.registry` keeps one `Running` per evaluation.
"""

from __future__ import annotations

import logging
import math
import os
import re
import time
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from functools import cache
from pathlib import Path

from pydantic import ValidationError

from coordinator.base import clock
from coordinator.base.clock import Throttle
from coordinator.base.listing import Listing
from coordinator.base.version import version_text
from coordinator.decide.evaluation import scoring, shards
from coordinator.decide.evaluation import step as machine
from coordinator.decide.evaluation.actions import Action, CancelJob, ReleaseClaims, SubmitJob
from coordinator.decide.evaluation.events import (
    Accepted,
    AnyEvent,
    JobEnded,
    OutcomeSeen,
    Restarted,
    ShardCorrupted,
    ShardsDumped,
    ShardsStray,
    StragglersFound,
)
from coordinator.decide.evaluation.records import EvaluationRecord
from coordinator.decide.evaluation.state import State
from coordinator.runtime import causes, detect
from coordinator.runtime.effects import Performer
from coordinator.runtime.finalize import make_report_or_none
from coordinator.runtime.journal import CopiedJournalError, Journal, line_of, replayed_state
from coordinator.runtime.make_summary import summary_now, values_in
from coordinator.runtime.summary import WRITE_SECONDS, Summary, failed_jobs, write_summary
from coordinator.site.cluster import Job, JobState
from coordinator.site.cluster.sbatch_text import log_file
from coordinator.site.diagnosis.diagnose import Diagnosis, diagnosis_in_words
from coordinator.site.services.metric_queue import MetricQueue
from evaljobs.contract.archived_files import file_exists
from evaljobs.contract.outcomes import OUTCOME, Failed
from evaljobs.contract.paths import EvaluationPaths, entry_manifest, request_set_manifest
from evaljobs.contract.specs import FrameRef
from evaljobs.contract.storage import (
    FrameError,
    list_anew,
    make_folder,
    read_frame,
    read_frames,
    read_plain,
    write_atomic,
)
from evaljobs.queue.redis_client import QueueUnavailable
from evaljobs.queue.work_queue import QueueSnapshot

log = logging.getLogger(__name__)

LOGS_SECONDS = 1.0  # reading logs of dead trials; the rest waits for the next listing
SETS_SECONDS = 15.0  # between two checks for request sets; a failed job triggers one, too
AUDIT_SECONDS = 15.0  # between two comparisons of the work queue with the shards to do
PACE_SECONDS = 5.0  # between two comparisons of trials with each other
METRIC_AUDIT_SECONDS = 3.0  # between two looks at the metric queue; a look costs one round trip
FULL_SCAN_SECONDS = 15.0  # between two looks at all response files; Redis names grown ones sooner
REFILL_SECONDS = 2.0  # between two tries to fill the queue of a Redis that takes no writes
RESPONSE_FILE_NAME = re.compile(r"[\w.-]+\.frames", re.ASCII)  # other file names are ignored
SUMMARY_SECONDS = 1.0  # between two summaries of a state
SIGN_SECONDS = 10.0  # between two signs that a coordinator runs the evaluation: its journal's mtime
# events that follow from an event's actions, recursively: an entry is looked up, planned and scored once
MAX_ANSWERS = 50
MAX_ANSWERS_AN_ENTRY = 4
LAST_ANSWERS = 10  # logged of an endless turn
MOST_SAID = 500  # bytes of each
MAX_OUTCOME_BYTES = 1 << 24  # larger outcome files are skipped


class EndlessTurnError(Exception):
    """Raised if an evaluation's events and actions cause each other endlessly: it is parked, and the loop continues."""


class Running:
    """An accepted evaluation; `state.ended_at` is set once it is over and has nothing left on the cluster."""

    def __init__(self, state: State, journal: Journal, performer: Performer, grace: detect.Grace) -> None:
        self.state = state
        self.journal = journal
        self.performer = performer
        self.grace = grace
        self.paths: EvaluationPaths = performer.site.of(state)
        self.seen = detect.Sightings()
        self.snapshot: QueueSnapshot | None = None
        self.listed: Sequence[JobState] = ()  # jobs at the last look, for the live screen
        self._outcomes_read = {self.paths.outcome(kind, name).name for kind, name in state.seen}
        self._outcomes = Listing(self.paths.outcomes)
        self._consumed: dict[str, int] = {}
        self._throttle = Throttle()
        self._cancels: list[str] = []  # job or member ids ("id_index") to cancel
        self._submits: deque[SubmitJob] = deque()
        self._paces: dict[str, detect.Pace] = {}
        self._refilled_at: float | None = None  # while the queue is known to be lost
        self._queued_again: set[str] = set()  # shards that an audit found missing and queued again
        self._refused: tuple[str, ...] = ()  # missing shards that Redis refused; already journalled
        self._strange: set[str] = set()  # response files with unknown shards, already logged
        self._failed = failed_jobs(self.paths) if state.seen else {}  # job or trial -> its error
        self._read = cache(values_in)  # each score file is read once
        self._summary: Summary | None = None
        self._written: Summary | None = None  # as in the file

    # --- birth and return ------------------------------------------------------------------------------------------

    @classmethod
    def accept(cls, record: EvaluationRecord, performer: Performer, grace: detect.Grace) -> Running:
        """Create a new evaluation: its folder and its journal's first event."""
        paths = performer.site.paths.evaluation(record.evaluation_id)
        for folder in paths.folders():
            make_folder(folder)
        write_atomic(paths.evaluation, record.model_dump_json(indent=1).encode())
        event = Accepted(at=clock.now(), record=record, code=version_text())
        with ExitStack() as opened:
            journal = Journal(paths.journal, performer.fence)
            opened.callback(journal.close)
            journal.append([event])
            state, actions = machine.start_evaluation(event)
            running = cls(state, journal, performer, grace)
            running._perform(actions)
            opened.pop_all()
            return running

    @classmethod
    def resume(
        cls, root: Path, performer: Performer, grace: detect.Grace, *, ran_here: bool = False
    ) -> Running | None:
        """Restore an evaluation from its journal; None if that is empty. `ran_here`: it was parked in this process."""
        path = EvaluationPaths(root).journal
        seen_at = path.stat().st_mtime if path.exists() and not ran_here else None
        with ExitStack() as opened:
            journal = Journal(path, performer.fence)
            opened.callback(journal.close)
            if not ran_here:
                journal.renew()
            state = replayed_state(journal.replay())
            if state is None:
                return None
            if state.evaluation_id != root.name:
                raise CopiedJournalError(f"{path} is the journal of {state.evaluation_id} and is skipped")
            running = cls(state, journal, performer, grace)
            if state.ended_at is None:
                running.make_folders()
                clock.not_before(journal.last_at)
                now = clock.now()
                running.take([Restarted(at=now, seen_at=None if seen_at is None else min(seen_at, now))])
            opened.pop_all()
            return running

    def make_folders(self) -> None:
        """Create the folders that jobs write to, in case archiving removed them at an earlier end. Raise OSError."""
        for folder in self.paths.folders():
            make_folder(folder)

    def gone(self) -> tuple[int, ...]:
        """Return entries of a retry that start over, since their responses or request sets are no longer on disk.

        `prune` removes them, and a score job that finds other prompts drops the sets.
        """
        lost = []
        for entry in (e for e in self.state.entries if e.status == "failed" or e.unscored):
            frames = (
                self.state.shards.by_name[s].frame
                for s in shards.shards_of(self.state, entry.leaves.values())
            )
            files = {self.paths.responses / frame.file for frame in frames if frame is not None}
            whole = [entry_manifest(entry.folder)] if entry.sets else []
            if not all(map(file_exists, [*files, *whole, *map(request_set_manifest, entry.sets.values())])):
                lost.append(entry.index)
        return tuple(lost)

    # --- what is shown ---------------------------------------------------------------------------------------------

    def summary(self, now: float) -> Summary:
        """Return its summary, recomputed at most once in SUMMARY_SECONDS. `now`: unix seconds."""
        if self._throttle.due("summary", SUMMARY_SECONDS, now) or self._summary is None:
            self._summary = summary_now(
                self.state, self.paths, now, self.snapshot, self.listed, failed=self._failed, read=self._read
            )
        return self._summary

    def write_summary(self) -> bool:
        """Write the summary if it has changed. Return False if the disk refuses it."""
        made = self.summary(clock.now())
        if made.like(self._written):
            return True
        if not write_summary(self.paths, made):
            return False
        self._written = made
        return True

    # --- the loop's body -------------------------------------------------------------------------------------------

    def take(self, events: Sequence[AnyEvent]) -> None:
        """Step these events, journal them with the decisions, then perform the actions; resulting events are taken likewise."""
        if not events:
            return
        ended_at = self.state.ended_at
        actions = self._logged(events)
        try:
            self._perform(actions)
        finally:
            cancels, self._cancels = self._cancels, []
            self.performer.cancel(cancels)  # one command for all
        if ended_at is not None or self.state.ended_at is not None:
            self._summary = None  # it contains the length of the journal
        if self.state.ended_at != ended_at and self.state.ended_at is not None:
            # again: the outcomes of the last jobs came after the results
            make_report_or_none(self.state, self.paths)
            self.write_summary()

    def _logged(self, events: Iterable[AnyEvent]) -> list[Action]:
        """Journal these events and the decisions that follow, and return the actions. If the journal refuses them, or a step
        fails, the state is ahead of the journal and must be read back.
        """
        step = machine.step(self.state, self.performer.site, events)
        for event, why in step.illegal:
            log.error("%s: skipped an illegal %s: %s", self.state.evaluation_id, event.kind, why)
        self.journal.append(step.events)
        return list(step.actions)

    def _perform(self, actions: Iterable[Action]) -> None:
        """Perform these actions, and those that follow from the results. Raise EndlessTurnError if that does not end."""
        waiting = deque(actions)
        answers: list[AnyEvent] = []
        while waiting:
            action = waiting.popleft()
            if isinstance(action, CancelJob):
                member = "" if action.index is None else f"_{action.index}"
                self._cancels.append(action.job_id + member)
                continue
            if isinstance(action, SubmitJob):
                self._submits.append(action)  # `submit` waits for its turn, after all that is known
                continue
            came = self.performer.perform(self.state, action)
            answers += came
            if len(answers) > MAX_ANSWERS + MAX_ANSWERS_AN_ENTRY * len(self.state.entries):
                last = b"".join(line_of(event)[:MOST_SAID] + b"\n" for event in answers[-LAST_ANSWERS:])
                log.error("%s: its last events:\n%s", self.state.evaluation_id, last.decode(errors="replace"))
                raise EndlessTurnError(
                    f"{len(answers)} events followed from one another, the last is {answers[-1].kind}: a bug of evalspan"
                )
            waiting.extend(self._logged(came))

    def submit(self, deadline: float) -> None:
        """Submit waiting jobs concurrently until `deadline` (monotonic seconds) or a late answer. The rest waits for the next
        tick, so that a slow controller does not hold up the loop.
        """
        while (self._submits or self.performer.submitting(self.state)) and time.monotonic() < deadline:
            count = max(0, min(self.performer.room, len(self._submits)))
            wave = [self._submits.popleft() for _ in range(count)]
            self.take(self.performer.submit(self.state, wave))
            if not count or self.performer.submitting(self.state):
                return

    def observe(self, listing: Sequence[JobState] | None, now: float) -> None:
        """Run one tick. `listing`: all jobs of the cluster, or None if unknown."""
        if self.state.ended_at is not None:
            return
        if self._throttle.due("sign", SIGN_SECONDS, now):
            self.journal.sign(now)
        if self._throttle.due("write summary", WRITE_SECONDS, now):
            self.write_summary()
        outcomes = self._new_outcomes(now)
        self._look_at_queue(now)
        known = self.snapshot.trials if self.snapshot is not None else ()
        started = detect.started_trials(self.state, known, self.seen, now)
        dumped = self._new_shards(now, thorough=bool(outcomes) or listing is not None)
        failed = any(isinstance(e, OutcomeSeen) and e.outcome.kind == "failed" for e in outcomes)
        lost = (
            self.performer.lost_sets(self.state)
            if failed or self._throttle.due("sets", SETS_SECONDS, now)
            else []
        )
        self.take([*started, *lost, *dumped, *self._corrupted(outcomes, now), *outcomes])
        if listing is not None:
            self.listed = listing
            events, twins = detect.job_events(self.state, listing, self.seen, self.grace, now)
            self.performer.cancel(twins)
            if any(isinstance(event, JobEnded) for event in events):
                self._take_last_files(now)
            claims = self.snapshot.claims if self.snapshot is not None else {}
            until = clock.now() + LOGS_SECONDS
            told = detect.with_causes(
                self.state,
                events,
                listing,
                claims,
                began=_began,
                cause=self._cause,
                enough=lambda: clock.now() > until,
            )
            self.take(told)
        self.performer.cancel(detect.overdue_jobs(self.state, self.seen, self.grace, now))
        progress = None
        if self.snapshot is not None:
            progress = {t: (p.progress_at, p.shard) for t, p in self.snapshot.trials.items()}
        self.take(detect.hung_trials(self.state, progress, self.seen, self.grace, now))
        self.take(detect.waits_over(self.state, now))
        if self._throttle.due("compare trials", PACE_SECONDS, now):
            self._compare_trials(now)
        if self._throttle.due("audit", AUDIT_SECONDS, now):
            self._audit(now)
        if self._throttle.due("audit metrics", METRIC_AUDIT_SECONDS, now):
            self._audit_metrics(now)

    def _cause(self, job: Job, index: int, word: str) -> Diagnosis:
        """Return why a member ended without an outcome, and show it under the name of its trial or job."""
        info = self.state.jobs.by_name[job.name]
        cause = causes.cause_of_log(Path(log_file(job, index)), word)
        name = info.trials[index] if job.purpose == "trial" else job.name
        if cause.reason not in ("Preempted", "Cancelled"):
            self._failed[name] = diagnosis_in_words(cause, f"its job ended: {word}")
        return cause

    def _take_last_files(self, now: float) -> None:
        """Take what jobs left just before their end: a job without an outcome counts as killed."""
        list_anew(self.paths.outcomes)
        if outcomes := self._new_outcomes(now):
            dumped = self._new_shards(now, thorough=True)
            self.take([*dumped, *self._corrupted(outcomes, now), *outcomes])

    def _new_outcomes(self, now: float) -> list[AnyEvent]:
        events: list[AnyEvent] = []
        with self._outcomes.news(now) as entries:
            names = [e.name for e in entries or ()]
        for name in sorted(n for n in names if n not in self._outcomes_read and n.endswith(".json")):
            try:
                outcome = OUTCOME.validate_json(read_plain(self.paths.outcomes / name, MAX_OUTCOME_BYTES))
            except ValidationError as error:
                log.warning(
                    "%s is not an outcome of this version and is skipped: %s", name, error.errors()[0]["msg"]
                )
            except FrameError as error:
                log.warning("%s is skipped", error)
            else:
                entry = getattr(outcome, "entry", None)
                cause = causes.cause_of_outcome(outcome) if isinstance(outcome, Failed) else None
                if isinstance(outcome, Failed):
                    self._failed[outcome.name] = diagnosis_in_words(cause, outcome.error)
                if entry is None or 0 <= entry < len(self.state.entries):
                    left_at = min((self.paths.outcomes / name).stat().st_mtime, now)
                    events.append(OutcomeSeen(at=now, outcome=outcome, left_at=left_at, cause=cause))
                else:
                    log.warning("%s is for an unknown entry and is skipped", name)
            self._outcomes_read.add(name)
        return events

    def _corrupted(self, outcomes: Iterable[AnyEvent], now: float) -> list[AnyEvent]:
        """Return events for shards whose corrupt records made a metric job fail, to be taken before that failure."""
        failed = [
            e.outcome.name for e in outcomes if isinstance(e, OutcomeSeen) and e.outcome.kind == "failed"
        ]
        events: dict[str, AnyEvent] = {}
        for metric in (self.state.scoring.metrics[n] for n in failed if n in self.state.scoring.outstanding):
            its = self.state.entries[metric.entry].leaves.values()
            for shard in shards.shards_of(self.state, [metric.task] if metric.kind == "execute" else its):
                frame = self.state.shards.by_name[shard].frame
                if frame is None or shard in events:
                    continue
                try:
                    read_frame(self.paths.responses, frame)
                except FrameError as error:
                    log.warning("%s: %s", shard, error)
                    events[shard] = ShardCorrupted(at=now, shard=shard, error=str(error))
        return list(events.values())

    def _look_at_queue(self, now: float) -> None:
        self.snapshot = self.performer.snapshot(self.state)
        if self.snapshot is None:
            return
        if self.snapshot.epoch == self.state.queue_epoch:
            self._refilled_at = None
        elif self._refilled_at is None or now - self._refilled_at >= REFILL_SECONDS:
            self._refilled_at = now
            self._queued_again.clear()
            # shards that trials ran without Redis are on disk, and are not queued again
            self.take(self._new_shards(now, thorough=True))
            self._perform(shards.refill_queue(self.state))

    def _new_shards(self, now: float, *, thorough: bool) -> list[AnyEvent]:
        """Return events for shards whose first complete record appeared in response files since the last look."""
        if not self.state.shards.leaves:
            return []
        hints = self.snapshot.trials if self.snapshot else {}
        names = {
            self.paths.response_file(t).name
            for t, p in hints.items()
            if p.response_bytes > self._consumed.get(self.paths.response_file(t).name, 0)
        }
        every = 0.0 if thorough or self.snapshot is None else FULL_SCAN_SECONDS
        if self._throttle.due("scan", every, now):
            with os.scandir(self.paths.responses) as entries:
                names |= {
                    e.name
                    for e in entries
                    if RESPONSE_FILE_NAME.fullmatch(e.name)
                    and e.is_file(follow_symlinks=False)
                    and e.stat(follow_symlinks=False).st_size > self._consumed.get(e.name, 0)
                }
        first: dict[str, FrameRef] = {}
        for name in sorted(names):
            for shard, frame in self._tail(name):
                first.setdefault(shard, frame)
        return [ShardsDumped(at=now, shards=tuple(first.items()))] if first else []

    def _tail(self, name: str) -> list[tuple[str, FrameRef]]:
        found: list[tuple[str, FrameRef]] = []
        try:
            for reference, head in read_frames(self.paths.responses / name, self._consumed.get(name, 0)):
                self._consumed[name] = reference.offset + reference.length
                shard = self.state.shards.by_name.get(head.shard)
                # otherwise it speaks of another trial
                own = name == self.paths.response_file(head.trial).name
                if shard is not None and own and 0 <= head.seconds < math.inf:
                    pace = self._paces.get(head.trial, detect.Pace())
                    self._paces[head.trial] = pace.and_done(head.seconds, shard.seconds)
                its = None if shard is None else self.state.shards.leaves[shard.leaf].planned
                if shard is None or its is None or (its.task, its.key) != (head.task, head.key):
                    if name not in self._strange and not shards.is_retired(self.state, head.shard):
                        log.warning("%s contains a shard of other requests (%s): skipped", name, head.shard)
                    self._strange.add(name)
                elif shard.frame is None:
                    found.append((head.shard, reference))
        except FileNotFoundError:
            pass
        return found

    def _compare_trials(self, now: float) -> None:
        """Find stragglers, by their finished shards and the running one (timed by the Redis host's clock)."""
        if self.snapshot is None or not self.state.shards.todo:
            return
        paces = dict(self._paces)
        for trial, progress in self.snapshot.trials.items():
            held = self.state.shards.by_name.get(progress.shard or "")
            if held is None or trial not in self.state.trials.live:
                continue
            elapsed = progress.beat_at - self.snapshot.claimed_at.get(progress.shard or "", progress.beat_at)
            paces[trial] = paces.get(trial, detect.Pace()).and_in_hand(
                elapsed, held.seconds, progress.batches_done, progress.batches
            )
        found = detect.find_stragglers(paces, self.state.plan.sigma)
        fresh = {
            trial: times
            for trial, times in found.items()
            if trial in self.state.trials.live and trial not in self.state.trials.stragglers
        }
        self.take([StragglersFound(at=now, trials=fresh)] if fresh else [])

    def _audit(self, now: float) -> None:
        """Queue shards again that are to do but neither queued nor claimed by a living trial.

        Remove shards from the queue that are on disk: a trial that ran one without Redis may not live to report it.
        """
        if self.snapshot is None or self._refilled_at is not None:
            return
        if not self.state.shards.todo and not self.snapshot.unclaimed:
            return
        try:
            queue = self.performer.queue(self.state.evaluation_id)
            claims, queued = self.snapshot.claims, queue.unclaimed()
            queue.withdraw(detect.dumped_shards(self.state, queued))
            stray = detect.stray_shards(self.state, queued, claims)
            if not stray:
                return
            if stray == self._refused:
                self._perform(shards.requeue_shards(self.state, stray))
            else:
                holders = {s: claims[s] for s in stray if s in claims}
                # a Redis that came back empty has forgotten which trials were released
                self._perform([ReleaseClaims(trial=t) for t in sorted(set(holders.values()))])
                # a shard that a trial is running has not been run in vain
                again = tuple(s for s in stray if s in self._queued_again and s not in holders)
                self.take([ShardsStray(at=now, shards=stray, again=again)])
            taken = set(stray) & set(queue.unclaimed())
        except QueueUnavailable:
            return
        self._queued_again |= taken  # shards that Redis refused were not run either
        self._refused = () if taken else stray

    def _audit_metrics(self, now: float) -> None:
        """Queue metric jobs again that have no outcome and that RQ lost or whose worker died."""
        if self.state.scoring.outstanding:
            metrics: MetricQueue = self.performer.metric_queue(self.state.evaluation_id)
            try:
                gone = metrics.gone(self.state.scoring.outstanding)
            except QueueUnavailable:
                return
            if gone:  # a job that ended since the look may have left its outcome
                outcomes = self._new_outcomes(now)
                self.take([*self._corrupted(outcomes, now), *outcomes])
            died, again = detect.metric_events(self.state, gone, self.seen, now)
            self.take(died)
            self._perform(scoring.enqueue_metric(self.state, metric) for metric in again)


def _began(job: Job, index: int) -> bool:
    """Return whether the member has a log, which Slurm opens before it runs the job's script."""
    return Path(log_file(job, index)).exists()
