"""Reader of lm-eval's task YAML files that needs neither lm-eval nor the modules that a YAML names.

Rule: files are merged and indexed as lm-eval does it (lm_eval/tasks/_yaml_loader.py, _index.py, 0.4.13). A data path and a
function keep the YAML file that has them. Called from `source_files` (keys), `task_paths` (loading), `catalogue` (listing,
and the check before a submission) and `run`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml


class YamlText(str):
    """A data path with the YAML file that has it; copies by lm-eval's merging keep the file."""

    __slots__ = ("yaml",)
    yaml: Path

    @classmethod
    def of(cls, text: str, file: Path) -> YamlText:
        made = cls(text)
        made.yaml = file
        return made


class Function(YamlText):
    """The text of a `!function` tag: module.function."""

    __slots__ = ()

    @property
    def module(self) -> str:
        return self.rpartition(".")[0]

    @property
    def file(self) -> Path:
        """Location of the module unless it is installed."""
        return self.yaml.parent / f"{self.module.replace('.', '/')}.py"


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """YAML loader that leaves `!function` tags as text."""

    def __init__(self, stream: Any) -> None:
        super().__init__(stream)
        self.file = Path(stream.name)


def _tagged(loader: Any, suffix: str, node: Any) -> Any:
    text = str(node.value) if isinstance(node, yaml.ScalarNode) else ""
    return Function.of(text, loader.file) if suffix == "function" else text


_Loader.add_multi_constructor("!", _tagged)


def _loaded(path: Path) -> Any:
    """Return a YAML's value. Raise ValueError if it is nested too deeply, or contains itself through an alias."""
    try:
        with path.open("rb") as file:
            value = yaml.load(file, Loader=_Loader)  # noqa: S506 (a safe loader)
        json.dumps(value, default=str, skipkeys=True)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    except ValueError as error:
        raise ValueError(
            "an alias in it contains itself" if "Circular" in str(error) else str(error)
        ) from error
    return value


def parse_yaml(path: Path) -> dict[str, Any]:
    """Return a YAML's own content; empty if it cannot be read."""
    try:
        config = _loaded(path)
    except (OSError, yaml.YAMLError, ValueError):
        return {}
    return mark_data_paths(config, path) if isinstance(config, dict) else {}


def unreadable_reason(path: Path) -> str:
    """Return why a YAML cannot be read, in one line with its line and column; "" if it can."""
    try:
        _loaded(path)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = "" if mark is None else f"line {mark.line + 1}, column {mark.column + 1}: "
        return f"{where}{error.problem}"
    except (OSError, yaml.YAMLError, ValueError) as error:
        return " ".join(str(error).split())
    return ""


def included_files(path: Path, config: Mapping[str, Any]) -> list[Path]:
    named = config.get("include") or []
    return [path.parent / str(one) for one in (named if isinstance(named, list) else [named])]


def merged_config(
    path: Path, seen: frozenset[Path] = frozenset(), read: Callable[[Path], dict[str, Any]] = parse_yaml
) -> dict[str, Any]:
    """Return a YAML's config as merged by lm-eval: included files first, then the file's own keys."""
    path = path.resolve()
    if path in seen:
        return {}
    config = read(path)
    merged: dict[str, Any] = {}
    for other in included_files(path, config):
        merged |= merged_config(other, seen | {path}, read)
    return merged | config


def missing_include(path: Path, seen: frozenset[Path] = frozenset()) -> str:
    """Return an error about a YAML that includes a missing or unreadable file, which lm-eval skips; otherwise ""."""
    path = path.resolve()
    for other in included_files(path, parse_yaml(path)) if path not in seen else ():
        if not other.is_file():
            return f"{path}: include: no file {other}"
        if not parse_yaml(other):
            return f"{path}: include: {other} has no readable task configuration"
        if why := missing_include(other, seen | {path}):
            return why
    return ""


