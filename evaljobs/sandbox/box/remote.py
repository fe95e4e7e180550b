"""Objects of the candidate as the test meets them.

Rule: a `Remote` has no value of its own. The candidate may be asked what its own objects do with each other, as Python
would ask them; it is never asked what one of them is beside plain data of the test, which may be the expected value:
equal they are not, and arithmetic and order between the two are errors. But for one kind: an object that the test itself
has made, by calling a class that it uses as one (`names.subjects`), is what is under test, its operators included.
It does not know: how a question is put, or what becomes of its answer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from types import TracebackType

    from evaljobs.sandbox.box.link import Link

NOTHING: Final = 0  # ranks: what a Remote may be asked beside plain data
ARITHMETIC: Final = 1  # a result of a subject's arithmetic: only for more of that
SUBJECT: Final = 2
_PROTOCOLS: Final = frozenset({"__name__", "__doc__", "__dict__", "__qualname__"})


class Remote:
    """An object of the candidate."""

    __slots__ = ("_link", "_number", "_rank")

    def __init__(self, link: Link, number: int) -> None:
        object.__setattr__(self, "_link", link)
        object.__setattr__(self, "_number", number)
        object.__setattr__(self, "_rank", NOTHING)

    def _ask(self, operation: str, *operands: object) -> Any:
        return self._link.ask(operation, self, *operands)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name not in _PROTOCOLS:
            raise AttributeError(
                name
            )  # protocols that libraries look for: a candidate's word for a number is no number
        return self._ask("get", name)

    def __setattr__(self, name: str, value: object) -> None:
        self._ask("set", name, value)

    def __delattr__(self, name: str) -> None:
        self._ask("delete", name)

    def __getitem__(self, key: object) -> Any:
        return self._ask("getitem", key)

    def __setitem__(self, key: object, value: object) -> None:
        self._ask("setitem", key, value)

    def __delitem__(self, key: object) -> None:
        self._ask("delitem", key)

    def __contains__(self, item: object) -> bool:
        if _may_be_asked(SUBJECT, self, item):
            return self._ask("contains", item) is True
        self._link.note_unasked("in", item, self)
        return any(own is item or own == item for own in self)  # item by item, compared here

    def __iter__(self) -> Any:
        iterator = self._ask("iter")
        while True:
            try:
                value = self._link.ask("next", iterator)
            except StopIteration:
                return
            yield value

    def __next__(self) -> Any:
        return self._ask("next")

    def __reversed__(self) -> Any:
        return iter(self._ask("reversed"))

    def __len__(self) -> int:
        return int(self._typed("len", int))

    def __bool__(self) -> bool:
        return bool(self._typed("bool", bool))

    def __str__(self) -> str:
        return str(self._typed("str", str))

    def __repr__(self) -> str:
        return str(self._typed("repr", str))

    def __format__(self, spec: str) -> str:
        return str(self._typed("format", str, spec))

    def __dir__(self) -> Any:
        return self._ask("dir")

    def __hash__(self) -> int:
        return int(self._typed("hash", int))

    def _typed(self, operation: str, kind: type[Any], *operands: object) -> Any:
        value = self._ask(operation, *operands)
        if type(value) is not kind:
            raise TypeError(f"{operation}() of the candidate's object is no {kind.__name__}")
        return value

    def __copy__(self) -> Any:
        return self._ask("copy")

    def __deepcopy__(self, _: object) -> Any:
        return self._ask("deepcopy")

    def __enter__(self) -> Any:
        return self._ask("enter")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        return bool(self._link.leave(self, error, trace))

    def __instancecheck__(self, instance: object) -> bool:
        return bool(self._link.is_instance(self, instance))

    def __subclasscheck__(self, kind: object) -> bool:
        return is_remote(kind) and self._link.ask("issubclass", kind, self) is True

    def __eq__(self, other: object) -> Any:
        return _compare("eq", self, other, unasked=False)

    def __ne__(self, other: object) -> Any:
        return _compare("ne", self, other, unasked=True)


Remote.__doc__ = property(lambda self: self._ask("get", "__doc__"))  # type: ignore[assignment]  # the object's, not ours


class RemoteCallable(Remote):
    __slots__ = ()
    __doc__ = Remote.__doc__

    def __call__(self, *args: object, **kwargs: object) -> Any:
        return self._link.call(self, args, kwargs)


def is_remote(value: object) -> bool:
    """Whether a value is an object of the candidate."""
    return issubclass(type(value), Remote)


def number_of(remote: Any) -> int:
    """The candidate's number of an object."""
    number: int = object.__getattribute__(remote, "_number")
    return number


def rank_of(remote: Any) -> int:
    """What it may be asked beside plain data."""
    rank: int = object.__getattribute__(remote, "_rank")
    return rank


