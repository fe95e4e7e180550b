"""Opaque handles: the program's objects as the test sees them.

Rule: a test may call a handle, get its attributes, iterate over it and take its length, truth and
texts. Each is a request to the program, and the answer is data or another handle. Two handles may
be compared with `==`. All else ends the test as unsupported, since the program's answer about an
expected value (`==` with data, `<`, `+`, `float`) must not decide a verdict. Made by `link`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from evaljobs.sandbox.rpc.link import Link

_PROTOCOLS: Final = frozenset({"__name__", "__qualname__", "__dict__"})


class Handle:  # noqa: PLW1641  (`__hash__` is among the unsupported operations below)
    """An object of the program; the test's side has only its number."""

    __slots__ = ("__link", "__number")

    def __init__(self, link: Link, number: int) -> None:
        object.__setattr__(self, "_Handle__link", link)
        object.__setattr__(self, "_Handle__number", number)

    def __call__(self, *args: object, **kwargs: object) -> Any:
        return self.__link.ask("call", self, args, tuple(kwargs.items()))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name not in _PROTOCOLS:
            raise AttributeError(name)  # an optional protocol that a library probes
        return self.__link.ask("get", self, name)

    def __iter__(self) -> Iterator[Any]:
        iterator = self.__link.ask("iter", self)
        while True:
            try:
                value = self.__link.ask("next", iterator)
            except StopIteration:
                return
            yield value

    def __next__(self) -> Any:
        return self.__link.ask("next", self)

    def __len__(self) -> int:
        return int(self.__typed("len", int))

    def __bool__(self) -> bool:
        return bool(self.__typed("bool", bool))

    def __str__(self) -> str:
        return str(self.__typed("str", str))

    def __repr__(self) -> str:
        return str(self.__typed("repr", str))

    def __format__(self, spec: str) -> str:
        return str(self.__typed("format", str, spec))

    def __eq__(self, other: object) -> bool:
        if other is None:
            return False
        if not is_handle(other):
            raise self.__link.unsupported("== between an object of the program and data")
        return self.__link.ask("eq", self, other) is True

    def __typed(self, operation: str, kind: type[Any], *operands: object) -> Any:
        value = self.__link.ask(operation, self, *operands)
        if type(value) is not kind:
            raise TypeError(f"{operation}() of an object of the program is no {kind.__name__}")
        return value


def is_handle(value: object) -> bool:
    """Whether a value is an object of the program."""
    return type(value) is Handle


def number_of(handle: Handle) -> int:
    """The program's number of an object."""
    number: int = object.__getattribute__(handle, "_Handle__number")
    return number


def _unsupported(name: str) -> Callable[..., Any]:
    def refuse(self: Handle, *_: object) -> Any:
        raise object.__getattribute__(self, "_Handle__link").unsupported(
            f"{name} of an object of the program"
        )

    return refuse


_BINARY: Final = (
    *("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "divmod"),
    *("and", "or", "xor", "lshift", "rshift"),
)
_UNSUPPORTED: Final = (
    *_BINARY,
    *(f"r{name}" for name in _BINARY),
    *("lt", "le", "gt", "ge", "hash", "contains", "reversed", "instancecheck", "subclasscheck"),
    *("neg", "pos", "invert", "abs", "int", "float", "complex", "index", "round", "trunc", "floor", "ceil"),
    *("getitem", "setitem", "delitem", "setattr", "delattr", "enter", "exit", "dir"),
    *("copy", "deepcopy", "reduce_ex"),
)
for _name in _UNSUPPORTED:
    setattr(Handle, f"__{_name}__", _unsupported(f"__{_name}__"))
