"""Users of a shared work folder: who asked, by the owner of a file, and who may command what.

Rule: the file system says who wrote a file; nothing in the file does. A work folder that one group shares has `People`;
in any other one user asks and commands. Called by the daemon's intake and by the commands.
"""

from __future__ import annotations

import grp
import os
import pwd
import stat
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from coordinator.intake.work_folder import SHARED


class NotAMemberError(Exception):
    """A file in a shared work folder that counts for no user; the text says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class People:
    """The user of a work folder, the group that shares it (ids), and users who may command all of it (names)."""

    owner: int
    group: int
    admins: frozenset[str] = frozenset()

    @classmethod
    def of(cls, root: Path, admins: Collection[str] = ()) -> People | None:
        """Of this work folder; None where no group shares it."""
        with suppress(OSError):
            found = root.stat()
            if stat.S_IMODE(found.st_mode) == SHARED:
                return cls(owner=found.st_uid, group=found.st_gid, admins=frozenset(admins))
        return None

    @property
    def daemon(self) -> str:
        """The name of the work folder's user, as whom the daemon runs."""
        return name_of(self.owner)

    def author(self, file: os.stat_result) -> str:
        """The user who wrote an open file. NotAMemberError where others may have, or the user is not of the group."""
        name = name_of(file.st_uid)
        if file.st_mode & 0o022:
            raise NotAMemberError(f"other users than {name} may write to its file")
        if file.st_nlink != 1:
            raise NotAMemberError(f"its file, which {name} owns, has another name, perhaps of another user")
        if file.st_uid not in (0, self.owner) and self.group not in _groups(file.st_uid):
            raise NotAMemberError(f"{name} is not a member of the group that shares the work folder")
        return name

    def commands_all(self, user: str) -> bool:
        """May this user command every evaluation, and nodes?"""
        return user in (self.daemon, name_of(0)) or user in self.admins


def asker(root: Path) -> str:
    """The user of this process where the work folder is shared; "" where one user has it."""
    return "" if People.of(root) is None else name_of(os.geteuid())


def name_of(uid: int) -> str:
    """The user's name; the number where this host knows none."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def group_name(gid: int) -> str:
    """The group's name; the number where this host knows none."""
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)


def _groups(uid: int) -> Collection[int]:
    with suppress(KeyError, OSError):
        user = pwd.getpwuid(uid)
        return os.getgrouplist(user.pw_name, user.pw_gid)
    return ()


def refusal(
    people: People | None, user: str, what: str, asked_by: Collection[str] = (), evaluation: str = ""
) -> str:
    """Why this user may not `cancel`, `retry` or `release`; "" where he may. `asked_by`: of the evaluation."""
    if people is None or people.commands_all(user) or user in asked_by:
        return ""
    may = f"{people.daemon}, as whom the daemon runs, and [users] admins may"
    if what == "release":
        return f"{user} may not release nodes: {may}"
    return f"{user} may not {what} {evaluation}: {' and '.join(asked_by) or people.daemon} asked for it; {may}, too"
