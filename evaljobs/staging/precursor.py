"""The precursor: stages a checkpoint into its node's memory, holds it there, and clears it.

    join (a lease) -> lock -> whole copy there? verify it : copy and publish it -> read the environment ahead -> Staged
    -> hold -> leave -> Cleared

Rules: the bytes of a checkpoint leave shared storage once per node; a second precursor waits for
the first, and copies in its place if the first dies. Only a copy with the announced sizes, hashes
and identity is published. A root that cannot be used is named and the next one is tried; past the
last, trials read storage. `trial/hosted_trials.py` stages and clears through it inside its own job.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from evaljobs.contract.outcomes import Cleared, Failed, Staged
from evaljobs.contract.paths import EvaluationPaths, WorkPaths
from evaljobs.contract.specs import CheckpointFile, StageSpec
from evaljobs.contract.storage import write_atomic, write_outcome
from evaljobs.errors import JobError, RetryError, one_line
from evaljobs.staging import copy as copying
from evaljobs.staging import environment, segments, store
from evaljobs.staging.capacity import gpu_name, measure_room
from evaljobs.staging.coordinator_lease import CoordinatorLease, is_there
from evaljobs.staging.fingerprint import (
    announced_mtime,
    check_identity,
    check_storage,
    content_of,
    hash_file,
)
from evaljobs.staging.store import INCOMING, MANIFEST, Slot, StoreRefused

POLL_SECONDS = 0.5  # between two looks for the release file
RELEASED_REASON = "released"
READER_PATIENCE = 10.0  # seconds for trials to exit, or to finish opening files, before a copy is removed
FREE_MARGIN_BYTES = 64 << 20  # bytes to keep free on a root beside a copy


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedCheckpoint:
    """A staged checkpoint and the slot with our lease. `slot` is None if trials read the weights from storage."""

    spec: StageSpec
    staged: Staged
    slot: Slot | None


class NoRoomForPrefetchError(RetryError):
    """The share of this node's memory for prefetches is too small for the checkpoint."""


def log_line(text: str) -> None:
    """Print a line to the job's log."""
    print(time.strftime("%H:%M:%S"), text, file=sys.stderr, flush=True)  # noqa: T201


# --- staging ---------------------------------------------------------------------------------------------------------


def stage_only(spec: StageSpec, *, stop: threading.Event | None = None) -> StagedCheckpoint:
    """Stage on the first usable root of `spec.roots`, or leave the weights on storage. The caller finishes with `clear_weights`.

    Raises SourceChanged (an operator must act), Stopped (`stop` was set), OSError (storage cannot be read; retry).
    """
    stop = stop if stop is not None else threading.Event()
    started = time.monotonic()
    slot, copied, path, rung, content = None, 0, spec.checkpoint.source, "storage", None
    why: list[str] = []
    for root in spec.roots:
        try:
            slot, copied, notes = _stage_on(root, spec, stop)
        except (StoreRefused, copying.TargetFailed) as error:
            why.append(str(error))
            log_line(f"cannot stage on {root}: {error}")
            continue
        path, rung = str(slot.model), measure_room(root).rung
        content = content_of(json.loads((slot.path / MANIFEST).read_bytes())["files"])
        why += notes
        break
    else:
        if spec.share is not None:
            raise NoRoomForPrefetchError("not prefetched: " + ("; ".join(why) or "no root is configured"))
        check_storage(spec.checkpoint)
        why = why or ["no root to stage on is configured"]
    copied_at = time.monotonic()
    libraries = environment.list_of(WorkPaths(Path(spec.evaluation_dir).parent))
    environment_bytes = environment.read_ahead(libraries, readers=spec.readers, stop=stop)
    staged = Staged(
        name=spec.name,
        node=spec.node,
        path=path,
        rung=rung,
        bytes=spec.checkpoint.bytes,
        storage_bytes=copied,
        seconds=copied_at - started,
        why="; ".join(why),
        gpu_name=gpu_name(),
        content=content,
        environment_bytes=environment_bytes,
        environment_seconds=time.monotonic() - copied_at,
    )
    return StagedCheckpoint(spec=spec, staged=staged, slot=slot)


