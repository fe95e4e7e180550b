"""Runs a command to completion, within a time limit.

Rule: on a timeout or an interrupt the command and its children are killed, so that a wrapper script cannot keep the
coordinator waiting. Output is decoded as UTF-8; invalid bytes are replaced.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence

REAP_SECONDS = 5.0  # for a killed command to disappear


class CommandError(Exception):
    """A command failed. The message is one line without the command; `stderr` is everything it printed there."""

    def __init__(
        self, message: str, *, stderr: str = "", code: int | None = None, timed_out: bool = False
    ) -> None:
        super().__init__(message)
        self.stderr = stderr
        self.code = code  # exit status; None: it did not start, or timed out
        self.timed_out = timed_out


def run_command(
    argv: Sequence[str],
    *,
    seconds: float | None = None,
    env: Mapping[str, str] | None = None,
    stdin: str = "",
) -> str:
    """Return the standard output of a command. `seconds`: time limit; `env`: its complete environment, None: ours.

    Raise CommandError if it cannot be started, times out, or exits with a status other than 0.
    """
    try:
        child = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=env,
            start_new_session=True,
        )
    except OSError as error:
        raise CommandError(f"cannot be run: {error.strerror}") from error
    try:
        out, err = child.communicate(stdin.encode("utf-8", "surrogateescape"), timeout=seconds)
    except BaseException as error:
        _kill(child)
        if isinstance(error, subprocess.TimeoutExpired):
            raise CommandError(f"timed out after {seconds:g} s", timed_out=True) from error
        raise
    if child.returncode != 0:
        stderr = err.decode("utf-8", "replace")
        last = (stderr.strip().splitlines() or [f"exit status {child.returncode}"])[-1]
        raise CommandError(last, stderr=stderr, code=child.returncode)
    return out.decode("utf-8", "replace")


def _kill(child: subprocess.Popen[bytes]) -> None:
    """Kill a command with its children, and reap it without waiting for those that hold its pipes."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
    for pipe in (child.stdin, child.stdout, child.stderr):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(timeout=REAP_SECONDS)
