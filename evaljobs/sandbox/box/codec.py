"""Values that cross between a candidate and its checker: data alone, as JSON with tagged objects.

Rule: decoding builds values of fixed, built-in types and runs nothing that the other side chose; a value that is not
data crosses as a handle, which the receiver's `make_handle` turns into an object of its own. Every JSON object has
exactly one key, its tag; lists, strings, booleans, None and ordinary numbers stand for themselves.
Lists and other mutable values go by number where the two sides share them (`shared`).
It does not know: which side it runs on, sockets, or what is done with a value.

Bounds: integers of more than 4,000 digits go as hexadecimal, which is linear in their length (JSON would be quadratic).
"""

from __future__ import annotations

import collections
import functools
import json
import re
import sys
from collections.abc import Callable
from typing import Any, Final

from evaljobs.sandbox.box import shared as sharing

DEEPEST: Final = 4000  # frames: some 1,000 levels of lists in lists
_PLAIN: Final = frozenset({str, int, float, bool, type(None)})
_INT_LIMIT: Final = 1 << 13000  # about 3,900 digits, under the 4,300 at which int() refuses
_DTYPE: Final = re.compile(r"[<>|=]?[biufcUS]\d{1,6}")


_CLASSES: Final = frozenset(
    {int, float, complex, bool, str, bytes, bytearray, list, tuple, dict, set, frozenset, range}
)


def is_plain_class(value: object) -> bool:
    """Whether a value is a built-in class that crosses by its name: of data or of exceptions. What another makes would be an
    object of the receiver's that has no form here.
    """
    if not isinstance(value, type):
        return False
    return value in _CLASSES or (issubclass(value, BaseException) and value.__module__ == "builtins")


class CodecError(Exception):
    """What came is not a value of this codec."""


class NotDataError(Exception):
    """A value that has no data form and no handle, named by its type."""


def _deep(function: Callable[..., Any]) -> Callable[..., Any]:
    """Values may be nested as deeply as a program of the usual recursion limit can make them; we have several frames a level."""

    @functools.wraps(function)
    def deeper(*args: Any, **kwargs: Any) -> Any:
        before = sys.getrecursionlimit()
        sys.setrecursionlimit(max(before, DEEPEST))
        try:
            return function(*args, **kwargs)
        finally:
            sys.setrecursionlimit(before)

    return deeper


