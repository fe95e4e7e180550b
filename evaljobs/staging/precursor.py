"""The precursor: stages a checkpoint into its node's memory, holds it there, and clears it.

    join (a lease) -> lock -> whole copy there? verify it : copy and publish it -> Staged -> hold -> leave -> Cleared

Rules: the bytes of a checkpoint leave shared storage once per node; a second precursor waits for
the first, and copies in its place if the first dies. Only a copy with the announced sizes, hashes
and identity is published. A root that cannot be used is named and the next one is tried; past the
last, trials read storage. `trial/hosted_trials.py` stages and clears through it inside its own job.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from evaljobs.contract.outcomes import Cleared, Failed, Staged
from evaljobs.contract.paths import EvaluationPaths
from evaljobs.contract.specs import StageSpec
from evaljobs.contract.storage import write_outcome
from evaljobs.errors import JobError, RetryError, one_line
from evaljobs.staging import copy as copying
from evaljobs.staging import owned_files, publish, segments, store
from evaljobs.staging.capacity import gpu_name, room
from evaljobs.staging.coordinator_lease import CoordinatorLease, is_there
from evaljobs.staging.fingerprint import check_storage
from evaljobs.staging.owned_files import Refused
from evaljobs.staging.store import Slot

POLL_SECONDS = 0.5  # between two looks for the release file
RELEASED = "released"
READER_PATIENCE = 10.0  # seconds that trials get to end, or to finish opening files, before a copy is removed
MARGIN = 64 << 20  # bytes that stay free on a root beside a copy


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """A staged checkpoint and the slot with our lease. `slot` is None where trials read the weights from storage."""

    spec: StageSpec
    staged: Staged
    slot: Slot | None


class NoRoomForPrefetchError(RetryError):
    """The share of this node's memory that a prefetch may use is too small for the checkpoint."""


def say(text: str) -> None:
    """A line for the job's log."""
    print(time.strftime("%H:%M:%S"), text, file=sys.stderr, flush=True)  # noqa: T201


# --- staging ---------------------------------------------------------------------------------------------------------


def stage_only(spec: StageSpec, *, stop: threading.Event | None = None) -> Holding:
    """Stage on the first usable root of `spec.roots`, else leave the weights on storage. The caller ends it with `clear`.

    Raises SourceChanged (an operator must act), Stopped (`stop` was set), OSError (storage cannot be read; try again).
    """
    stop = stop if stop is not None else threading.Event()
    started = time.monotonic()
    slot, copied, path, rung, content = None, 0, spec.checkpoint.source, "storage", None
    why: list[str] = []
    for root in spec.roots:
        try:
            slot, copied, notes = _stage_on(root, spec, stop)
        except (Refused, TimeoutError, copying.TargetFailed) as error:
            why.append(str(error))
            say(f"cannot stage on {root}: {error}")
            continue
        path, rung = str(slot.model), room(root).rung
        content = publish.content(slot)
        why += notes
        break
    else:
        if spec.share is not None:
            raise NoRoomForPrefetchError("not prefetched: " + ("; ".join(why) or "no root is configured"))
        check_storage(spec.checkpoint)
        why = why or ["no root to stage on is configured"]
    staged = Staged(
        name=spec.name,
        node=spec.node,
        path=path,
        rung=rung,
        bytes=spec.checkpoint.bytes,
        storage_bytes=copied,
        seconds=time.monotonic() - started,
        why="; ".join(why),
        gpu_name=gpu_name(),
        content=content,
    )
    return Holding(spec=spec, staged=staged, slot=slot)


def _stage_on(root: str, spec: StageSpec, stop: threading.Event) -> tuple[Slot, int, list[str]]:
    """The slot with a whole copy, bytes that left storage for it, and notes for the report."""
    if not spec.checkpoint.files:
        raise copying.SourceChanged(f"{spec.checkpoint.source} announces no files")
    try:
        slot = store.join(root, spec.checkpoint.digest)
    except OSError as error:
        raise Refused(f"{root}: {error.strerror or error}") from error
    try:
        with _only_stager(slot, stop):
            return slot, *_publish(slot, spec, stop)
    except BaseException:
        store.leave(slot, patience=0.0)
        raise


@contextlib.contextmanager
def _only_stager(slot: Slot, stop: threading.Event) -> Iterator[None]:
    """Hold the stage lock, which one process has at a time: a living one is waited for, a dead one has lost it."""
    lock = owned_files.open_lock(slot.fd, store.STAGE_LOCK)
    try:
        said = False
        while not owned_files.try_flock(lock):
            if not said:
                say(f"another precursor is staging {slot.path}: waiting for it")
                said = True
            if stop.wait(0.05):
                raise copying.Stopped("asked to stop while waiting for another precursor")
        yield
    finally:
        os.close(lock)


