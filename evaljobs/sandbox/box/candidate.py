"""The untrusted side: runs the candidate's program and answers the checker's requests about it.

Rule: nothing here is relied upon. The program shares this process and can change all of it; what leaves is data, and
the checker judges it as such. This process never holds a test, an expected value or a verdict.
It does not know: what it is asked for next, or why.

A request is a frame: a JSON list (operation, whether to capture standard output, whether the checker asks while it decodes
an answer), a newline, then a list of the operands,
shared values that changed, and numbers of those no longer held. An answer is such a list, too: "v" and a value, "stop"
and null, or "e" and (class, message, arguments or None, the exception or None); changes; numbers; captured output.
"""

from __future__ import annotations

import builtins
import contextlib
import copy
import io
import json
import math
import operator
import os
import socket
import sys
import types
from collections.abc import Callable
from typing import Any, Final

from evaljobs.sandbox.box import codec
from evaljobs.sandbox.box.frames import receive_frame, send_frame
from evaljobs.sandbox.box.remote import OPERATORS
from evaljobs.sandbox.box.shared import Shared

CHANNEL_FD: Final = 3
_SHORT: Final = 2000  # characters of a message that an answer carries
_NAME: Final = 200


class Agent:
    """Serves one program until the channel closes."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._handles: list[Any] = []
        self._numbers: dict[int, int] = {}  # id of an object → its handle
        shared = self._shared = Shared(1)
        self._encoder = codec.Encoder(self._make_handle, shared)
        self._decoder = codec.Decoder(self._from_handle, shared)
        self._wholes: set[int] = set()  # ids of data that crosses as a handle
        self._encoder.is_handle = lambda value: id(value) in self._wholes
        self._encoder.own_handle = self._own_handle
        self._encoder.class_handle = lambda kind: self._make_handle(kind)[0]
        self._decoder.make_class = self._tuple_class
        self._decoder.own_tags["x"] = lambda body: body[0](*body[1])
        self._globals: dict[str, Any] = {}
        for name in ("exit", "quit"):  # as the site module would, which the box does without
            setattr(builtins, name, sys.exit)

    def _make_handle(self, value: Any) -> list[Any]:
        if type(value) is _Whole:
            value = value.value
            self._wholes.add(id(value))
        if codec.is_plain_class(value) and vars(builtins).get(name := str(value.__name__)) is value:
            return [name, True]
        number = self._numbers.get(id(value))
        if number is None:
            number = self._numbers[id(value)] = len(self._handles)
            self._handles.append(value)
        if isinstance(value, type) and issubclass(value, BaseException):
            return [number, True, value.__module__, [kind.__name__[:_NAME] for kind in value.__mro__]]
        return [number, callable(value)]

    def _own_handle(self, value: Any) -> list[Any] | None:
        return None if vars(builtins).get(type(value).__name__) is type(value) else self._make_handle(value)

    def _from_handle(self, body: list[Any]) -> Any:
        return vars(builtins)[body[0]] if isinstance(body[0], str) else self._handles[body[0]]

    def _tuple_class(self, number: int | None, name: str, fields: list[str]) -> type[Any]:
        kind: type[Any] = codec.named_class(None, name, fields) if number is None else self._handles[number]
        return kind

    def serve(self) -> None:
        """Answer requests until the checker is gone."""
        while (frame := receive_frame(self._channel)) is not None:
            head, _, arguments = frame.partition(b"\n")
            operation, capture, inner = json.loads(head)
            output = ""
            if capture:
                with contextlib.redirect_stdout(io.StringIO()) as buffer:
                    answer = self._answer(operation, arguments)
                output = buffer.getvalue()
            else:
                answer = self._answer(operation, arguments)
            # Now that no frame of ours holds what the program has let go. In the midst of the checker's decoding the halves
            # are not to be compared.
            news = ("[]", "[]") if inner else self._encoder.news()
            if output or news != ("[]", "[]"):
                answer = f"{answer[:-1]},{','.join(news)},{json.dumps(output)}]"
            send_frame(self._channel, answer.encode())

    def _answer(self, operation: str, arguments: bytes) -> str:
        self._encoder.begin()
        try:
            operands, _, dropped = self._decoder.loads(arguments)
            self._shared.forget(dropped)
            return f'["v",{self._encoder.dumps(getattr(self, "_do_" + operation)(*operands))}]'
        except _StopError:
            return '["stop",null]'
        except BaseException as error:  # noqa: BLE001  (the program may raise anything, and it is an answer)
            return self._refusal(error)

    def _refusal(self, error: BaseException) -> str:
        """An exception as data: its class, short message, arguments if they are plain, and itself if it may have more."""
        own = vars(builtins).get(type(error).__name__) is not type(error)
        with contextlib.suppress(BaseException):  # a hostile __str__ or class
            args = error.args if all(type(v) in _PLAIN for v in error.args) else None
            error.__traceback__ = None  # it would keep what the program has let go
            message = str(error)[:_SHORT]
            return f'["e",{self._encoder.dumps((type(error), message, args, error if own else None))}]'
        kind = next(k for k in type(error).__mro__ if vars(builtins).get(k.__name__) is k)
        return f'["e",{self._encoder.dumps((kind, "", None, None))}]'

    # --- the program

    def _do_load(self, code: str, names: tuple[str, ...]) -> Any:
        exec(compile(code, "<candidate>", "exec"), self._globals)  # noqa: S102
        return {name: _describe(self._globals[name]) for name in names if name in self._globals}

    def _do_in_process(self, code: str, test: str, token: str) -> str:
        exec(compile(code + "\n" + test, "<candidate and test>", "exec"), self._globals)  # noqa: S102
        return token

    def _do_main(self, code: str, text: str) -> None:
        """Run a program that reads standard input and prints; its output does not pass through here."""
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

    # --- operations on the objects that it defined or returned

    def _do_call(self, function: Any, args: tuple[Any, ...], kwargs: tuple[Any, ...]) -> Any:
        return function(*args, **dict(kwargs))

    def _do_make(self, kind: Any, args: tuple[Any, ...], kwargs: tuple[Any, ...]) -> Any:
        """Call a class whose objects the test is about: also one that is a list, say, is asked for all that it does."""
        made = kind(*args, **dict(kwargs))
        return _Whole(made) if isinstance(kind, type) and type(made) is kind else made

    def _do_get(self, value: Any, name: str) -> Any:
        return getattr(value, name)

    def _do_set(self, value: Any, name: str, item: Any) -> None:
        setattr(value, name, item)

    def _do_delete(self, value: Any, name: str) -> None:
        delattr(value, name)

    def _do_getitem(self, value: Any, key: Any) -> Any:
        return value[key]

    def _do_setitem(self, value: Any, key: Any, item: Any) -> None:
        value[key] = item

    def _do_delitem(self, value: Any, key: Any) -> None:
        del value[key]

    def _do_contains(self, value: Any, item: Any) -> bool:
        return item in value

    def _do_iter(self, value: Any) -> Any:
        return iter(value)

    def _do_next(self, value: Any) -> Any:
        try:
            return next(value)
        except StopIteration:
            raise _StopError from None

    def _do_reversed(self, value: Any) -> Any:
        return reversed(value)

    def _do_len(self, value: Any) -> int:
        return len(value)

    def _do_bool(self, value: Any) -> bool:
        return bool(value)

    def _do_str(self, value: Any) -> str:
        return str(value)

    def _do_repr(self, value: Any) -> str:
        return repr(value)

    def _do_format(self, value: Any, spec: str) -> str:
        return format(value, spec)

    def _do_dir(self, value: Any) -> list[str]:
        return dir(value)

    def _do_type(self, value: Any) -> type[Any]:
        return type(value)

    def _do_hash(self, value: Any) -> int:
        return hash(value)

    def _do_copy(self, value: Any) -> Any:
        return copy.copy(value)

    def _do_deepcopy(self, value: Any) -> Any:
        return copy.deepcopy(value)

    def _do_operate(self, name: str, *operands: Any) -> Any:
        if name not in OPERATORS:
            raise ValueError(name)
        function: Callable[..., Any] = _FUNCTIONS.get(name) or getattr(operator, name)
        return function(*operands)

    def _do_isinstance(self, value: Any, kind: Any) -> bool:
        return isinstance(value, kind)

    def _do_issubclass(self, value: Any, kind: Any) -> bool:
        return issubclass(value, kind)

    def _do_enter(self, value: Any) -> Any:
        return type(value).__enter__(value)

    def _do_leave(self, value: Any, raised: tuple[Any, ...]) -> bool:
        """Leave a `with` block: after nothing, an exception of the program, or one of the test by class and message."""
        if not raised:
            type(value).__exit__(value, None, None, None)
            return False
        error = raised[0] if len(raised) == 1 else raised[0](raised[1])
        return bool(type(value).__exit__(value, type(error), error, None))


class _Whole:
    """Says of a value that it crosses as a handle, data or not."""

    def __init__(self, value: Any) -> None:
        self.value = value


class _StopError(Exception):
    """An iterator's end, which is no exception of the program's."""


_PLAIN: Final = frozenset({str, int, float, bool, type(None)})
_FUNCTIONS: Final[dict[str, Callable[..., Any]]] = {
    "and": operator.and_,
    "or": operator.or_,
    "int": int,
    "float": float,
    "complex": complex,
    "divmod": divmod,
    "round": round,
    "trunc": math.trunc,
    "floor": math.floor,
    "ceil": math.ceil,
}


def _describe(value: Any) -> tuple[str, Any]:
    """What a global of the program is: ("module", name) or ("value", itself)."""
    return ("module", value.__name__) if isinstance(value, types.ModuleType) else ("value", value)
