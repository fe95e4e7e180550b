"""A TOML file to a checked record; every complaint names file, line and key.

Rule: what a person wrote is read strictly (no "4" for 4, no unknown key) and refused in one line that says where and
what to write instead. Python's own parser gives values without lines, so lines are found by a second, shallow scan.
It does not know: what the keys mean.
"""

from __future__ import annotations

import difflib
import json
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from coordinator.errors import OperatorError

Model = TypeVar("Model", bound=BaseModel)
Location = tuple[str | int, ...]
Where = Callable[[Location], str]  # says whence the value at a location came, e.g. "evalspan.toml, line 3"

_HEADER = re.compile(r"(\[\[?)([^\]]*)\]")
_KEY = re.compile(r"""\s*("(?:[^"\\]|\\.)*"|'[^']*'|[A-Za-z0-9_-]+)\s*""")
_QUOTES = ('"""', "'''", '"', "'")


def read(path: Path) -> tuple[dict[str, Any], dict[Location, int]]:
    """Values of a TOML file, and the line (from 1) of each key and table. OperatorError where it is no TOML."""
    try:
        text = path.read_text(encoding="utf-8")
        return tomllib.loads(text), lines_of(text)
    except tomllib.TOMLDecodeError as error:
        raise OperatorError(f"{path} is not TOML: {error}") from error
    except UnicodeDecodeError as error:
        raise OperatorError(f"{path} is not UTF-8 text: {error}") from error
    except OSError as error:
        raise OperatorError(f"{path} cannot be read: {error.strerror or error}") from error


def check(model: type[Model], data: Mapping[str, Any], where: Where) -> Model:
    """`data` as a `model`. OperatorError names the first fault; `where(location)` says whence a value came."""
    try:
        # JSON mode is strict on types yet takes lists for tuples and text for paths, as a TOML file has them.
        return model.model_validate_json(json.dumps(data, default=str), strict=True)
    except ValidationError as error:
        raise OperatorError(_complaint(model, data, error, where)) from error


def lines_of(text: str) -> dict[Location, int]:
    """Line of every key and table header, by its location, e.g. ("task", 0, "limit"). Inline tables count as a value."""
    found: dict[Location, int] = {}
    arrays: dict[Location, int] = {}
    table: Location = ()
    for line, statement in _statements(text):
        header = _HEADER.match(statement)
        if header:
            table = _resolve(_keys(header[2]), arrays)
            if header[1] == "[[":
                arrays[table] = arrays.get(table, -1) + 1
                table = (*table, arrays[table])
            found.setdefault(table, line)
        else:
            for part in _prefixes(_keys(statement)):
                found.setdefault((*table, *part), line)
    return found


def _statements(text: str) -> Iterator[tuple[int, str]]:
    """(line, text up to the line's end) of every statement; lines inside a value are passed over."""
    position, line = 0, 1
    while position < len(text):
        end = _value_end(text, position)
        statement = text[position:end].strip()
        if statement and not statement.startswith("#"):
            yield line, statement
        line += text.count("\n", position, end + 1)
        position = end + 1


def _value_end(text: str, position: int) -> int:
    """Index of the line end that closes the statement at `position`: outside of strings, brackets and comments."""
    depth = 0
    while position < len(text):
        char = text[position]
        if char == "#":
            position = _find(text, "\n", position)
            continue
        if char in "\"'":
            position = _string_end(text, position)
            continue
        if char in "[{":
            depth += 1
        elif char in "]}":
            depth -= 1
        elif char == "\n" and depth <= 0:
            return position
        position += 1
    return position


def _string_end(text: str, position: int) -> int:
    quote = next(q for q in _QUOTES if text.startswith(q, position))
    position += len(quote)
    while position < len(text) and not text.startswith(quote, position):
        position += 2 if quote[0] == '"' and text[position] == "\\" else 1
    return position + len(quote)


def _find(text: str, what: str, position: int) -> int:
    found = text.find(what, position)
    return len(text) if found < 0 else found


