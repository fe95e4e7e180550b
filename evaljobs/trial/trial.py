"""Shards → responses: one model load on k GPUs that runs many shards and ends when none is left.

Rule: a shard counts when its record is on disk, not when Redis was told. The trial stops between two tokens when told
to: the shard in hand goes back to the queue, what was dumped stays.

It does not know: who plans, how a model class works, or what the answers are for.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from evaljobs.contract.outcomes import Failed, Probed, TrialEnded
from evaljobs.contract.paths import EvaluationPaths, parse_shard
from evaljobs.contract.specs import LaneSpec, TrialSpec
from evaljobs.contract.storage import FrameWriter, write_outcome
from evaljobs.errors import JobError, OperatorError, RetryError, one_line
from evaljobs.lmeval import run as harness
from evaljobs.queue.work_queue import QueueUnavailable, WorkQueue
from evaljobs.staging.store import NotStaged, reading, slot_of
from evaljobs.trial import engine
from evaljobs.trial.shard_runner import RequestSet, run_shard

log = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 2.0
BEAT_SECONDS = 10.0  # the most that a heartbeat under way is waited for: Redis may be away
FILL_PATIENCE_SECONDS = 600.0  # queue or request sets not there yet
STAGING_PATIENCE_SECONDS = 600.0
# Trials are submitted once the weights are there: where nothing of them is seen, another /dev/shm is looked at.
UNSEEN_PATIENCE_SECONDS = 5.0
POLL_SECONDS = 0.5

T = TypeVar("T")


class TerminatedError(BaseException):
    """SIGTERM or SIGINT came. A BaseException, so that no model code swallows it."""


class UnstagedError(RetryError):
    """Nothing of the staged checkpoint is seen from here."""


class OvertakenError(Exception):
    """The shard in hand is somebody else's now, or done: going on with it serves nobody."""


class QueueLostError(Exception):
    """Redis was away for longer than a GPU should wait for it."""


@dataclass(slots=True)
class Standing:
    """What the heartbeat tells; written by the trial's thread, read by the beating one."""

    phase: str = "wait"
    shard: str | None = None
    batches_done: int = 0
    batches: int = 0
    overtaken: str | None = None  # written by the beating thread: a shard that is not ours to finish


@dataclass(slots=True)
class Seconds:
    """Where the trial's time went, by cause."""

    wait: float = 0.0
    load: float = 0.0
    imports: float = 0.0
    warm: float = 0.0
    infer: float = 0.0
    dump: float = 0.0
    idle: float = 0.0

    @contextlib.contextmanager
    def spent(self, cause: str) -> Iterator[None]:
        started = time.monotonic()
        try:
            yield
        finally:
            setattr(self, cause, getattr(self, cause) + time.monotonic() - started)


def member_index() -> int:
    """Which member of the array this process is."""
    for name in ("EVALSPAN_INDEX", "SLURM_ARRAY_TASK_ID"):
        if os.environ.get(name):
            return int(os.environ[name])
    return 0


def main(spec: TrialSpec) -> int:
    """Run one trial. Exit status 0 with `TrialEnded`; 1 with `Failed`, which names the shard in hand."""
    harness.quiet_environment(offline=True)
    trial = Trial(spec, spec.lanes[member_index()])
    heard = trial.listen()
    try:
        return trial.perform()
    finally:  # its account is written: a signal changes nothing, also while the interpreter ends, which takes handlers away
        for number in heard:
            signal.signal(number, signal.SIG_IGN)


