"""Removes from a work folder what a policy does not keep; or says what it would remove.

Rule: `retention` has decided. Each evaluation is looked at once more under its journal's lock, so that one that
a coordinator resumed loses nothing. A part goes at once, by a rename, before its files are deleted: killed at any step an
evaluation stays readable, and the next prune goes on. Called by `evalspan prune` and the daemon's housekeeping.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path

from coordinator.config.schema import RetentionConfig
from coordinator.keeping.archive import MOST_FILES, count_files, write_archive
from coordinator.keeping.inventory import read_work_folder
from coordinator.keeping.retention import OnDisk, Shared, WorkFolder, going
from coordinator.runtime.journal import alone
from coordinator.runtime.summary import ended
from evaljobs.contract.folded import archive_of
from evaljobs.contract.paths import EvaluationPaths, WorkPaths

log = logging.getLogger(__name__)
# File WORK_DIR/ID/.pruned-NAME: what is being removed | `prune`, the coordinator | at the next prune
GOING = ".pruned-"  # how names of what is being removed begin


def carry_out(
    work: WorkPaths, made: WorkFolder, policy: RetentionConfig, now: float
) -> Iterator[tuple[str, str]]:
    """Remove what was planned: (id or path, why it was left, or "") one after the other."""
    for removal in made.evaluations:
        yield removal.evaluation_id, _try_prune(work, removal)
    for item in made.shared:
        yield item.path, _try_remove(item, now - policy.older_than_seconds)
    for folder in (work.request_sets, work.converted, work.cache):
        _clear(folder)


def prune_now(work: WorkPaths, policy: RetentionConfig, now: float, *, code: str | None) -> WorkFolder:
    """Remove what the policy does not keep, and return what that was; what was left is logged."""
    made = going(read_work_folder(work), policy, now, code=code)
    for name, why in carry_out(work, made, policy, now):
        if why:
            log.warning("%s is left: %s", name, why)
    return made


def _try_prune(work: WorkPaths, removal: OnDisk) -> str:
    paths = work.evaluation(removal.evaluation_id)
    try:
        with alone(paths.journal):
            found = ended(paths)
            if found is None or found.ended_at != removal.ended_at:
                return "a coordinator has resumed it"
            prune_held(paths, tuple(removal.parts))
    except BlockingIOError:
        return "it is in use"
    except OSError as error:
        return str(error)
    return ""


def prune_held(paths: EvaluationPaths, parts: tuple[str, ...]) -> None:
    """Remove these parts of an ended evaluation, whose journal's lock the caller holds. OSError."""
    for part in parts:
        _set_aside(paths.root / part)
    if archive_of(paths.root).exists() or count_files(paths) > MOST_FILES:
        write_archive(paths, without=parts)
    _clear(paths.root)


def _set_aside(path: Path) -> Path:
    """Give a file or folder the name of one that is being removed."""
    aside = path.with_name(f"{GOING}{path.name}")
    if aside.exists():
        _delete(aside)
    with contextlib.suppress(FileNotFoundError):
        path.rename(aside)
    return aside


def _try_remove(item: Shared, used_before: float) -> str:
    """Remove what evaluations share, unless one has begun to use it since it was looked at: its user touches it first."""
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
    for left in folder.glob(f"{GOING}*"):
        _delete(left)


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