def _publish(slot: Slot, spec: StageSpec, stop: threading.Event) -> tuple[int, list[str]]:
    """Verify the copy that is there, or make one; bytes that left storage, and notes. The caller holds the stage lock."""
    notes: list[str] = []
    if publish.is_published(slot):
        bad = publish.verify_slot(slot, spec.checkpoint, readers=spec.readers)
        if not bad:
            if spec.share is None:
                with store.locked_home(slot.root) as home:
                    store.remove_unused(home, keep=slot.digest)
            return 0, notes
        notes.append(f"the copy found in {slot.path} was damaged ({', '.join(bad)}) and was replaced")
        say(notes[-1])
        publish.withdraw(slot)
    publish.make_room(slot, spec.checkpoint, margin=MARGIN, share=spec.share)
    progress = _Progress(spec.checkpoint.bytes)
    publish.copy_in(slot, spec.checkpoint, readers=spec.readers, stop=stop, progress=progress.add)
    return spec.checkpoint.bytes, notes


class _Progress:
    """Counts the bytes written, from any thread, and logs them every 5 seconds."""

    def __init__(self, total: int) -> None:
        self.total, self.done = total, 0
        self.lock = threading.Lock()
        self.next = time.monotonic() + 5.0

    def add(self, count: int) -> None:
        with self.lock:
            self.done += count
            if time.monotonic() >= self.next:
                self.next = time.monotonic() + 5.0
                say(f"staged {self.done / 1e9:.2f} of {self.total / 1e9:.2f} GB")


# --- holding and clearing --------------------------------------------------------------------------------------------


def hold(holding: Holding, stop: threading.Event) -> str:
    """Hold until the release file is there, `stop` is set, the coordinator's lease ends or the copy is gone; the reason."""
    spec = holding.spec
    release = EvaluationPaths(spec.evaluation_dir).release_file(spec.name)
    lease = CoordinatorLease(Path(spec.lease_file), spec.lease_seconds)
    while True:
        if is_there(release):
            return RELEASED
        if stop.is_set():
            return "terminated"
        if expired := lease.expired():
            return expired
        if holding.slot is not None and holding.slot.lost():
            return f"{holding.slot.path} was removed by another process"
        stop.wait(POLL_SECONDS)


def clear(holding: Holding, reason: str) -> Cleared:
    """Give the lease back; the last precursor of this checkpoint here frees the memory. Also memory of engines that died."""
    segments.sweep()
    freed = 0 if holding.slot is None else store.leave(holding.slot, patience=READER_PATIENCE)
    return Cleared(name=holding.spec.name, node=holding.spec.node, freed_bytes=freed, reason=reason)


@contextlib.contextmanager
def stopping_on_signals() -> Iterator[threading.Event]:
    """An event that SIGTERM or SIGINT sets. The earlier handlers are restored at the end."""
    stop = threading.Event()
    before = {s: signal.signal(s, lambda *_: stop.set()) for s in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def failure(error: Exception, *, name: str, node: str, job: Literal["stage", "host"] = "stage") -> Failed:
    """The outcome of a failed staging; `blame` says who must act."""
    match error:
        case copying.SourceChanged():
            text = f"the checkpoint changed or vanished while it was staged: {error}; evaluate it again"
            return Failed(name=name, job=job, blame="operator", error=text, node=node)
        case JobError():
            return Failed(name=name, job=job, blame=error.blame, error=one_line(error), node=node)
        case PermissionError():
            text = f"the checkpoint cannot be read: {error}; give this user the right to"
            return Failed(name=name, job=job, blame="operator", error=text, node=node)
        case _:
            text = f"storage failed while the checkpoint was read: {one_line(error)}"
            return Failed(name=name, job=job, blame="retry", error=text, node=node)


def main(spec: StageSpec) -> int:
    """Run the precursor: stage, leave `Staged`, hold, clear, leave `Cleared`. Exit status 0, or 1 with `Failed`."""
    paths = EvaluationPaths(spec.evaluation_dir)
    with stopping_on_signals() as stop:
        try:
            holding = stage_only(spec, stop=stop)
        except (JobError, OSError) as error:
            failed = failure(error, name=spec.name, node=spec.node)
            say(failed.error)
            write_outcome(paths, failed)
            return 1
        reason = "the precursor failed"
        try:
            say(f"staged: {holding.staged.model_dump_json()}")
            write_outcome(paths, holding.staged)
            reason = hold(holding, stop)
        finally:
            cleared = clear(holding, reason)
            say(f"cleared {cleared.freed_bytes} bytes: {reason}")
        write_outcome(paths, cleared)
    return 0
