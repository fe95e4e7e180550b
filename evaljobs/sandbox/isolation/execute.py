"""Runs one program and its test in this process, as openai/human-eval does.

Rule: program and test are one text, executed in one empty namespace. The pass is a token of this
run, which the caller writes after the test's last line; no exit status, output or file counts.
Called from `zygote`, in the program's own process.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import types
from typing import Any, Final, NoReturn

MEMORY, FAILED = b"m", b"f"  # first byte of a message that is no pass
_MOST_REASON: Final = 400  # characters


def judge(task: dict[str, Any], token: bytes) -> bytes:
    """`token` if the program passes its test, else MEMORY or FAILED with the reason.

    `task` has "source", the program with its test; or "source" of a program that is run as a script,
    with "stdin" and the "stdout" that it must print.
    """
    try:
        if "stdout" in task:
            _run_script(**task)
        else:
            _run_test(task["source"])
    except MemoryError:
        return MEMORY + b"out of memory"
    except BaseException as error:  # noqa: BLE001  (whatever a program or its test raises is its verdict)
        return FAILED + _describe(error)
    return token


def _describe(error: BaseException) -> bytes:
    with contextlib.suppress(BaseException):  # a hostile class, or an integer too long to print
        return f"{type(error).__name__}: {str(error)[:_MOST_REASON]}".encode(errors="replace")
    return b"Exception: without a text"


class _WriteOnly(io.StringIO):
    """Output that is dropped; input that cannot be read (human_eval/execution.py)."""

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


def _run_script(source: str, stdin: str, stdout: str) -> None:
    """Run a program as `__main__` on descriptors 0 and 1, which are files in memory."""
    data = stdin.encode("utf-8", "surrogatepass")
    while data:
        data = data[os.write(0, data) :]
    os.lseek(0, 0, os.SEEK_SET)
    sys.modules["__main__"] = module = types.ModuleType("__main__")
    try:
        exec(compile(source, "<string>", "exec", dont_inherit=True), vars(module))  # noqa: S102
    except SystemExit as leave:
        if leave.code not in (None, 0):
            raise
    import threading  # noqa: PLC0415

    threading._shutdown()  # type: ignore[attr-defined]  # noqa: SLF001  (wait for its threads, as at an interpreter's end)
    sys.stdout.flush()
    printed = os.pread(1, os.fstat(1).st_size, 0).decode("utf-8", "replace")
    if _lines(printed) != _lines(stdout):
        raise AssertionError("standard output differs")


def _lines(text: str) -> list[str]:
    """Output in the form that is compared: without trailing blanks and empty last lines."""
    return "\n".join(line.rstrip() for line in text.splitlines()).rstrip().split("\n")
