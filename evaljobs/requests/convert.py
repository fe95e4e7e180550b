"""The `convert` job: a training run's own checkpoint format into a Hugging Face folder, by the operator's command.

Rule: the command writes into a folder of this attempt's own; only a folder that the command left with exit status 0, of
a source that did not change meanwhile, gets the name under which others find it. A result that is there is used as it is.

It does not know: the formats; whether the result is a checkpoint (the coordinator looks at it before anything is staged).
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from evaljobs.contract.outcomes import Converted, Failed
from evaljobs.contract.paths import EvaluationPaths
from evaljobs.contract.specs import ConvertSpec
from evaljobs.contract.storage import write_outcome
from evaljobs.errors import JobError, OperatorError, RetryError, one_line

log = logging.getLogger(__name__)


def main(spec: ConvertSpec) -> int:
    """Convert once; leaves `Converted` or `Failed`. The command's own output goes to the job's log."""
    paths = EvaluationPaths(spec.evaluation_dir)
    started = time.monotonic()
    try:
        _convert(spec)
    except Exception as error:
        log.exception("%s failed", spec.name)
        blame = error.blame if isinstance(error, JobError) else "retry"  # a disk that is full or away
        write_outcome(paths, Failed(name=spec.name, job="convert", blame=blame, error=one_line(error)))
        return 1
    write_outcome(paths, Converted(name=spec.name, path=spec.out_dir, seconds=time.monotonic() - started))
    return 0


def arguments(command: str, source: str, target: str) -> list[str]:
    """The command's words, `{src}` and `{dst}` filled in. No shell reads them."""
    return [word.replace("{src}", source).replace("{dst}", target) for word in shlex.split(command)]


def _convert(spec: ConvertSpec) -> None:
    out = Path(spec.out_dir)
    out.parent.mkdir(parents=True, exist_ok=True)
    with _alone(out.with_name(f"{out.name}.lock")):
        if out.is_dir():
            return
        _check(spec)
        part = out.with_name(f"{out.name}.{os.getpid()}.part")
        try:
            part.mkdir()
            _run(arguments(spec.command, spec.source.source, str(part)), spec.name)
            _check(spec)
            _date(part, max(f.mtime_ns for f in spec.source.files))
            part.replace(out)
        finally:
            shutil.rmtree(part, ignore_errors=True)


@contextlib.contextmanager
def _alone(lock: Path) -> Iterator[None]:
    """One conversion of a checkpoint at a time, where the file system has locks; elsewhere both work, and one is kept."""
    with lock.open("w") as file:
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _check(spec: ConvertSpec) -> None:
    for file in spec.source.files:
        path = Path(spec.source.source) / file.name
        try:
            found = path.stat()
        except FileNotFoundError as error:
            raise OperatorError(
                f"{path} is gone: the checkpoint was deleted before it was converted"
            ) from error
        if (found.st_size, found.st_mtime_ns) != (file.size, file.mtime_ns):
            raise OperatorError(f"{path} changed after the checkpoint was announced; announce it again")


def _run(argv: list[str], job: str) -> None:
    try:
        process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, start_new_session=True)
    except OSError as error:
        raise OperatorError(f"[checkpoint] convert: {argv[0]} cannot be run: {error.strerror}") from error

    def end(number: int, _frame: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        status = process.wait()
    finally:
        signal.signal(signal.SIGTERM, before)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    if status < 0:
        raise RetryError(f"[checkpoint] convert: {argv[0]} was ended by signal {-status} (out of memory?)")
    if status:
        raise OperatorError(
            f"[checkpoint] convert: {argv[0]} ended with exit status {status}; its last words are in {job}'s log"
        )


def _date(folder: Path, mtime_ns: int) -> None:
    """Give the result its source's date: converted once more, it is the same checkpoint."""
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink():
            os.utime(path, ns=(mtime_ns, mtime_ns))
