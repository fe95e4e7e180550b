"""docs/reference/events.md: events of a journal and news, from their records: docstrings, comments of fields, types."""

from __future__ import annotations

import inspect
import json
import re
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from docs_lib.reference.text import block, code, field_notes, first_upper, page, plain, table
from pydantic import BaseModel

from coordinator.cluster import Job
from coordinator.evaluation import events, step
from coordinator.monitor import notify
from evaljobs.contract import outcomes as outcomes_of

INTRO = """Events in the journal of an evaluation, `ID/journal.jsonl` of the work folder, one a line as JSON; and the news that
`[notify]` sends. Times are unix seconds. How the pieces fit: [architecture](../architecture.md)."""
PARTS = (events.Offer, Job, events.PlannedLeaf, events.PlannedLane)
CAPITALS = 20  # characters of a name that stands for a text
AT = 1795352000.0  # a time in the example lines


def events_page() -> str:
    parts = ["## States that events change", *_states()]
    parts += ["## Events", "Each event has `kind` and `at`. After `Then` stands what follows from it."]
    for event in get_args(events.AnyEvent):
        parts += _event(event)
    parts.append("## Records within events")
    for record in PARTS:
        parts += [f"### `{record.__name__}`", plain(record.__doc__ or ""), _fields(record)]
    parts += [
        "## Outcomes of jobs",
        "An `outcome-seen` event holds one of these; so does its file in `ID/outcomes`.",
    ]
    for record in get_args(get_args(outcomes_of.Outcome)[0]):
        kind = record.model_fields["kind"].default
        parts += [f"### Outcome `{kind}`", plain(record.__doc__ or ""), _fields(record, without=("kind",))]
    parts += ["## News of `[notify]`", plain(notify.News.__doc__ or ""), _fields(notify.News)]
    parts += [f"### `{notify.Fell.__name__}`", plain(notify.Fell.__doc__ or ""), _fields(notify.Fell)]
    parts += ["An example of a piece of news:", block(sample_line(notify.News, indent=2))]
    return page("Events", INTRO, *parts)


def _states() -> Iterator[str]:
    """The diagrams of `coordinator.evaluation.step`, with the sentences between them."""
    text = inspect.cleandoc(step.__doc__ or "")
    _, _, rest = text.partition("The phases of an evaluation")
    text = "The phases of an evaluation" + rest.partition("A worked example.")[0]
    for paragraph in re.split(r"\n\s*\n", text.strip()):
        yield block(textwrap.dedent(paragraph)) if paragraph.startswith("    ") else plain(paragraph)


def _event(event: type[events.Event]) -> Iterator[str]:
    kind = event.model_fields["kind"].default
    yield f"### `{kind}`"
    yield plain(event.__doc__ or "")
    yield _fields(event, without=("kind", "at"))
    yield block(sample_line(event)) if event is not events.Accepted else ""


def _fields(record: type, without: tuple[str, ...] = ()) -> str:
    notes = field_notes(record)
    types = inspect.get_annotations(record)
    rows = [
        [code(name), code(types[name]), default, plain(first_upper(notes.get(name, "")))]
        for name, default in _defaults(record)
        if name not in without
    ]
    return table(["field", "type", "default", "meaning"], rows)


def _defaults(record: type) -> Iterator[tuple[str, str]]:
    """Each field with its default as JSON; "" where it has none."""
    if issubclass(record, BaseModel):
        for name, field in record.model_fields.items():
            value = None if field.is_required() else field.get_default(call_default_factory=True)
            yield name, "" if field.is_required() else code(json.dumps(value))
    else:
        for each in fields(record):
            made = each.default_factory() if each.default_factory is not MISSING else each.default
            yield each.name, "" if made is MISSING else code(json.dumps(made))


# --- example lines -----------------------------------------------------------------------------------------------------


def sample_line(record: type[BaseModel], indent: int | None = None) -> str:
    """A line as a journal has it: names in capitals stand for texts; checked by reading it back."""
    line = record.model_validate_json(json.dumps(_sample(record))).model_dump(mode="json")
    return json.dumps(line, indent=indent, ensure_ascii=False)


def _sample(record: type[BaseModel]) -> dict[str, Any]:
    return {
        name: _value(name, field.annotation)
        for name, field in record.model_fields.items()
        if field.is_required() or name == "kind"  # which tells the members of a choice apart
    }


def _value(name: str, kind: Any) -> Any:
    """A value of this type; of a choice the first."""
    origin, inner = get_origin(kind), [each for each in get_args(kind) if each is not NoneType]
    if name == "at":
        return AT
    if origin is None:
        return _single(name, kind)
    if origin in (tuple, list):
        return [_value(name, each) for each in inner if each is not Ellipsis]
    if origin in (dict, Mapping):
        return {_value(name, inner[0]): _value(name, inner[1])}
    return inner[0] if origin is Literal else _value(name, inner[0])


def _single(name: str, kind: Any) -> Any:
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return _sample(kind)
    if is_dataclass(kind):
        types = get_type_hints(kind)
        needed = [each.name for each in fields(kind) if each.default is MISSING is each.default_factory]
        return {each: _value(each, types[each]) for each in needed}
    return {int: 1, float: 1.5, bool: True}.get(kind, name.upper()[:CAPITALS])
