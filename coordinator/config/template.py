"""The commented evalspan.toml that `evalspan init` writes.

Rule: it holds every setting, made of the fields of `schema.py`. Those that the probe of the cluster decided are set; all
others are commented out with their default, so the file is the reference and changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic.fields import FieldInfo

from coordinator.config.schema import Config, record_of, settings
from coordinator.config.toml import as_toml

HEAD = """\
# evalspan.toml, written by `evalspan init` for: {summary}.
# Read from --config, $EVALSPAN_CONFIG, ./evalspan.toml or ~/.config/evalspan.toml, the first that exists.
# Each key is also an environment variable (EVALSPAN_CLUSTER_PARTITION); the command line overrides both.
# A line that is commented out shows the default, or an example where it says so.
"""
WIDTH = 30  # characters of a line before its comment


def default_text(summary: str, chosen: Mapping[str, tuple[Any, str]]) -> str:
    """Text of an evalspan.toml for a site. `chosen`: setting ("cluster.partition") -> its value, and a note for the reader."""
    lines = [HEAD.format(summary=summary)]
    table: tuple[str, ...] = ()
    for location, field in settings():
        if location[:-1] != table:
            table = location[:-1]
            lines += ["", f"# {what(table)}", f"[{'.'.join(table)}]"]
        lines.append(_line(location[-1], field, chosen.get(".".join(location))))
    return "\n".join(lines) + "\n"


def what(table: tuple[str, ...]) -> str:
    """What the settings of a table are about: the text of its field, else its record's."""
    model: Any = Config
    for key in table:
        field = model.model_fields[key]
        model = record_of(field)
    return field.description or str(model.__doc__)


def _line(key: str, field: FieldInfo, chosen: tuple[Any, str] | None) -> str:
    text = str(field.description)
    if chosen is not None:
        value, note = chosen
        return f"{key} = {as_toml(value)}".ljust(WIDTH) + f"  # {f'{note}; ' if note else ''}{text}"
    value, text = (field.examples[0], f"example: {text}") if field.examples else (field.default, text)
    return f"# {key} = {as_toml(value)}".ljust(WIDTH) + f"  # {text}"
