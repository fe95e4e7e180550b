"""docs/reference/settings.md: each key of evalspan.toml, from the fields of the schema."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from docs_lib.reference.text import code, first_upper, literal, page, plain, table

from coordinator.config import loading
from coordinator.config.loading import OPTIONS, PREFIX
from coordinator.config.schema import Config, RoleConfig, record_of
from coordinator.config.template import text_of
from coordinator.config.toml import as_toml
from evaljobs.contract.specs import Record

INTRO = "Each section and key of `evalspan.toml`. `evalspan init` writes a file with all of them."


def settings_page() -> str:
    # the paragraph of the module that loads them
    where = (loading.__doc__ or "").split("\n\n")[1]
    parts = ["## Settings: file, environment, command line", plain(where), _section("", Config)]
    for name, field in Config.model_fields.items():
        if model := record_of(field):
            parts += _sections(name, model)
    return page("Settings", INTRO, *parts)


def _sections(name: str, model: type[Record]) -> Iterator[str]:
    yield _section(name, model)
    roles = [key for key, field in model.model_fields.items() if record_of(field)]
    if roles:
        yield _roles(name, roles)


def _section(name: str, model: type[Record]) -> str:
    head = f"## `[{name}]`" if name else "## Keys at the top"
    return "\n\n".join(filter(None, [head, _sentence(text_of((name,))) if name else "", _table(name, model)]))


def _roles(name: str, roles: Sequence[str]) -> str:
    return "\n\n".join(
        [
            f"### {', '.join(f'`[{name}.{role}]`' for role in roles)}",
            plain(RoleConfig.__doc__ or ""),
            "\n".join(f"- `[{name}.{role}]`: {text_of((name, role))}" for role in roles),
            f"Keys of each, here of `{roles[0]}`:",
            _table(f"{name}.{roles[0]}", RoleConfig),
        ]
    )


def _table(section: str, model: type[Record]) -> str:
    shapes = model.model_json_schema()
    rows = []
    for key, field in model.model_fields.items():
        if record_of(field):
            continue
        dotted = f"{section}.{key}".lstrip(".")
        shape = shapes["properties"][key]
        text, _, without = text_of(tuple(dotted.split("."))).partition("; default: ")
        default = without if field.default is None else literal(shape.get("default", field.default))
        example = f" Example: {code(as_toml(field.examples[0]))}." if field.examples else ""
        option = f", `{OPTIONS[dotted]}`" if dotted in OPTIONS else ""
        rows.append(
            [
                code(key),
                words(shape, shapes.get("$defs", {})),
                default or "none",
                _sentence(text) + example,
                code(PREFIX + dotted.replace(".", "_").upper()) + option,
            ]
        )
    return table(["key", "type", "default", "what it does", "also by"], rows)


def _sentence(text: str) -> str:
    return plain((text if text.startswith(("true:", "false:")) else first_upper(text)).rstrip(".") + ".")


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
