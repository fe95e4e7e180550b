"""The work folder: private to its user, or readable by one group; refused if others could replace what jobs run.

Rule: its root decides who may see its contents, since a new file is as visible as its folder (`storage.file_mode`). Members
of the group leave checkpoints in the inbox, whose sticky bit protects each member's files from the others; everything else is
the user's. Called by the intake and the commands.
"""

from __future__ import annotations

import errno
import grp
import logging
import os
import pwd
import shlex
import stat
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from coordinator.base.disk_space import FREE_SPACE_ADVICE, disk_shortage
from coordinator.errors import OperatorError
from coordinator.site.config import loading
from coordinator.site.config.schema import Config
from evaljobs.contract.paths import WorkPaths

log = logging.getLogger(__name__)

PRIVATE_MODE = 0o700
SHARED_MODE = 0o2750  # setgid: new files inside belong to the group as well
NEW_FOLDER_ADVICE = "give --work-dir a new folder"
SHARED_INBOX_MODE = 0o3770  # of a shared inbox, in which each member of the group leaves files


def load_settings(
    path: str | Path | None,
    work_dir: str | Path | None = None,
    more: Mapping[str, object] | None = None,
    *,
    makes: bool = True,
) -> Config:
    """Load the current settings: file, environment, command line. Create and check the work folder.

    `more`: dotted key -> value of another option; None: not given. `makes` False: for commands that only read; a missing or
    read-only folder is left as it is.
    """
    overrides = {"work_dir": work_dir, **(more or {})}
    config = loading.load_config(Path(path) if path else None, os.environ, overrides)
    work = config.work_dir
    try:
        if not makes and is_read_only(work):
            return config
        open_folder(work, config.shared_group)
        probe = work / f".probe-{os.getpid()}"
        probe.write_bytes(b"")
        probe.unlink(missing_ok=True)  # a process of another host may have had the same pid and name
    except OSError as error:
        if not makes and error.errno == errno.ENOENT:
            return config
        full = disk_shortage(error, work)
        paths = WorkPaths(work)
        used = any(map(os.path.exists, (paths.lock, paths.inbox)))  # False in a private folder
        if used and (full or error.errno in {errno.EACCES, errno.EROFS}):
            return config  # in use before: the loop waits for space, and `report` reads another user's scores
        if full:
            raise OperatorError(f"{full}: {FREE_SPACE_ADVICE}") from error
        raise OperatorError(
            f"the work folder {work} cannot be written ({error.strerror}): give --work-dir a folder of yours on shared storage"
        ) from error
    return config


def open_folder(root: Path, shared_group: str | None) -> None:
    """Create the work folder, or adapt the modes of an existing one to the settings.

    Another user's folder is left as it is. Raise OperatorError if others may write to it too, or if the group is unknown or
    not this user's; OSError if the file system refuses.
    """
    root.parent.mkdir(parents=True, exist_ok=True)
    made = False
    with suppress(FileExistsError):
        root.mkdir(PRIVATE_MODE)
        made = True
    found = root.stat()
    if found.st_uid != os.geteuid():
        if os.geteuid() != 0 and os.access(root, os.W_OK):
            raise OperatorError(
                f"the work folder {root} is another user's, and more users than you may write to it: {NEW_FOLDER_ADVICE}"
            )
        return
    if not made:
        _refuse_writable(root, found.st_mode)
        if is_read_only(root):
            raise OperatorError(
                f"the work folder {root} is read-only ({stat.S_IMODE(found.st_mode):04o}): "
                f"`chmod u+w {shlex.quote(str(root))}`, or {NEW_FOLDER_ADVICE}"
            )
    group = None if shared_group is None else _group_id(shared_group)
    if group is None:
        _keep_private(root, stat.S_IMODE(found.st_mode))
    elif made or (stat.S_IMODE(found.st_mode), found.st_gid) != (SHARED_MODE, group):
        _share(root, group, str(shared_group))
    _open_inbox(WorkPaths(root), group)


def _open_inbox(paths: WorkPaths, group: int | None) -> None:
    """Let the group, if there is one, write to the inbox, but to no folder below it."""
    refused = paths.inbox / "refused"
    if group is not None:  # otherwise a member could create it
        refused.mkdir(PRIVATE_MODE, parents=True, exist_ok=True)
    _fit(refused, PRIVATE_MODE if group is None else SHARED_MODE, group)
    _fit(paths.redis, PRIVATE_MODE)
    _fit(paths.inbox, PRIVATE_MODE if group is None else SHARED_INBOX_MODE, group)


