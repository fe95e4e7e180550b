"""Encodes values that cross between a test and a program: data alone, as JSON with tagged objects.

Rule: decoding builds values of fixed, built-in types and runs no code of the other side. All else
crosses as a handle, a number that the receiver's `make_handle` turns into an object of its own.
Every JSON object has exactly one key, its tag; lists, texts, booleans, None and ordinary numbers
stand for themselves. Integers of more than 4,000 digits cross as hexadecimal, which is linear in
their length. Mutable arguments cross by number (`arguments`). Called from `link` and `candidate`.
"""

from __future__ import annotations

import collections
import contextlib
import json
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any, Final

from evaljobs.sandbox.rpc.arguments import Arguments, fill_set

DEEPEST: Final = 4000  # frames of recursion: some 1,000 levels of nested lists
MAX_NAMED_CLASSES: Final = 64  # most namedtuple classes of one program
_PLAIN: Final = frozenset({str, int, float, bool, type(None)})
_INT_LIMIT: Final = 1 << 13000  # about 3,900 digits, under the 4,300 at which int() refuses
_DTYPE: Final = re.compile(r"[<>|=]?[biufcUS]\d{1,6}")

# Classes of data, which cross by their names.
CLASSES: Final[dict[str, Any]] = {
    kind.__name__: kind
    for kind in (
        *(int, float, complex, bool, str, bytes, bytearray),
        *(list, tuple, dict, set, frozenset, range),
    )
}
_FACTORIES: Final = {name: CLASSES[name] for name in ("list", "dict", "set", "int", "float", "str", "tuple")}


class CodecError(Exception):
    """The text is not a value of this codec."""


@contextlib.contextmanager
def _deep() -> Iterator[None]:
    """Let code handle values nested as deep as a program can make them."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(max(before, DEEPEST))
    try:
        yield
    finally:
        sys.setrecursionlimit(before)


class Encoder:
    """Values → JSON text. `make_handle(value)` returns a handle's body, or raises."""

    def __init__(self, make_handle: Callable[[Any], int | str]) -> None:
        self._make_handle = make_handle
        self._arguments = Arguments()
        self._naming = False
        self._exact = False

    def dumps(self, value: object, arguments: Arguments | None = None, *, naming: bool = False) -> str:
        """JSON text of a value, ASCII only.

        Mutable `arguments` cross by number alone; with `naming` all others get a number.
        """
        self._arguments, self._naming = arguments or Arguments(), naming
        return self._text(lambda: self._tree(value))

    def dumps_changes(self, arguments: Arguments) -> str:
        """JSON text of [number, content] for every changed argument."""
        if not (changed := arguments.changed()):
            return "[]"
        self._arguments, self._naming = arguments, False
        return self._text(lambda: [[number, self._content(value)] for number, value in changed])

    @_deep()
    def _text(self, make_tree: Callable[[], Any]) -> str:
        self._exact = False
        try:
            text = json.dumps(make_tree())
        except ValueError:  # an integer with too many digits stood in a plain list
            text = None
        if text is None or "\\ud" in text:
            # Or a lone surrogate, or merely a character past U+FFFF: only JSON's own pairs are
            # safe.
            self._exact = True
            if self._naming:
                self._arguments.clear()
            text = json.dumps(make_tree())
        return text

    def _tree(self, x: Any) -> Any:
        kind = type(x)
        if kind in _PLAIN:
            return self._exactly(x) if self._exact else x
        if kind in _MUTABLE:
            number = self._arguments.number(x)
            if number is not None:
                return {"m": number}
            if not self._naming:
                return self._content(x)
            content = self._content(x)  # first, so that a value that holds itself is refused
            return {"m": [self._arguments.add(x), content]}
        return {"t": self._items(x)} if kind is tuple else self._other(x)

    def _items(self, x: Any) -> list[Any]:
        plain = not self._exact and _PLAIN.issuperset(map(type, x))
        return list(x) if plain else [self._tree(v) for v in x]

    def _content(self, x: Any) -> Any:
        tag = _MUTABLE[type(x)]
        if tag == "":
            return self._items(x)
        if tag == "a":
            return {tag: x.hex()}
        if tag == "q":
            return {tag: [self._items(x), x.maxlen]}
        if tag == "e":
            return {tag: self._items(x)}
        pairs = [self._tree(v) for pair in x.items() for v in pair]
        if tag == "M":
            name = getattr(x.default_factory, "__name__", "")
            return {tag: [name if x.default_factory is _FACTORIES.get(name, tag) else "", pairs]}
        return {tag: pairs}

    @staticmethod
    def _exactly(x: Any) -> Any:
        if type(x) is int and not -_INT_LIMIT < x < _INT_LIMIT:
            return {"i": hex(x)}
        if type(x) is str and not x.isascii():
            try:
                x.encode()
            except UnicodeEncodeError:
                return {"s": x.encode("utf-16-le", "surrogatepass").hex()}
        return x

    def _other(self, x: Any) -> Any:
        """Subclasses of immutable data, IntEnum too, cross as their data, without their methods."""
        if type(x).__module__.partition(".")[0] == "numpy":
            return self._numpy(x)
        if isinstance(x, str):
            return self._tree("".join(str.__iter__(x)))
        if isinstance(x, (int, float)):
            return self._tree(int.__pos__(x) if isinstance(x, int) else float.__pos__(x))
        if isinstance(x, (bytes, frozenset)):
            return (
                {"b": bytes.hex(x)}
                if isinstance(x, bytes)
                else {"f": self._items(list(frozenset.__iter__(x)))}
            )
        return self._tuple(x) if isinstance(x, tuple) else self._library(x)

    def _tuple(self, x: Any) -> Any:
        items, fields = self._items(list(tuple.__iter__(x))), getattr(type(x), "_fields", None)
        if isinstance(fields, tuple) and all(isinstance(f, str) for f in fields):
            return {"N": [type(x).__name__, list(fields), items]}
        return {"t": items}

    def _library(self, x: Any) -> Any:
        if type(x) is complex:
            return {"c": [x.real, x.imag]}
        if type(x) is range:
            return {"r": [self._exactly(v) for v in (x.start, x.stop, x.step)]}
        module, name = type(x).__module__.partition(".")[0], type(x).__name__
        if module in ("decimal", "_decimal") and name == "Decimal":
            return {"D": str(x)}
        if module == "fractions" and name == "Fraction":
            return {"F": [self._exactly(x.numerator), self._exactly(x.denominator)]}
        if module == "datetime" and (moment := _moment(x, name)) is not None:
            return {"T": [name, moment]}
        return {"h": self._make_handle(x)}

    def _numpy(self, x: Any) -> Any:
        if type(x).__name__ == "ndarray" and x.dtype.kind in "biufcUS":
            return {"n": [x.dtype.str, list(x.shape), [self._tree(v) for v in x.ravel().tolist()]]}
        scalar = hasattr(x, "dtype") and hasattr(x, "item") and getattr(x, "shape", None) == ()
        if scalar and x.dtype.kind in "biufcUS":
            return {"n": [x.dtype.str, None, [self._tree(x.item())]]}
        return {"h": self._make_handle(x)}


