"""Summaries of the evaluations of a work folder. Writes nothing there.

Rule: a journal is replayed only if its evaluation has no valid summary; once, until it has grown.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from coordinator.base.listing import Listing
from coordinator.base.words import first_of
from coordinator.decide.evaluation.records import EvaluationRecord
from coordinator.errors import OperatorError
from coordinator.runtime.summary import Summary, read_evaluation, read_file
from coordinator.site.config.schema import Config
from evaljobs.contract.paths import EvaluationPaths

ENDED_SECONDS = 60.0  # between two readings of summaries of ended evaluations, in case of a retry


def known_ids(work_dir: Path) -> list[str]:
    """Return the ids of all evaluations of a work folder that can be read, sorted."""
    return sorted(p.parent.name for p in work_dir.glob("*/journal.jsonl"))


def unreadable_message(work_dir: Path) -> str:
    """Return how many evaluations of a work folder this user may not read; "" if none."""
    folders = [p for p in work_dir.glob("*-" + 8 * "[0-9a-f]") if not os.access(p, os.X_OK)]
    many = "evaluations here belong" if len(folders) > 1 else "evaluation here belongs"
    todo = "cannot be read: their owner lets a group read by `shared_group` in evalspan.toml"
    return f"{len(folders)} {many} to another user and {todo}" if folders else ""


def ids_of(name: str, ids: Iterable[str]) -> list[str]:
    """Return the ids that begin with `name`, or end with it as their digest; where it is whole words of some, these alone, so
    that "step-100" does not mean "step-1000-…".
    """
    found = [i for i in ids if _matches(name, i)]
    whole = [i for i in found if f"{i}-".startswith(f"{name}-")]
    return whole or found


def _matches(name: str, one: str) -> bool:
    return one.startswith(name) or one.endswith(f"-{name}")


def find_folder(config: Config, prefix: str, names: Collection[str] | None = None) -> EvaluationPaths:
    """Return the folder of the evaluation whose id begins with `prefix`, or ends with it as its digest. Raise OperatorError
    unless there is exactly one. `names`: of the work folder's entries; spares a listing of 50 ms among 3,000.
    """
    root = Path(config.work_dir)

    def is_evaluation(name: str) -> bool:
        return os.path.exists(root / name / "journal.jsonl")  # noqa: PTH110 (False in a private folder)

    if prefix != ".." and Path(prefix).name == prefix and is_evaluation(prefix):
        return EvaluationPaths(root / prefix)
    if names is None:
        ids = known_ids(root)
    else:
        ids = sorted(name for name in names if _matches(prefix, name) and is_evaluation(name))
        if not ids:
            raise OperatorError(f"no evaluation in {root} begins with {prefix!r}")
    found = ids_of(prefix, ids)
    if len(found) != 1:
        known = first_of(found or ids) or "none"
        what = "no evaluation" if not found else f"{len(found)} evaluations"
        verb = "begins" if not found else "begin"
        todo = "type more of the id" if found else unreadable_message(root) or "`evalspan status` lists all"
        raise OperatorError(f"{what} in {root} {verb} with {prefix!r} (there are: {known}): {todo}")
    return EvaluationPaths(root / found[0])


def find_record(config: Config, prefix: str) -> tuple[EvaluationRecord, EvaluationPaths]:
    """Return the evaluation of that name as it was accepted. Raise OperatorError if it cannot be read."""
    paths = find_folder(config, prefix)
    if (record := read_evaluation(paths)) is None:
        raise OperatorError(f"{paths.evaluation} cannot be read")
    return record, paths


class Summaries:
    """Follows the evaluations of a work folder. Ended ones are read again every ENDED_SECONDS."""

    def __init__(self, config: Config, only: str | None = None, most: float = math.inf) -> None:
        """Follow the evaluation `only`, or all; keep the summaries of the `most` newest ended ones."""
        self.open: list[Summary] = []  # oldest first; as of the last `look`
        self.ended: list[Summary] = []  # newest first
        self._config = config
        self._most = most
        self.names: frozenset[str] = frozenset([only] if only else [])  # of folders, as of the last `look`
        self._listing = None if only else Listing(config.work_dir)
        self._over: set[str] = set()  # names of evaluations that had ended when last read
        self._over_at = -math.inf
        # journal's length in bytes, and its summary
        self._replayed: dict[str, tuple[int, Summary | None]] = {}

    def look(self, now: float) -> None:
        """Read what may have changed. `now`: seconds of any monotonic clock."""
        self._list(now)
        if now - self._over_at >= ENDED_SECONDS:
            self._over, self._over_at, self.ended = set(), now, []
        self._over &= self.names
        self._replayed = {name: kept for name, kept in self._replayed.items() if name in self.names}
        found = list(self._read())
        self.open = sorted((s for s in found if s.ended_at is None), key=lambda s: s.accepted_at)
        over = [s for s in found if s.ended_at is not None]
        self._over |= {s.evaluation_id for s in over}
        kept = [s for s in self.ended if s.evaluation_id in self._over]
        newest = sorted([*kept, *over], key=lambda s: -(s.ended_at or 0.0))
        self.ended = newest if self._most == math.inf else newest[: int(self._most)]

    def _list(self, now: float) -> None:
        if self._listing is not None:
            with suppress(OSError), self._listing.news(now) as entries:
                if entries is not None:
                    self.names = frozenset(entry.name for entry in entries if entry.is_dir())

    def _read(self) -> Iterator[Summary]:
        for name in self.names - self._over:
            summary = read_file(f"{self._config.work_dir}/{name}")
            if summary is not None:
                self._replayed.pop(name, None)
            else:
                paths = EvaluationPaths(Path(self._config.work_dir) / name)
                summary = self._by_journal(paths)
            if summary is not None:
                yield summary

    def _by_journal(self, paths: EvaluationPaths) -> Summary | None:
        """Return None for a folder that is not an evaluation: its journal is empty, or of another folder."""
        try:
            size = paths.journal.stat().st_size
        except OSError:  # not an evaluation, or storage is unavailable
            return self._replayed.get(paths.root.name, (0, None))[1]
        known = self._replayed.get(paths.root.name)
        if known is None or known[0] != size:
            from coordinator.runtime.make_summary import find_by_journal  # noqa: PLC0415 (few evaluations need the state machine)

            known = self._replayed[paths.root.name] = size, find_by_journal(paths, time.time())
        return known[1]
