"""Lists, dicts and other mutable data that test and program both hold: one object in Python, one on each side here.

Rule: what crosses once has a number, and its other half on the other side is the same object for as long as both sides
hold it. With every message each side says which of its halves changed since, and which it no longer holds; so a list
behaves as in one process whenever the other side gets to run. Either side may only change what the other one has passed
to it, or has taken from it.
It does not know: sockets, JSON, or which side it is on, but for the numbers that it gives.
"""

from __future__ import annotations

import collections
import operator
import sys
from collections.abc import Callable
from typing import Any, Final

MUTABLE: Final = (list, dict, set, bytearray, collections.deque)
_FACTORIES: Final[dict[str, Any]] = {k.__name__: k for k in (list, dict, set, int, float, str, tuple)}
_FLAT: Final = frozenset({str, int, float, bool, type(None), bytes, complex})


class SharingError(Exception):
    """What came names a half that does not exist, or is of another kind."""


class _Half:
    """One side's half: the object and what it held when both sides last agreed."""

    __slots__ = ("held", "nested", "value")

    def __init__(self, value: Any) -> None:
        self.value = value
        self.held: Any = None  # nothing sent yet
        self.nested = False

    def agree(self) -> None:
        self.held = self.value[:] if type(self.value) is list else holds(self.value)
        self.nested = not _FLAT.issuperset(map(type, self.held))

    def is_changed(self) -> bool:
        now, then = self.value, self.held
        if type(now) is not list:  # of which there may be very many
            now = holds(now)
        if then is None or type(now) is bytes:
            return bool(now != then)
        # by identity: `==` of a candidate's object would ask it
        return len(now) != len(then) or not all(map(operator.is_, now, then))


class Shared:
    """The halves of one side, by number. The checker's own numbers are even, the candidate's odd."""

    def __init__(self, first: int) -> None:
        self._next = first
        self._first = first
        self._halves: dict[int, _Half] = {}
        self._numbers: dict[int, int] = {}  # id of an object → its number; its half keeps it alive
        # Told what a value holds that comes by its number alone.
        self.on_mention: Callable[[list[Any]], None] | None = None
        probe = _Half([])
        self._own_references = sys.getrefcount(probe.value)

    def number(self, value: Any) -> int:
        """The number of an object, a new one if it has none."""
        number = self._numbers.get(id(value))
        if number is None:
            number, self._next = self._next, self._next + 2
            self._add(number, value)
        return number

    def _add(self, number: int, value: Any) -> _Half:
        half = self._halves[number] = _Half(value)
        self._numbers[id(value)] = number
        return half

    def is_agreed(self, number: int) -> bool:
        """Whether the other side's half holds the same already."""
        half = self._halves[number]
        return half.held is not None and not half.is_changed()

    def agree(self, number: int) -> None:
        """Both sides hold the same from now on."""
        self._halves[number].agree()

    def changed(self, but: set[int]) -> list[Any]:
        """Objects that this side changed since both agreed, apart from those that are being told of."""
        return [
            half.value for number, half in self._halves.items() if number not in but and half.is_changed()
        ]

    def receive(self, number: Any, kind: Any, content: Any, *, whole: bool) -> Any:
        """The object of a number from the other side, made to hold `content` if that is `whole`."""
        if type(number) is not int or type(kind) is not str:
            raise SharingError("a malformed number")
        half = self._halves.get(number)
        if half is None:
            if number < 0 or number % 2 == self._first % 2:
                raise SharingError("an unknown number")
            half = self._add(number, _empty(kind))
        elif kind_of(half.value) != kind:
            raise SharingError("a value changed its kind")
        if whole:
            _fill(half.value, content)
        elif half.nested and self.on_mention is not None:
            self.on_mention(half.held)
        half.agree()
        return half.value

    def forget(self, numbers: list[Any]) -> None:
        """What the other side no longer holds is this side's own."""
        for number in numbers:
            half = self._halves.pop(number, None) if type(number) is int else None
            if half is not None:
                del self._numbers[id(half.value)]

    def collect(self) -> list[int]:
        """Forget, and name, what nothing on this side refers to any more. Only after `changed` has been dealt with."""
        inner: dict[int, int] = {}
        for half in self._halves.values():
            if half.nested:
                for value in half.held:
                    if id(value) in self._numbers:
                        inner[id(value)] = inner.get(id(value), 0) + 2  # from the object, and from `held`
        alive = [
            number
            for number, half in self._halves.items()
            if sys.getrefcount(half.value) - self._own_references > inner.get(id(half.value), 0)
        ]
        if len(alive) == len(self._halves):
            return []
        seen = set(alive)
        while alive:
            half = self._halves[alive.pop()]
            if half.nested:
                found = {self._numbers[id(v)] for v in half.held if id(v) in self._numbers} - seen
                seen |= found
                alive += found
        dropped = [number for number in self._halves if number not in seen]
        self.forget(dropped)
        return dropped


