"""Reads a TOML file as a checked record; every error names file, line and key.

Rule: the file is read strictly (no "4" for 4, no unknown key). An error is one line: where, and what to write instead.
Python's parser gives no line numbers, so the line of a key is searched for after an error.
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
from pydantic.fields import FieldInfo

from coordinator.errors import OperatorError
from evaljobs import secret_values

Model = TypeVar("Model", bound=BaseModel)
MOST_BYTES = 16 << 20  # of a settings or suite file
Location = tuple[str | int, ...]
Where = Callable[[Location], str]  # location -> source of its value, e.g. "evalspan.toml, line 3"


def read_toml(path: Path) -> tuple[dict[str, Any], str]:
    """Read the values of a TOML file, and its text. Raise OperatorError if it is not TOML."""
    text = read_text(path)
    try:
        return tomllib.loads(text), text
    except RecursionError as error:
        raise OperatorError(f"{path} is nested too deeply") from error
    except tomllib.TOMLDecodeError as error:
        raise OperatorError(f"{path} is not TOML: {error}") from error


def read_text(path: Path, most: int = MOST_BYTES) -> str:
    """Read a file that a person named. Raise OperatorError if that fails, or it is no text of at most so many bytes."""
    try:
        with path.open("rb") as file:
            found = file.read(most + 1)
        if len(found) > most:
            raise OperatorError(f"{path} is longer than {most >> 20} MiB: not a settings or suite file")
        return found.decode()
    except UnicodeDecodeError as error:
        raise OperatorError(f"{path} is not UTF-8 text: {error}") from error
    except OSError as error:
        raise OperatorError(f"{path} cannot be read: {error.strerror or error}") from error


def validate_table(model: type[Model], data: Mapping[str, Any], where: Where) -> Model:
    """Return `data` as a `model`. Raise OperatorError for the first error, or secret, with its source from `where`."""
    _refuse_secrets(data, where)
    for location, text in _texts(data):
        if LONE_SURROGATE.search(text):
            shown = text.encode(errors="surrogateescape")
            raise OperatorError(f"{where(location)}: {shown!r} is not UTF-8: give it another name")
    try:
        # JSON mode is strict on types but accepts TOML's lists for tuples and text for paths
        return model.model_validate_json(json.dumps(data, default=str), strict=True)
    except ValidationError as error:
        raise OperatorError(_complaint(model, data, error, where)) from error


LONE_SURROGATE = re.compile("[\ud800-\udfff]")  # Python's escape of a byte that is not UTF-8
VARIABLES_TABLE = ("trial", "env")  # table whose keys are names of variables
COMMAND_SETTINGS = {("trial", "prologue"), ("trial", "container"), ("checkpoint", "convert")}
MAY_HOLD = {("redis", "url")}  # only written to redis/address.json (mode 0600)
SECRET_ALTERNATIVES = {
    "judge": "api_key_env names its variable, api_key_file its file (mode 0600)",
    "notify": "webhook_file names a file (mode 0600) with the address",
    "redis": "password_file names its file (mode 0600)",
    "trackers": "set the tracker's own variable where evalspan starts (MLFLOW_TRACKING_PASSWORD, WANDB_API_KEY)",
}


def _refuse_secrets(data: Mapping[str, Any], where: Where) -> None:
    """Raise OperatorError if a value is a secret: settings and suites appear in records, scripts and command lines."""
    found = next((place for place in _secrets(data) if place not in MAY_HOLD), None)
    if found is None:
        return
    variable = found[-1] if found[:2] == VARIABLES_TABLE else "HF_TOKEN"
    instead = SECRET_ALTERNATIVES.get(
        str(found[0]),
        f'write it to a file of mode 0600, and set prologue = "export {variable}=$(cat FILE)" in [trial]',
    )
    raise OperatorError(
        f"{where(found)}: {_key_name(found[-1])} of {table_header(found[:-1])} contains a secret that would appear in records and logs: {instead}"
    )


def _secrets(data: Mapping[str, Any]) -> Iterator[Location]:
    yield from secret_values.secret_locations(data)
    trial = data.get(VARIABLES_TABLE[0])
    env = trial.get(VARIABLES_TABLE[1]) if isinstance(trial, Mapping) else ()
    yield from ((*VARIABLES_TABLE, *place) for place in secret_values.secret_locations(env, variables=True))
    for place, text in _texts(data):
        if (place[:2] in COMMAND_SETTINGS or "extra_args" in place) and secret_values.in_command(text):
            yield place


def _texts(data: Any) -> Iterator[tuple[Location, str]]:
    """Yield (location, text) of each text in nested tables and lists."""
    if isinstance(data, str | Path):
        yield (), str(data)
    pairs: Any = data.items() if isinstance(data, Mapping) else enumerate(data) if _is_list(data) else ()
    for key, value in pairs:
        yield from (((key, *rest), text) for rest, text in _texts(value))


def is_file_name(text: str) -> bool:
    """Return whether `text` names a suite file rather than a shipped suite."""
    return "/" in text or text.endswith(".toml")


def line_of(text: str, location: Location) -> int | None:
    """Return the line (from 1) where the statement that sets `location`, e.g. ("task", 0, "limit"), begins; or None.

    The statement ends with the first line up to which the text parses and has the key.
    """
    lines = text.splitlines(keepends=True)
    start = 0
    for end in range(1, len(lines) + 1):
        try:
            data = tomllib.loads("".join(lines[:end]))
        except tomllib.TOMLDecodeError:
            continue  # inside a multi-line value
        if _known(location, data) == location:
            return start + 1
        start = end
    return None


def file_locations(path: Path, text: str) -> Where:
    """Return a `Where` that gives "FILE, line N" of the nearest key or table in the file."""

    def where(location: Location) -> str:
        for length in range(len(location), 0, -1):
            if (line := line_of(text, location[:length])) is not None:
                return f"{path}, line {line}"
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
    # unknown keys come first, since they often explain missing ones
    location, first = min(faults.items(), key=lambda item: item[1][0][0] != "extra_forbidden")
    kind, fault = first[0]
    owner, key = table_header(location[:-1]), location[-1] if location else ""
    if location in missing:
        text = f"{owner} needs the key {key!r}"
    elif kind == "extra_forbidden":
        text = f"{owner} has no key {key!r}; {did_you_mean(str(key), _fields(model, location[:-1]))}"
    else:
        wanted = " or ".join(dict.fromkeys(_wanted(f) for _, f in first))
        text = f"{_key_name(key)} of {owner} should be {wanted}, not {_shown(fault['input'])}"
        if wanted == "a list" and isinstance(fault["input"], str):  # usually from a variable
            text += f": write {_shown(fault['input'].split(','))}"
        elif wanted == "a list" and isinstance(fault["input"], Mapping):
            text += f": write [[{key}]]"
    # a list with a faulty member is also reported as too short
    holders = {place[:end] for place in faults for end in range(len(place))}
    others = dict.fromkeys(repr(str(place[-1])) for place in faults if place not in {location, *holders})
    more = f" (also wrong: {', '.join(others)})" if others else ""
    return f"{where(location)}: {text}{more}"


def _known(location: Location, data: Any) -> Location:
    """Return `location` without what pydantic adds for the members of a union."""
    known: list[str | int] = []
    for part in location:
        if isinstance(data, Mapping) and part in data:
            data = data[str(part)]
        elif _is_list(data) and isinstance(part, int) and part < len(data):
            data = data[part]
        else:
            break
        known.append(part)
    return tuple(known)


def _is_list(data: Any) -> bool:
    return isinstance(data, Sequence) and not isinstance(data, str)


def _key_name(key: str | int) -> str:
    return f"item {key + 1}" if isinstance(key, int) else repr(key)


def table_header(location: Location) -> str:
    """Return a table's header as written: "[trial]", "[[task]] 2" (from 1), "samples of [[task]] 2", or "the file"."""
    if not location:
        return "the file"
    array = next((end for end in range(len(location), 0, -1) if isinstance(location[end - 1], int)), 0)
    if not array:
        return f"[{'.'.join(str(p) for p in location)}]"
    header = f"[[{'.'.join(str(p) for p in location[: array - 1])}]] {int(location[array - 1]) + 1}"
    return f"{'.'.join(str(p) for p in location[array:])} of {header}" if location[array:] else header