@dataclass(kw_only=True)
class TaskDefinition:
    """A task or group with its YAML, or a tag (no YAML). `members`: the names that it contains."""

    yaml: str = ""
    members: list[str] = field(default_factory=list)


Index = Mapping[str, TaskDefinition]


def _is_group(config: Mapping[str, Any]) -> bool:
    return "group" in config and "class" not in config


def defined_by(path: Path, config: Mapping[str, Any] | None = None) -> TaskDefinition:
    """Return the task or group of a YAML file. `config`: its merged one, if the caller has it."""
    config = merged_config(path) if config is None else config
    return TaskDefinition(
        yaml=str(path), members=[*names_in(config.get("task"))] if _is_group(config) else []
    )


def index_of(
    folders: Iterable[str], read: Callable[[Path], dict[str, Any]] = parse_yaml
) -> dict[str, TaskDefinition]:
    """Return tasks, groups and tags that these folders define.

    As in lm-eval, the first of two files in one folder counts, and the later of two folders.
    """
    index: dict[str, TaskDefinition] = {}
    for folder in folders:
        part: dict[str, TaskDefinition] = {}
        for path in sorted(Path(folder).glob("**/*.yaml"), key=lambda p: p.as_posix()):
            if "__pycache__" in path.parts or ".ipynb_checkpoints" in path.parts:
                continue
            config = merged_config(path, read=read)
            group = _is_group(config)
            name = config.get("group" if group else "task")
            if not isinstance(name, str) or name in part:
                continue
            part[name] = defined_by(path, config)
            tags = [] if group else config.get("tag") or []
            for tag in tags if isinstance(tags, list) else [tags]:
                part.setdefault(str(tag), TaskDefinition()).members.append(name)
        index |= part
    return index


def names_in(member: Any) -> Iterator[str]:
    """Yield names in a group's `task:`; an inline group is replaced by its own members."""
    if isinstance(member, str):
        yield member
    elif isinstance(member, list):
        for one in member:
            yield from names_in(one)
    elif isinstance(member, dict):
        yield from names_in(member.get("task") or member.get("group"))


def reachable_names(index: Index, names: Iterable[str]) -> set[str]:
    """Return these names and the members of their groups and tags, including undefined ones."""
    found: set[str] = set()
    waiting = list(names)
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting += index[name].members if name in index else []
    return found


def iterate_texts(value: Any, keys: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield texts of a YAML value with the keys above them."""
    if isinstance(value, str):
        yield keys, value
    elif isinstance(value, dict):
        for name, member in value.items():
            yield from iterate_texts(member, (*keys, str(name)))
    elif isinstance(value, list):
        for member in value:
            yield from iterate_texts(member, keys)


def mark_data_paths(config: Mapping[str, Any], file: Path) -> dict[str, Any]:
    """Return the config with a `YamlText` for each data path, including those in a group's settings for its members."""
    found = dict(config)

    def mark(text: str) -> str:
        return YamlText.of(text, file)

    if isinstance(config.get("dataset_path"), str):
        found["dataset_path"] = mark(config["dataset_path"])
    keywords = config.get("dataset_kwargs")
    if isinstance(keywords, dict):
        files = {
            key: map_data_files(keywords[key], mark) for key in ("data_files", "data_dir") if key in keywords
        }
        found["dataset_kwargs"] = keywords | files
    if isinstance(config.get("task"), list):
        found["task"] = [mark_data_paths(m, file) if isinstance(m, dict) else m for m in config["task"]]
    return found


def map_data_files(files: Any, change: Callable[[str], str]) -> Any:
    """Return data_files, in any shape that `datasets` accepts, with `change` applied to each path."""
    if isinstance(files, str):
        return change(files)
    if isinstance(files, dict):
        return {split: map_data_files(paths, change) for split, paths in files.items()}
    if isinstance(files, list):
        return [
            {**one, "path": map_data_files(one["path"], change)}
            if isinstance(one, dict) and "path" in one
            else map_data_files(one, change)
            for one in files
        ]
    return files
