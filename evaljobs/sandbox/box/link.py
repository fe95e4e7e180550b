"""The checker's end of the line to the candidate: requests out, answers in, both as data.

Rule: every answer is parsed, bounded and typed before the test sees it; what is no answer is a fault that outlasts
whatever the test catches. Where an honest program and its test would need more than data can tell, that is noted, so that
its failure is told apart from a wrong answer.
It does not know: what is tested, how it is judged, or what a verdict is.
"""

from __future__ import annotations

import builtins
import collections
import json
import socket
import sys
from types import BuiltinFunctionType, TracebackType
from typing import Any, Final

from evaljobs.sandbox.box import codec
from evaljobs.sandbox.box.frames import FrameError, receive_frame, send_frame
from evaljobs.sandbox.box.remote import (
    NOTHING,
    SUBJECT,
    Remote,
    RemoteCallable,
    is_remote,
    number_of,
    own_of,
    rank_of,
    set_rank,
    with_own,
)
from evaljobs.sandbox.box.shared import MUTABLE, Shared, holds

Outcome = tuple[str, str]  # verdict, reason
SHORT: Final = 200
_MESSAGE: Final = 2000  # characters of an exception's message
_KINDS: Final = 1000  # exception classes of one program
_CONTAINERS: Final = (tuple, frozenset, *MUTABLE)
_DATA_MODULES: Final = frozenset({"datetime", "decimal", "_decimal", "fractions", "numpy"})


class CandidateDeadError(BaseException):
    """The candidate's process is gone, or what it sends is no answer. BaseException: tests catch Exception."""


class CandidateExitError(BaseException):
    """The program raised SystemExit, KeyboardInterrupt or another exception that is not an Exception."""


class NeedsSharedProcessError(BaseException):
    """The test hands over an object that is not data."""