def _stage_on(root: str, spec: StageSpec, stop: threading.Event) -> tuple[Slot, int, list[str]]:
    """Return the slot with a complete copy, bytes read from storage for it, and notes for the report."""
    notes: list[str] = []
    while True:
        try:
            slot = store.join_slot(root, spec.checkpoint.digest)
        except OSError as error:
            raise StoreRefused(f"{root}: {error.strerror or error}") from error
        try:
            with _locked(slot, stop) as is_whole:
                if not is_whole:
                    _make_room(slot, spec)
                    copy_in(slot, spec, stop)
                    return slot, spec.checkpoint.bytes, notes
                bad = _differing(slot, spec)
            if not bad:
                if spec.share is None:
                    with store.locked_home(root) as home:
                        store.remove_unused(home, keep=slot.path.name)
                return slot, 0, notes
        except BaseException:
            store.leave_slot(slot, patience=0.0)
            raise
        notes.append(f"the copy found in {slot.path} was damaged ({', '.join(bad)}) and was replaced")
        log_line(notes[-1])
        store.leave_slot(slot, patience=0.0, damaged=True)  # a trial that has mapped it keeps its pages


@contextlib.contextmanager
def _locked(slot: Slot, stop: threading.Event) -> Iterator[bool]:
    """Hold the copy's lock, shared if it is complete (True), otherwise exclusively, to copy; wait for a living copier."""
    said, manifest = False, slot.path / MANIFEST
    while (taken := store.open_lock(slot.path, shared=manifest.exists())) is None:
        if slot.lost():
            raise RetryError(f"{slot.path} was removed by another process")
        if not said:
            log_line(f"another precursor is staging {slot.path}: waiting for it")
            said = True
        if stop.wait(0.05):
            raise copying.CopyStopped("asked to stop while waiting for another precursor")
    try:
        yield manifest.exists()
    finally:
        os.close(taken)


def _differing(slot: Slot, spec: StageSpec) -> list[str]:
    """Return published files that differ from what was copied or announced. Reads every byte."""
    try:
        sums = json.loads((slot.path / MANIFEST).read_bytes())["files"]
    except (OSError, ValueError):
        return [MANIFEST]

    def bad(file: CheckpointFile) -> bool:
        try:
            found = hash_file(slot.model / file.name)
        except OSError:
            return True
        return found != sums.get(file.name) or file.xxh3_128 not in (None, found)

    files = spec.checkpoint.files
    with ThreadPoolExecutor(spec.readers) as pool:
        return [f.name for f, wrong in zip(files, pool.map(bad, files), strict=True) if wrong]


def _make_room(slot: Slot, spec: StageSpec) -> None:
    """Remove unused copies of other checkpoints, and the incomplete one here; then check that the copy fits.

    A prefetch (`share` is set) only removes retired copies, and only takes that part of the free space. Raises Refused if
    there is not enough.
    """
    need, share = spec.checkpoint.bytes + FREE_MARGIN_BYTES, spec.share
    with store.locked_home(slot.root) as home:
        store.remove_tree(slot.path / INCOMING)
        store.remove_unused(home, keep=slot.path.name, retired_only=share is not None)
    there = measure_room(slot.root)
    if there.free * (1.0 if share is None else share) < need:
        part = "" if share is None else f"{share:g} of "
        raise StoreRefused(
            f"{slot.root}: {need / 1e9:.2f} GB are needed, {part}{there.free / 1e9:.2f} GB are {there.limit}"
        )


