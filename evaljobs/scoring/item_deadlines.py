"""Runs one item's metric at a time, with a deadline and a note on disk of the current item.

Rule: an item has no score if its metric exceeds the deadline, or if two processes died while it ran. Its metric is then not
run again, it counts in no mean, and it is named with the reason. Every other item's value is lm-eval's. A task without any
item left has no score. A metric that no signal can interrupt (one long call into C) is killed from outside, by the process
that reads the note (`ItemWatch`). Called from `score`, `collect_programs` and `worker`.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from evaljobs.contract.paths import EvaluationPaths, slug
from evaljobs.contract.specs import ExecuteSpec, ScoreSpec
from evaljobs.contract.storage import make_file, make_folder, try_lock
from evaljobs.errors import OperatorError, RetryError
from evaljobs.lmeval.deadline import LateError, task_deadline

Item = tuple[str, int]  # leaf task, document

MAX_DEATHS: Final = 2  # processes that died on an item before it is left out
FIRST_SECONDS: Final = 300.0  # seconds added for a task's first item, which imports
NOTE_BYTES: Final = 512


def note_file(spec: ExecuteSpec | ScoreSpec) -> Path:
    """Return a job's note: its current item, then the items of deaths. Attempts at a score share one."""
    job = spec.name if isinstance(spec, ExecuteSpec) else "score"
    # File WORK_DIR/ID/verdicts/ENTRY-JOB.hand: the item that a metric worker runs, should it kill the process | a metric
    # worker | archived; `prune --keep scores`
    return EvaluationPaths(spec.evaluation_dir).verdicts / f"{spec.entry:03d}-{slug(job)}.hand"


def _parse(note: bytes) -> Item | None:
    try:
        task, document = json.loads(note)
        return str(task), int(document)
    except (ValueError, TypeError):
        return None


def _deaths(file: Path) -> Counter[Item]:
    """Return items on which processes died, from the lines of a note."""
    try:
        lines = file.read_bytes()[NOTE_BYTES:].splitlines()
    except FileNotFoundError:
        return Counter()
    return Counter(item for line in lines if (item := _parse(line)) is not None)


class Items:
    """The items of one metric job. As a context manager: within it this process writes the note.

    `_seconds`: deadline of one item's metric. `failed`: items without a score, with the reason.
    """

    def __init__(self, spec: ExecuteSpec | ScoreSpec) -> None:
        self.failed: dict[Item, str] = {}
        self.current: Item = ("", -1)
        self._file = note_file(spec)
        self._seconds = spec.item_seconds
        self._note = -1
        self._deaths: Counter[Item] = Counter()
        self._first: set[str] = set()  # tasks whose metric has run
        # leaf task -> documents to score; None: all
        self._asked = spec.documents if isinstance(spec, ScoreSpec) else None

    def __enter__(self) -> Items:
        make_folder(self._file.parent)
        note = make_file(self._file, os.O_RDWR)
        with contextlib.suppress(OSError):  # without file locks there is no note
            if try_lock(note):  # else a second run of this job has it
                self._note = note
                died = os.pread(note, NOTE_BYTES, 0).strip()
                if _parse(died) is not None:
                    os.pwrite(note, died + b"\n", max(NOTE_BYTES, os.fstat(note).st_size))
                self.clear()
        if self._note < 0:
            os.close(note)
        entry = self._file.name.partition("-")[0]
        self._deaths = sum((_deaths(f) for f in self._file.parent.glob(f"{entry}-*.hand")), Counter[Item]())
        return self

    def __exit__(self, *_error: object) -> None:
        if self._note >= 0:
            self.clear()
            if not _deaths(self._file):
                self._file.unlink(missing_ok=True)
            os.close(self._note)
            self._note = -1

    def take(self, item: Item) -> None:
        """Note the current item: if the process dies now, the death counts as this item's."""
        self.current = item
        self._write(json.dumps(item).encode()[: NOTE_BYTES - 1])

    def clear(self) -> None:
        """Clear the note: what follows belongs to no item."""
        self._write(b"")

    def _write(self, note: bytes) -> None:
        if self._note >= 0:
            os.pwrite(self._note, note.ljust(NOTE_BYTES), 0)

    def value(self, item: Item, metric: Callable[[], Mapping[str, Any]]) -> Mapping[str, Any]:
        """Return the item's metrics, or an empty mapping (with the reason in `failed`)."""
        if self._deaths[item] >= MAX_DEATHS:
            self.failed[item] = (
                f"its metric was running when {MAX_DEATHS} processes died, so it is not run again"
            )
        if item in self.failed:
            return {}
        seconds = self._seconds + (0 if item[0] in self._first else FIRST_SECONDS)
        self._first.add(item[0])
        try:
            with task_deadline(seconds):
                return metric()
        except LateError:
            self.failed[item] = f"its metric took longer than {self._seconds:g} s"
            return {}

    @contextlib.contextmanager
    def apart(self) -> Iterator[None]:
        """Mark work within an item's metric that belongs to no item and has its own deadlines (the sandbox's)."""
        before = os.pread(self._note, NOTE_BYTES, 0) if self._note >= 0 else b""
        self.clear()
        with task_deadline(None):
            yield
        self._write(before)

    def guard(self, name: str, task: Any) -> None:
        """Route lm-eval's loop over a task's documents through `value`, and limit the time of its filters."""
        documents, metric, filters = task.doc_iterator, task.process_results, task.apply_filters
        asked = None if self._asked is None else set(self._asked.get(name, ()))

        def doc_iterator(**arguments: Any) -> Iterator[tuple[int, Any]]:
            count = 0
            for document, doc in documents(**arguments):
                if asked is not None and getattr(task, "_instances", None) and document not in asked:
                    continue  # not while requests are built: prompts may depend on the documents before
                count += 1
                self.take((name, document))
                yield document, doc
            self.clear()
            mine = [why for (task_name, _), why in self.failed.items() if task_name == name]
            if count and len(mine) == count:
                raise RetryError(f"{name}: no item could be scored; the first: {mine[0]}")

        def process_results(doc: Any, results: Sequence[Any]) -> Mapping[str, Any]:
            return self.value(self.current, lambda: metric(doc, results))

        def apply_filters() -> Any:
            most = self._seconds + FIRST_SECONDS
            try:
                with task_deadline(most):
                    return filters()
            except LateError:
                raise OperatorError(
                    f"{name}: its filters took longer than {most:g} s: look for a regular expression in its filter_list that "
                    "backtracks without end, such as (a+)+$; [metric] item_seconds raises the limit"
                ) from None

        task.doc_iterator, task.process_results, task.apply_filters = (
            doc_iterator,
            process_results,
            apply_filters,
        )

    def reasons(self) -> dict[str, str]:
        """Return `failed` in the form of an outcome: "task document" -> reason."""
        return {f"{task} {document}": why for (task, document), why in sorted(self.failed.items())}


class ItemWatch:
    """Checks from another process whether a job's current item is far over its deadline."""

    def __init__(self, spec: ExecuteSpec | ScoreSpec) -> None:
        self._file = note_file(spec)
        self._most = 2 * spec.item_seconds + FIRST_SECONDS
        self._seen: tuple[bytes, float] = (b"", 0.0)

    def overdue(self, now: float) -> str:
        """Return the item that has been current for too long, otherwise "". `now`: seconds of a monotonic clock."""
        try:
            with self._file.open("rb") as file:
                note = file.read(NOTE_BYTES)
        except OSError:
            return ""
        if note != self._seen[0]:
            self._seen = (note, now)
        item = _parse(note)
        return f"{item[0]} {item[1]}" if item and now - self._seen[1] > self._most else ""