class Trial:
    """One array member: its claims, its response file, its account."""

    def __init__(
        self,
        spec: TrialSpec,
        lane: LaneSpec,
        *,
        monotonic: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._monotonic, self._sleep = monotonic, sleep  # the clock by which patience with Redis is measured
        self.spec = spec
        self.lane = lane
        self.paths = EvaluationPaths(spec.evaluation_dir)
        self.standing = Standing()
        self.seconds = Seconds()
        self.shards = 0
        self._loaded: engine.Loaded | None = None
        self._queue: WorkQueue | None = None
        self._sets: dict[str, str] = dict(spec.request_sets)
        self._open: dict[str, RequestSet] = {}
        self._batch_size = spec.batch_size
        self._terminated = False
        self._uninterruptible = False

    def run(self) -> int:
        """`perform` for a process that goes on afterwards: signals are its own again."""
        handlers = self.listen()
        try:
            return self.perform()
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)

    def listen(self) -> dict[signal.Signals, Any]:
        """Hear what ends a trial; the handlers of before."""
        return {s: signal.signal(s, self._on_signal) for s in (signal.SIGTERM, signal.SIGINT)}

    def perform(self) -> int:
        """The work, and an outcome that says how it ended; the exit status."""
        started_at = time.time()
        failed: Failed | None = None
        over = threading.Event()
        beating = threading.Thread(target=self._beat, args=(over,), daemon=True)
        try:
            try:
                beating.start()
                reason = self._work()
            finally:
                self._uninterruptible = True
        except TerminatedError:
            reason = "terminated"
        except QueueLostError as error:
            log.warning("%s", error)
            reason = "queue-lost"
        except Exception as error:
            log.exception("trial %s failed", self.lane.trial)
            reason, failed = "failed", self._failure(error)
        finally:
            over.set()
        self._drop_shard(beating)
        write_outcome(self.paths, failed or self._ended(reason, started_at))
        log.info("trial %s ended: %s after %d shards", self.lane.trial, reason, self.shards)
        return 1 if failed else 0

    # --- the work ------------------------------------------------------------------------------------------------

    def _work(self) -> str:
        slot = slot_of(self.spec.model_path)
        seen = slot is None or slot.exists()
        patience = STAGING_PATIENCE_SECONDS if seen else UNSEEN_PATIENCE_SECONDS
        with contextlib.ExitStack() as held:
            try:
                with self.seconds.spent("wait"):
                    held.enter_context(reading(self.spec.model_path, wait_seconds=patience))
            except NotStaged as error:
                if not seen:
                    raise UnstagedError(f"nothing is staged in {slot}, seen from this job") from error
                raise RetryError(f"the staged checkpoint is gone: {one_line(error)}") from error
            self._loaded = engine.load(
                self.spec.model_path, self.spec.model, self.spec.batch_size, phase=self._phase
            )
            self.seconds.imports = self._loaded.import_seconds
            self.seconds.load = self._loaded.load_seconds
            self.seconds.warm = engine.warm_up(self._loaded.lm, self.spec.model)
            if self.spec.batch_size == "auto":
                self._settle_batch_size(self._loaded.lm)
            self._phase("infer")
            with FrameWriter(self.paths.response_file(self.lane.trial)) as responses:
                return self._pull(responses)

    def _settle_batch_size(self, lm: Any) -> None:
        """Find the size, tell it, and wait for the request sets that are then cut to it."""
        place = self.spec.request_sets_file
        if place is None:
            raise OperatorError('batch_size "auto" needs a request_sets_file to be told the settled size')
        size = engine.probe_batch_size(lm)
        write_outcome(self.paths, Probed(name=self.lane.trial, batch_size=size))
        self._phase("wait")
        with self.seconds.spent("idle"):
            told = self._wait_for_sets(Path(place))
        self._batch_size = int(told["batch_size"])
        self._sets = dict(told["request_sets"])
        engine.fix_batch_size(lm, self._batch_size)

    def _wait_for_sets(self, place: Path) -> dict[str, Any]:
        deadline = time.monotonic() + FILL_PATIENCE_SECONDS
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError):  # not there yet, or storage is away
                told: dict[str, Any] = json.loads(place.read_text())
                return told
            time.sleep(POLL_SECONDS)
        raise QueueLostError(f"no request sets in {place} after {FILL_PATIENCE_SECONDS:g} s")

    def _pull(self, responses: FrameWriter) -> str:
        """Claim shards until none is left, or the queue is not to be had."""
        idle_since: float | None = None
        unfilled_since: float | None = None
        while True:
            self._heed()
            claim = self._insist(lambda queue: queue.claim(self.lane.trial, self.lane.lane))
            if claim.kind == "shard" and claim.shard is not None:
                if not self._knows(parse_shard(claim.shard)[0]):
                    return self._leave(claim.shard)
                idle_since = unfilled_since = None
                self._run_one(claim.shard, responses)
                continue
            now = time.monotonic()
            if claim.kind == "wait":
                idle_since, unfilled_since = None, unfilled_since or now
                if now - unfilled_since > FILL_PATIENCE_SECONDS:
                    return "queue-lost"
            else:
                # A shard that another trial gives back may still come.
                idle_since = idle_since or now
                if now - idle_since >= self.spec.idle_seconds:
                    return "drained"
            with self.seconds.spent("idle"):
                time.sleep(POLL_SECONDS)

    def _leave(self, shard: str) -> str:
        """It is of a task that was planned after our start (a retry): whoever starts now knows it."""
        self._insist(lambda queue: queue.give_back(self.lane.trial, shard))
        return "outdated"

    def _run_one(self, shard: str, responses: FrameWriter) -> None:
        assert self._loaded is not None
        self.standing.shard, self.standing.batches_done, self.standing.overtaken = shard, 0, None
        task, first, end = parse_shard(shard)
        self.standing.batches = end - first
        try:
            with self.seconds.spent("infer"):
                record = run_shard(
                    self._loaded.lm,
                    self._request_set(task),
                    shard,
                    trial=self.lane.trial,
                    seed=self.spec.seed,
                    tick=self._tick,
                )
        except OvertakenError:
            log.info("%s is dropped: another trial has it", shard)
            self.standing.shard = None
            return
        self._uninterruptible = True
        with self.seconds.spent("dump"):
            responses.append(record)
        self.shards += 1
        self.standing.shard = None
        self._uninterruptible = False
        if self._terminated:
            # its record is on disk and will be found; the queue need not hear of it before we go
            raise TerminatedError
        size = responses.bytes
        self._insist(lambda queue: queue.done(self.lane.trial, shard, size))

    def _knows(self, task: str) -> bool:
        """Is its request set named to us, or to all since then?"""
        place = self.spec.request_sets_file
        if task not in self._sets and place is not None:
            with contextlib.suppress(FileNotFoundError):
                self._sets |= json.loads(Path(place).read_text())["request_sets"]
        return task in self._sets

    def _request_set(self, task: str) -> RequestSet:
        if task not in self._open:
            assert self._batch_size != "auto"
            self._open[task] = RequestSet(self._sets[task], self._batch_size)
        return self._open[task]

    # --- queue ---------------------------------------------------------------------------------------------------

    def _insist(self, effect: Callable[[WorkQueue], T]) -> T:
        """An effect on the queue, again and again with growing pauses while Redis is away."""
        patience = self.spec.redis_patience_seconds
        deadline = self._monotonic() + patience
        pause = 0.2
        while True:
            try:
                if self._queue is None:
                    self._queue = WorkQueue.connect(Path(self.spec.redis_file), self.spec.evaluation_id)
                return effect(self._queue)
            except QueueUnavailable as error:
                if self._monotonic() + pause > deadline:
                    raise QueueLostError(f"Redis was away for {patience:g} s: {one_line(error)}") from error
                log.warning("queue: %s; again in %.1f s", one_line(error), pause)
            with self.seconds.spent("idle"):
                self._sleep(pause)
            pause = min(pause * 2, 10.0)

    def _drop_shard(self, beating: threading.Thread) -> None:
        """Give back what is in hand. `beating`: told to end; a beat of it that is under way would claim it anew."""
        if self.standing.shard is None or self._queue is None:
            return
        beating.join(BEAT_SECONDS)
        with contextlib.suppress(QueueUnavailable):
            self._queue.give_back(self.lane.trial, self.standing.shard)

    def _beat(self, over: threading.Event) -> None:
        """Heartbeats on a connection of their own until `over`; a queue that is away is met by the work, not here."""
        queue: WorkQueue | None = None
        while not over.wait(HEARTBEAT_SECONDS if queue is not None else POLL_SECONDS):
            now = self.standing
            shard = now.shard  # the trial's thread goes on meanwhile
            if shard == now.overtaken:
                shard = None  # once the other has done it, a beat would claim it anew
            try:
                queue = queue or WorkQueue.connect(Path(self.spec.redis_file), self.spec.evaluation_id)
                held = queue.heartbeat(
                    self.lane.trial,
                    phase=now.phase,
                    shard=shard,
                    batches_done=now.batches_done,
                    batches=now.batches,
                )
                if not held:
                    now.overtaken = shard
            except QueueUnavailable:
                continue

    # --- account -------------------------------------------------------------------------------------------------

    def _phase(self, phase: str) -> None:
        self.standing.phase = phase

    def _tick(self, done: int, of: int) -> None:
        self.standing.batches_done, self.standing.batches = done, of
        self._heed()
        if self.standing.shard is not None and self.standing.overtaken == self.standing.shard:
            raise OvertakenError

    def _on_signal(self, *_signal: object) -> None:
        self._terminated = True
        if not self._uninterruptible:
            raise TerminatedError

    def _heed(self) -> None:
        """What the handler raised within a destructor or a callback of a library was swallowed there."""
        if self._terminated:
            raise TerminatedError

    def _ended(self, reason: str, started_at: float) -> TrialEnded:
        loaded = self._loaded
        return TrialEnded(
            name=self.lane.trial,
            node=self.spec.node or socket.gethostname(),
            reason=reason,
            shards=self.shards,
            started_at=started_at,
            ended_at=time.time(),
            wait_seconds=self.seconds.wait,
            import_seconds=self.seconds.imports,
            load_seconds=self.seconds.load,
            warm_seconds=self.seconds.warm,
            infer_seconds=self.seconds.infer,
            dump_seconds=self.seconds.dump,
            idle_seconds=self.seconds.idle,
            devices=loaded.devices if loaded else "",
            gpus=loaded.gpus if loaded else 0,
        )

    def _failure(self, error: Exception) -> Failed:
        blame = error.blame if isinstance(error, JobError) else "retry"
        return Failed(
            name=self.lane.trial,
            job="trial",
            blame=blame,
            error=one_line(error),
            detail=traceback.format_exc()[-4000:],
            node=self.spec.node,
            shard=self.standing.shard,
            unstaged=isinstance(error, UnstagedError),
        )
