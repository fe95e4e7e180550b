"""One item's metric at a time: each has a deadline, and a note of the one in hand outlives the process.

Rule: an item whose metric takes longer than its deadline, or was in hand when two processes died, has no score: its metric
is not asked (again), it counts in no mean, and it is named with the reason. Every other item's value is lm-eval's. Where
no item of a task is left there is no score. Filters run over all items at once, as lm-eval runs them; only where that hangs
or dies, over one at a time. A metric that no signal reaches (one long call into C) is ended from outside,
by whoever looks at the note (`Watch`).
It does not know: what a metric does, who starts the next process.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
import logging
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, Final

from evaljobs.contract.paths import EvaluationPaths, slug
from evaljobs.contract.specs import ExecuteSpec, ScoreSpec
from evaljobs.errors import RetryError

log = logging.getLogger(__name__)

Item = tuple[str, int]  # leaf task, document

ALL: Final = -1  # in place of a document: all of a task's at once
MAX_DEATHS: Final = 2  # processes that an item may have been in hand of
FIRST_SECONDS: Final = 300.0  # added to a task's first item: what its metric imports may lie on slow storage
NOTE_BYTES: Final = 512
_NOTHING: Final = b"".ljust(NOTE_BYTES)


class ItemTimeoutError(BaseException):
    """An item's deadline. Not an Exception: metrics catch those, and answer with a value of their own."""


def note_file(spec: ExecuteSpec | ScoreSpec) -> Path:
    """A job's note: what it has in hand, and below that what died with it. Tries of a score share one."""
    job = spec.name if isinstance(spec, ExecuteSpec) else "score"
    return EvaluationPaths(spec.evaluation_dir).verdicts / f"{spec.entry:03d}-{slug(job)}.hand"


def _parse(note: bytes) -> Item | None:
    try:
        task, document = json.loads(note)
        return str(task), int(document)
    except (ValueError, TypeError):
        return None


def _deaths(file: Path) -> Counter[Item]:
    """Items that processes died with, by the lines of a note."""
    try:
        lines = file.read_bytes()[NOTE_BYTES:].splitlines()
    except FileNotFoundError:
        return Counter()
    return Counter(item for line in lines if (item := _parse(line)) is not None)


