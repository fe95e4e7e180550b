"""Contents of a work folder, by kind and by evaluation, and removal of what a policy does not keep.

Rule: `read_work_folder` reads names, sizes and the beginnings of journals, and `retention` decides. Each evaluation is
checked again under its journal's lock, so that one resumed by a coordinator loses nothing. A part is first renamed, then its
files are deleted: killed at any step an evaluation stays readable, and the next prune continues. Called by `evalspan prune`,
`status --disk` and the daemon's housekeeping.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import shutil
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from coordinator.operations.keeping.archive import MOST_FILES, count_files, write_archive
from coordinator.operations.keeping.retention import OnDisk, SharedFile, Size, WorkFolder, removable_parts
from coordinator.runtime.journal import exclude_coordinators
from coordinator.runtime.summary import read_ended_summary, read_evaluation
from coordinator.site.config.schema import RetentionConfig
from evaljobs.contract.archived_files import archive_members, archive_of
from evaljobs.contract.paths import EvaluationPaths, WorkPaths

log = logging.getLogger(__name__)
# File WORK_DIR/ID/.pruned-NAME: what is being removed | `prune`, the coordinator | at the next prune
PRUNED_PREFIX = ".pruned-"  # prefix of what is being removed
_SETS = re.compile(rb'/request_sets/([^/"]+)')
_HEAD_BYTES = 1 << 20  # of a journal, which name its request sets
_BLOCK = 512  # bytes of a block in `st_blocks`


# --- contents ----------------------------------------------------------------------------------------------------------


def read_work_folder(work: WorkPaths) -> WorkFolder:
    """Read the current work folder, ignoring what disappears meanwhile."""
    evaluations: list[OnDisk] = []
    shared: list[SharedFile] = []
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


def _shared(folder: Path, kind: str) -> Iterator[SharedFile]:
    """Yield contents of one of the shared folders, each with its own kind if `prune` may remove it."""
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
            yield SharedFile(kind=of, path=str(path), size=size, used_at=used_at)


def _evaluation(paths: EvaluationPaths) -> OnDisk:
    parts: dict[str, Size] = defaultdict(Size)
    for entry in _entries(paths.root):
        if entry.is_dir(follow_symlinks=False):
            parts[entry.name.removeprefix(PRUNED_PREFIX)] += _below(Path(entry.path))
        else:
            parts[""] += _size(entry)
    with contextlib.suppress(OSError):  # damaged
        for name, info in archive_members(archive_of(paths.root)).items():
            parts[name.partition("/")[0]] += Size(bytes=info.compress_size)
            parts[""] += Size(bytes=-info.compress_size)
    over = read_ended_summary(paths)
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
    """Return the folders of an evaluation's request sets, which one of its first events names."""
    with contextlib.suppress(OSError), journal.open("rb") as lines:
        for line in iter(lambda: lines.readline() if lines.tell() < _HEAD_BYTES else b"", b""):
            if b'"kind":"request-sets-found"' in line:
                return frozenset(name.decode() for name in _SETS.findall(line))
    return frozenset()


def _reused(journal: Path) -> frozenset[str]:
    """Return the evaluations whose responses an open one reuses."""
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


# --- removing -------------------------------------------------------------------------------------------------------


def prune_folder(
    work: WorkPaths, made: WorkFolder, policy: RetentionConfig, now: float
) -> Iterator[tuple[str, str]]:
    """Remove what was planned, one by one, and yield (id or path, why it was kept, or "")."""
    for removal in made.evaluations:
        yield removal.evaluation_id, _try_prune(work, removal)
    for item in made.shared:
        yield item.path, _try_remove(item, now - policy.older_than_seconds)
    for folder in (work.request_sets, work.converted, work.cache):
        _clear(folder)


def prune_now(work: WorkPaths, policy: RetentionConfig, now: float, *, code: str | None) -> WorkFolder:
    """Remove what the policy does not keep, and return it; what could not be removed is logged."""
    made = removable_parts(read_work_folder(work), policy, now, code=code)
    for name, why in prune_folder(work, made, policy, now):
        if why:
            log.warning("%s is kept: %s", name, why)
    return made


def _try_prune(work: WorkPaths, removal: OnDisk) -> str:
    paths = work.evaluation(removal.evaluation_id)
    try:
        with exclude_coordinators(paths.journal):
            found = read_ended_summary(paths)
            if found is None or found.ended_at != removal.ended_at:
                return "a coordinator has resumed it"
            prune_held(paths, tuple(removal.parts))
    except BlockingIOError:
        return "it is in use"
    except OSError as error:
        return str(error)
    return ""


def prune_held(paths: EvaluationPaths, parts: tuple[str, ...]) -> None:
    """Remove these parts of an ended evaluation, whose journal's lock the caller holds. Raise OSError."""
    for part in parts:
        _set_aside(paths.root / part)
    if archive_of(paths.root).exists() or count_files(paths) > MOST_FILES:
        write_archive(paths, without=parts)
    _clear(paths.root)


def _set_aside(path: Path) -> Path:
    """Rename a file or folder to mark it as being removed."""
    aside = path.with_name(f"{PRUNED_PREFIX}{path.name}")
    if aside.exists():
        _delete(aside)
    with contextlib.suppress(FileNotFoundError):
        path.rename(aside)
    return aside


def _try_remove(item: SharedFile, used_before: float) -> str:
    """Remove something shared, unless an evaluation has begun to use it since, which touches it first."""
    path = Path(item.path)
    try:
        aside = _set_aside(path)
        if aside.stat().st_mtime > used_before:
            aside.rename(path)
            return "it is in use again"
        _delete(aside)
    except OSError as error:
        return str(error)
    return ""


def _clear(folder: Path) -> None:
    """Delete what an earlier prune has renamed."""
    for left in folder.glob(f"{PRUNED_PREFIX}*"):
        _delete(left)


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