class Encoder:
    """Values → JSON text. `make_handle(value)` gives the number of a value that is no data, or raises NotDataError.

    With `shared`, a message is what is encoded from one `begin` to the next.
    """

    def __init__(self, make_handle: Callable[[Any], list[Any]], shared: sharing.Shared | None = None) -> None:
        self._make_handle = make_handle
        self._shared = shared
        self._sent: set[int] = set()  # numbers whose content this message holds
        self._again: set[int] = set()  # those whose content stood in a text that was thrown away
        # Whether an object of a data type goes as a handle none the less; the handle of a namedtuple's class.
        self.is_handle: Callable[[Any], bool] = lambda _: False
        # The handle of an object that is data with attributes of its own, such as a member of an IntEnum.
        self.own_handle: Callable[[Any], list[Any] | None] = lambda _: None
        self.class_handle: Callable[[type[Any]], int | None] = lambda _: None
        # What to make an exception from again, None where it is not to be made.
        self.arguments: Callable[[Any], tuple[Any, ...] | None] = lambda _: None

    def begin(self) -> None:
        """A new message."""
        self._sent.clear()

    def news(self) -> tuple[str, str]:
        """JSON texts of the shared values that changed and are not in the message yet, and of those no longer held."""
        if self._shared is None or not (changed := self._shared.changed(self._sent)):
            text = "[]"
        else:
            text = self.dumps(changed, root=False)
            del changed
        return text, json.dumps(self._shared.collect() if self._shared else [])

    @_deep
    def dumps(self, value: object, *, root: bool = True) -> str:
        """JSON text of a value, ASCII only. Without `root` a list is one of this codec's own, and never shared."""
        before = set(self._sent)
        try:
            text = json.dumps(self._root(value, exact=False, root=root))
        except ValueError:  # an integer with too many digits stood in a plain list
            text = None
        if text is None or "\\ud" in text:
            # Or a lone surrogate, or merely a character past U+FFFF: only JSON's own pairs are safe.
            self._again = self._sent - before
            self._sent = before
            text = json.dumps(self._root(value, exact=True, root=root))
            self._again = set()
        return text

    def _root(self, value: Any, *, exact: bool, root: bool) -> Any:
        return self._tree(value, exact=exact) if root else [self._tree(v, exact=exact) for v in value]

    def _tree(self, x: Any, *, exact: bool) -> Any:
        t = type(x)
        if t in _PLAIN:
            return self._exact(x) if exact else x
        if self._shared is not None and (t is list or isinstance(x, sharing.MUTABLE)):
            whole = t not in _EXACT and self.is_handle(x)
            return {"h": self._make_handle(x)} if whole else self._mention(x, self._shared, exact=exact)
        if t is list or t is tuple:
            items = self._items(x, exact=exact)
            return items if t is list else {"t": items}
        if t is dict:
            return {"d": self._pairs(x, exact=exact)}
        return self._other(x, exact=exact)

    def _items(self, x: Any, *, exact: bool) -> list[Any]:
        plain = not exact and _PLAIN.issuperset(map(type, x))
        return list(x) if plain else [self._tree(v, exact=exact) for v in x]

    def _mention(self, x: Any, shared: sharing.Shared, *, exact: bool) -> Any:
        """A shared value: with its content the first time that a message names it, unless the other side knows that."""
        number, kind = shared.number(x), sharing.kind_of(x)
        if number in self._sent or (number not in self._again and shared.is_agreed(number)):
            return {"m": [number, kind]}
        self._sent.add(number)  # before its content, which may hold it
        if isinstance(x, dict):
            body: Any = self._pairs(x, exact=exact)
        else:
            held = x if type(x) is list else sharing.holds(x)
            body = held.hex() if type(held) is bytes else self._items(held, exact=exact)
        shared.agree(number)
        return {"m": [number, kind, body]}

    def _pairs(self, x: Any, *, exact: bool) -> list[Any]:
        return [self._tree(v, exact=exact) for pair in sharing.items(x) for v in pair]

    @staticmethod
    def _exact(x: Any) -> Any:
        if type(x) is int and not -_INT_LIMIT < x < _INT_LIMIT:
            return {"i": hex(x)}
        if type(x) is str and not x.isascii():
            try:
                x.encode()
            except UnicodeEncodeError:
                return {"s": x.encode("utf-16-le", "surrogatepass").hex()}
        return x

    def _other(self, x: Any, *, exact: bool) -> Any:
        """Subclasses of data types cross as what they hold, IntEnum among them; their methods are not asked."""
        if type(x).__module__.partition(".")[0] == "numpy":
            return self._numpy(x, exact=exact)
        for base, tag in _BASES:
            if isinstance(x, base):
                if type(x) is not base and self.is_handle(x):
                    return {"h": self._make_handle(x)}
                return self._base(x, base, tag, exact=exact)
        if isinstance(x, BaseException) and (arguments := self.arguments(x)) is not None:
            return {"x": [self._tree(type(x), exact=exact), self._items(arguments, exact=exact)]}
        return self._library(x)

    def _base(self, x: Any, base: Any, tag: str, *, exact: bool) -> Any:
        if base in (str, int, float):
            plain = "".join(str.__iter__(x)) if base is str else base.__pos__(x)
            own = self.own_handle(x)
            tree = self._tree(plain, exact=exact)
            return tree if own is None else {"S": [own, tree]}
        if base is dict:
            return {_DICT_TAGS.get(type(x), "d"): self._pairs(x, exact=exact)}
        if base is bytes or base is bytearray:
            return {tag: base.hex(x)}
        items = [self._tree(v, exact=exact) for v in base.__iter__(x)]
        if base is collections.deque:
            return {"q": [items, x.maxlen]}
        fields = getattr(type(x), "_fields", None)
        if base is tuple and isinstance(fields, tuple) and all(isinstance(f, str) for f in fields):
            return {"N": [type(x).__name__, list(fields), items, self.class_handle(type(x))]}
        return {tag: items} if tag else items

    def _library(self, x: Any) -> Any:
        if type(x) is complex:
            return {"c": [x.real, x.imag]}
        if type(x) is range:
            return {"r": [self._exact(v) for v in (x.start, x.stop, x.step)]}
        module, name = type(x).__module__.partition(".")[0], type(x).__name__
        if module in ("decimal", "_decimal") and name == "Decimal":
            return {"D": str(x)}
        if module == "fractions" and name == "Fraction":
            return {"F": [self._exact(x.numerator), self._exact(x.denominator)]}
        if module == "datetime" and (moment := _moment(x, name)) is not None:
            return {"T": [name, moment]}
        return {"h": self._make_handle(x)}

    def _numpy(self, x: Any, *, exact: bool) -> Any:
        if type(x).__name__ == "ndarray" and x.dtype.kind in "biufcUS":
            flat = [self._tree(v, exact=exact) for v in x.ravel().tolist()]
            return {"n": [x.dtype.str, list(x.shape), flat]}
        if (
            hasattr(x, "dtype")
            and hasattr(x, "item")
            and getattr(x, "shape", None) == ()
            and x.dtype.kind in "biufcUS"
        ):
            return {"n": [x.dtype.str, None, [self._tree(x.item(), exact=exact)]]}
        return {"h": self._make_handle(x)}


