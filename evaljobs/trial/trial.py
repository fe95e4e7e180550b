"""The `trial` job: one model load on k GPUs that runs shards until the queue is empty.

Rule: a shard counts when its record is on disk, whatever Redis says. While Redis is unreachable, the trial runs shards of its
lane (`claims.UpcomingShards`) and reports them later. On SIGTERM it stops between two tokens: its shard goes back to the queue, and
written records are kept. Called from `python -m evaljobs trial`.
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
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evaljobs import garbage
from evaljobs.contract.names import ShardId
from evaljobs.contract.outcomes import Failed, Probed, TooLarge, TrialEnded
from evaljobs.contract.paths import EvaluationPaths, WorkPaths, request_set_manifest
from evaljobs.contract.specs import LaneSpec, TrialSpec
from evaljobs.contract.storage import FrameWriter, write_outcome
from evaljobs.errors import JobError, RetryError, error_details, one_line
from evaljobs.lmeval import quiet_environment
from evaljobs.queue.redis_client import Link, QueueUnavailable
from evaljobs.queue.work_queue import WorkQueue
from evaljobs.staging import environment
from evaljobs.staging.copy import SourceChanged
from evaljobs.staging.fingerprint import check_folder, check_storage
from evaljobs.staging.store import NotStaged, hold_for_reading, slot_of
from evaljobs.trial import trained_values
from evaljobs.trial.claims import Claims, QueueLostError, UpcomingShards
from evaljobs.trial.engines import loading
from evaljobs.trial.engines.loading import UnfitError
from evaljobs.trial.engines.protocol import Engine, Loaded, Usage
from evaljobs.trial.engines.weights import BrokenWeightsError
from evaljobs.trial.shard_runner import RequestSet, TooLargeError, run_shard

log = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 2.0
AHEAD_SECONDS = 10.0  # between two looks at the next shards
BEAT_SECONDS = 10.0  # longest wait for a heartbeat in progress
FILL_PATIENCE_SECONDS = 600.0  # longest wait for a filled queue or request sets
STAGING_PATIENCE_SECONDS = 600.0
# How long to wait for a sign of the weights. Trials are submitted after staging, so a node without one has another /dev/shm.
UNSEEN_PATIENCE_SECONDS = 5.0
POLL_SECONDS = 0.5
NOT_LOADED = Loaded(devices="", gpus=0, import_seconds=0.0, load_seconds=0.0)
MOST_SAID = 300  # characters of torch's error kept in an outcome


class TerminatedError(BaseException):
    """SIGTERM or SIGINT arrived. A BaseException, so that no model code catches it."""


class UnstagedError(RetryError):
    """This job sees no staged checkpoint on its node."""


class OvertakenError(Exception):
    """Another trial has taken or finished the current shard, or it is needed no longer, so this one drops it."""


@dataclass(slots=True)
class Activity:
    """State that heartbeats report. The trial's thread writes it; the heartbeat thread reads it."""

    phase: str = "wait"
    shard: str | None = None
    batches_done: int = 0
    batches: int = 0
    looks: int = 0  # calls of `tick` so far
    overtaken: str | None = None  # written by the heartbeat thread: a shard to drop


def main(spec: TrialSpec) -> int:
    """Run one trial. Exit status 0 with `TrialEnded`, 1 with `Failed` and its current shard."""
    quiet_environment(offline=True)
    member = os.environ.get("EVALSPAN_INDEX") or os.environ.get("SLURM_ARRAY_TASK_ID") or "0"
    trial = Trial(spec, spec.lanes[int(member)])
    handled = (signal.SIGTERM, signal.SIGINT)
    for number in handled:
        signal.signal(number, trial.on_signal)
    try:
        return trial.perform()
    finally:
        # The outcome is written: a signal must change nothing, even while the interpreter exits.
        for number in handled:
            signal.signal(number, signal.SIG_IGN)