_MUTABLE: Final[dict[type[Any], str]] = {
    list: "",
    dict: "d",
    set: "e",
    bytearray: "a",
    collections.deque: "q",
    collections.OrderedDict: "O",
    collections.Counter: "C",
    collections.defaultdict: "M",
}


def _moment(x: Any, name: str) -> Any:
    """The body of a naive date or time; None for another object of datetime's."""
    if name == "timedelta":
        return [x.days, x.seconds, x.microseconds]
    return (
        x.isoformat() if name in ("date", "time", "datetime") and getattr(x, "tzinfo", None) is None else None
    )


class Decoder:
    """JSON text → values. `make_handle(body)` returns the receiver's object for a handle."""

    def __init__(self, make_handle: Callable[[Any], Any]) -> None:
        self._make_handle = make_handle
        self._arguments = Arguments()
        self._naming = False

    @_deep()
    def loads(self, text: str | bytes, arguments: Arguments | None = None, *, naming: bool = False) -> Any:
        """The value of one JSON text; CodecError for anything else.

        With `naming` the text may number its mutable values, else it may only name `arguments`.
        """
        self._arguments, self._naming = arguments or Arguments(), naming
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
        if tag == "m":
            return self._mentioned(body)
        if tag == "h":
            return self._make_handle(body)
        _require(tag in _BUILD)
        return _BUILD[tag](body)

    def _mentioned(self, body: Any) -> Any:
        if self._naming and type(body) is list:
            number, value = body
            self._arguments.add(value, number)
            return value
        _require(type(body) is int)
        return self._arguments.values[body]


def _require(condition: object) -> None:
    if not condition:
        raise CodecError("a malformed value")


def _pairs(body: Any) -> Any:
    _require(type(body) is list and len(body) % 2 == 0)
    return zip(body[::2], body[1::2], strict=True)


def _integer(body: Any) -> int:
    _require(type(body) is str)
    return int(body, 16)


def _defaulting(body: Any) -> Any:
    factory, pairs = body
    return collections.defaultdict(_FACTORIES.get(factory), _pairs(pairs))


def _timed(body: Any) -> Any:
    import datetime as dt  # noqa: PLC0415  (rare, and the box must stay small)

    kind, value = body
    if kind == "timedelta":
        return dt.timedelta(*value)
    _require(kind in ("date", "time", "datetime"))
    moment = getattr(dt, kind).fromisoformat(value)
    _require(getattr(moment, "tzinfo", None) is None)  # so that it can be encoded again
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
    import numpy as np  # noqa: PLC0415

    if shape is None:
        return np.dtype(dtype).type(flat[0])
    _require(type(shape) is list and all(type(n) is int and n >= 0 for n in shape))
    return np.array(flat, dtype=dtype).reshape(shape)


_named_classes: dict[tuple[str, ...], Any] = {}


def _named(body: Any) -> Any:
    """A namedtuple: values of the same class name and fields have one class, until `forget`."""
    name, fields, values = body
    _require(type(name) is str and name.isidentifier() and len(name) < 200 and len(fields) < 200)
    _require(all(type(f) is str and f.isidentifier() and len(f) < 200 for f in fields))
    _require(type(values) is list and len(values) == len(fields))
    key = (name, *fields)
    if key not in _named_classes:
        _require(len(_named_classes) < MAX_NAMED_CLASSES)
        _named_classes[key] = collections.namedtuple(name, fields)  # noqa: PYI024  (the fields are not known before)
    return tuple.__new__(_named_classes[key], values)


def forget() -> None:
    """Drop the classes kept for one program's values."""
    _named_classes.clear()


def _set(items: Any) -> set[Any]:
    made: set[Any] = set()
    fill_set(made, items)
    return made


_BUILD: Final[dict[str, Callable[[Any], Any]]] = {
    "t": tuple,
    "d": lambda b: dict(_pairs(b)),
    "O": lambda b: collections.OrderedDict(_pairs(b)),
    "C": lambda b: collections.Counter(dict(_pairs(b))),
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
    "M": _defaulting,
    "N": _named,
    "n": _array,
}


if hasattr(sys, "set_int_max_str_digits") and sys.get_int_max_str_digits() == 0:
    sys.set_int_max_str_digits(4300)  # an environment variable may have removed the bound