def _moment(x: Any, name: str) -> Any:
    """The body of a naive date or time; None for another object of datetime's."""
    if name == "timedelta":
        return [x.days, x.seconds, x.microseconds]
    return (
        x.isoformat() if name in ("date", "time", "datetime") and getattr(x, "tzinfo", None) is None else None
    )


_BASES: Final[tuple[tuple[Any, str], ...]] = (
    (str, ""),
    (int, ""),
    (float, ""),
    (tuple, "t"),
    (list, ""),
    (dict, "d"),
    (set, "e"),
    (frozenset, "f"),
    (bytes, "b"),
    (bytearray, "a"),
    (collections.deque, "q"),
)
_EXACT: Final = frozenset(base for base, _ in _BASES)
_DICT_TAGS: Final[dict[Any, str]] = {
    collections.OrderedDict: "O",
    collections.Counter: "C",
    collections.defaultdict: "M",
}


class Decoder:
    """JSON text → values. `make_handle(number, flags…)` gives the receiver's object for a handle."""

    def __init__(self, make_handle: Callable[[list[Any]], Any], shared: sharing.Shared | None = None) -> None:
        self._make_handle = make_handle
        self._shared = shared
        self.own_tags: dict[str, Callable[[Any], Any]] = {"N": self._named, "S": self._own}
        # Data with attributes of its own, from its handle and what it holds; a namedtuple's class from its handle, name, fields.
        self.make_own: Callable[[list[Any], Any], Any] = lambda _, data: data
        self.make_class: Callable[[int | None, str, list[str]], type[Any]] = named_class

    @_deep
    def loads(self, text: str | bytes) -> Any:
        """The value of one JSON text; CodecError for anything that is not of this codec, whatever is wrong with it."""
        try:
            return json.loads(text, object_hook=self._hook)
        except CodecError:
            raise
        except Exception as error:  # noqa: BLE001  (hostile input fails in any way; MemoryError included)
            raise CodecError(f"{type(error).__name__} in an answer") from None

    def _hook(self, tagged: dict[str, Any]) -> Any:
        if len(tagged) != 1:
            raise CodecError("an object must have one tag")
        (tag, body), *_ = tagged.items()
        if tag == "t":
            return tuple(body)
        if tag in _PAIRED:
            _require(type(body) is list and len(body) % 2 == 0)
            return _PAIRED[tag](zip(body[::2], body[1::2], strict=True))
        if tag == "m" and self._shared is not None:
            number, kind, *content = body
            return self._shared.receive(number, kind, *content or [None], whole=bool(content))
        if tag == "h":
            return self._make_handle(body)
        build = self.own_tags.get(tag) or _BUILD.get(tag)
        if build is None:
            raise CodecError("unknown tag")
        return build(body)

    def _own(self, body: Any) -> Any:
        own, data = body
        _require(type(data) in (str, int, float))
        return self.make_own(own, data)

    def _named(self, body: Any) -> Any:
        name, fields, values, *number = body
        number = number[0] if number else None
        _require(number is None or (type(number) is int and number >= 0))
        _require(type(name) is str and name.isidentifier() and len(name) < 200 and len(fields) < 200)
        _require(all(type(f) is str and f.isidentifier() and len(f) < 200 for f in fields))
        _require(type(values) is list and len(values) == len(fields))
        return tuple.__new__(self.make_class(number, name, fields), values)


