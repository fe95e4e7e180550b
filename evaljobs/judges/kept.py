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


def find(folder: Path, cache: Path, key: str) -> Judgement | None:
    """The judgement of an ask, maybe an error; copies an answer of another evaluation into `folder`."""
    own = _read(folder / f"{key}.json")
    if own is not None and own.answer is not None:
        return own
    shared = _read(_link(cache, key))
    if shared is None:
        return own
    keep(folder, cache, shared)
    return shared


def keep(folder: Path, cache: Path, judgement: Judgement) -> None:
    """Write a judgement; it is on disk on return. Raises OSError where the file system refuses."""
    own, link = folder / f"{judgement.key}.json", _link(cache, judgement.key)
    write_atomic(own, judgement.model_dump_json(indent=1).encode())
    if judgement.answer is not None:
        make_folder(link.parent)
        with contextlib.suppress(OSError):  # the link exists, or the file system has none
            os.link(own, link)


def judgements(folder: Path) -> Iterator[Judgement]:
    """All judgements of an evaluation's folder, errors included; unreadable files are skipped."""
    for file in files_in(folder, "*.json"):
        if (found := _read(file)) is not None:
            yield found


def _link(cache: Path, key: str) -> Path:
    return cache / key[:2] / f"{key}.json"


def _read(file: Path) -> Judgement | None:
    try:
        return Judgement.model_validate_json(read_bytes(file))
    except (OSError, ValidationError):
        return None