def is_of_another(root: Path) -> bool:
    """Return whether it belongs to another user, and may at most be read or given checkpoints. Root acts as the owner."""
    try:
        return os.geteuid() not in (0, root.stat().st_uid)
    except OSError:
        return False


def refuse_guest(root: Path, instead: str = "") -> None:
    """Raise OperatorError if the work folder is another user's, who alone commands it. `instead`: what this user may do."""
    if is_of_another(root):
        owner = name_of(root.stat().st_uid)
        raise OperatorError(f"evaluations of {root} are {owner}'s: ask {owner}{instead}")


def unsafe_reason(file: os.stat_result) -> str:
    """Return why a file in the work folder may not be what its owner wrote; "" if it is."""
    if file.st_mode & 0o022:
        return f"other users than {name_of(file.st_uid)} may write to its file"
    if file.st_nlink != 1:
        return f"its file, which {name_of(file.st_uid)} owns, has another name, perhaps of another user"
    return ""


def name_of(uid: int) -> str:
    """Return the user's name; the number if this host knows none."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def is_read_only(root: Path) -> bool:
    """Return whether its owner may not write to it, as in a folder that a person has closed."""
    return not root.stat().st_mode & stat.S_IWUSR


def _refuse_writable(root: Path, mode: int) -> None:
    who = [name for name, bit in (("its group", stat.S_IWGRP), ("all users", stat.S_IWOTH)) if mode & bit]
    if who:
        raise OperatorError(
            f"{' and '.join(who)} may write to the work folder {root}, and so replace what your jobs run: "
            + (f"`chmod -R go-w {shlex.quote(str(root))}`" if _is_only_ours(root) else NEW_FOLDER_ADVICE)
        )


def _is_only_ours(root: Path) -> bool:
    """Return whether it is a work folder already, or empty. Modes of other folders are not evalspan's to change."""
    work = WorkPaths(root)
    marks = (work.lock, work.inbox, work.redis, work.cache, work.request_sets)
    used = any(mark.exists() for mark in marks) or any(root.glob("*/journal.jsonl"))
    return used or not any(root.iterdir())


def _group_id(name: str) -> int:
    try:
        group = grp.getgrnam(name).gr_gid
    except KeyError:
        raise OperatorError(f"shared_group = {name!r}: this host knows no such group") from None
    if os.geteuid() != 0 and group not in (os.getegid(), *os.getgroups()):
        raise OperatorError(f"shared_group = {name!r}: you are not a member of this group")
    return group


def _keep_private(root: Path, mode: int) -> None:
    if mode == PRIVATE_MODE:
        return
    if mode & 0o077 and not _is_only_ours(root):
        raise OperatorError(
            f"{root} holds other files, and other users may read it: {NEW_FOLDER_ADVICE}, or type `chmod 700 {shlex.quote(str(root))}`"
        )
    root.chmod(PRIVATE_MODE)
    if mode & 0o077:
        log.warning(
            "%s is now readable by you alone (it was %04o): shared_group names a group that may read it",
            root,
            mode,
        )


def _share(root: Path, group: int, name: str) -> None:
    """Give the folder to the group. Raise OperatorError if something in it would stay closed to the group."""
    with os.scandir(root) as entries:
        closed = [e.name for e in entries if not _is_open(e.stat(follow_symlinks=False), group, e.name)]
    if closed:
        at = shlex.quote(str(root))
        raise OperatorError(
            f"shared_group = {name!r}: its members cannot read {min(closed)} in {root}, from before it was shared: "
            f"`chgrp -R {name} {at}; chmod -R g+rX,g-w {at}; find {at} -type d -exec chmod g+s {{}} +`"
        )
    os.chown(root, -1, group)
    root.chmod(SHARED_MODE)


def _is_open(entry: os.stat_result, group: int, name: str) -> bool:
    """Return whether the group may read this entry of the root. True for entries created or adapted later."""
    if name.startswith(".") or name in ("redis", "inbox"):
        return True
    return bool(entry.st_mode & (stat.S_IRGRP if entry.st_gid == group else stat.S_IROTH))


def _fit(folder: Path, mode: int, group: int | None = None) -> None:
    """Set a folder's mode and group if it exists and belongs to this user."""
    with suppress(FileNotFoundError):
        found = folder.lstat()
        if stat.S_ISDIR(found.st_mode) and (
            stat.S_IMODE(found.st_mode) != mode or group not in (None, found.st_gid)
        ):
            os.chown(folder, -1, -1 if group is None else group)
            folder.chmod(mode)