def _keys(text: str) -> tuple[str, ...]:
    """Parts of a dotted key at the start of `text`."""
    parts: list[str] = []
    position = 0
    while match := _KEY.match(text, position):
        raw = match[1]
        parts.append(json.loads(raw) if raw[0] == '"' else raw.strip("'"))
        position = match.end()
        if text[position : position + 1] != ".":
            break
        position += 1
    return tuple(parts)


def _resolve(keys: tuple[str, ...], arrays: Mapping[Location, int]) -> Location:
    """A header's keys with the index of the last element wherever they pass through an array of tables."""
    location: Location = ()
    for number, key in enumerate(keys):
        location = (*location, key)
        if location in arrays and number < len(keys) - 1:
            location = (*location, arrays[location])
    return location


def _prefixes(keys: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    return (keys[: n + 1] for n in range(len(keys)))


def in_file(path: Path, lines: Mapping[Location, int]) -> Where:
    """Says "FILE, line N" of the nearest known location."""

    def where(location: Location) -> str:
        for length in range(len(location), 0, -1):
            if location[:length] in lines:
                return f"{path}, line {lines[location[:length]]}"
        return str(path)

    return where


def _complaint(model: type[BaseModel], data: Mapping[str, Any], error: ValidationError, where: Where) -> str:
    faults: dict[Location, list[tuple[str, Any]]] = {}
    missing: set[Location] = set()
    for fault in error.errors(include_url=False):
        location = _known(fault["loc"], data)
        if fault["type"] == "missing":
            location = fault["loc"]
            missing.add(location)
        faults.setdefault(location, []).append((fault["type"], fault))
    # A key that we do not know comes first: it is often why another one is missing.
    location, first = min(faults.items(), key=lambda item: item[1][0][0] != "extra_forbidden")
    kind, fault = first[0]
    owner, key = name(location[:-1]), location[-1] if location else ""
    if location in missing:
        text = f"{owner} needs the key {key!r}"
    elif kind == "extra_forbidden":
        text = f"{owner} has no key {key!r}; {_instead(str(key), _fields(model, location[:-1]))}"
    else:
        wanted = " or ".join(dict.fromkeys(_wanted(f) for _, f in first))
        text = f"{key!r} of {owner} should be {wanted}, not {_shown(fault['input'])}"
    more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
    return f"{where(location)}: {text}{more}"


def _known(location: Location, data: Any) -> Location:
    """`location` less what pydantic adds for the members of a union."""
    known: list[str | int] = []
    for part in location:
        if isinstance(data, Mapping) and part in data:
            data = data[str(part)]
        elif isinstance(data, Sequence) and not isinstance(data, str) and isinstance(part, int):
            data = data[part]
        else:
            break
        known.append(part)
    return tuple(known)


def name(location: Location) -> str:
    """A table as its header is written: "[trial]", "[[task]] 2" (from 1), or "the file"."""
    if not location:
        return "the file"
    if isinstance(location[-1], int):
        return f"[[{'.'.join(str(p) for p in location[:-1])}]] {location[-1] + 1}"
    return f"[{'.'.join(str(p) for p in location)}]"


def _wanted(fault: Any) -> str:
    text: str = fault["msg"]
    text = text.removeprefix("Input should be ").removeprefix("Value error, ")
    return {"an object": "a table", "a valid array": "a list", "a valid tuple": "a list"}.get(text, text)


def _shown(value: Any) -> str:
    return json.dumps(value, default=str)[:80]


def _fields(model: type[BaseModel], location: Location) -> list[str]:
    """Keys that the table at `location` may have."""
    current: Any = model
    for part in location:
        if isinstance(part, int):
            continue
        current = _model_in(current.model_fields[str(part)].annotation)
        if current is None:
            return []
    return list(current.model_fields)


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """The record in an annotation such as `Trial` or `tuple[Task, ...]`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for part in getattr(annotation, "__args__", ()):
        if found := _model_in(part):
            return found
    return None


def _instead(key: str, keys: list[str]) -> str:
    near = difflib.get_close_matches(key, keys, n=1, cutoff=0.6)
    return f"did you mean {near[0]!r}?" if near else f"it may have: {', '.join(keys)}"
