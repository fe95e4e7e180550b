"""Judgements on disk: one file each, named by content.

Rule: an answer is on disk before it counts. It lies in the evaluation that paid for it. A hard link
in the work folder's cache lets another evaluation with the same ask use it. Called from `asking`,
and from the coordinator's `runtime.finalize` for the cost.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from pydantic import ValidationError

from evaljobs.contract.folded import files_in, read_bytes
from evaljobs.contract.storage import make_folder, write_atomic
from evaljobs.judges.judgement import Judgement


class Kept:
    """Judgements of one evaluation; processes may share the folder."""

    def __init__(self, folder: Path, cache: Path, evaluation: str) -> None:
        self._folder = folder
        self._cache = cache
        self._evaluation = evaluation

    def find(self, key: str) -> Judgement | None:
        """The judgement of an ask, maybe an error; copies an answer of another evaluation."""
        file, other = self._files(key)
        own = _read(file, key)
        if own is not None and own.answer is not None:
            return own
        shared = _read(other, key)
        if shared is None or shared.answer is None:
            return own
        if own is not None:  # the cost of failed tries stays with this evaluation
            shared = shared.model_copy(
                update={"evaluation": self._evaluation, "cost_millionths": own.cost_millionths}
            )
        write_atomic(file, _bytes(shared))
        return shared

    def keep(self, judgement: Judgement) -> None:
        """Write a judgement; it is on disk on return. Raises OSError where the file system refuses."""
        own, shared = self._files(judgement.key)
        write_atomic(own, _bytes(judgement))
        if judgement.answer is None:
            return
        make_folder(shared.parent)
        with contextlib.suppress(OSError):  # the link exists, or the file system has none
            os.link(own, shared)

    def spent(self) -> int:
        """Millionths that this evaluation has paid, summed over its files."""
        return sum(j.cost_millionths for j in judgements(self._folder) if j.evaluation == self._evaluation)

    def _files(self, key: str) -> tuple[Path, Path]:
        """The evaluation's own file of an ask, and the shared one."""
        return self._folder / f"{key}.json", self._cache / key[:2] / f"{key}.json"


def judgements(folder: Path) -> Iterator[Judgement]:
    """All judgements of an evaluation's folder, errors included; unreadable files are skipped."""
    for file in files_in(folder, "*.json"):
        found = _read(file, file.stem)
        if found is not None:
            yield found


def _bytes(judgement: Judgement) -> bytes:
    return judgement.model_dump_json(indent=1).encode(errors="replace")


def _read(file: Path, key: str) -> Judgement | None:
    try:
        found = Judgement.model_validate_json(read_bytes(file))
    except (OSError, ValidationError):
        return None
    return found if found.key == key else None
