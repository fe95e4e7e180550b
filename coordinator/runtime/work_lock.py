"""The lock of a work folder: one coordinator at a time. Called by `runtime`, and by commands that ask for its holder.

Rule: who takes the lock writes a token of its own to the lock's file. Where locks do not reach from host to host, two take it:
the earlier one finds a token that is not its own, and ends (`check`), before it does anything that it had logged since.
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

DAEMON = "evalspan daemon"  # the command that takes submissions while it holds a work folder
UNTIL_IDLE = f"{DAEMON} --until-idle"  # ... and that ends once it is idle
NO_LOCKS = frozenset({errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK})  # of a mount without them
FILE_BYTES = 1024  # of the lock's file, written when it is taken, so that a full disk refuses no later change
HOLDER_BYTES = 512  # of them, of the holder and its token; the trouble, which changes often, is written behind these alone
ASKING_SECONDS = 0.5  # longest time for which a command that only asks for the holder keeps the lock


def is_daemon(holder: str) -> bool:
    """Does this holder of a work folder's lock, as `WorkLock.holder` names it, take submissions?"""
    return holder.startswith(DAEMON)


class InUseError(OperatorError):
    """Another command holds the work folder: `holder`, as `WorkLock.holder` names it."""

    def __init__(self, message: str, holder: str) -> None:
        super().__init__(message)
        self.holder = holder


class WorkLock:
    """One coordinator per work folder. The kernel frees the lock when its owner dies, however it dies."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd: int | None = None
        self._mine = b""  # holder and token, as the file has them; empty where the disk refused them
        self._trouble = ""

    def acquire(self, command: str = "evalspan") -> None:
        """Take the lock for `command`, such as DAEMON; InUseError names the command and the process that hold it.

        OperatorError where the folder is another user's; RetryError where the file system has no locks.
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
        except OSError:  # on a full disk the lock holds without it
            self._mine = b""

    def check(self) -> None:
        """TakenOverError where another coordinator has taken the work folder that we hold. Storage that is away says nothing."""
        if self._fd is None or not self._mine:
            return
        try:
            with self.path.open("rb") as file:  # anew: NFS asks the server for what another host has written
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
        """Write what the holder waits for beside its name, for `status`; "": nothing. The file keeps its time."""
        if self._fd is not None and trouble != self._trouble:
            self._trouble = trouble
            most = FILE_BYTES - HOLDER_BYTES
            with suppress(OSError):
                taken_at = os.fstat(self._fd).st_mtime_ns
                os.pwrite(self._fd, one_line(trouble).encode()[:most].ljust(most), HOLDER_BYTES)
                os.utime(self._fd, ns=(taken_at, taken_at))

    def holder(self) -> str:
        """The command and process that hold it, such as "evalspan eval, pid 7 on n1"; "" where none does. A process that
        only asks the same holds nothing. RetryError where the file system has no locks.
        """
        return self.holder_and_trouble()[0]

    def holder_and_trouble(self) -> tuple[str, str]:
        """The holder, and what `show_trouble` says of it; "" for none."""
        try:
            fd = os.open(self.path, os.O_RDONLY)  # also for users who may only read the work folder
        except OSError:
            return "", ""
        try:
            return ("", "") if take_lock(fd, shared=True, wait=0.0) else (_owner(fd), _lines_of(fd)[1])
        finally:
            os.close(fd)

    def held(self) -> bool:
        """Does any command hold it?"""
        return bool(self.holder())

    @property
    def there(self) -> bool:
        """Do we hold it, and does its path show the file that we hold? Not while the storage below it is away."""
        try:
            return self._fd is not None and os.path.samestat(os.fstat(self._fd), self.path.stat())
        except OSError:
            return False

    @property
    def removed(self) -> bool:
        """Was the file that we hold deleted, as with its folder? False while the storage below it is away."""
        try:
            return self._fd is not None and os.fstat(self._fd).st_nlink == 0
        except OSError:
            return False

    def release(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def take_lock(fd: int, *, shared: bool = False, wait: float = ASKING_SECONDS) -> bool:
    """`try_lock`, for long enough for a command that only asks for the holder; RetryError on a file system without locks."""
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
