"""The inbox of a work folder: checkpoints to evaluate and commands, one file each.

Rule: hook, `submit`, watched folders and commands leave files of one format (`coordinator.hook.write_notice`), and only `Inbox`
reads them. A file stays until its evaluation is journalled or its command is obeyed, so that a restarted daemon reads it
again; refused files move to `refused/`, with the reason beside them. A file's owner determines what it may request: this user
anything; a member of the group that shares the work folder a checkpoint below `[watch] roots`; others nothing.
"""

from __future__ import annotations

import json
import logging
import math
import os
import stat
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, ValidationError

from coordinator import hook
from coordinator.base.isolate import warn_once
from coordinator.base.words import CONTROL_CHARACTERS, one_line
from coordinator.decide.evaluation.records import EvaluationRecord
from coordinator.errors import OperatorError
from coordinator.intake.checkpoint import MOST_STEPS
from coordinator.intake.work_folder import SHARED_INBOX_MODE, name_of, unsafe_reason
from evaljobs.contract.paths import EvaluationPaths, WorkPaths
from evaljobs.contract.specs import Record, StateRecord, SuiteSpec
from evaljobs.contract.storage import FrameError, find_record, read_with_status, write_atomic, write_record

log = logging.getLogger(__name__)

MOST_BYTES = 1 << 20  # of a file: `release` may name thousands of nodes
MOST_NEW = 200  # new files per look of a daemon: a millisecond each on NFS
UNBOUNDED_LOOK = 100_000  # files that the single look of a command reads
MOST_ERRORS = 3  # errors shown of a malformed file
MOST_SHOWN = 500  # characters shown of a malformed file
MOST_NAME = 200  # characters of a refused file's name
MOST_REFUSED = 100  # refused files to keep: the newest
UNFINISHED_SECONDS = 3600.0  # a file unfinished for this long has lost its writer
REFUSED_SECONDS = 7 * 86400.0  # how long a refusal is kept and shown
LEFT_SECONDS = {
    ".tmp": UNFINISHED_SECONDS,
    ".values": REFUSED_SECONDS,
}  # by suffix: seconds after which a file that no notice names is removed
MOST_VALUES_BYTES = 4 << 20  # of a rank's file of trained values: 1 MiB as base64, and its rows
SAME_SAVE_SECONDS = (
    60.0  # ranks record the values of one save within this time: an earlier run may have left its own
)


def _line(text: str) -> str:
    if CONTROL_CHARACTERS.search(text):
        raise ValueError("contains a control character")
    return text


Line = Annotated[str, Field(max_length=4096), AfterValidator(_line)]  # a path that Linux accepts, or a name


class Notice(Record):
    """One file: a checkpoint that is announced or found, or a command. The hook writes the first six fields."""

    checkpoint: Line = ""
    step: int | None = Field(default=None, ge=-MOST_STEPS, le=MOST_STEPS)
    suite: Line = "default"
    priority: int = 0
    noticed_at: float = 0.0  # unix seconds
    final: bool = False  # the last checkpoint of a training: each task is asked
    trained_values: str = Field(default="", pattern=r"^[0-9a-f]{0,16}$")  # names the ranks' files beside it
    # found in a watched folder: perhaps half-written, since no training announced it as saved
    seen: bool = False
    command: Literal["evaluate", "rescore", "cancel", "pause", "resume", "priority", "retry", "release"] = (
        "evaluate"
    )
    # of `submit`: the id it printed; of a command for an evaluation: the name of a folder in the work folder, not a path
    evaluation_id: str = Field(default="", pattern=r"^([A-Za-z0-9_-][A-Za-z0-9_.-]{0,250})?$")
    spec: SuiteSpec | None = None  # of `submit`: the suite, if no name or file denotes it
    record: EvaluationRecord | None = None  # of `rescore`
    nodes: tuple[str, ...] = ()  # of `release`
    seconds: float = 0.0  # length of their cordon; 0: lift it
    reason: str = "on request"

    @property
    def key(self) -> tuple[str, str]:
        """What to evaluate: notices with the same key are one pending checkpoint."""
        return self.checkpoint, self.suite if self.spec is None else self.spec.model_dump_json()


class RefusedCheckpoint(StateRecord):
    """The file NAME.reason beside the refused file NAME.json. `at`: unix seconds."""

    checkpoint: str
    suite: str
    at: float
    why: str
    command: str = "evaluate"


@dataclass(frozen=True, slots=True)
class InboxFile:
    """A file of the inbox. `member`: its owner, if another user; `wrong`: why it is refused, otherwise "".

    `notice`: its contents; for a malformed file, what it claims.
    """

    path: Path
    notice: Notice
    member: str = ""
    wrong: str = ""


