"""Loads one Config from evalspan.toml, the environment and the command line.

Settings are searched for in `--config`, `$EVALSPAN_CONFIG`, `./evalspan.toml` and `~/.config/evalspan.toml`; the first file
found counts. Key `x` of section `[s]` can also be set by the variable `EVALSPAN_S_X`: text is used as is, everything else is
parsed as TOML (`EVALSPAN_WATCH_FOLDERS='["/a"]'`). The command line overrides variables, variables override the file, and the
file overrides the defaults. A wrong key or type is refused with file, line and key before anything is submitted.

Rule: the defaults are those of `schema.py`. Unknown keys in the file are refused. No other module of the coordinator reads
settings from the environment.
"""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Iterator, Mapping
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from coordinator.errors import OperatorError
from coordinator.site.config import toml
from coordinator.site.config.schema import Config, SlurmConfig, all_settings
from evaljobs.contract.paths import expand_home

FILE_NAME = "evalspan.toml"
PREFIX = "EVALSPAN_"
MODEL_ARGS = "trial.model_args"
FOR_SLURM = ("partition", "cpu_partition", "account", "qos", "nice", "reservation", "extra_args")  # [cluster]

# dotted key -> its command-line option
OPTION_OF_SETTING = {
    "work_dir": "--work-dir",
    "cluster.kind": "--cluster",
    "cluster.partition": "--partition",
    "cluster.account": "--account",
    "cluster.qos": "--qos",
    "cluster.slots": "--slots",
    "trial.engine": "--model",
    "trial.device": "--device",
    "gpu_hour_price": "--gpu-hour-price",
}


def _said_by(key: str) -> str:
    """Return what set this dotted key, for a message: the command-line option, otherwise `settings` of a call."""
    return (
        "--model-args"
        if key.startswith(f"{MODEL_ARGS}.")
        else OPTION_OF_SETTING.get(key, f"settings {key!r}")
    )


def _in_defaults(_location: toml.Location) -> str:
    """Return the source of an unset setting."""
    return "the defaults"


def load_config(
    path: Path | None, environ: Mapping[str, str], overrides: Mapping[str, object] | None = None
) -> Config:
    """Return the settings of this process, checked once.

    `path`: from --config (None: searched, see `find_config_file`). `overrides`: dotted key ("cluster.partition") -> value from the
    command line; None: not given. Raise OperatorError, which names file and line, variable or option.
    """
    file = find_config_file(path, environ)
    data: dict[str, Any] = {"work_dir": Config.model_fields["work_dir"].default}
    in_file: toml.Where = _in_defaults
    if file is not None:
        read, text = toml.read_toml(file)
        in_file = toml.file_locations(file, text)
        data |= _absolute(read, file.parent)
    given: dict[toml.Location, object] = {
        tuple(key.split(".")): value
        for key, value in (overrides or {}).items()
        if value is not None or key.startswith(f"{MODEL_ARGS}.")  # None is a valid model argument
    }
    said: dict[toml.Location, str] = {}
    for location, source, value in (
        *_from_environment(environ),
        *((location, _said_by(".".join(map(str, location))), value) for location, value in given.items()),
    ):
        _put(data, location, value)
        said[location] = source
    _over_roles(data, given)
    named = [location for location, _ in all_settings() if _is_for_slurm(location) and _has(data, location)]
    if named and not _has(data, ("cluster", "kind")):
        # a partition or an account implies Slurm; a file with them can still be used with --cluster local
        _put(data, ("cluster", "kind"), "slurm")

    def where(location: toml.Location) -> str:
        tables = (location[:length] for length in range(len(location), 0, -1))
        return next((said[table] for table in tables if table in said), "") or in_file(location)

    config = toml.validate_table(Config, _absolute(data, Path.cwd()), where)
    # if the file selects local, a variable does not override that
    typed = given if ("cluster", "kind") in said else said
    for location in named if config.cluster.kind == "local" else ():
        if location in typed:
            raise OperatorError(
                f"{where(location)}: {toml.table_header(location[:-1])} {location[-1]} is for Slurm, and jobs would run on this machine: "
                f'add --cluster slurm, or set kind = "slurm" in [cluster] of {FILE_NAME}'
            )
    return config


