"""The trusted side: runs the test and decides, in another process than the program that it tests.

Rule: a verdict rests on what the test concludes from data. The program's names stand in the test as `Remote` objects
that ask the candidate over the codec; no object of the program, no exit status, output or file of it decides, but for a
program whose answer is its standard output. A dead or babbling candidate is remembered, whatever the test catches.
It does not know: processes, limits or deadlines; another process ends this one when time is up.
"""

from __future__ import annotations

import builtins
import json
import os
import socket
from typing import Any, Final

from evaljobs.sandbox.box import codec, names

MAX_OUTPUT: Final = 16 << 20  # bytes of standard output that are read
_SHORT: Final = 200
_DATA_MODULES: Final = frozenset({"datetime", "decimal", "_decimal", "fractions", "numpy"})
Outcome = tuple[str, str]  # verdict, reason


class CandidateDeadError(BaseException):
    """The candidate's process is gone, or what it sends is no answer. BaseException: tests catch Exception."""


class CandidateExitError(BaseException):
    """The program raised SystemExit, KeyboardInterrupt or another exception that is not an Exception."""


class NeedsSharedProcessError(BaseException):
    """The test hands over an object that is not data."""


class Remote:
    """An object of the candidate. It has no value of its own: comparing it with data is False, arithmetic an error."""

    __slots__ = ("_link", "_number")

    def __init__(self, link: Link, number: int) -> None:
        object.__setattr__(self, "_link", link)
        object.__setattr__(self, "_number", number)

    def _ask(self, operation: str, *operands: object, arguments: object = None) -> Any:
        return self._link.ask([operation, self._number, *operands], arguments)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name not in ("__name__", "__doc__"):
            raise AttributeError(
                name
            )  # protocols that libraries look for: a candidate's word for a number is no number
        return self._ask("get", name)

    def __setattr__(self, name: str, value: object) -> None:
        self._ask("set", name, arguments=value)

    def __getitem__(self, key: object) -> Any:
        return self._ask("getitem", arguments=key)

    def __setitem__(self, key: object, value: object) -> None:
        self._ask("setitem", arguments=(key, value))

    def __iter__(self) -> Any:
        number = self._ask("iter")
        while True:
            try:
                value = self._link.ask(["next", number], None)
            except StopIteration:
                return
            yield value

    def __next__(self) -> Any:
        return self._ask("next")

    def __len__(self) -> int:
        return int(self._typed("len", int))

    def __bool__(self) -> bool:
        return bool(self._typed("bool", bool))

    def __str__(self) -> str:
        return str(self._typed("str", str))

    def __repr__(self) -> str:
        return str(self._typed("repr", str))

    def _typed(self, name: str, kind: type[Any]) -> Any:
        value = self._ask("builtin", name)
        if type(value) is not kind:
            raise TypeError(f"{name}() of the candidate's object is no {kind.__name__}")
        return value

    def __eq__(self, other: object) -> bool:
        # Two objects of the candidate may be compared by it: no expected value is involved.
        if isinstance(other, Remote):
            return self._number == _number_of(other) or self._ask("eq", _number_of(other)) is True
        return False

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(self._number)

    def __instancecheck__(self, instance: object) -> bool:
        return isinstance(instance, Remote) and self._ask("isinstance", _number_of(instance)) is True


def _number_of(remote: Remote) -> int:
    number: int = object.__getattribute__(remote, "_number")
    return number


class RemoteCallable(Remote):
    """An object of the candidate that can be called."""

    __slots__ = ()

    def __call__(self, *args: object, **kwargs: object) -> Any:
        return self._link.call(self._number, args, kwargs)