def leave_notice(paths: WorkPaths, notice: Notice) -> Path:
    """Leave a notice for the coordinator of this work folder and return its file. Raise OperatorError if this user may not."""
    try:
        return Path(hook.write_notice(str(paths.root), notice.model_dump_json(exclude_defaults=True)))
    except PermissionError as error:
        raise OperatorError(
            f"{paths.inbox} cannot be written: an inbox is for its work folder's user and for the members of shared_group"
        ) from error


class Inbox:
    """The files of an inbox, for a process that looks repeatedly: each is read once."""

    def __init__(self, paths: WorkPaths, most: int = MOST_NEW) -> None:
        """Read at most `most` new files per look; ALL: for a command, which removes nothing."""
        self.most = most
        self.folder = paths.inbox
        self._root = paths.root
        self._read: dict[str, InboxFile] = {}  # by name

    def look(self) -> list[InboxFile]:
        """Return the current files, oldest first; those of the last look if storage is unavailable.

        The folder is reopened, so that an NFS client asks the server for its entries.
        """
        try:
            names, owner = self._names(), self._root.stat().st_uid
            shared = stat.S_IMODE(self.folder.stat().st_mode) == SHARED_INBOX_MODE
        except (FileNotFoundError, NotADirectoryError):
            names, owner, shared = [], 0, False
        except OSError as error:
            warn_once(log, one_line(f"{self.folder} cannot be read yet: {error}"))
            return list(self._read.values())
        unread = (name for name in names if name not in self._read)
        opened = ((name, self._open(self.folder / name, owner, shared=shared)) for name in unread)
        known = self._read | dict(islice(((n, f) for n, f in opened if f is not None), self.most))
        self._read = {name: known[name] for name in names if name in known}
        return list(self._read.values())

    def _names(self) -> list[str]:
        """Return the names of regular files; anything else is ignored. Remove what a killed writer left."""
        names = []
        with os.scandir(self.folder) as entries:
            for entry in entries:
                if entry.name.endswith(".json") and entry.is_file(follow_symlinks=False):
                    names.append(entry.name)
                elif (age := LEFT_SECONDS.get(Path(entry.name).suffix)) and self.most != UNBOUNDED_LOOK:
                    with suppress(OSError):
                        if time.time() - entry.stat(follow_symlinks=False).st_mtime >= age:
                            Path(entry.path).unlink()
        return sorted(names)

    def _open(self, path: Path, owner: int, *, shared: bool) -> InboxFile | None:
        """Read a file; None if it is gone, or cannot be read now and belongs to the work folder's owner."""
        member = ""
        try:
            text, status = read_with_status(path, MOST_BYTES)
            member = _member(status, owner)
        except FileNotFoundError:
            return None
        except (OSError, FrameError) as error:
            with suppress(OSError):
                member = _member(path.lstat(), owner)
            denied = isinstance(error.__cause__, PermissionError)
            if isinstance(error, OSError) or (denied and not member):
                warn_once(log, one_line(f"{path} cannot be read yet: {error}"))
                return None
            return InboxFile(path, _claims(b"", path), member, one_line(error, MOST_SHOWN))
        notice, wrong = parse_notice(text, path)
        if why := unsafe_reason(status):
            wrong = why
        elif member and not (shared and notice.command == "evaluate"):
            wrong = f"{member} left it: ask {name_of(owner)}, whose work folder this is"
        return InboxFile(path, notice, member, wrong)


def _member(status: os.stat_result, owner: int) -> str:
    """Return the user who owns the file; "" if it is the work folder's owner, or root."""
    return "" if status.st_uid in (0, owner) else name_of(status.st_uid)


def remove_notice(file: InboxFile) -> None:
    """Remove a file that has been handled. If that fails it is read again, without effect."""
    with suppress(OSError):
        file.path.unlink(missing_ok=True)


def gather_values(files: Iterable[InboxFile], paths: EvaluationPaths) -> None:
    """Move the trained values of these notices to their evaluation, one line per rank. Raise OSError.

    Without rank 0's file, or if its owner differs from its notice's, the evaluation gets an empty one.
    """
    for file in files:
        if not file.notice.trained_values:
            continue
        found: dict[Path, tuple[float, bytes]] = {}
        for place in sorted(file.path.parent.glob(f"trained-{file.notice.trained_values}-*.values")):
            with suppress(FrameError, ValueError, LookupError, TypeError, ArithmeticError, RecursionError):
                text, status = read_with_status(place, MOST_VALUES_BYTES)
                if status.st_uid == file.path.stat().st_uid:
                    found[place] = (float(json.loads(text)["at"]), text)
        first = next((at for place, (at, _) in found.items() if place.stem.endswith("-0")), -math.inf)
        lines = [text for at, text in found.values() if abs(at - first) < SAME_SAVE_SECONDS]
        # otherwise gathered before, and the notice was read again
        if lines or not paths.trained_values.exists():
            write_atomic(paths.trained_values, b"\n".join(lines))
        for place in found:
            place.unlink(missing_ok=True)