def _require(condition: object) -> None:
    if not condition:
        raise CodecError("a malformed value")


def _integer(body: Any) -> int:
    _require(type(body) is str)
    return int(body, 16)


def _timed(body: Any) -> Any:
    import datetime as dt  # noqa: PLC0415  (rare, and the box must stay small)

    kind, value = body
    if kind == "timedelta":
        return dt.timedelta(*value)
    _require(kind in ("date", "time", "datetime"))
    moment = getattr(dt, kind).fromisoformat(value)
    _require(getattr(moment, "tzinfo", None) is None)  # what is decoded can always be encoded again
    return moment


def _decimal(body: Any) -> Any:
    import decimal  # noqa: PLC0415

    _require(type(body) is str)
    return decimal.Decimal(body)


def _fraction(body: Any) -> Any:
    import fractions  # noqa: PLC0415

    numerator, denominator = body
    _require(type(numerator) is int and type(denominator) is int)
    return fractions.Fraction(numerator, denominator)


def _array(body: Any) -> Any:
    dtype, shape, flat = body
    _require(type(dtype) is str and _DTYPE.fullmatch(dtype) and type(flat) is list)
    _require(not any(isinstance(v, (list, tuple, dict)) for v in flat))
    if shape is None:
        import numpy as np  # noqa: PLC0415

        return np.dtype(dtype).type(flat[0])
    import numpy as np  # noqa: PLC0415

    _require(type(shape) is list and all(type(n) is int and n >= 0 for n in shape))
    return np.array(flat, dtype=dtype).reshape(shape)


_NAMED: dict[tuple[str, ...], Any] = {}


def named_class(_: int | None, name: str, fields: list[str]) -> type[Any]:
    """A namedtuple's class of this name and these fields, the same one for one sample. CodecError past 64 of them."""
    key = (name, *fields)
    if key not in _NAMED:
        _require(len(_NAMED) < 64)
        _NAMED[key] = collections.namedtuple(name, fields)  # noqa: PYI024  (the fields are not known before)
    kind: type[Any] = _NAMED[key]
    return kind


def forget() -> None:
    """Drop what was kept for one sample's values."""
    _NAMED.clear()


def _set(items: Any) -> set[Any]:
    made: set[Any] = set()
    sharing.fill_set(made, items)
    return made


_PAIRED: Final[dict[str, Callable[[Any], Any]]] = {
    "d": dict,
    "O": collections.OrderedDict,
    "C": lambda pairs: collections.Counter(dict(pairs)),
    "M": lambda pairs: collections.defaultdict(None, pairs),
}

_BUILD: Final[dict[str, Callable[[Any], Any]]] = {
    "i": _integer,
    "s": lambda b: bytes.fromhex(b).decode("utf-16-le", "surrogatepass"),
    "e": _set,
    "f": frozenset,
    "b": bytes.fromhex,
    "a": bytearray.fromhex,
    "c": lambda b: complex(*b),
    "r": lambda b: range(*b),
    "q": lambda b: collections.deque(b[0], b[1]),
    "D": _decimal,
    "F": _fraction,
    "T": _timed,
    "n": _array,
}


if hasattr(sys, "set_int_max_str_digits") and sys.get_int_max_str_digits() == 0:
    sys.set_int_max_str_digits(4300)  # an environment may have switched the bound off