def holds(value: Any) -> Any:
    """What a mutable value holds: bytes of a bytearray, else a list, a dict's keys first and its values after them."""
    if isinstance(value, dict):
        pairs = items(value)
        return [key for key, _ in pairs] + [v for _, v in pairs]
    if isinstance(value, bytearray):
        return bytes(value)
    bases: tuple[Any, ...] = (list, set, collections.deque)
    for base in bases:
        if isinstance(value, base):
            return list(base.__iter__(value))
    raise SharingError("not a mutable value")


def items(value: Any) -> Any:
    """Pairs of a dict in its order, whatever its class overrides."""
    kind = collections.OrderedDict if isinstance(value, collections.OrderedDict) else dict
    return kind.items(value)


def kind_of(value: Any) -> str:
    """What the other half of a value must be: a letter, and what belongs to it."""
    if type(value) is list:
        return "l"
    letter = next(letter for base, letter in _LETTERS if isinstance(value, base))
    if letter == "M":
        name = getattr(value.default_factory, "__name__", "")
        return letter + (name if value.default_factory is _FACTORIES.get(name, _FACTORIES) else "")
    return f"q{value.maxlen}" if letter == "q" and value.maxlen is not None else letter


_LETTERS: Final[tuple[tuple[type[Any], str], ...]] = (  # subclasses first
    (list, "l"),
    (collections.OrderedDict, "O"),
    (collections.Counter, "C"),
    (collections.defaultdict, "M"),
    (dict, "d"),
    (set, "e"),
    (bytearray, "a"),
    (collections.deque, "q"),
)


def _empty(kind: str) -> Any:
    letter, rest = kind[:1], kind[1:]
    if letter == "M":
        return collections.defaultdict(_FACTORIES.get(rest))
    if letter == "q":
        return collections.deque(maxlen=int(rest) if rest.isdecimal() and len(rest) < 10 else None)
    make = _EMPTY.get(kind)
    if make is None:
        raise SharingError("an unknown kind")
    return make()


_EMPTY: Final[dict[str, Any]] = {
    "l": list,
    "d": dict,
    "e": set,
    "a": bytearray,
    "O": collections.OrderedDict,
    "C": collections.Counter,
}


def _fill(value: Any, content: Any) -> None:
    """Make a value hold what came, by the methods of its data type."""
    if isinstance(value, dict):
        kind = collections.OrderedDict if isinstance(value, collections.OrderedDict) else dict
        if type(content) is not list or len(content) % 2:
            raise SharingError("a malformed dict")
        kind.clear(value)
        for key, v in zip(content[::2], content[1::2], strict=True):
            kind.__setitem__(value, key, v)
    elif isinstance(value, bytearray):
        bytearray.__setitem__(value, slice(None), bytes.fromhex(content))
    elif type(content) is not list:
        raise SharingError("a malformed value")
    elif isinstance(value, list):
        list.__setitem__(value, slice(None), content)
    elif isinstance(value, set):
        fill_set(value, content)
    else:
        collections.deque.clear(value)
        collections.deque.extend(value, content)


def fill_set(value: set[Any], content: Any) -> None:
    """Fill a set in the order of these items where that can be: a literal's table may be larger than a grown set's, so
    equal sets may differ in order, and tests there are that see it.
    """
    set.clear(value)
    set.update(value, content)
    if not _in_order(value, content):
        literal: set[Any] = set()
        literal.update(frozenset(content))  # as a literal is made
        if _in_order(literal, content):
            set.clear(value)
            set.update(value, frozenset(content))


def _in_order(made: set[Any], content: list[Any]) -> bool:
    return all(a is b for a, b in zip(set.__iter__(made), content, strict=False))