def copy_in(slot: Slot, spec: StageSpec, stop: threading.Event) -> None:
    """Copy the checkpoint below `incoming`, check it, publish it. The caller holds the copy's lock exclusively.

    `model` and then the manifest get their names only if sizes, hashes and identity are as announced. Raises SourceChanged,
    Stopped, TargetFailed (no space …), OSError of the source; nothing is published then.
    """
    checkpoint, incoming = spec.checkpoint, slot.path / INCOMING
    with contextlib.ExitStack() as opened:
        copies = []
        for file in checkpoint.files:
            target = _create(incoming / file.name, file.size)
            opened.callback(os.close, target)
            source = Path(checkpoint.source, file.name)
            copies.append(copying.Copy(file.name, source, file.size, announced_mtime(file), target))
        sums = copying.copy_files(copies, readers=spec.readers, stop=stop)
    for file in checkpoint.files:
        if file.xxh3_128 not in (None, sums[file.name]):
            raise copying.SourceChanged(
                f"{checkpoint.source}/{file.name} is not what was saved: its hash is {sums[file.name]},"
                f" {file.xxh3_128} was written down at save time"
            )
    check_identity(checkpoint, incoming)
    if stop.is_set():
        raise copying.CopyStopped("asked to stop before the copy was published")
    store.remove_tree(slot.model)  # a precursor that was killed left it without a manifest
    incoming.rename(slot.model)
    manifest = json.dumps({"digest": checkpoint.digest, "files": sums})
    write_atomic(slot.path / MANIFEST, manifest.encode(), mode=0o600)


def _create(path: Path, size: int) -> int:
    """Create a file of `size` bytes, open for writing. Raise TargetFailed."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        os.ftruncate(descriptor, size)
    except OSError as error:
        raise copying.TargetFailed(f"{path}: {error.strerror}") from error
    return descriptor


# --- holding and clearing --------------------------------------------------------------------------------------------


def hold_weights(holding: StagedCheckpoint, stop: threading.Event) -> str:
    """Hold until the release file exists, `stop` is set, the coordinator's lease ends or the copy is gone; return the reason."""
    spec = holding.spec
    release = EvaluationPaths(spec.evaluation_dir).release_file(spec.name)
    lease = CoordinatorLease(Path(spec.lease_file), spec.lease_seconds)
    while True:
        if is_there(release):
            return RELEASED_REASON
        if stop.is_set():
            return "terminated"
        if expired := lease.expired():
            return expired
        if holding.slot is not None and holding.slot.lost():
            return f"{holding.slot.path} was removed by another process"
        stop.wait(POLL_SECONDS)


def clear_weights(holding: StagedCheckpoint, reason: str) -> Cleared:
    """Give the lease back; the last precursor of this checkpoint here frees the memory. Also frees memory of dead engines."""
    segments.sweep_segments()
    freed = 0 if holding.slot is None else store.leave_slot(holding.slot, patience=READER_PATIENCE)
    return Cleared(name=holding.spec.name, node=holding.spec.node, freed_bytes=freed, reason=reason)


@contextlib.contextmanager
def stopping_on_signals() -> Iterator[threading.Event]:
    """Provide an event that SIGTERM or SIGINT sets. The earlier handlers are restored at the end."""
    stop = threading.Event()
    before = {s: signal.signal(s, lambda *_: stop.set()) for s in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def staging_failure(
    error: Exception, *, name: str, node: str, job: Literal["stage", "host"] = "stage"
) -> Failed:
    """Return the outcome of a failed staging; `blame` says who must act."""
    match error:
        case copying.SourceChanged():
            text = f"the checkpoint changed or disappeared while it was staged: {error}; evaluate it again"
            return Failed(name=name, job=job, blame="operator", error=text, node=node)
        case JobError():
            return Failed(name=name, job=job, blame=error.blame, error=one_line(error), node=node)
        case PermissionError():
            text = f"the checkpoint cannot be read: {error}; grant this user read access"
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
            failed = staging_failure(error, name=spec.name, node=spec.node)
            log_line(failed.error)
            write_outcome(paths, failed)
            return 1
        reason = "the precursor failed"
        try:
            log_line(f"staged: {holding.staged.model_dump_json()}")
            write_outcome(paths, holding.staged)
            reason = hold_weights(holding, stop)
        finally:
            cleared = clear_weights(holding, reason)
            log_line(f"cleared {cleared.freed_bytes} bytes: {reason}")
        write_outcome(paths, cleared)
    return 0
