"""Reader of lm-eval's task YAML files that needs neither lm-eval nor the modules that a YAML names.

Rule: files are merged and indexed as lm-eval does it (lm_eval/tasks/_yaml_loader.py, _index.py,
0.4.13). Called from `source_files`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml


class Function(str):
    """The text of a `!function` tag."""

    __slots__ = ()


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """YAML loader that leaves `!function` tags as text."""


def _tagged(_loader: Any, suffix: str, node: Any) -> Any:
    text = str(node.value) if isinstance(node, yaml.ScalarNode) else ""
    return Function(text) if suffix == "function" else text


_Loader.add_multi_constructor("!", _tagged)


def parsed(path: Path) -> dict[str, Any]:
    try:
        config = yaml.load(path.read_bytes(), Loader=_Loader)  # noqa: S506 (a safe loader)
    except (OSError, yaml.YAMLError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}


def included(path: Path, config: Mapping[str, Any]) -> list[Path]:
    named = config.get("include") or []
    return [path.parent / str(one) for one in (named if isinstance(named, list) else [named])]


def merged_config(path: Path, seen: frozenset[Path] = frozenset()) -> dict[str, Any]:
    """A YAML's config as lm-eval merges it: included files first, then the file's own keys."""
    if path in seen:
        return {}
    config = parsed(path)
    merged: dict[str, Any] = {}
    for other in included(path, config):
        merged |= merged_config(other, seen | {path})
    return merged | config


def index_of(folders: tuple[str, ...]) -> dict[str, tuple[list[Path], list[str]]]:
    """Name -> the YAML files that define it, and the names that a tag holds.

    As in lm-eval, the first of two files in one folder counts, and the later of two folders.
    """
    index: dict[str, tuple[list[Path], list[str]]] = {}
    for folder in folders:
        part: dict[str, tuple[list[Path], list[str]]] = {}
        for path in sorted(Path(folder).glob("**/*.yaml"), key=lambda p: p.as_posix()):
            if "__pycache__" in path.parts or ".ipynb_checkpoints" in path.parts:
                continue
            config = merged_config(path)
            name = config.get("group") if "group" in config and "class" not in config else config.get("task")
            if not isinstance(name, str):
                continue
            part.setdefault(name, ([path], []))
            tags = config.get("tag") or []
            for tag in tags if isinstance(tags, list) else [tags]:
                part.setdefault(str(tag), ([], []))[1].append(name)
        index |= part
    return index


def names_in(member: Any) -> Iterator[str]:
    """Task and group names that a group's `task:` holds, nested groups included."""
    if isinstance(member, str):
        yield member
    elif isinstance(member, list):
        for one in member:
            yield from names_in(one)
    elif isinstance(member, dict):
        yield from names_in(member.get("task"))
        yield from names_in(member.get("group"))