def find_config_file(path: Path | None, environ: Mapping[str, str]) -> Path | None:
    """Return the first of --config, $EVALSPAN_CONFIG, ./evalspan.toml, ~/.config/evalspan.toml; or None.

    Raise OperatorError if a named file is missing.
    """
    named = path or (Path(environ["EVALSPAN_CONFIG"]) if environ.get("EVALSPAN_CONFIG") else None)
    if named is not None:
        named = expand_home(named).absolute()
        if not os.path.isfile(named):  # noqa: PTH113 (False in a private folder)
            by = "--config" if path else "$EVALSPAN_CONFIG"
            raise OperatorError(f"{by} names {named}, which is not a file: `evalspan init` writes one")
        return named
    # File ./evalspan.toml: settings | you, or `evalspan init` | by hand
    # File ~/.config/evalspan.toml: settings, where the current folder has none | you | by hand
    home = Path(environ["HOME"]) if environ.get("HOME") else None
    places = [Path.cwd() / FILE_NAME, *([home / ".config" / FILE_NAME] if home else [])]
    return next((place for place in places if os.path.isfile(place)), None)  # noqa: PTH113 (as above)


def source_of(path: Path | None, environ: Mapping[str, str], *location: str) -> str:
    """Return what sets a setting: "$VARIABLE", or "FILE, line N"; "" if neither. `path`, `environ`: as in `load`."""
    variable = PREFIX + "_".join(location).upper()
    if environ.get(variable):
        return f"${variable}"
    file = find_config_file(path, environ)
    line = toml.line_of(toml.read_toml(file)[1], location) if file is not None else None
    return f"{file}, line {line}" if line is not None else ""


def _over_roles(data: dict[str, Any], given: Mapping[toml.Location, object]) -> None:
    """Apply --account and --qos to every role, --partition to those with jobs on GPU nodes."""
    for key in ("partition", "account", "qos"):
        roles = ("precursor", "trial") if key == "partition" else SlurmConfig.model_fields
        for role in roles if ("cluster", key) in given else ():
            if _has(data, ("slurm", role, key)):
                del data["slurm"][role][key]


def _is_for_slurm(location: tuple[str, ...]) -> bool:
    return location[0] in ("slurm", "nodes") or (location[0] == "cluster" and location[1] in FOR_SLURM)


def _has(data: Any, location: tuple[str, ...]) -> bool:
    for key in location:
        if not isinstance(data, Mapping) or key not in data:
            return False
        data = data[key]
    return True


def _from_environment(environ: Mapping[str, str]) -> Iterator[tuple[toml.Location, str, object]]:
    for location, field in all_settings():
        variable = PREFIX + "_".join(location).upper()
        if environ.get(variable):
            yield location, f"${variable}", _value(environ[variable], field)
    known = {PREFIX + "_".join(location).upper() for location, _ in all_settings()}
    sections = {location[0] for location, _ in all_settings() if len(location) > 1}
    for variable in sorted(environ.keys() - known):
        section, _, key = variable.removeprefix(PREFIX).lower().partition("_")
        if variable.startswith(PREFIX) and section in sections:
            yield (section, key), f"${variable}", environ[variable]  # refused as an unknown key


def _value(text: str, field: FieldInfo) -> object:
    """Return the text itself if the key takes text, otherwise parse it as TOML; checked later."""
    annotation: Any = field.annotation
    adapter: TypeAdapter[Any] = TypeAdapter(annotation)
    try:
        adapter.validate_json(json.dumps(text), strict=True)
    except ValidationError:
        try:
            return tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            return text
    return text


def _put(data: Any, location: toml.Location, value: object) -> None:
    """Set a key in nested tables; a value in place of a table is kept, and refused later."""
    for key in location[:-1]:
        data = data.setdefault(str(key), {})
        if not isinstance(data, dict):
            return
    data[str(location[-1])] = value


def _absolute(data: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return `data` with every path absolute: `~` is the home, relative paths start from `folder`."""

    def absolute(value: Any) -> Any:
        if isinstance(value, list):
            return [absolute(each) for each in value]
        return str((folder / expand_home(value)).absolute()) if isinstance(value, str | Path) else value

    changed: dict[str, Any] = json.loads(json.dumps(data, default=str))
    for location, field in all_settings():
        if not _has(changed, location):
            continue
        *tables, key = location
        table = reduce(getitem, tables, changed)
        value = table[key]
        is_list = "tuple" in str(field.annotation)
        if ("Path" in str(field.annotation) and is_list == isinstance(value, list)) or (
            location == ("watch", "suite") and isinstance(value, str) and toml.is_file_name(value)
        ):
            table[key] = absolute(value)
    return changed