class Link:
    """Asks the candidate."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._encoder = codec.Encoder(self._to_handle)
        self._decoder = codec.Decoder(self._from_handle)
        self._exceptions: dict[str, type[BaseException]] = {}
        self.fault: Outcome | None = None  # set once the candidate is dead or its answers are unusable

    def _to_handle(self, value: Any) -> list[Any]:
        if isinstance(value, Remote):
            return [_number_of(value)]
        if type(value).__module__.partition(".")[0] in _DATA_MODULES:
            # Such a value may come from the candidate, which must not choose how it is judged.
            raise TypeError(f"the test passes a {type(value).__name__} that has no data form")
        raise NeedsSharedProcessError(f"the test passes a {type(value).__name__}")

    def _from_handle(self, body: list[Any]) -> Remote:
        number, is_callable = body
        if type(number) is not int or number < 0:
            raise codec.CodecError("a malformed handle")
        return (RemoteCallable if is_callable else Remote)(self, number)

    def learn_exception(self, name: str, bases: list[str]) -> type[BaseException]:
        """A local class that stands for an exception class of the program."""
        self._exceptions[name] = type(name, (_builtin_exception(bases),), {})
        return self._exceptions[name]

    def _fail(self, verdict: str, reason: str) -> CandidateDeadError:
        self.fault = self.fault or (verdict, reason)
        return CandidateDeadError(reason)

    def encode(self, value: object) -> str:
        """Arguments of a request as text."""
        return self._encoder.dumps(value)

    def ask(self, head: list[Any], arguments: object) -> Any:
        """One request and its answer's value; exceptions of the candidate as local ones of a built-in type."""
        return self._exchange(head, self.encode(arguments))[0]

    def call(self, number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call an object of the candidate. Where it returns None, changes that it made to lists and the like are
        repeated on the caller's objects.
        """
        value, *now = self._exchange(["call", number], self.encode([list(args), kwargs]))
        if now:
            _repeat_changes([list(args), kwargs], now[0])
        return value

    def _exchange(self, head: list[Any], arguments: str) -> list[Any]:
        self.send(head, arguments)
        return self.receive(is_next=head[0] == "next")

    def send(self, head: list[Any], arguments: str) -> None:
        """Send a request, its arguments encoded already."""
        try:
            codec.send_frame(self._channel, f"{json.dumps(head)}\n{arguments}".encode())
        except OSError:
            raise self._fail("crash", "the candidate's process ended") from None
        except codec.CodecError as error:
            raise self._fail("fail", f"request refused: {error}") from None

    def receive(self, *, is_next: bool = False) -> list[Any]:
        """What follows the tag of a good answer: its value, and for a call perhaps the arguments as they are now."""
        try:
            frame = codec.receive_frame(self._channel)
        except OSError:
            frame = None
        except codec.CodecError as error:
            raise self._fail("fail", f"answer refused: {error}") from None
        if frame is None:
            raise self._fail("crash", "the candidate's process ended")
        try:
            answer = self._decoder.loads(frame)
        except codec.CodecError as error:
            raise self._fail("fail", f"answer refused: {error}") from None
        if not isinstance(answer, list) or not answer:
            raise self._fail("fail", "answer refused: not a list")
        if answer[0] == "v" and len(answer) in (2, 3):
            return answer[1:]
        if answer == ["stop"] and is_next:
            raise StopIteration
        raise self._exception(answer)

    def _exception(self, answer: list[Any]) -> BaseException:
        tag, name, bases, message = answer if len(answer) == 4 else (None, None, None, None)
        if (
            tag != "e"
            or not isinstance(name, str)
            or not isinstance(message, str)
            or not isinstance(bases, list)
        ):
            return self._fail("fail", "answer refused: neither a value nor an exception")
        if name in self._exceptions:
            return self._exceptions[name](message[:_SHORT])
        kind = _builtin_exception(bases)
        if issubclass(kind, (StopIteration, StopAsyncIteration)):
            # It would end a loop of the test over map(), unseen.
            return RuntimeError(f"the program raised {kind.__name__}")
        if not issubclass(kind, Exception):
            return CandidateExitError(f"{name[:_SHORT]}: {message[:_SHORT]}")
        return _make_error(kind, message[:_SHORT])


def _make_error(kind: type[BaseException], message: str) -> BaseException:
    try:
        return kind(message)
    except TypeError:  # UnicodeDecodeError and its like want more
        return ValueError(message) if issubclass(kind, ValueError) else RuntimeError(message)


def _builtin_exception(bases: list[Any]) -> type[BaseException]:
    """The most derived built-in exception among `bases`; BaseException if there is none."""
    for name in bases:
        kind = vars(builtins).get(name) if isinstance(name, str) else None
        if isinstance(kind, type) and issubclass(kind, BaseException):
            return kind
    return BaseException


def _repeat_changes(old: Any, new: Any) -> None:
    """Make mutable `old` hold what `new` holds, keeping the identity of what is nested at the same place."""
    if type(old) is not type(new):
        return
    if isinstance(old, list):
        for index in range(min(len(old), len(new))):
            if codec.is_mutable(old[index]) and type(old[index]) is type(new[index]):
                _repeat_changes(old[index], new[index])
                new[index] = old[index]
        old[:] = new
    elif isinstance(old, dict):
        for key in new.keys() & old.keys():
            if codec.is_mutable(old[key]) and type(old[key]) is type(new[key]):
                _repeat_changes(old[key], new[key])
                new[key] = old[key]
        old.clear()
        old.update(new)
    elif isinstance(old, set):
        old.clear()
        old.update(new)
    elif codec.is_mutable(old):  # bytearray, deque
        old.clear()
        old.extend(new)


# --- the three ways to judge --------------------------------------------------------------------------------------


def judge(job: dict[str, Any], channel: socket.socket, output_fd: int | None) -> Outcome:
    """Verdict and reason for one job (see `records.Job`). "again" asks for another run in the shared process."""
    link = Link(channel)
    try:
        if job["mode"] == "stdio":
            outcome = _judge_output(job, link, -1 if output_fd is None else output_fd)
        elif job["mode"] == "in_process":
            outcome = _judge_in_process(job, link)
        else:
            outcome = _judge_test(job, link)
    except NeedsSharedProcessError as error:
        outcome = ("again", str(error))
    except (CandidateDeadError, CandidateExitError) as error:
        outcome = ("fail", _text(error))
    except MemoryError:
        outcome = ("memory", "out of memory")
    except BaseException as error:  # noqa: BLE001  (whatever a test raises is its verdict)
        outcome = ("fail", f"{type(error).__name__}: {_text(error)}")
    return link.fault or outcome


def _text(error: BaseException) -> str:
    try:
        return str(error)[:_SHORT]
    except BaseException:  # noqa: BLE001  (an integer too long to print, say)
        return ""


def _judge_test(job: dict[str, Any], link: Link) -> Outcome:
    test, entry_point = job["test"], job["entry_point"]
    if names.must_share_process(test):
        raise NeedsSharedProcessError("the test inspects, awaits or extends the program's objects")
    compiled = compile(test, "<test>", "exec")
    needed = names.needs(test, compiled, entry_point)
    code = job["setup"] + "\n" + job["code"] if job["setup"] else job["code"]
    found = link.ask(["load"], (code, sorted(needed.targets | needed.library)))
    if not isinstance(found, dict):
        return "fail", "answer refused: no names"
    scope: dict[str, Any] = {}
    if entry_point is not None:
        helpers = names.prompt_helpers(job["prompt"], entry_point, names.code_names(compiled))
        if helpers.body:
            exec(compile(helpers, "<prompt>", "exec"), scope)  # noqa: S102
            scope.pop(entry_point, None)
    if job["setup"]:
        exec(compile(job["setup"], "<setup>", "exec"), scope)  # noqa: S102
    for name in needed.targets | needed.library:
        description = found.get(name)
        if (
            isinstance(description, tuple)
            and len(description) == 2
            and (name in needed.targets or name not in scope)
        ):
            _supply(scope, name, description, link, is_target=name in needed.targets)
    exec(compiled, scope)  # noqa: S102
    return "pass", ""


def _supply(
    scope: dict[str, Any], name: str, description: tuple[Any, Any], link: Link, *, is_target: bool
) -> None:
    kind, value = description
    if not is_target:  # the program only decides that the name exists, as its own import would
        scope[name] = names.library_object(name)
    elif kind == "module":
        if isinstance(value, str) and names.is_trusted_module(value):
            scope[name] = __import__(value, fromlist=["_"])
    elif kind == "exception" and isinstance(value, list):
        scope[name] = link.learn_exception(name, value)
    elif kind == "value":
        scope[name] = value


def _judge_in_process(job: dict[str, Any], link: Link) -> Outcome:
    """Program and test in one process, as openai/human-eval does it. A hostile program can fool this one; the record
    says so.
    """
    token = os.urandom(16).hex()
    setup = job["setup"] + "\n" if job["setup"] else ""
    answer = link.ask(["in_process"], (setup + job["code"], job["test"], token))
    return ("pass", "") if answer == token else ("fail", "the program did not reach the end of the test")


def _judge_output(job: dict[str, Any], link: Link, output_fd: int) -> Outcome:
    link.send(["main"], link.encode((job["code"], job["stdin"])))
    output = bytearray()
    while chunk := os.read(output_fd, 1 << 16):
        output += chunk
        if len(output) > MAX_OUTPUT:
            return "fail", f"more than {MAX_OUTPUT} bytes of output"
    link.receive()
    if lines(output.decode("utf-8", "replace")) != lines(job["stdout"]):
        return "fail", "standard output differs"
    return "pass", ""


def lines(text: str) -> list[str]:
    """Output as it is compared: without blanks at the ends of lines and empty lines at the end."""
    return "\n".join(line.rstrip() for line in text.splitlines()).rstrip().split("\n")
