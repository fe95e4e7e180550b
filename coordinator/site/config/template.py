"""The commented evalspan.toml that `evalspan init` writes, and settings of some public sites by their documentation (`sites.toml`).

Rule: it contains every setting, generated from the fields of `schema.py`. Settings decided by the probe of the cluster are
set; all others are commented out with their default, so the file is a reference and changes nothing.
"""

from __future__ import annotations

import ast
import inspect
import tomllib
from collections.abc import Mapping
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from pydantic.fields import FieldInfo

from coordinator.errors import OperatorError
from coordinator.site.config.schema import Config, all_settings, settings_record
from coordinator.site.config.toml import as_toml, did_you_mean
from evaljobs.contract.specs import Record

TEMPLATE_HEAD = """\
# evalspan.toml, written by `evalspan init` for: {summary}.
# Read from --config, $EVALSPAN_CONFIG, ./evalspan.toml or ~/.config/evalspan.toml, the first that exists.
# Each key is also an environment variable (EVALSPAN_CLUSTER_PARTITION); the command line overrides both.
# A line that is commented out shows the default, or an example where it says so.
"""
SITES_TABLE = Path(__file__).with_name("sites.toml")
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


class SitePreset(Record):
    """A site as its documentation describes it."""

    title: str
    source: str  # the documentation
    read: str  # day, as YYYY-MM-DD
    account: bool  # are jobs charged to an account that the user names?
    notes: tuple[str, ...]  # what a user must know that is no setting
    settings: dict[str, Any]  # setting ("cluster.partition") -> value; the others are for `doctor` to find


def site_presets() -> dict[str, SitePreset]:
    """Return the presets by name."""
    table = tomllib.loads(SITES_TABLE.read_text(encoding="utf-8"))
    return {name: SitePreset.model_validate(one) for name, one in table.items()}


def site_preset(name: str) -> SitePreset:
    """Return the preset of this name. OperatorError where there is none."""
    known = site_presets()
    if name not in known:
        names = ", ".join(known)
        raise OperatorError(f"--site {name}: {did_you_mean(name, list(known))}; there are presets of {names}")
    return known[name]
