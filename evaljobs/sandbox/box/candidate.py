"""The untrusted side: runs the candidate's program and answers the checker's requests about it.

Rule: nothing here is relied upon. The program shares this process and can change all of it; what leaves is data, and
the checker judges it as such. This process never holds a test, an expected value or a verdict.
It does not know: what it is asked for next, or why.

A request is a frame: a JSON list (operation, operands), a newline, then the encoded arguments. An answer is a JSON list:
["v", value], ["v", null, arguments as they are now], ["stop"], or ["e", type name, built-in bases, message].
"""

from __future__ import annotations

import builtins
import json
import os
import socket
import sys
import types
from typing import Any, Final

from evaljobs.sandbox.box import codec

CHANNEL_FD: Final = 3
_SHORT: Final = 200  # characters of a name or message that an answer carries


class Agent:
    """Serves one program until the channel closes."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._handles: list[Any] = []
        self._encoder = codec.Encoder(self._make_handle)
        self._decoder = codec.Decoder(lambda body: self._handles[body[0]])
        self._globals: dict[str, Any] = {}
        for name in ("exit", "quit"):  # as the site module would, which the box does without
            setattr(builtins, name, sys.exit)

    def _make_handle(self, value: Any) -> list[Any]:
        self._handles.append(value)
        return [len(self._handles) - 1, callable(value)]

    def serve(self) -> None:
        """Answer requests until the checker is gone."""
        while (frame := codec.receive_frame(self._channel)) is not None:
            head, _, arguments = frame.partition(b"\n")
            try:
                operation, *operands = json.loads(head)
                answer = getattr(self, "_do_" + operation)(arguments, *operands)
            except BaseException as error:  # noqa: BLE001  (the program may raise anything, and it is an answer)
                answer = json.dumps(describe_error(error))
            codec.send_frame(self._channel, answer.encode())

    def _value(self, value: Any) -> str:
        return f'["v",{self._encoder.dumps(value)}]'

    # --- the program

    def _do_load(self, arguments: bytes) -> str:
        code, names = self._decoder.loads(arguments)
        exec(compile(code, "<candidate>", "exec"), self._globals)  # noqa: S102
        found = {name: _describe(self._globals[name]) for name in names if name in self._globals}
        return self._value(found)

    def _do_in_process(self, arguments: bytes) -> str:
        code, test, token = self._decoder.loads(arguments)
        exec(compile(code + "\n" + test, "<candidate and test>", "exec"), self._globals)  # noqa: S102
        return self._value(token)

    def _do_main(self, arguments: bytes) -> str:
        """Run a program that reads standard input and prints; its output does not pass through here."""
        code, text = self._decoder.loads(arguments)
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
        return self._value(None)

    # --- operations on the objects that it defined or returned

    def _do_call(self, arguments: bytes, handle: int) -> str:
        args, kwargs = self._decoder.loads(arguments)
        result = self._handles[handle](*args, **kwargs)
        if result is None and (
            any(map(codec.is_mutable, args)) or any(map(codec.is_mutable, kwargs.values()))
        ):
            now = self._encoder.dumps([args, kwargs])
            if now.encode() != arguments:
                return f'["v",null,{now}]'
        return self._value(result)

    def _do_get(self, _: bytes, handle: int, name: str) -> str:
        return self._value(getattr(self._handles[handle], name))

    def _do_set(self, arguments: bytes, handle: int, name: str) -> str:
        setattr(self._handles[handle], name, self._decoder.loads(arguments))
        return self._value(None)

    def _do_getitem(self, arguments: bytes, handle: int) -> str:
        return self._value(self._handles[handle][self._decoder.loads(arguments)])

    def _do_setitem(self, arguments: bytes, handle: int) -> str:
        key, value = self._decoder.loads(arguments)
        self._handles[handle][key] = value
        return self._value(None)

    def _do_iter(self, _: bytes, handle: int) -> str:
        iterator = iter(self._handles[handle])
        self._handles.append(iterator)
        return self._value(len(self._handles) - 1)

    def _do_next(self, _: bytes, handle: int) -> str:
        try:
            return self._value(next(self._handles[handle]))
        except StopIteration:
            return '["stop"]'

    def _do_builtin(self, _: bytes, handle: int, name: str) -> str:
        """len, bool, str or repr of an object."""
        return self._value(getattr(builtins, name)(self._handles[handle]))

    def _do_eq(self, _: bytes, left: int, right: int) -> str:
        return self._value(bool(self._handles[left] == self._handles[right]))

    def _do_isinstance(self, _: bytes, kind: int, handle: int) -> str:
        return self._value(isinstance(self._handles[handle], self._handles[kind]))


def _describe(value: Any) -> tuple[str, Any]:
    """What a global of the program is: ("module", name), ("exception", built-in bases) or ("value", itself)."""
    if isinstance(value, types.ModuleType):
        return ("module", value.__name__)
    if isinstance(value, type) and issubclass(value, BaseException):
        return ("exception", _bases(value))
    return ("value", value)


def _bases(kind: type) -> list[str]:
    return [k.__name__ for k in kind.__mro__ if k.__module__ == "builtins"]


def describe_error(error: BaseException) -> list[Any]:
    """An exception as data: ["e", name, names of its built-in bases, short message]."""
    try:
        message = str(error)[:_SHORT]
    except BaseException:  # noqa: BLE001  (a hostile __str__)
        message = ""
    return ["e", type(error).__name__[:_SHORT], _bases(type(error)), message]
