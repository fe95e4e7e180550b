"""The mutable arguments of one request, by number.

Rule: a list, dict, set, bytearray or deque that a test passes has a number during one request. Both
sides hold one object for it, however often it stands in the arguments. The answer names it by its
number, with its new content if the program changed it. Called from `codec`, `link` and `candidate`.
"""

from __future__ import annotations

import operator
from typing import Any


class Arguments:
    """The mutable values of one request by number; a repeated value is one object on both sides."""

    def __init__(self) -> None:
        self.values: dict[int, Any] = {}
        self._numbers: dict[int, int] = {}  # id of a value → its number
        self._before: dict[int, list[Any]] = {}

    def number(self, value: Any) -> int | None:
        """The number of a value, None if it has none."""
        return self._numbers.get(id(value))

    def add(self, value: Any, number: int | None = None) -> int:
        """Number a value: the next number, or the one that the request gives it."""
        number = len(self.values) if number is None else number
        self.values[number] = value
        self._numbers[id(value)] = number
        return number

    def clear(self) -> None:
        """Forget all values."""
        self.values.clear()
        self._numbers.clear()

    def remember(self) -> None:
        """Store the current contents of all values."""
        self._before = {number: _held(value) for number, value in self.values.items()}

    def changed(self) -> list[tuple[int, Any]]:
        """Numbers and values whose contents have changed since `remember`."""
        return [
            (number, self.values[number])
            for number, then in self._before.items()
            if len(now := _held(self.values[number])) != len(then) or not all(map(operator.is_, now, then))
        ]

    def change(self, changes: Any) -> None:
        """Set contents from [number, value of the same type] pairs. ValueError for others."""
        for number, content in changes:
            value = self.values.get(number) if type(number) is int else None
            if value is None or type(content) is not type(value):
                raise ValueError("a change of an argument that was not passed, or of its type")
            _fill(value, content)


def _held(value: Any) -> list[Any]:
    return [*value, *value.values()] if isinstance(value, dict) else list(value)


def _fill(value: Any, content: Any) -> None:
    if isinstance(value, (list, bytearray)):
        value[:] = content
    elif isinstance(value, set):
        fill_set(value, list(content))
    elif isinstance(value, dict):
        pairs = list(content.items())
        value.clear()
        for key, held in pairs:  # Counter.update would add
            value[key] = held
    else:
        items = list(content)
        value.clear()
        value.extend(items)


def fill_set(value: set[Any], content: list[Any]) -> None:
    """Fill a set in the order of these items, if possible.

    A literal's table may be larger than a grown set's, so equal sets may differ in order, and some
    tests depend on it.
    """
    value.clear()
    value.update(content)
    if not _in_order(value, content):
        literal: set[Any] = set()
        literal.update(frozenset(content))  # built like a literal
        if _in_order(literal, content):
            value.clear()
            value.update(frozenset(content))


def _in_order(made: set[Any], content: list[Any]) -> bool:
    return all(a is b for a, b in zip(made, content, strict=False))
