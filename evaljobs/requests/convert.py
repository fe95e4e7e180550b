"""The `convert` job: the operator's command converts a checkpoint to a Hugging Face folder.

Rule: the command writes to a folder of this attempt, which gets its final name only if the command exits with 0 and the
source has not changed meanwhile. An existing result is used as is; the coordinator checks it as a checkpoint. Called from
`python -m evaljobs convert`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shlex
import shutil
import signal
import subprocess
import time
from pathlib import Path

from evaljobs.contract.outcomes import Converted, Failed
from evaljobs.contract.paths import EvaluationPaths
from evaljobs.contract.specs import ConvertSpec
from evaljobs.contract.storage import hold_lock, make_folder, show_as, write_outcome
from evaljobs.errors import JobError, OperatorError, RetryError, one_line

log = logging.getLogger(__name__)


def main(spec: ConvertSpec) -> int:
    """Convert once, and write `Converted` or `Failed`. The command's own output goes to the job's log."""
    paths = EvaluationPaths(spec.evaluation_dir)
    started = time.monotonic()
    try:
        _convert(spec)
    except Exception as error:
        log.exception("%s failed", spec.name)
        blame = error.blame if isinstance(error, JobError) else "retry"  # such as a full disk
        write_outcome(paths, Failed(name=spec.name, job="convert", blame=blame, error=one_line(error)))
        return 1
    write_outcome(paths, Converted(name=spec.name, path=spec.out_dir, seconds=time.monotonic() - started))
    return 0


def command_words(command: str, source: str, target: str) -> list[str]:
    """Return the command's words, with `{src}` and `{dst}` filled in. No shell interprets them."""
    return [word.replace("{src}", source).replace("{dst}", target) for word in shlex.split(command)]


def _convert(spec: ConvertSpec) -> None:
    out = Path(spec.out_dir)
    # File WORK_DIR/converted/DIGEST.lock: locked (flock) by the one conversion | a conversion | `prune`
    # File WORK_DIR/converted/DIGEST.PID.part/…: an unfinished conversion | a conversion | at its end; `prune`
    with hold_lock(out.with_name(f"{out.name}.lock")):
        if out.is_dir():
            return
        _check(spec)
        part = out.with_name(f"{out.name}.{os.getpid()}.part")
        try:
            make_folder(part)
            _run(command_words(spec.command, spec.source.source, str(part)), spec.name)
            _check(spec)
            show_as(part, part.parent)
            _date(part, max(f.mtime_ns for f in spec.source.files))
            part.replace(out)
        finally:
            shutil.rmtree(part, ignore_errors=True)


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
        raise RetryError(f"[checkpoint] convert: {argv[0]} was killed by signal {-status} (out of memory?)")
    if status:
        raise OperatorError(
            f"[checkpoint] convert: {argv[0]} exited with status {status}; see the end of {job}'s log"
        )


def _date(folder: Path, mtime_ns: int) -> None:
    """Give the result its source's mtime, so that a second conversion is the same checkpoint."""
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink():
            os.utime(path, ns=(mtime_ns, mtime_ns))