class Link:
    """Asks the candidate."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        shared = self._shared = Shared(2)
        self._encoder = codec.Encoder(self._to_handle, shared)
        self._decoder = codec.Decoder(self._from_handle, shared)
        self._encoder.is_handle = lambda value: own_of(value) is not None
        self._decoder.make_own = self._make_own
        self._owned: dict[int, Any] = {}  # texts and numbers that are objects of the program, too, by handle
        self._encoder.class_handle = lambda kind: getattr(kind, "_kind_number", None)
        self._decoder.make_class = self._tuple_class
        self._encoder.arguments = self._arguments
        shared.on_mention = self._mention
        self._remotes: dict[int, Remote] = {}
        self._tuples: dict[int, type[Any]] = {}  # namedtuple classes of the program, by handle
        self._kinds: dict[int, type[BaseException]] = {}  # exception classes of the program, by handle
        self._broad: dict[
            type[BaseException], type[BaseException]
        ] = {}  # classes that catch a failed assertion → what stands for them
        self._stdout = sys.stdout
        self._decoding = False  # a value in the making asks for a hash: the halves are not whole
        self._seen: list[
            tuple[Remote, int | None]
        ] = []  # what the answer in hand names, with its rank, None if new
        self.subjects: set[int] = set()  # handles of classes whose objects the test is about
        self.has_subjects = False  # whether there have been any
        self.fault: Outcome | None = None  # set once the candidate is dead or its answers are unusable
        self._loaded: collections.Counter[int] = (
            collections.Counter()
        )  # handles → how often the loaded program named them
        self.needs_shared_process: str | None = None
        self.unasked: str | None = None  # what an honest program might have answered, and was not asked

    # --- handles

    def _to_handle(self, value: Any) -> list[Any]:
        own = own_of(value)
        if own is not None or is_remote(value):
            return [number_of(value if own is None else own)]
        if isinstance(value, BaseException) and is_remote(own := vars(value).get("_own")):
            return [number_of(own)]
        if isinstance(value, (type, BuiltinFunctionType)):
            for number, kind in self._kinds.items():
                if kind is value:
                    return [number]
            value = next((kind for kind, own in self._broad.items() if own is value), value)
            name = str(value.__name__)
            if vars(builtins).get(name) is value:
                return [name]
        if type(value).__module__.partition(".")[0] in _DATA_MODULES:
            # Such a value may come from the candidate, which must not choose how it is judged.
            raise TypeError(f"the test passes a {type(value).__name__} that has no data form")
        self.needs_shared_process = f"the test passes a {type(value).__name__}"
        raise NeedsSharedProcessError(self.needs_shared_process)

    def _from_handle(self, body: list[Any]) -> Any:
        number, is_callable, *names = body
        if type(number) is str:
            kind = vars(builtins).get(number)
            if kind is None or not codec.is_plain_class(kind):
                raise codec.CodecError("not a built-in class of data")
            return self._caught(kind)
        if type(number) is not int or number < 0:
            raise codec.CodecError("a malformed handle")
        if names:
            return self._kind(number, *names)
        remote = self._remotes.get(number)
        if remote is None:
            remote = self._remotes[number] = (RemoteCallable if is_callable else Remote)(self, number)
            self._seen.append((remote, None))
        else:
            self._return(remote)
        return remote

    def _make_own(self, body: list[Any], data: Any) -> Any:
        remote = self._from_handle(body)
        if not is_remote(remote):
            raise codec.CodecError("a malformed value")
        number = number_of(remote)
        if number not in self._owned:
            self._owned[number] = with_own(data, remote)
        return self._owned[number]

    def _return(self, remote: Remote) -> None:
        self._seen.append((remote, rank_of(remote)))
        set_rank(remote, NOTHING)  # whoever returned it may have been asked for data
        self.subjects.discard(number_of(remote))  # a class that the program hands out is any callable

    def _mention(self, content: list[Any]) -> None:
        """The candidate names a shared value that both know, and with it all that this holds."""
        if not self.has_subjects:
            return
        seen: set[int] = set()
        waiting: list[Any] = [content]
        while waiting:
            for value in waiting.pop():
                if is_remote(value):
                    self._return(value)
                elif isinstance(value, _CONTAINERS) and id(value) not in seen:
                    seen.add(id(value))
                    waiting.append(holds(value) if isinstance(value, MUTABLE) else list(value))

    def _caught(self, kind: type[Any]) -> type[Any]:
        """What stands for a class that the candidate names: an own one, where `except` of it would catch the test's failed
        assertions.
        """
        if not issubclass(AssertionError, kind) or kind is object:
            return kind
        if kind not in self._broad:
            self._broad[kind] = type(kind.__name__, (kind,), {})
        return self._broad[kind]

    def _arguments(self, value: Any) -> tuple[Any, ...] | None:
        """Arguments to make an exception of the program's or of Python's again, None for any other value. The program must
        not have a test share its process by giving it an exception class where it expects a function.
        """
        if not isinstance(value, BaseException) or is_remote(vars(value).get("_own")):
            return None
        kind = type(value)
        known = (*self._kinds.values(), *self._broad.values())
        return value.args if kind in known or vars(builtins).get(kind.__name__) is kind else None

    def _kind(self, number: int, module: Any, names: Any) -> type[BaseException]:
        """A local class that stands for an exception class of the program: the test's own where it is the library's, else a
        new one. `names` are its own and those of its bases.
        """
        if type(names) is not list or not names or not all(type(n) is str for n in names) or len(names) > 100:
            raise codec.CodecError("a malformed class")
        if number in self._kinds:
            return self._kinds[number]
        if len(self._kinds) > _KINDS:
            return _builtin_exception(names)
        if type(module) is str and module.partition(".")[0] in sys.stdlib_module_names:
            kind = vars(sys.modules.get(module, builtins)).get(names[0])
            if isinstance(kind, type) and issubclass(kind, BaseException):
                kind = self._caught(kind)
                self._kinds[number] = kind
                return kind
        known = {kind.__name__: kind for kind in self._kinds.values()}
        base = next((known[name] for name in names[1:] if name in known), None)
        base = base or _builtin_exception(names[1:])
        name = names[0][:SHORT].replace("\0", "")
        self._kinds[number] = type(name, (base,), {"__str__": _say, "__getattr__": _look_up})
        return self._kinds[number]

    def _tuple_class(self, number: int | None, name: str, fields: list[str]) -> type[Any]:
        """A local namedtuple class that stands for the program's; its methods are the program's."""
        if number is None or len(self._tuples) > _KINDS:
            return codec.named_class(number, name, fields)
        kind = self._tuples.get(number)
        if kind is None or list(getattr(kind, "_fields", ())) != fields:

            def look_up(value: Any, attribute: str) -> Any:
                if attribute.startswith("__"):
                    raise AttributeError(attribute)
                return self.ask("get", value, attribute)

            body = {"_kind_number": number, "__getattr__": look_up, "__slots__": ()}
            kind = self._tuples[number] = type(name, (codec.named_class(number, name, fields),), body)
        return kind

    # --- questions

    def note_unasked(self, name: str, *operands: object) -> None:
        """Remember a question that only the candidate's own word could answer, and that it was not asked."""
        if self.unasked is None:
            what = " and ".join(_describe(value) for value in operands)
            self.unasked = f"not asked of the program: {name} of {what}"

    def ask(self, operation: str, *operands: object) -> Any:
        """One request and its answer's value; exceptions of the candidate as local ones."""
        return self._exchange(operation, operands)[0]

    def make(self, operation: str, *operands: object, new: int | None) -> Any:
        """Like `ask`, for what the test makes: the rank of an object that only this answer names, and as its value alone,
        stays what it was, and is `new` (if given) where nobody has seen it before.
        """
        value, seen = self._exchange(operation, operands)
        if is_remote(value):
            ranks = [rank for remote, rank in seen if remote is value]
            rank = ranks[0] if len(ranks) == 1 else NOTHING
            rank = new if rank is None else rank
            if rank is not None:
                set_rank(value, rank)
        return value

    def _exchange(
        self, operation: str, operands: tuple[object, ...]
    ) -> tuple[Any, list[tuple[Remote, int | None]]]:
        self.send(operation, *operands)
        before, self._seen = self._seen, []
        try:
            return self.receive(is_next=operation == "next"), self._seen
        finally:
            # What is asked while an answer is decoded belongs to that answer.
            self._seen = before + self._seen if self._decoding else before

    def call(self, remote: Remote, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call an object of the candidate."""
        operands = remote, args, tuple(kwargs.items())
        if number_of(remote) in self.subjects:
            return self.make("make", *operands, new=SUBJECT)
        return self.ask("call", *operands)

    def load(self, code: str, wanted: tuple[str, ...]) -> Any:
        """Run the program. What the names stand for in it: as `ask`."""
        found, seen = self._exchange("load", (code, wanted))
        self._loaded = collections.Counter(number_of(remote) for remote, _ in seen)
        return found

    def learn_subjects(self, classes: list[Any]) -> None:
        """Classes whose objects the test is about, unless the program has other names for them, too."""
        numbers = {number_of(kind) for kind in classes if is_remote(kind)}
        self.subjects = {number for number in numbers if self._loaded[number] == 1}
        self.has_subjects = bool(self.subjects)

    def is_instance(self, kind: Remote, value: object) -> bool:
        """Whether the candidate's class counts a value as its own."""
        if own_of(value) is not None:
            return self.ask("isinstance", value, kind) is True
        if not is_remote(value):
            kind_number = getattr(type(value), "_kind_number", None)
            return kind_number is not None and kind_number == number_of(kind)
        return self.ask("isinstance", value, kind) is True

    def type_of(self, value: object) -> Any:
        """The class of a value, for the test: of the program's objects, its own."""
        if own_of(value) is None and not is_remote(value):
            number = getattr(type(value), "_kind_number", None)
            return self._remotes.get(number, type(value)) if number is not None else type(value)
        known = set(self.subjects)
        kind, seen = self._exchange("type", (value,))
        if is_remote(kind) and len(seen) == 1:
            self.subjects |= known & {
                number_of(kind)
            }  # that the test asked for it by `type` hands nothing out
        if not is_remote(kind) and kind is not object:
            raise TypeError("an object of the program has the class of plain data")
        return kind

    def leave(self, manager: Remote, error: BaseException | None, trace: TracebackType | None) -> bool:
        """End a `with` block. Whether its exception goes no further: only one that the test's text raises, and no failed
        assertion, may end there at the candidate's word.
        """
        if error is None:
            self.ask("leave", manager, ())
            return False
        own = vars(error).get("_own")
        kind = next(k for k in type(error).__mro__ if k in self._kinds.values() or k.__module__ == "builtins")
        given = (own,) if is_remote(own) else (kind, str(error)[:_MESSAGE])
        suppressed = self.ask("leave", manager, given) is True
        if suppressed and (isinstance(error, AssertionError) or not _is_raised_by_test(trace)):
            self.note_unasked("__exit__", manager, error)
            return False
        return suppressed

    # --- frames

    def send(self, operation: str, *operands: object) -> None:
        """Send a request."""
        self._encoder.begin()
        arguments = self._encoder.dumps(operands)
        head = json.dumps([operation, sys.stdout is not self._stdout, self._decoding])
        try:
            news = ("[]", "[]") if self._decoding else self._encoder.news()
            body = f"{head}\n[{arguments},{','.join(news)}]"
            send_frame(self._channel, body.encode())
        except OSError:
            raise self._fail("crash", "the candidate's process ended") from None
        except FrameError as error:
            raise self._fail("fail", f"unsupported: request refused: {error}") from None

    def receive(self, *, is_next: bool = False) -> Any:
        """The value of a good answer; raises what the program raised."""
        handed = set(self._broad)
        answer = self._answer()
        tag, body, *more = answer if len(answer) > 1 else (*answer, None)
        if len(more) > 1 and isinstance(more[1], list):
            self._shared.forget(more[1])
        if len(more) > 2 and isinstance(more[2], str) and sys.stdout is not self._stdout:
            sys.stdout.write(more[2])
        if tag == "v":
            return body
        if tag == "stop" and is_next:
            raise StopIteration
        raise self._exception(tag, body, handed)

    def _answer(self) -> list[Any]:
        before, self._decoding = self._decoding, True
        try:
            frame = receive_frame(self._channel)
            answer = None if frame is None else self._decoder.loads(frame)
        except OSError:
            frame = None
        except (FrameError, codec.CodecError) as error:
            raise self._fail("fail", f"answer refused: {error}") from None
        finally:
            self._decoding = before
        if frame is None:
            raise self._fail("crash", "the candidate's process ended")
        if not isinstance(answer, list) or not 0 < len(answer) < 6:
            raise self._fail("fail", "answer refused: not a list")
        return answer

    def _fail(self, verdict: str, reason: str) -> CandidateDeadError:
        self.fault = self.fault or (verdict, reason)
        return CandidateDeadError(reason)

    def _exception(self, tag: Any, body: Any, handed: set[Any]) -> BaseException:
        """The exception that an answer tells of; `handed` are the broad classes that the test may know by another name."""
        if tag != "e" or not isinstance(body, tuple) or len(body) != 4:
            return self._fail("fail", "answer refused: neither a value nor an exception")
        kind, message, args, own = body
        if not (isinstance(kind, type) and issubclass(kind, BaseException)) or not isinstance(message, str):
            return self._fail("fail", "answer refused: not an exception")
        broad = next((known for known, own in self._broad.items() if own is kind), None)
        if broad is not None and broad not in handed:
            kind = broad  # as raised, it is Python's own
            del self._broad[kind]
        if issubclass(kind, (StopIteration, StopAsyncIteration)):
            # It would end a loop of the test over map(), unseen.
            return RuntimeError(f"the program raised {kind.__name__}")
        if not issubclass(kind, Exception):
            return CandidateExitError(f"{kind.__name__}: {message[:SHORT]}")
        error = _make_error(kind, message[:_MESSAGE], args if isinstance(args, tuple) else None)
        if is_remote(own) and kind in self._kinds.values():
            vars(error).update(_own=own, _text=message[:_MESSAGE])
        return error


def _describe(value: object) -> str:
    return "an object of the program" if is_remote(value) else f"a {type(value).__name__}"


def _say(error: BaseException) -> str:
    """`str()` of a program's exception."""
    text = vars(error).get("_text")
    library: Any = next(kind for kind in type(error).__mro__ if kind.__module__ == "builtins")
    return text if isinstance(text, str) else str(library.__str__(error))


def _look_up(error: BaseException, name: str) -> Any:
    """An attribute that only the program's own exception has."""
    own = vars(error).get("_own")
    if own is None or name.startswith("__"):
        raise AttributeError(name)
    return getattr(own, name)


def _make_error(kind: type[BaseException], message: str, args: tuple[Any, ...] | None) -> BaseException:
    for arguments in (args, (message,)):
        try:
            if arguments is not None:
                return kind(*arguments)
        except Exception:  # noqa: BLE001, S112  (UnicodeDecodeError and its like want more)
            continue
    return kind.__new__(kind, message)


def _builtin_exception(names: list[str]) -> type[BaseException]:
    """The most derived built-in exception among these; BaseException if there is none."""
    for name in names:
        kind = vars(builtins).get(name)
        if isinstance(kind, type) and issubclass(kind, BaseException):
            return kind
    return BaseException


def _is_raised_by_test(trace: TracebackType | None) -> bool:
    """Whether an exception comes from a `raise` in the test's own text."""
    import opcode  # noqa: PLC0415  (rare, and the box must stay small)

    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None:
        return False
    code = trace.tb_frame.f_code
    return code.co_filename == "<test>" and opcode.opname[code.co_code[trace.tb_lasti]] == "RAISE_VARARGS"
