"""The inbox of a work folder: checkpoints to evaluate and commands, a file each.

Rule: hook, `submit`, watched folders and commands leave files of one kind (`coordinator.hook.leave`), and `Inbox` is their
one reader. A file stays until its evaluation is journalled or its command is obeyed, so that a restarted daemon reads it
again; what is refused moves to `refused/`, with the reason beside it. The file's owner decides what it may ask for: this
user all; a member of the group that shares the work folder a checkpoint below `[watch] roots`; others nothing.
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
from coordinator.base.words import CONTROL, one_line
from coordinator.errors import OperatorError
from coordinator.evaluation.records import EvaluationRecord
from coordinator.intake.work_folder import DROP, name_of, unsafe
from evaljobs.contract.paths import EvaluationPaths, WorkPaths
from evaljobs.contract.specs import Kept, Record, SuiteSpec
from evaljobs.contract.storage import FrameError, read_with_status, write_atomic, write_record

log = logging.getLogger(__name__)

MOST_BYTES = 1 << 20  # size of a file: `release` may name thousands of nodes
MOST_NEW = 200  # new files that one look of a daemon reads: a millisecond each on NFS
ALL = 100_000  # files that the one look of a command reads
MOST_ERRORS = 3  # errors shown of a malformed file
MOST_SHOWN = 500  # characters shown of a malformed file
MOST_STEPS = 1 << 53  # every step below is a float, too
MOST_NAME = 200  # characters of a refused file's name
MOST_REFUSED = 100  # refused files that are kept: the newest
UNFINISHED_SECONDS = 3600.0  # a file that is still being written after so long has lost its writer
REFUSED_SECONDS = 7 * 86400.0  # a refusal is kept and shown for so long
LEFT_SECONDS = {
    ".tmp": UNFINISHED_SECONDS,
    ".values": REFUSED_SECONDS,
}  # by suffix: a file that no notice names is removed after so many seconds
MOST_VALUES_BYTES = 4 << 20  # of a rank's file of trained values: 1 MiB as base64, and its rows
SAME_SAVE_SECONDS = (
    60.0  # ranks take the values of one save within this time: an earlier run may have left its own
)


def _line(text: str) -> str:
    if CONTROL.search(text):
        raise ValueError("it has a control character")
    return text


Line = Annotated[str, Field(max_length=4096), AfterValidator(_line)]  # a path that Linux takes, or a name


class Notice(Record):
    """One file: a checkpoint that is announced or seen, or a command. The hook writes the first six fields."""

    checkpoint: Line = ""
    step: int | None = Field(default=None, ge=-MOST_STEPS, le=MOST_STEPS)
    suite: Line = "default"
    priority: int = 0
    noticed_at: float = 0.0  # unix seconds
    final: bool = False  # the last checkpoint of a training: each task is asked
    trained_values: str = Field(default="", pattern=r"^[0-9a-f]{0,16}$")  # names the ranks' files beside it
    seen: bool = False  # in a watched folder: perhaps half-written, since no training said that it is saved
    command: Literal["evaluate", "rescore", "cancel", "pause", "resume", "priority", "retry", "release"] = (
        "evaluate"
    )
    # of `submit`: what it printed; of a command to an evaluation: the name of a folder in the work folder, and no path
    evaluation_id: str = Field(default="", pattern=r"^([A-Za-z0-9_-][A-Za-z0-9_.-]{0,250})?$")
    spec: SuiteSpec | None = None  # of `submit`: the suite, if neither a name nor a file means it
    record: EvaluationRecord | None = None  # of `rescore`
    nodes: tuple[str, ...] = ()  # of `release`
    seconds: float = 0.0  # length of their cordon; 0: end it
    reason: str = "on request"

    @property
    def key(self) -> tuple[str, str]:
        """What is to be evaluated: notices of one key are one pending checkpoint."""
        return self.checkpoint, self.suite if self.spec is None else self.spec.model_dump_json()


class Refused(Kept):
    """NAME.reason beside the refused file NAME.json. `at`: unix seconds."""

    checkpoint: str
    suite: str
    at: float
    why: str
    command: str = "evaluate"


@dataclass(frozen=True, slots=True)
class InboxFile:
    """A file of the inbox. `member`: its owner, where that is another user; `wrong`: why it is refused, "" where it is not.

    `notice`: what it holds, or of a malformed one what it claims.
    """

    path: Path
    notice: Notice
    member: str = ""
    wrong: str = ""


def leave(paths: WorkPaths, notice: Notice) -> Path:
    """Leave a notice for the coordinator of this work folder, and return its file. OperatorError where this user may not."""
    try:
        return Path(hook.leave(str(paths.root), notice.model_dump_json(exclude_defaults=True)))
    except PermissionError as error:
        raise OperatorError(
            f"{paths.inbox} cannot be written: an inbox is for its work folder's user and for the members of shared_group"
        ) from error


class Inbox:
    """The files of an inbox, for a process that looks again and again: each is read once."""

    def __init__(self, paths: WorkPaths, most: int = MOST_NEW) -> None:
        """`most`: new files that one look reads; ALL: of a command, which removes nothing."""
        self.most = most
        self.folder = paths.inbox
        self._root = paths.root
        self._read: dict[str, InboxFile] = {}  # by name

    def look(self) -> list[InboxFile]:
        """The files that are there, oldest first. Where storage is away: those of the last look.

        The folder is opened anew, so that an NFS client asks the server for its entries.
        """
        try:
            names, owner = self._names(), self._root.stat().st_uid
            shared = stat.S_IMODE(self.folder.stat().st_mode) == DROP
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
        """Regular files alone: what else a person made there asks for nothing. What a killed writer left goes."""
        names = []
        with os.scandir(self.folder) as entries:
            for entry in entries:
                if entry.name.endswith(".json") and entry.is_file(follow_symlinks=False):
                    names.append(entry.name)
                elif (age := LEFT_SECONDS.get(Path(entry.name).suffix)) and self.most != ALL:
                    with suppress(OSError):
                        if time.time() - entry.stat(follow_symlinks=False).st_mtime >= age:
                            Path(entry.path).unlink()
        return sorted(names)

    def _open(self, path: Path, owner: int, *, shared: bool) -> InboxFile | None:
        """None where it is gone, or cannot be read now and is the owner's of the work folder."""
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
        notice, wrong = parse(text, path)
        if why := unsafe(status):
            wrong = why
        elif member and not (shared and notice.command == "evaluate"):
            wrong = f"{member} left it: ask {name_of(owner)}, whose work folder this is"
        return InboxFile(path, notice, member, wrong)