def set_rank(remote: Any, rank: int) -> None:
    """Say what it may be asked beside plain data."""
    object.__setattr__(remote, "_rank", rank)


class _Own:
    """Data of the candidate that has attributes of its own: equal, ordered and added as the data that it is."""

    _own: Remote

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._own, name)

    def __str__(self) -> str:
        return str(self._own)

    def __repr__(self) -> str:
        return repr(self._own)

    def __format__(self, spec: str) -> str:
        return format(self._own, spec)


class _OwnInt(_Own, int):
    pass


class _OwnFloat(_Own, float):
    pass


class _OwnStr(_Own, str):  # noqa: SLOT000  (it has an attribute)
    pass


_OWN: Final[dict[type[Any], Any]] = {int: _OwnInt, float: _OwnFloat, str: _OwnStr}


def with_own(data: Any, remote: Any) -> Any:
    """A text or number that is also an object of the candidate."""
    value = _OWN[type(data)](data)
    value._own = remote  # noqa: SLF001
    return value


def own_of(value: object) -> Any:
    """The object of the candidate that a text or number is also, or None."""
    return value._own if issubclass(type(value), _Own) else None  # type: ignore[attr-defined]  # noqa: SLF001


def _may_be_asked(least: int, *operands: object) -> bool:
    """Whether the candidate may be asked what these give together: all are its own, or one is a subject of the test."""
    remotes = [value for value in operands if is_remote(value)]
    return len(remotes) == len(operands) or any(rank_of(value) >= least for value in remotes)


def _compare(name: str, left: Remote, right: object, *, unasked: bool) -> Any:
    if _may_be_asked(SUBJECT, left, right):
        return left._link.ask("operate", name, left, right)  # noqa: SLF001
    if right is not None:
        left._link.note_unasked(name, left, right)  # noqa: SLF001
    return unasked


def _order(name: str) -> Callable[[Remote, object], Any]:
    def compare(self: Remote, other: object) -> Any:
        if _may_be_asked(SUBJECT, self, other):
            return self._link.ask("operate", name, self, other)
        self._link.note_unasked(name, self, other)
        return NotImplemented

    return compare


def _forward(name: str, *, reflected: bool = False) -> Callable[[Remote, object], Any]:
    def operate(self: Remote, other: object) -> Any:
        left, right = (other, self) if reflected else (self, other)
        if _may_be_asked(ARITHMETIC, left, right):
            rank = min(ARITHMETIC, max(rank_of(value) for value in (left, right) if is_remote(value)))
            if name in _IN_PLACE:  # after `s += x`, s is still what the test made
                result = self._link.make("operate", name, left, right, new=rank)
            else:
                result = self._link.ask("operate", name, left, right)
                if is_remote(result):
                    set_rank(result, rank)
            if is_remote(result):
                return result
            if _may_be_asked(SUBJECT, left, right):
                return result
        # A number that the candidate makes of an expected one would satisfy `abs(x - expected) < 1e-6`.
        self._link.note_unasked(name, left, right)
        return NotImplemented

    return operate


def _single(name: str) -> Callable[..., Any]:
    def operate(self: Remote, *operands: object) -> Any:
        rank = rank_of(self)
        result = self._link.ask("operate", name, self, *operands)
        if is_remote(result):
            set_rank(result, min(rank, ARITHMETIC))
        elif rank < SUBJECT:  # a number in the place of the one that the test expects
            self._link.note_unasked(name, self)
            raise TypeError(f"{name}() of an object of the program")
        return result

    return operate


_BINARY: Final = (
    *("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul"),
    *("and", "or", "xor", "lshift", "rshift", "divmod"),
)
_IN_PLACE: Final = frozenset(f"i{name}" for name in _BINARY if name != "divmod")
_ORDER: Final = ("lt", "le", "gt", "ge")
_SINGLE: Final = (
    "neg",
    "pos",
    "invert",
    "abs",
    "int",
    "float",
    "complex",
    "index",
    "round",
    "trunc",
    "floor",
    "ceil",
)
OPERATORS: Final = frozenset({"eq", "ne", *_ORDER, *_BINARY, *_IN_PLACE, *_SINGLE})

for _name in _BINARY:
    setattr(Remote, f"__{_name}__", _forward(_name))
    setattr(Remote, f"__r{_name}__", _forward(_name, reflected=True))
for _name in _IN_PLACE:
    setattr(Remote, f"__{_name}__", _forward(_name))
for _name in _ORDER:
    setattr(Remote, f"__{_name}__", _order(_name))
for _name in _SINGLE:
    setattr(Remote, f"__{_name}__", _single(_name))
