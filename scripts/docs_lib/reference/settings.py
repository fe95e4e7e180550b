"""docs/reference/settings.md: each key of evalspan.toml. Types and bounds are the schema's, descriptions the template's."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from docs_lib.reference.text import code, first_upper, literal, page, plain, table
from pydantic.fields import FieldInfo

from coordinator.config import loading, template
from coordinator.config.loading import OPTIONS, PREFIX
from coordinator.config.schema import Config
from evaljobs.contract.specs import Record

INTRO = "Each section and key of `evalspan.toml`. `evalspan init` writes a file with all of them."
LINE = re.compile(r"(?:# )?([a-z_]+) = (.*?)(?:\s+# (.*))?")
MORE = re.compile(r"# {10,}# (.*)")  # a description's second line


@dataclass(frozen=True, slots=True, kw_only=True)
class Described:
    """A key as the template has it. `default`: what happens without it, where the schema's default is none."""

    text: str
    example: str = ""
    default: str = ""


def settings_page() -> str:
    said = described()
    # the paragraph of the module that loads them
    where = (loading.__doc__ or "").split("\n\n")[1]
    parts = ["## Settings: file, environment, command line", plain(where), _section("", Config, said)]
    for name, field in Config.model_fields.items():
        if model := _model(field):
            parts += _sections(name, model, said)
    return page("Settings", INTRO, *parts)


def _sections(name: str, model: type[Record], said: Mapping[str, Described]) -> Iterator[str]:
    yield _section(name, model, said)
    roles = [(key, sub) for key, field in model.model_fields.items() if (sub := _model(field))]
    if roles:
        yield _roles(name, dict(roles), said)


def _section(name: str, model: type[Record], said: Mapping[str, Described]) -> str:
    head = f"## `[{name}]`" if name else "## Keys at the top"
    what = "" if name == "" else plain(model.__doc__ or "")
    return "\n\n".join(filter(None, [head, what, _table(name, model, said)]))


def _roles(name: str, roles: Mapping[str, type[Record]], said: Mapping[str, Described]) -> str:
    first, model = next(iter(roles.items()))
    heads = ", ".join(f"`[{name}.{role}]`" for role in roles)
    what = [f"- `[{name}.{role}]`: {template.ROLES[role]}" for role in roles]
    return "\n\n".join(
        [
            f"### {heads}",
            plain(model.__doc__ or ""),
            "\n".join(what),
            f"Keys of each, here of `{first}`:",
            _table(f"{name}.{first}", model, said),
        ]
    )


def _table(section: str, model: type[Record], said: Mapping[str, Described]) -> str:
    shapes = model.model_json_schema()
    rows = []
    for key, field in model.model_fields.items():
        if _model(field):
            continue
        dotted = f"{section}.{key}".lstrip(".")
        note = said[dotted]
        shape = shapes["properties"][key]
        value = field.get_default(call_default_factory=True)
        default = note.default if value is None else literal(shape.get("default", value))
        example = f" Example: {code(note.example)}." if note.example else ""
        option = f", `{OPTIONS[dotted]}`" if dotted in OPTIONS else ""
        rows.append(
            [
                code(key),
                words(shape, shapes.get("$defs", {})),
                default or "none",
                _sentence(note.text) + example,
                code(PREFIX + dotted.replace(".", "_").upper()) + option,
            ]
        )
    return table(["key", "type", "default", "what it does", "also by"], rows)


def _sentence(text: str) -> str:
    if not text:
        return ""
    return plain((text if text.startswith(("true:", "false:")) else first_upper(text)).rstrip(".") + ".")


def _model(field: FieldInfo) -> type[Record] | None:
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, Record) else None


# --- descriptions ------------------------------------------------------------------------------------------------------


def described() -> dict[str, Described]:
    """Dotted key -> what the template says of it."""
    found: dict[str, Described] = {}
    section, above, last = "", [], ""
    for line in template.default_text("", {}).splitlines():
        if line.startswith("["):
            section = line.partition("]")[0].strip("[") + "."
        elif (more := MORE.fullmatch(line)) and last:
            found[last] = _parsed(f"{found[last].text} {more[1]}", "", found[last])
        elif key := LINE.fullmatch(line):
            last = section + key[1]
            found[last] = _parsed(" ".join([*above, *([key[3]] if key[3] else [])]), key[2])
        if line.startswith("# ") and not LINE.fullmatch(line) and not MORE.fullmatch(line):
            above.append(line.removeprefix("# "))
        else:
            above = []
    return found


def _parsed(text: str, value: str, before: Described | None = None) -> Described:
    """`text`: a comment of the template, such as "example: the port; default: any"."""
    example, default = "", ""
    if found := re.match(r"example(?:, of|[:,;])?\s*", text):
        example, text = value, text[found.end() :]
    if found := re.search(r"(?:^|; )default: ([^;(]+)", text):
        default = found[1].strip()
        text = (text[: found.start()] + text[found.end() :]).strip()
    if before:
        return Described(text=text, example=before.example, default=default or before.default)
    return Described(text=text, example=example, default=default)


# --- types -------------------------------------------------------------------------------------------------------------


def words(shape: Mapping[str, Any], known: Mapping[str, Any]) -> str:
    """A type of JSON Schema in plain words, with its bounds."""
    if "$ref" in shape:
        target = known[shape["$ref"].rpartition("/")[2]]
        keys = ", ".join(f"{key} = {words(of, known)}" for key, of in target["properties"].items())
        return f"{{ {keys} }}"
    if "anyOf" in shape:
        return " or ".join(dict.fromkeys(words(s, known) for s in shape["anyOf"] if s.get("type") != "null"))
    if "const" in shape or "enum" in shape:
        return " or ".join(literal(value) for value in shape.get("enum", [shape.get("const")]))
    if shape.get("type") in {"array", "object"}:
        return _collection(shape, known)
    names = {"integer": "whole number", "number": "number", "boolean": "`true` or `false`"}
    name = names.get(shape.get("type", ""), "text")
    return ("path" if shape.get("format") == "path" else name) + _bounds(shape)


def _collection(shape: Mapping[str, Any], known: Mapping[str, Any]) -> str:
    if shape["type"] == "array":
        of = words(shape["items"], known)
        least = f", at least {shape['minItems']}" if "minItems" in shape else ""
        return f"list of {PLURALS.get(of, of)}{least}"
    more = shape.get("additionalProperties")
    if not isinstance(more, dict):
        return "table"
    of = words(more, known)
    return f"table of {PLURALS.get(of, of)}"


PLURALS = {"text": "texts", "path": "paths", "number": "numbers", "whole number": "whole numbers"}


def _bounds(shape: Mapping[str, Any]) -> str:
    low, above, high, below = (
        shape.get(key) for key in ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")
    )
    said = []
    if low is not None:
        said.append(f"from {low:g}")
    if above is not None:
        said.append(f"above {above:g}")
    if high is not None:
        said.append(f"to {high:g}")
    if below is not None:
        said.append(f"below {below:g}")
    return f" {' and '.join(said)}" if said else ""
