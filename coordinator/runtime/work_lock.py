"""The lock of a work folder: one coordinator at a time. Called by `runtime`, and by commands that ask for its holder.

Rule: taking the lock writes a unique token to its file. If locks do not reach across hosts, two processes may take it: the
earlier one finds a foreign token and ends (`check`) before it acts on anything logged since.
"""

from __future__ import annotations

import errno
import os
import secrets
from contextlib import suppress
from pathlib import Path

from coordinator.base.words import one_line
from coordinator.errors import OperatorError, RetryError, TakenOverError
from evaljobs.contract.storage import make_file, make_folder, try_lock

DAEMON = "evalspan daemon"  # command that takes submissions while it holds a work folder
UNTIL_IDLE = f"{DAEMON} --until-idle"  # ... and that exits once it is idle
# of a mount without locks
NO_LOCKS = frozenset({errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK})
FILE_BYTES = 1024  # written in full when the lock is taken, so that a full disk refuses no later change
HOLDER_BYTES = 512  # of the holder and its token; the trouble, which changes often, is written after them
ASKING_SECONDS = 0.5  # longest time that a query for the holder keeps the lock


def is_daemon(holder: str) -> bool:
    """Return whether this holder, as named by `WorkLock.holder`, takes submissions."""
    return holder.startswith(DAEMON)


class InUseError(OperatorError):
    """Raised if another command holds the work folder: `holder`, as named by `WorkLock.holder`."""

    def __init__(self, message: str, holder: str) -> None:
        super().__init__(message)
        self.holder = holder


class WorkLock:
    """A lock that allows one coordinator per work folder. The kernel releases it when its owner dies."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd: int | None = None
        self._mine = b""  # holder and token, as in the file; empty if the disk refused them
        self._trouble = ""

    def acquire(self, command: str = "evalspan") -> None:
        """Take the lock for `command`, such as DAEMON. Raise InUseError, which names the holder, if it is taken.

        Raise OperatorError for another user's folder, RetryError if the file system has no locks.
        """
        try:
            make_folder(self.path.parent)
            fd = make_file(self.path, os.O_RDWR)
        except PermissionError as error:
            raise OperatorError(
                f"{self.path.parent} is another user's work folder: give --work-dir a folder of yours"
            ) from error
        if not take_lock(fd):
            owner = _owner(fd)
            os.close(fd)
            now = "submit to it (`evalspan submit`), end it" if is_daemon(owner) else "wait until it ends"
            said = f"{self.path.parent} is in use by {owner}: {now}, or give --work-dir another folder"
            raise InUseError(said, owner)
        self._fd = fd
        holder = f"{command}, pid {os.getpid()} on {os.uname().nodename}\n{secrets.token_hex(8)}"
        self._mine, self._trouble = holder.encode()[:HOLDER_BYTES].ljust(HOLDER_BYTES), ""
        try:
            os.pwrite(fd, self._mine.ljust(FILE_BYTES), 0)
            os.fsync(fd)  # before a journal is read: an earlier coordinator sees it from then on
        except OSError:  # on a full disk the lock works without it
            self._mine = b""

    def check(self) -> None:
        """Raise TakenOverError if another coordinator has taken our work folder. Unavailable storage does not count."""
        if self._fd is None or not self._mine:
            return
        try:
            # reopened: NFS then asks the server what another host has written
            with self.path.open("rb") as file:
                now = file.read(HOLDER_BYTES)
        except OSError:
            return
        if now and now != self._mine:
            folder, other = self.path.parent, now.decode(errors="replace").partition("\n")[0].strip()
            raise TakenOverError(
                f"{folder} was taken over by {other}, which does not see this process's lock and goes on with the jobs. Mount "
                "it with locks that hosts share (Lustre: `flock`; NFS: without `local_lock`), or run one coordinator on one host"
            )

    def show_trouble(self, trouble: str) -> None:
        """Record what the holder waits for, for `status`; "": nothing. The file's mtime is kept."""
        if self._fd is not None and trouble != self._trouble:
            self._trouble = trouble
            most = FILE_BYTES - HOLDER_BYTES
            with suppress(OSError):
                taken_at = os.fstat(self._fd).st_mtime_ns
                os.pwrite(self._fd, one_line(trouble).encode()[:most].ljust(most), HOLDER_BYTES)
                os.utime(self._fd, ns=(taken_at, taken_at))

    def holder(self) -> str:
        """Return the command and process that hold it, such as "evalspan eval, pid 7 on n1"; "" if none does. A concurrent
        query does not count as a holder. Raise RetryError if the file system has no locks.
        """
        return self.holder_and_trouble()[0]

    def holder_and_trouble(self) -> tuple[str, str]:
        """Return the holder, and what `show_trouble` recorded; "" for none."""
        try:
            fd = os.open(self.path, os.O_RDONLY)  # works for users who may only read the work folder
        except OSError:
            return "", ""
        try:
            return ("", "") if take_lock(fd, shared=True, wait=0.0) else (_owner(fd), _lines_of(fd)[1])
        finally:
            os.close(fd)

    def held(self) -> bool:
        """Return whether any command holds it."""
        return bool(self.holder())

    @property
    def there(self) -> bool:
        """Return whether we hold it and its path still is our file. False while its storage is unavailable."""
        try:
            return self._fd is not None and os.path.samestat(os.fstat(self._fd), self.path.stat())
        except OSError:
            return False

    @property
    def removed(self) -> bool:
        """Return whether our file was deleted, as with its folder. False while its storage is unavailable."""
        try:
            return self._fd is not None and os.fstat(self._fd).st_nlink == 0
        except OSError:
            return False

    def release(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def take_lock(fd: int, *, shared: bool = False, wait: float = ASKING_SECONDS) -> bool:
    """Call `try_lock` for long enough to outlast a query for the holder. Raise RetryError if the file system has no locks."""
    try:
        return try_lock(fd, shared=shared, wait=wait)
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        from evaljobs.staging.capacity import fs_type  # noqa: PLC0415 (a message of few file systems needs it)

        folder = Path(f"/proc/self/fd/{fd}").readlink().parent
        raise RetryError(
            f"the file system of {folder} ({fs_type(folder)}) has no file locks (flock: {error.strerror}), which keep a "
            "second coordinator away: mount it with `-o flock` (Lustre), or give --work-dir a folder elsewhere"
        ) from error


def _lines_of(fd: int) -> tuple[str, str]:
    said = os.pread(fd, FILE_BYTES, 0)
    owner, trouble = (part.decode(errors="replace") for part in (said[:HOLDER_BYTES], said[HOLDER_BYTES:]))
    return owner.partition("\n")[0].strip(), trouble.strip()


def _owner(fd: int) -> str:
    return _lines_of(fd)[0] or "another process"
