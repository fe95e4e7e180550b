"""The commented evalspan.toml that `evalspan init` writes.

Rule: it contains every setting, generated from the fields of `schema.py`. Settings decided by the probe of the cluster are
set; all others are commented out with their default, so the file is a reference and changes nothing.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Mapping
from functools import cache
from itertools import pairwise
from typing import Any

from pydantic.fields import FieldInfo

from coordinator.site.config.schema import Config, all_settings, settings_record
from coordinator.site.config.toml import as_toml
from evaljobs.contract.specs import Record

TEMPLATE_HEAD = """\
# evalspan.toml, written by `evalspan init` for: {summary}.
# Read from --config, $EVALSPAN_CONFIG, ./evalspan.toml or ~/.config/evalspan.toml, the first that exists.
# Each key is also an environment variable (EVALSPAN_CLUSTER_PARTITION); the command line overrides both.
# A line that is commented out shows the default, or an example where it says so.
"""
SETTING_WIDTH = 30  # column of the comments


def default_text(summary: str, chosen: Mapping[str, tuple[Any, str]]) -> str:
    """Return an evalspan.toml for a site. `chosen`: setting ("cluster.partition") -> its value, and a comment for the reader."""
    lines = [TEMPLATE_HEAD.format(summary=summary)]
    table: tuple[str, ...] = ()
    for location, field in all_settings():
        if location[:-1] != table:
            table = location[:-1]
            lines += ["", f"# {text_of(table)}.", f"[{'.'.join(table)}]"]
        lines.append(_line(location, field, chosen.get(".".join(location))))
    return "\n".join(lines) + "\n"


def text_of(location: tuple[str, ...]) -> str:
    """Return a setting's or table's one-line description: the docstring below its field, otherwise its record's."""
    *tables, key = location
    model: type[Record] = Config
    for table in tables:
        model = settings_record(model.model_fields[table]) or model
    inner = settings_record(model.model_fields[key])
    text = _texts(model).get(key) or (inner and inner.__doc__) or ""
    return " ".join(text.split()).rstrip(".")


@cache
def _texts(model: type[Record]) -> dict[str, str]:
    """Return field -> the docstring below it. Read on demand, since most commands show none."""
    (record,) = ast.parse(inspect.getsource(model)).body
    below = pairwise(ast.iter_child_nodes(record))
    return {
        field.target.id: str(text.value.value)
        for field, text in below
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
    }


def _line(location: tuple[str, ...], field: FieldInfo, chosen: tuple[Any, str] | None) -> str:
    key, text = location[-1], text_of(location)
    if chosen is not None:
        value, note = chosen
        return f"{key} = {as_toml(value)}".ljust(SETTING_WIDTH) + f"  # {f'{note}; ' if note else ''}{text}"
    value, text = (field.examples[0], f"example: {text}") if field.examples else (field.default, text)
    return f"# {key} = {as_toml(value)}".ljust(SETTING_WIDTH) + f"  # {text}"