def refuse_notice(file: InboxFile, why: str, now: float) -> None:
    """Move a file to `refused/` with its reason. `now`: unix seconds. Raise OSError if the disk refuses; it is read again."""
    notice, folder = file.notice, file.path.parent / "refused"
    # File WORK_DIR/inbox/refused/NAME.reason: why NAME.json was refused, and when | the coordinator | after a week
    reason = RefusedCheckpoint(
        checkpoint=notice.checkpoint, suite=notice.suite, at=now, why=why, command=notice.command
    )
    name = file.path.stem[:MOST_NAME]
    write_record(folder / f"{name}.reason", reason)
    file.path.replace(folder / f"{name}.json")
    kept = _reasons(folder)
    for path, _ in kept[:-MOST_REFUSED] + [one for one in kept if now - one[1].at >= REFUSED_SECONDS]:
        _remove(path)


def forget_refusals(paths: WorkPaths, notice: Notice) -> None:
    """Remove the refusals of a checkpoint that is now accepted."""
    for path, reason in _reasons(paths.inbox / "refused"):
        if (reason.checkpoint, reason.suite) == (notice.checkpoint, notice.suite):
            _remove(path)


def waiting_files(paths: WorkPaths) -> list[InboxFile]:
    """Return the checkpoints in the inbox, oldest first, for a command."""
    return [file for file in Inbox(paths, UNBOUNDED_LOOK).look() if file.notice.command == "evaluate"]


def read_refusals(paths: WorkPaths, now: float) -> tuple[RefusedCheckpoint, ...]:
    """Return checkpoints refused within a week, by their last refusals, oldest first."""
    found = {
        (reason.checkpoint, reason.suite): reason
        for _, reason in _reasons(paths.inbox / "refused")
        if reason.command == "evaluate" and now - reason.at < REFUSED_SECONDS
    }
    return tuple(found.values())


def refusal_of(paths: WorkPaths, files: Iterable[str]) -> RefusedCheckpoint | None:
    """Return why one of these files of the inbox was refused; None if none was."""
    names = {Path(file).stem[:MOST_NAME] for file in files}
    return next((reason for path, reason in _reasons(paths.inbox / "refused") if path.stem in names), None)


def parse_notice(text: bytes, path: Path) -> tuple[Notice, str]:
    """Return (notice, ""), or (what it claims, why it is invalid). `path`: used as the checkpoint if `text` names none."""
    try:
        notice = Notice.model_validate_json(text)
    except ValidationError as error:
        why = "; ".join(
            f"{'.'.join(map(str, e['loc'])) or 'all of it'}: {e['msg']}" for e in error.errors()[:MOST_ERRORS]
        )
        return _claims(text, path), one_line(f"not a notice of this version ({why})", MOST_SHOWN)
    if notice.command == "evaluate" and not notice.checkpoint:
        return _claims(text, path), "it names no checkpoint"
    if notice.command == "rescore" and notice.record is None:
        return notice, "it contains no record of an evaluation"
    return notice, ""


def _claims(text: bytes, path: Path) -> Notice:
    """Return the displayable claims of a malformed file: untrusted text on one line that is safe for any file or terminal."""
    try:
        named = json.loads(text)
    except (ValueError, RecursionError):
        named = None
    fields = named if isinstance(named, dict) else {}
    return Notice(
        checkpoint=one_line(fields.get("checkpoint") or path, MOST_SHOWN),
        suite=one_line(fields.get("suite", "default"), MOST_SHOWN),
    )


def _reasons(folder: Path) -> list[tuple[Path, RefusedCheckpoint]]:
    """Return the reasons in `refused/`, oldest first; none if storage is unavailable."""
    files: list[Path] = []
    with suppress(OSError), os.scandir(folder) as entries:
        files = sorted(Path(entry.path) for entry in entries if entry.name.endswith(".reason"))
    found = ((file, find_record(file, RefusedCheckpoint)) for file in files)
    return sorted(((file, reason) for file, reason in found if reason), key=lambda one: one[1].at)


def _remove(path: Path) -> None:
    """Remove a reason and the file beside it."""
    with suppress(OSError):
        path.with_suffix(".json").unlink(missing_ok=True)
        path.unlink(missing_ok=True)
