"""Runs one program and its test in this process, as openai/human-eval does.

Rule: program and test are one text, executed in one empty namespace. The pass is a token of this
run, which the caller writes after the test's last line; no exit status, output or file counts.
Called from `zygote`, in the program's own process.
"""

from __future__ import annotations

import contextlib
import io
from typing import Any, Final, NoReturn

MEMORY, FAILED = b"m", b"f"  # first byte of a message other than a pass
MOST_REASON: Final = 400  # characters


def judge_program(source: str, token: bytes) -> bytes:
    """Return `token` if the program passes its test, which `source` ends with; otherwise MEMORY or FAILED with the reason."""
    try:
        _run_test(source)
    except MemoryError:
        return MEMORY + b"out of memory"
    except BaseException as error:  # noqa: BLE001  (whatever a program or its test raises is its verdict)
        return FAILED + _describe(error)
    return token


def _describe(error: BaseException) -> bytes:
    with contextlib.suppress(BaseException):  # a hostile class, or an integer too long to print
        return f"{type(error).__name__}: {str(error)[:MOST_REASON]}".encode(errors="replace")
    return b"Exception: without a text"


class _WriteOnly(io.StringIO):
    """Output that is discarded; input that cannot be read (human_eval/execution.py)."""

    def read(self, *_: Any) -> NoReturn:
        raise OSError

    readline = readlines = read

    def readable(self) -> bool:
        return False


class _StandardInput(contextlib._RedirectStream[_WriteOnly]):  # noqa: SLF001  (as human-eval has it)
    _stream = "stdin"


def _run_test(source: str) -> None:
    stream = _WriteOnly()
    with contextlib.redirect_stdout(stream), contextlib.redirect_stderr(stream), _StandardInput(stream):
        exec(compile(source, "<string>", "exec", dont_inherit=True), {})  # noqa: S102
