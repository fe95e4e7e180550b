"""What lies in a work folder: files and bytes by kind and by evaluation, and what evaluations still need.

Rule: reads names, sizes and the beginnings of journals, and writes nothing. A folder of 3,000 archived evaluations
takes seconds. Called by `status --disk`, `prune` and the daemon's housekeeping.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from coordinator.keeping.retention import OnDisk, Shared, Size, WorkFolder
from coordinator.runtime.summary import ended, read_evaluation
from evaljobs.contract.folded import archive_of, members
from evaljobs.contract.paths import EvaluationPaths, WorkPaths

_SETS = re.compile(rb'/request_sets/([^/"]+)')
_HEAD_BYTES = 1 << 20  # of a journal, in which its request sets are named
_BLOCK = 512  # bytes of a block as `st_blocks` counts them


def read_work_folder(work: WorkPaths) -> WorkFolder:
    """The work folder as it is now; what goes meanwhile is passed over."""
    evaluations: list[OnDisk] = []
    shared: list[Shared] = []
    others: dict[str, Size] = {}
    kinds = {
        work.request_sets: "request sets",
        work.converted: "converted checkpoints",
        work.cache: "cache",
    }
    for entry in sorted(_entries(work.root), key=lambda e: e.name):
        path = Path(entry.path)
        if not entry.is_dir(follow_symlinks=False):
            others["other files"] = others.get("other files", Size()) + _size(entry)
        elif path in kinds:
            shared += _shared(path, kinds[path])
        elif (path / "journal.jsonl").exists():
            evaluations.append(_evaluation(EvaluationPaths(path)))
        else:
            others[f"{entry.name}/"] = _below(path)
    return WorkFolder(tuple(evaluations), tuple(shared), others)


def _shared(folder: Path, kind: str) -> Iterator[Shared]:
    """What lies in one of the shared folders, each with its own kind where `prune` may remove it."""
    for entry in _entries(folder):
        name, path = entry.name, Path(entry.path)
        of = kind
        if kind == "cache" and name.startswith("code-"):
            of = "code for jobs"
        elif kind == "cache" and name == "judgements":
            of = "judgements"
        with contextlib.suppress(FileNotFoundError):
            used_at = entry.stat(follow_symlinks=False).st_mtime
            size = _below(path) if entry.is_dir(follow_symlinks=False) else _size(entry)
            yield Shared(kind=of, path=str(path), size=size, used_at=used_at)


def _evaluation(paths: EvaluationPaths) -> OnDisk:
    parts: dict[str, Size] = defaultdict(Size)
    for entry in _entries(paths.root):
        if entry.is_dir(follow_symlinks=False):
            parts[entry.name.removeprefix(".pruned-")] += _below(Path(entry.path))
        else:
            parts[""] += _size(entry)
    with contextlib.suppress(OSError):  # damaged
        for name, info in members(archive_of(paths.root)).items():
            parts[name.partition("/")[0]] += Size(bytes=info.compress_size)
            parts[""] += Size(bytes=-info.compress_size)
    over = ended(paths)
    record = read_evaluation(paths) if over is None else None
    return OnDisk(
        evaluation_id=paths.root.name,
        accepted_at=over.accepted_at if over else record.accepted_at if record else 0.0,
        ended_at=over.ended_at if over else None,
        parts=dict(parts),
        sets=_sets(paths.journal),
        reuses=frozenset() if over else _reused(paths.journal),
        checkpoint=record.checkpoint.digest if record else "",
    )


def _sets(journal: Path) -> frozenset[str]:
    """The folders of an evaluation's request sets, which one of its first events names."""
    with contextlib.suppress(OSError), journal.open("rb") as lines:
        for line in iter(lambda: lines.readline() if lines.tell() < _HEAD_BYTES else b"", b""):
            if b'"kind":"request-sets-found"' in line:
                return frozenset(name.decode() for name in _SETS.findall(line))
    return frozenset()


def _reused(journal: Path) -> frozenset[str]:
    """The evaluations whose responses an open one uses again."""
    found: set[str] = set()
    with contextlib.suppress(OSError, ValueError), journal.open("rb") as lines:
        for line in lines:
            if b'"kind":"responses-found"' in line:
                found |= set(json.loads(line).get("sources", {}).values())
    return frozenset(found)


def _below(folder: Path) -> Size:
    total = Size()
    for entry in _entries(folder):
        total += _below(Path(entry.path)) if entry.is_dir(follow_symlinks=False) else _size(entry)
    return total


def _size(entry: os.DirEntry[str]) -> Size:
    with contextlib.suppress(OSError):
        return Size(files=1, bytes=entry.stat(follow_symlinks=False).st_blocks * _BLOCK)
    return Size()


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        return list(entries)
    return []