class Trial:
    """One member of the array, with its claims, response file and outcome."""

    def __init__(
        self,
        spec: TrialSpec,
        lane: LaneSpec,
        *,
        monotonic: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.spec = spec
        self.lane = lane
        self.paths = EvaluationPaths(spec.evaluation_dir)
        self.activity = Activity()
        # by cause, as in `TrialEnded`
        self.seconds = dict.fromkeys(("wait", "import", "load", "warm", "infer", "dump"), 0.0)
        self.shards = 0
        self._ahead = UpcomingShards()
        self._sleep = sleep
        self._claims = Claims(spec, lane, self._ahead, pause=self._pause, monotonic=monotonic)
        self._engine: Engine | None = None
        self._sets: dict[str, str] = dict(spec.request_sets)
        self._open: dict[tuple[str, str], RequestSet] = {}  # by task and cut
        self._batch_size = spec.batch_size
        self._in_place = True  # the checkpoint is read from storage
        self._weights = ""  # weights that could not be compared with training's
        self._too_large = 0  # batches that did not fit
        self._terminated = False
        self._uninterruptible = False

    def perform(self) -> int:
        """Do the work, write an outcome with the reason for the end, and return the exit status."""
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
        if self._engine is not None and self.lane.trial == self.spec.lanes[0].trial:
            with contextlib.suppress(OSError):
                environment.record_touched(environment.list_of(WorkPaths(self.paths.root.parent)))
        log.info("trial %s ended: %s after %d shards", self.lane.trial, reason, self.shards)
        return 1 if failed else 0

    # --- the work ------------------------------------------------------------------------------------------------

    def _work(self) -> str:
        slot = slot_of(self.spec.model_path)
        seen = slot is None or slot.exists()
        patience = STAGING_PATIENCE_SECONDS if seen else UNSEEN_PATIENCE_SECONDS
        with contextlib.ExitStack() as held:
            try:
                with self._spent("wait"):
                    held.enter_context(hold_for_reading(self.spec.model_path, wait_seconds=patience))
            except NotStaged as error:
                if not seen:
                    raise UnstagedError(f"this job sees no staged weights in {slot}") from error
                raise RetryError(f"the staged checkpoint is gone: {one_line(error)}") from error
            self._in_place = slot is None
            self._check_weights()
            engine = self._engine = loading.load_engine(
                self.spec.model_path,
                self.spec.model,
                self.spec.batch_size,
                gpus=self.spec.gpus,
                seed=self.spec.seed,
                phase=self._phase,
            )
            held.enter_context(contextlib.closing(engine))
            self._check_weights()
            self._weights = trained_values.check_trained_values(
                self.paths, self.spec, engine.model, engine.tokenizer
            )
            self.seconds["import"] = engine.loaded.import_seconds
            self.seconds["load"] = engine.loaded.load_seconds
            self.seconds["warm"] = engine.warm_up()
            garbage.collect_new()
            if self.spec.batch_size == "auto":
                self._settle_batch_size(engine)
            self._phase("infer")
            with FrameWriter(self.paths.response_file(self.lane.trial)) as responses:
                return self._pull(engine, responses)

    def _check_weights(self) -> None:
        """Raise SourceChanged if the weights loaded from storage are not the announced ones."""
        checkpoint, adapters = self.spec.checkpoint, self.spec.adapters
        try:
            if checkpoint is not None and self._in_place:
                check_storage(checkpoint)
            for place, identity in adapters.items():
                check_folder(place, identity)
        except SourceChanged as error:
            raise SourceChanged(
                f"the weights changed while they were loaded: {error}; evaluate it again"
            ) from error

    def _settle_batch_size(self, engine: Engine) -> None:
        """Find the batch size, report it, and wait for the request sets that are cut to it."""
        place = self.spec.request_sets_file
        assert place is not None
        size = engine.probe_batch_size()
        budget = engine.probe_token_budget(size)
        write_outcome(self.paths, Probed(name=self.lane.trial, batch_size=size, token_budget=budget))
        self._phase("wait")
        with self._spent("wait"):
            settled = self._wait_for_sets(Path(place))
        self._batch_size = int(settled["batch_size"])
        self._sets = dict(settled["request_sets"])
        engine.fix_batch_size(self._batch_size)

    def _wait_for_sets(self, place: Path) -> dict[str, Any]:
        deadline = time.monotonic() + FILL_PATIENCE_SECONDS
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError):  # the file does not exist yet, or storage is away
                settled: dict[str, Any] = json.loads(place.read_text())
                return settled
            time.sleep(POLL_SECONDS)
        raise QueueLostError(f"no request sets in {place} after {FILL_PATIENCE_SECONDS:g} s")

    def _pull(self, engine: Engine, responses: FrameWriter) -> str:
        """Claim shards until the queue is drained or stays unfilled, and return the reason."""
        unfilled_since: float | None = None
        while True:
            self._check_terminated()
            claim = self._claims.next(responses.bytes, self._has_requests)
            if claim.kind == "shard" and claim.shard is not None:
                shard = claim.shard
                if not self._has_requests(shard):
                    self._claims.give_back(shard)
                    return "outdated"  # trials that start now have its set
                unfilled_since = None
                self._run_one(engine, shard, responses)
                continue
            if claim.kind == "drained":
                return "drained"  # a shard that returns later gets a trial of its own
            unfilled_since = unfilled_since or time.monotonic()
            if time.monotonic() - unfilled_since > FILL_PATIENCE_SECONDS:
                return "queue-lost"
            self._pause(POLL_SECONDS)

    def _run_one(self, engine: Engine, shard: str, responses: FrameWriter) -> None:
        self.activity.shard, self.activity.batches_done, self.activity.overtaken = shard, 0, None
        name = ShardId.parse(shard)
        self.activity.batches = name.end_batch - name.first_batch
        try:
            with self._spent("infer"):
                record = run_shard(
                    engine,
                    self._request_set(name.task, name.cut),
                    shard,
                    trial=self.lane.trial,
                    seed=self.spec.seed,
                    tick=self._tick,
                )
        except OvertakenError:
            log.info("dropping %s: another trial has it, or its task is over", shard)
            self.activity.shard = None
            return
        except TooLargeError as error:
            self._report_too_large(engine, shard, error)
            return
        if not engine.loaded.gpus:  # the weights are mapped files, even after loading
            self._check_weights()
        self._uninterruptible = True
        with self._spent("dump"):
            responses.append(record)
        self.shards += 1
        self.activity.shard = None
        self._claims.dumped(shard)
        self._uninterruptible = False
        if self._terminated:
            # the coordinator finds the record on disk, so `done` can be skipped
            raise TerminatedError

    def _report_too_large(self, engine: Engine, shard: str, error: TooLargeError) -> None:
        """Write the outcome and drop the shard: the coordinator decides how its task is batched from now on."""
        log.warning(
            "%s: %d of %d rows of a batch fit this GPU's memory: %s", shard, error.fits, error.of, error
        )
        self._too_large += 1
        outcome = TooLarge(
            name=f"{self.lane.trial}.{self._too_large}",
            trial=self.lane.trial,
            node=self.spec.node or socket.gethostname(),
            shard=shard,
            what=error.what,
            fits=error.fits,
            of=error.of,
            devices=engine.loaded.devices,
            error=str(error)[:MOST_SAID],
        )
        write_outcome(self.paths, outcome)
        self.activity.shard = None
        self._claims.dumped(shard)  # no other trial must try it

    def _has_requests(self, shard: str) -> bool:
        """Return whether the request set of the shard's task exists, named at the start or in the file of later ones.

        False for one that was removed, which is rebuilt.
        """
        task, place = ShardId.parse(shard).task, self.spec.request_sets_file
        if task not in self._sets and place is not None:
            with contextlib.suppress(FileNotFoundError):
                self._sets |= json.loads(Path(place).read_text())["request_sets"]
        return task in self._sets and request_set_manifest(self._sets[task]).exists()

    def _request_set(self, task: str, cut: str) -> RequestSet:
        if (task, cut) not in self._open:
            assert cut or self._batch_size != "auto"
            self._open[task, cut] = RequestSet(self._sets[task], cut or str(self._batch_size))
        return self._open[task, cut]

    # --- queue ---------------------------------------------------------------------------------------------------

    def _drop_shard(self, beating: threading.Thread) -> None:
        """Give back the current shard, once the last heartbeat cannot claim it again."""
        if self.activity.shard is not None:
            beating.join(BEAT_SECONDS)
            self._claims.give_back(self.activity.shard)

    def _beat(self, over: threading.Event) -> None:
        """Send heartbeats on a separate connection until `over`; skip while the queue is unreachable."""
        queue: WorkQueue | None = None
        renew_at = 0.0
        while not over.wait(HEARTBEAT_SECONDS if queue is not None else POLL_SECONDS):
            now = self.activity
            shard = now.shard  # read once, since the trial's thread changes it
            if shard == now.overtaken:
                shard = None  # a beat would claim it again once the other trial has done it
            try:
                queue = queue or WorkQueue(Link(Path(self.spec.redis_file)), self.spec.evaluation_id)
                held = queue.heartbeat(
                    self.lane.trial,
                    phase=now.phase,
                    shard=shard,
                    batches_done=now.batches_done,
                    batches=now.batches,
                    looks=now.looks,
                )
                if not held:
                    now.overtaken = shard
                if self._ahead.away or time.monotonic() >= renew_at:
                    self._ahead.renew(queue.ahead(self.lane.lane))
                    renew_at = time.monotonic() + AHEAD_SECONDS
            except QueueUnavailable:
                self._ahead.away = True  # the trial's thread need not wait for its own timeout

    def _pause(self, seconds: float) -> None:
        with self._spent("wait"):
            self._sleep(seconds)

    @contextlib.contextmanager
    def _spent(self, cause: str) -> Iterator[None]:
        started = time.monotonic()
        try:
            yield
        finally:
            self.seconds[cause] += time.monotonic() - started

    # --- account -------------------------------------------------------------------------------------------------

    def _phase(self, phase: str) -> None:
        self.activity.phase = phase

    def _tick(self, done: int, of: int) -> None:
        self.activity.batches_done, self.activity.batches = done, of
        self.activity.looks += 1
        self._check_terminated()
        if self.activity.shard is not None and self.activity.overtaken == self.activity.shard:
            raise OvertakenError

    def on_signal(self, *_signal: object) -> None:
        self._terminated = True
        if not self._uninterruptible:
            raise TerminatedError

    def _check_terminated(self) -> None:
        """Raise TerminatedError again, in case a library has swallowed the handler's."""
        if self._terminated:
            raise TerminatedError

    def _ended(self, reason: str, started_at: float) -> TrialEnded:
        loaded, usage = NOT_LOADED, Usage()
        if self._engine is not None:
            loaded, usage = self._engine.loaded, self._engine.usage
        return TrialEnded(
            name=self.lane.trial,
            node=self.spec.node or socket.gethostname(),
            reason=reason,
            shards=self.shards,
            started_at=started_at,
            ended_at=time.time(),
            **{f"{cause}_seconds": seconds for cause, seconds in self.seconds.items()},
            tokenise_seconds=usage.tokenise_seconds,
            generated_tokens=usage.generated_tokens,
            devices=loaded.devices,
            gpus=loaded.gpus,
            fast=loaded.fast,
            weights=self._weights,
        )

    def _failure(self, error: Exception) -> Failed:
        blame = error.blame if isinstance(error, JobError) else "retry"
        return Failed(
            name=self.lane.trial,
            job="trial",
            blame=blame,
            error=one_line(error),
            detail=error_details(),
            node=self.spec.node,
            shard=None if isinstance(error, SourceChanged | BrokenWeightsError) else self.activity.shard,
            broken_weights=isinstance(error, BrokenWeightsError),
            unfit=isinstance(error, UnfitError),
            unstaged=isinstance(error, UnstagedError),
        )
