"""The test's connection to the program: requests out, answers in, both as data.

Rule: every answer is parsed, bounded and typed before the test sees it. An invalid answer, or an
operation that a handle does not allow, is a fault that holds whatever the test catches. Called from
`checker` and from handles.
"""

from __future__ import annotations

import builtins
import json
import socket
import sys
from types import BuiltinFunctionType
from typing import Any, Final

from evaljobs.sandbox.rpc import codec
from evaljobs.sandbox.rpc.arguments import Arguments
from evaljobs.sandbox.rpc.frames import FrameError, receive_frame, send_frame
from evaljobs.sandbox.rpc.handle import Handle, is_handle, number_of

Outcome = tuple[str, str]  # verdict, reason
SHORT: Final = 200  # most characters of a text that a reason quotes
_MESSAGE: Final = 2000  # most characters of an exception's message


class FaultError(BaseException):
    """The test cannot go on; `Link.fault` has the verdict. A BaseException: tests catch Exception."""


class CandidateExitError(BaseException):
    """The program raised SystemExit, KeyboardInterrupt or another BaseException."""


class Link:
    """Sends requests to the program's process."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._encoder = codec.Encoder(self._to_handle)
        self._decoder = codec.Decoder(self._from_handle)
        self._handles: dict[int, Handle] = {}
        self._arguments = Arguments()  # arguments of the pending request
        self._stdout = sys.stdout
        self.fault: Outcome | None = None  # set once the verdict is final

    def _to_handle(self, value: Any) -> int | str:
        if is_handle(value):
            return number_of(value)
        if isinstance(value, (type, BuiltinFunctionType)):
            name = str(value.__name__)
            if vars(builtins).get(name) is value:
                return name
        raise self.unsupported(f"the test passes a {type(value).__name__} to the program")

    def _from_handle(self, body: Any) -> Any:
        if type(body) is str and body in codec.CLASSES:
            return codec.CLASSES[body]
        if type(body) is not int or body < 0:
            raise codec.CodecError("a malformed handle")
        if body not in self._handles:
            self._handles[body] = Handle(self, body)
        return self._handles[body]

    def unsupported(self, what: str) -> FaultError:
        """Fail the program with its own reason, where an operation cannot cross."""
        return self._fail("fail", f"unsupported: {what}")

    def _fail(self, verdict: str, reason: str) -> FaultError:
        self.fault = self.fault or (verdict, reason)
        return FaultError(reason)

    # --- questions

    def ask(self, operation: str, *operands: object) -> Any:
        """Send one request and return its answer; the program's exceptions are raised here."""
        self.send(operation, *operands)
        return self.receive(is_next=operation == "next")

    def send(self, operation: str, *operands: object) -> None:
        """Send a request."""
        self._arguments = Arguments()
        try:
            body = self._encoder.dumps(operands, self._arguments, naming=True)
            head = json.dumps([operation, sys.stdout is not self._stdout])
            send_frame(self._channel, f"{head}\n{body}".encode())
        except OSError:
            raise self._fail("crash", "the program's process ended") from None
        except RecursionError:
            raise self.unsupported("an argument holds itself, or is nested too deeply") from None
        except FrameError as error:
            raise self.unsupported(f"request refused: {error}") from None

    def receive(self, *, is_next: bool = False) -> Any:
        """The value of a good answer, or the program's exception. Updates changed arguments."""
        tag, body, changes, output = self._answer()
        try:
            self._arguments.change(changes)
        except Exception as error:  # noqa: BLE001  (hostile content fails in any way)
            raise self._fail("fail", f"answer refused: {type(error).__name__} in its changes") from None
        if isinstance(output, str) and sys.stdout is not self._stdout:
            sys.stdout.write(output)
        if tag == "v":
            return body
        if tag == "stop" and is_next:
            raise StopIteration
        if tag == "u" and type(body) is str:
            raise self.unsupported(body[:SHORT])
        raise self._exception(tag, body)

    def _answer(self) -> list[Any]:
        try:
            frame = receive_frame(self._channel)
            answer = None if frame is None else self._decoder.loads(frame, self._arguments)
        except OSError:
            frame = None
        except (FrameError, codec.CodecError) as error:
            raise self._fail("fail", f"answer refused: {error}") from None
        if frame is None:
            raise self._fail("crash", "the program's process ended")
        if type(answer) is not list or len(answer) not in (2, 4):
            raise self._fail("fail", "answer refused: not a list of two or four")
        return answer if len(answer) > 2 else [*answer, [], ""]

    def _exception(self, tag: Any, body: Any) -> BaseException:
        if tag != "e" or type(body) is not list or len(body) != 3 or type(body[1]) is not str:
            return self._fail("fail", "answer refused: neither a value nor an exception")
        kinds, message, args = body
        kind = _exception_class(kinds)
        if issubclass(kind, (StopIteration, StopAsyncIteration)):
            # It would end a loop of the test over map(), unseen.
            return RuntimeError(f"the program raised {kind.__name__}")
        if not issubclass(kind, Exception):
            return CandidateExitError(f"{kind.__name__}: {message[:SHORT]}")
        return _make_error(kind, message[:_MESSAGE], args)


def _exception_class(kinds: Any) -> type[BaseException]:
    """The first standard exception class among these (module, name) pairs, most derived first.

    BaseException if there is none. A class of the program becomes the nearest base that a test can
    name.
    """
    for pair in kinds if type(kinds) is list else ():
        if type(pair) is list and len(pair) == 2 and all(type(text) is str for text in pair):
            module, name = pair
            known = module.partition(".")[0] in sys.stdlib_module_names and module in sys.modules
            kind = vars(sys.modules[module]).get(name) if known else None
            if isinstance(kind, type) and issubclass(kind, BaseException):
                return kind
    return BaseException


def _make_error(kind: type[BaseException], message: str, args: Any) -> BaseException:
    for arguments in (args, (message,)):
        try:
            if isinstance(arguments, (list, tuple)):
                return kind(*arguments)
        except Exception:  # noqa: BLE001, S112  (UnicodeDecodeError and its like want more)
            continue
    return kind.__new__(kind, message)