class Items:
    """The items of one metric job. A context: inside it the note is this process's.

    `seconds`: what one item's metric may take. `failed`: items without a score, with the reason.
    """

    def __init__(self, spec: ExecuteSpec | ScoreSpec) -> None:
        self.failed: dict[Item, str] = {}
        self._file = note_file(spec)
        self._seconds = spec.item_seconds
        self._note = -1
        self._deaths: Counter[Item] = Counter()
        self._first: set[str] = set()  # tasks whose metric has run

    def __enter__(self) -> Items:
        self._file.parent.mkdir(parents=True, exist_ok=True)
        note = os.open(self._file, os.O_RDWR | os.O_CREAT, 0o600)
        with contextlib.suppress(
            OSError
        ):  # held by a twin of this job: then the note is not ours to read or write
            fcntl.flock(note, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._note = note
            died = os.pread(note, NOTE_BYTES, 0).strip()
            if _parse(died) is not None:
                os.pwrite(note, died + b"\n", max(NOTE_BYTES, os.fstat(note).st_size))
            os.pwrite(note, _NOTHING, 0)
        if self._note < 0:
            os.close(note)
        entry = self._file.name.partition("-")[0]
        self._deaths = sum((_deaths(f) for f in self._file.parent.glob(f"{entry}-*.hand")), Counter[Item]())
        return self

    def __exit__(self, *_error: object) -> None:
        if self._note >= 0:
            self.put_down()
            if not _deaths(self._file):
                self._file.unlink(missing_ok=True)
            os.close(self._note)
            self._note = -1

    # --- one item ----------------------------------------------------------------------------------------------------

    def take(self, item: Item) -> None:
        """From here on a death of the process is this item's."""
        if self._note >= 0:
            os.pwrite(self._note, json.dumps(item).encode()[: NOTE_BYTES - 1].ljust(NOTE_BYTES), 0)

    def put_down(self) -> None:
        """What follows is no item's."""
        if self._note >= 0:
            os.pwrite(self._note, _NOTHING, 0)

    def value(self, item: Item, metric: Callable[[], Mapping[str, Any]]) -> Mapping[str, Any]:
        """The item's metrics, or none of them (`failed` says why)."""
        if self._deaths[item] >= MAX_DEATHS:
            self.failed[item] = (
                f"its filter or metric was at work when {MAX_DEATHS} processes died: it is not run again"
            )
        if item in self.failed:
            return {}
        seconds = self._seconds + (0 if item[0] in self._first else FIRST_SECONDS)
        self._first.add(item[0])
        try:
            with _deadline(seconds):
                return metric()
        except ItemTimeoutError:
            self.failed[item] = f"its filter or metric took longer than {self._seconds:g} s"
            return {}

    def filter(self, task: str, ensemble: Any, instances: Sequence[Any]) -> None:
        """lm-eval's `FilterEnsemble.apply` on a task's instances; an item that it hangs on or dies with has failed."""
        apply = functools.partial(type(ensemble).apply, ensemble)
        if not self._deaths[task, ALL]:
            self.take((task, ALL))
            try:
                with _deadline(self._seconds + FIRST_SECONDS):
                    apply(list(instances))
            except ItemTimeoutError:
                log.warning("%s: its filter %s is run on one item at a time", task, ensemble.name)
            else:
                return
            finally:
                self.put_down()
        for instance in instances:
            item = (task, int(instance.doc_id))
            self.take(item)
            self.value(item, functools.partial(_without_value, apply, [instance]))
            if item in self.failed:  # never looked at, but lm-eval writes it among the samples
                instance.filtered_resps[ensemble.name] = instance.resps
        self.put_down()

    @contextlib.contextmanager
    def apart(self) -> Iterator[None]:
        """Inside an item's metric: work that has deadlines of its own, and is no item's (the sandbox's)."""
        before = os.pread(self._note, NOTE_BYTES, 0) if self._note >= 0 else b""
        self.put_down()
        with _deadline(None):
            yield
        if before:
            os.pwrite(self._note, before, 0)

    # --- a task ------------------------------------------------------------------------------------------------------

    def guard(self, name: str, task: Any) -> None:
        """Have lm-eval's own filters and loop over a loaded task's documents go through `filter` and `value`."""
        documents, metric = task.doc_iterator, task.process_results
        in_hand = [-1]

        def doc_iterator(**arguments: Any) -> Iterator[tuple[int, Any]]:
            count = 0
            for document, doc in documents(**arguments):
                in_hand[0] = document
                count += 1
                self.take((name, document))
                yield document, doc
            self.put_down()
            mine = [why for (task_name, _), why in self.failed.items() if task_name == name]
            if count and len(mine) == count:
                raise RetryError(f"{name}: no item could be scored; the first: {mine[0]}")

        def process_results(doc: Any, results: Sequence[Any]) -> Mapping[str, Any]:
            return self.value((name, in_hand[0]), lambda: metric(doc, results))

        task.doc_iterator, task.process_results = doc_iterator, process_results
        for ensemble in getattr(task, "_filters", ()):
            ensemble.apply = functools.partial(self.filter, name, ensemble)

    def reasons(self) -> dict[str, str]:
        """`failed` as an outcome names it."""
        return {f"{task} {document}": why for (task, document), why in sorted(self.failed.items())}


def _without_value(what: Callable[[list[Any]], None], instances: list[Any]) -> dict[str, Any]:
    what(instances)
    return {}


@contextlib.contextmanager
def _deadline(seconds: float | None) -> Iterator[None]:
    """ItemTimeoutError after so long (None: never); whoever had set an alarm before has what is left of it afterwards.

    Metrics set alarms of their own and leave them (lm-eval's minerva_math): handler and timer are set again each time.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGALRM, _late)
    left, _ = signal.setitimer(signal.ITIMER_REAL, seconds or 0.0)
    started = time.monotonic()
    try:
        yield
    finally:
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
        finally:  # the deadline may come in this very moment
            signal.signal(signal.SIGALRM, before)
            if left:
                signal.setitimer(signal.ITIMER_REAL, max(0.001, left - (time.monotonic() - started)))


def _late(_number: int, _frame: FrameType | None) -> None:
    raise ItemTimeoutError


class Watch:
    """Whether a job's item in hand is far over its deadline; asked now and then by the process that can end it."""

    def __init__(self, spec: ExecuteSpec | ScoreSpec) -> None:
        self._file = note_file(spec)
        self._most = 2 * spec.item_seconds + FIRST_SECONDS
        self._seen: tuple[bytes, float] = (b"", 0.0)

    def overdue(self, now: float) -> str:
        """The item, where the same one has been in hand for too long; else empty. `now`: a monotonic clock's seconds."""
        try:
            with self._file.open("rb") as file:
                note = file.read(NOTE_BYTES)
        except OSError:
            return ""
        if note != self._seen[0]:
            self._seen = (note, now)
        item = _parse(note)
        return f"{item[0]} {item[1]}" if item and now - self._seen[1] > self._most else ""