def _member(status: os.stat_result, owner: int) -> str:
    """The user whose file it is; "" where it is the owner's of the work folder, or root's."""
    return "" if status.st_uid in (0, owner) else name_of(status.st_uid)


def done(file: InboxFile) -> None:
    """Remove a file that is dealt with; one that cannot be removed now comes again, to no effect."""
    with suppress(OSError):
        file.path.unlink(missing_ok=True)


def gather_values(files: Iterable[InboxFile], paths: EvaluationPaths) -> None:
    """Move the trained values that come with these notices to their evaluation, a line of each rank. OSError.

    Without rank 0's file, or where it is not its notice's owner's, the evaluation gets an empty one.
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
        if lines or not paths.trained_values.exists():  # else: gathered before, and the notice came again
            write_atomic(paths.trained_values, b"\n".join(lines))
        for place in found:
            place.unlink(missing_ok=True)


def refuse(file: InboxFile, why: str, now: float) -> None:
    """Move a file to `refused/`, its reason beside it. `now`: unix seconds. OSError where the disk refuses: it comes again."""
    notice, folder = file.notice, file.path.parent / "refused"
    # File WORK_DIR/inbox/refused/NAME.reason: why NAME.json was refused, and when | the coordinator | after a week
    reason = Refused(
        checkpoint=notice.checkpoint, suite=notice.suite, at=now, why=why, command=notice.command
    )
    name = file.path.stem[:MOST_NAME]
    write_record(folder / f"{name}.reason", reason)
    file.path.replace(folder / f"{name}.json")
    kept = _reasons(folder)
    for path, _ in kept[:-MOST_REFUSED] + [one for one in kept if now - one[1].at >= REFUSED_SECONDS]:
        _remove(path)


def forget_refusals(paths: WorkPaths, notice: Notice) -> None:
    """Remove what was refused of a checkpoint that is accepted now."""
    for path, reason in _reasons(paths.inbox / "refused"):
        if (reason.checkpoint, reason.suite) == (notice.checkpoint, notice.suite):
            _remove(path)


def waiting_files(paths: WorkPaths) -> list[InboxFile]:
    """The checkpoints in the inbox, oldest first: one look of a command."""
    return [file for file in Inbox(paths, ALL).look() if file.notice.command == "evaluate"]


def refusals(paths: WorkPaths, now: float) -> tuple[Refused, ...]:
    """Checkpoints that were refused within a week, by their last refusals, oldest first."""
    found = {
        (reason.checkpoint, reason.suite): reason
        for _, reason in _reasons(paths.inbox / "refused")
        if reason.command == "evaluate" and now - reason.at < REFUSED_SECONDS
    }
    return tuple(found.values())


def refusal_of(paths: WorkPaths, files: Iterable[str]) -> Refused | None:
    """Why one of these files of the inbox was refused; None where none was."""
    names = {Path(file).stem[:MOST_NAME] for file in files}
    return next((reason for path, reason in _reasons(paths.inbox / "refused") if path.stem in names), None)


def parse(text: bytes, path: Path) -> tuple[Notice, str]:
    """(notice, ""), or (what it claims, why it is none). `path`: stands for the checkpoint where `text` names none."""
    try:
        notice = Notice.model_validate_json(text)
    except ValidationError as error:
        why = "; ".join(
            f"{'.'.join(map(str, e['loc'])) or 'all of it'}: {e['msg']}" for e in error.errors()[:MOST_ERRORS]
        )
        return _claims(text, path), one_line(f"it is no notice of this version ({why})", MOST_SHOWN)
    if notice.command == "evaluate" and not notice.checkpoint:
        return _claims(text, path), "it names no checkpoint"
    if notice.command == "rescore" and notice.record is None:
        return notice, "it holds no record of an evaluation"
    return notice, ""


def _claims(text: bytes, path: Path) -> Notice:
    """What of a malformed file can be shown: untrusted text as one line that is safe for any file or terminal."""
    try:
        named = json.loads(text)
    except (ValueError, RecursionError):
        named = None
    fields = named if isinstance(named, dict) else {}
    return Notice(
        checkpoint=one_line(fields.get("checkpoint") or path, MOST_SHOWN),
        suite=one_line(fields.get("suite", "default"), MOST_SHOWN),
    )


def _reasons(folder: Path) -> list[tuple[Path, Refused]]:
    """The reasons in `refused/`, oldest first; none where storage is away."""
    found = []
    with suppress(OSError), os.scandir(folder) as entries:
        for name in sorted(e.name for e in entries if e.name.endswith(".reason")):
            with suppress(OSError, ValidationError):
                found.append((folder / name, Refused.model_validate_json((folder / name).read_bytes())))
    return sorted(found, key=lambda one: one[1].at)


def _remove(path: Path) -> None:
    """A reason, and the file beside it."""
    with suppress(OSError):
        path.with_suffix(".json").unlink(missing_ok=True)
        path.unlink(missing_ok=True)