_SIZE = re.compile(r"(String|List|Tuple) should have (at (?:least|most) \d+ (?:item|character)s?)")


def _wanted(fault: Any) -> str:
    text: str = fault["msg"]
    text = text.removeprefix("Input should be ").removeprefix("Value error, ")
    if size := _SIZE.match(text):
        return f"{'a text' if size[1] == 'String' else 'a list'} of {size[2]}"
    if text.startswith("String should match pattern"):  # the only one of a file's texts, `specs.Name`
        return "a text without control characters"
    return {"an object": "a table", "a valid array": "a list", "a valid tuple": "a list"}.get(text, text)


def _shown(value: Any) -> str:
    return json.dumps(secret_values.hide_secrets(value), default=str)[:80]


def _fields(model: type[BaseModel], location: Location) -> list[str]:
    """Return the keys that the table at `location` may have."""
    current: Any = model
    for part in location:
        if isinstance(part, int):
            continue
        current = _model_in(_keys(current)[str(part)].annotation)
        if current is None:
            return []
    return list(_keys(current))


def _keys(model: type[BaseModel]) -> dict[str, FieldInfo]:
    """Return the fields of a record by their keys in a file."""
    return {str(field.validation_alias or name): field for name, field in model.model_fields.items()}


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """Return the record in an annotation such as `Trial` or `tuple[Task, ...]`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for part in getattr(annotation, "__args__", ()):
        if found := _model_in(part):
            return found
    return None


def did_you_mean(key: str, keys: Sequence[str]) -> str:
    """Return a hint for a wrong key: the nearest valid one, or all."""
    near = difflib.get_close_matches(key, keys, n=1, cutoff=0.6)
    return f"did you mean {near[0]!r}?" if near else f"it may have: {', '.join(keys)}"


def as_toml(value: Any) -> str:
    """Format a value as TOML. Raise OperatorError for one that TOML cannot represent."""
    match value:
        case str() | Path():
            # JSON's escapes are TOML's, except for DEL, which TOML requires to be escaped
            return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")
        case bool() | int() | float():
            return json.dumps(value)
        case list() | tuple():
            return f"[{', '.join(map(as_toml, value))}]"
        case dict():
            inner = ", ".join(f"{as_toml(k)} = {as_toml(v)}" for k, v in value.items())
            return f"{{ {inner} }}" if inner else "{}"
        case _:
            raise OperatorError(f"TOML cannot represent {value!r}: omit it")
