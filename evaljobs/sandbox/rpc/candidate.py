"""The untrusted side: runs the program and answers the test's requests about it.

Rule: no verdict relies on this process, since the program shares it and can change all of it. What
leaves it is data. It never holds a test or a verdict, except for a test that shares the program's
process. Started by `zygote`.

A request is a JSON list (operation, whether to capture standard output), a newline, then the
operands. An answer is a JSON list: "v" and a value, "stop" and null, "u" and why there is no
answer, or "e" and [[module, name] of the exception's classes, message, arguments or null]; then
changed arguments and captured output, if there are any.
"""

from __future__ import annotations

import builtins
import contextlib
import io
import json
import os
import socket
import sys
import types
from collections.abc import Callable
from typing import Any, Final

from evaljobs.sandbox.rpc import codec
from evaljobs.sandbox.rpc.arguments import Arguments
from evaljobs.sandbox.rpc.frames import FrameError, receive_frame, send_frame

CHANNEL_FD: Final = 3
_SHORT: Final = 2000  # most characters of a message in an answer
_NAME: Final = 200  # most characters of a class's name


class Agent:
    """Serves one program until the channel closes."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._handles: list[Any] = []
        self._numbers: dict[int, int] = {}  # id of an object → its handle
        self._encoder = codec.Encoder(self._make_handle)
        self._decoder = codec.Decoder(self._from_handle)
        self._globals: dict[str, Any] = {}
        self._program: dict[str, Callable[..., Any]] = {
            "load": self._load,
            "in_process": self._in_process,
            "main": _run_main,
        }
        for name in ("exit", "quit"):  # as the site module, which is not loaded, would set them
            setattr(builtins, name, sys.exit)

    def _make_handle(self, value: Any) -> int | str:
        if isinstance(value, type) and codec.CLASSES.get(name := str(value.__name__)) is value:
            return name
        number = self._numbers.get(id(value))
        if number is None:
            number = self._numbers[id(value)] = len(self._handles)
            self._handles.append(value)
        return number

    def _from_handle(self, body: Any) -> Any:
        return vars(builtins)[body] if isinstance(body, str) else self._handles[body]

    def serve(self) -> None:
        """Answer requests until the test's side closes the channel."""
        while (frame := receive_frame(self._channel)) is not None:
            head, _, operands = frame.partition(b"\n")
            operation, capture = json.loads(head)
            try:
                send_frame(self._channel, self._answer(operation, operands, capture=capture).encode())
            except (RecursionError, FrameError) as error:
                send_frame(self._channel, json.dumps(["u", f"the program's answer: {error}"]).encode())
            except BaseException as error:  # noqa: BLE001  (out of memory, or an object of the program that is hostile)
                send_frame(self._channel, f"{_describe_error(error)}]".encode())

    def _answer(self, operation: str, operands: bytes, *, capture: bool) -> str:
        arguments = Arguments()
        with contextlib.redirect_stdout(io.StringIO()) if capture else contextlib.nullcontext() as output:
            try:
                values = self._decoder.loads(operands, arguments, naming=True)
                arguments.remember()
                result = (_OPERATIONS.get(operation) or self._program[operation])(*values)
            except _StopError:
                answer = '["stop",null'
            except BaseException as error:  # noqa: BLE001  (the program may raise anything, and it is an answer)
                answer = _describe_error(error)
            else:
                answer = f'["v",{self._encoder.dumps(result, arguments)}'
        changes = self._encoder.dumps_changes(arguments)
        if changes == "[]" and not (output and output.getvalue()):
            return f"{answer}]"
        return f"{answer},{changes},{json.dumps(output.getvalue() if output else '')}]"

    # --- the program

    def _load(self, code: str, names: tuple[str, ...]) -> Any:
        exec(compile(code, "<candidate>", "exec"), self._globals)  # noqa: S102
        return {name: _describe(self._globals[name]) for name in names if name in self._globals}

    def _in_process(self, code: str, test: str, token: str) -> str:
        exec(compile(code + "\n" + test, "<candidate and test>", "exec"), self._globals)  # noqa: S102
        return token


def _run_main(code: str, text: str) -> None:
    """Run a program that reads standard input and prints; its output bypasses this side."""
    data = text.encode("utf-8", "surrogatepass")
    while data:
        data = data[os.write(0, data) :]
    os.lseek(0, 0, os.SEEK_SET)
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    try:
        exec(compile(code, "<candidate>", "exec"), vars(module))  # noqa: S102
    except SystemExit as leave:
        if leave.code not in (None, 0):
            raise
    finally:
        import threading  # noqa: PLC0415

        threading._shutdown()  # type: ignore[attr-defined]  # noqa: SLF001  (wait for its threads, as at an interpreter's end)
        sys.stdout.flush()
        os.dup2(2, 1)  # the checker reads the output until its end, then the answer


class _StopError(Exception):
    """An iterator's end, which is not an exception of the program."""


def _next(value: Any) -> Any:
    try:
        return next(value)
    except StopIteration:
        raise _StopError from None


# Operations on the objects that the program defined or returned.
_OPERATIONS: Final[dict[str, Callable[..., Any]]] = {
    "call": lambda function, args, kwargs: function(*args, **dict(kwargs)),
    "get": getattr,
    "eq": lambda left, right: bool(left == right),
    "next": _next,
    "iter": iter,
    "len": len,
    "bool": bool,
    "str": str,
    "format": format,
    "repr": repr,
}
_PLAIN: Final = frozenset({str, int, float, bool, type(None)})


def _describe_error(error: BaseException) -> str:
    """The start of an exception's answer; for a hostile class, the name of its built-in base."""
    with contextlib.suppress(BaseException):
        kinds = [[str(kind.__module__), kind.__name__[:_NAME]] for kind in type(error).__mro__]
        plain = all(type(v) in _PLAIN for v in error.args)
        return f'["e",{json.dumps([kinds, str(error)[:_SHORT], error.args if plain else None])}'
    name = next(k.__name__ for k in type(error).__mro__ if vars(builtins).get(k.__name__) is k)
    return f'["e",{json.dumps([[["builtins", name]], "", None])}'


def _describe(value: Any) -> tuple[str, Any]:
    """A global of the program: ("module", name) or ("value", the value)."""
    return ("module", value.__name__) if isinstance(value, types.ModuleType) else ("value", value)
