"""The source key of a suite entry: a digest of all files that its YAMLs name: modules and data, wherever they are.

Rule: files count by content, so touching one changes nothing. Whatever the modules import or read counts once a build has
recorded it (`shown_inputs`). The coordinator computes the key before a submission; a build computes it again and refuses
files that changed, and its rows include these files. Imports no lm_eval.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from evaljobs.contract.names import PLACES
from evaljobs.contract.paths import expand_home
from evaljobs.contract.specs import ModelOptions
from evaljobs.contract.storage import write_atomic
from evaljobs.lmeval.task_yaml import (
    Function,
    TaskDefinition,
    defined_by,
    included_files,
    index_of,
    iterate_texts,
    merged_config,
    parse_yaml,
)

REMEMBERED_BYTES = 1 << 20  # bytes; larger files are hashed once per size, mtime, ctime and inode
DATA_KEYS = ("data_files", "data_dir", "dataset_path")  # their values may be folders or globs
HIDDEN_PREFIXES = (".", "__pycache__")


class Digests:
    """sha256 of files' contents; large files are cached in `cache` by size, mtime, ctime and inode."""

    def __init__(self, cache: Path | None = None) -> None:
        self._cache = cache
        self._known: dict[str, list[Any]] = {}
        self._here: dict[Path, str] = {}  # a Digests lives for one look at a suite
        self._fresh = False
        self._indexes: dict[tuple[str, ...], dict[str, TaskDefinition]] = {}
        if cache is not None:
            with contextlib.suppress(OSError, ValueError):
                self._known = dict(json.loads(cache.read_bytes()))

    def of(self, path: Path) -> str:
        """Return the digest of one file; "-" if it cannot be read, which the job that reads it reports."""
        if path not in self._here:
            self._here[path] = self._of(path)
        return self._here[path]

    def _of(self, path: Path) -> str:
        try:
            stat = path.stat()
            # an edit may restore size and mtime, but not ctime
            what = [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]
            known = self._known.get(str(path))
            if known is not None and known[:-1] == what:
                return str(known[-1])
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError:
            return "-"
        if stat.st_size >= REMEMBERED_BYTES:
            self._known[str(path)] = [*what, digest]
            self._fresh = True
        return digest

    def index(self, folders: Sequence[str]) -> dict[str, TaskDefinition]:
        """Return tasks, groups and tags that these folders define, read once."""
        if tuple(folders) not in self._indexes:
            self._indexes[tuple(folders)] = index_of(folders)
        return self._indexes[tuple(folders)]

    def keep(self) -> None:
        """Write new digests to the cache; if the disk refuses, the next caller hashes again."""
        if self._cache is not None and self._fresh:
            with contextlib.suppress(OSError):
                write_atomic(self._cache, json.dumps(self._known).encode())
            self._fresh = False


@dataclass(slots=True)
class NamedFiles:
    """Real paths of the files that an entry's YAMLs name, including those YAMLs, with their digests.

    The key includes the paths, since a build's rows do: a copy of the folder is another suite, whose modules may be edited
    separately.
    """

    digests: Digests
    found: dict[str, str] = field(default_factory=dict)
    data: set[str] = field(default_factory=set)  # the found files that a YAML names as data
    yamls: set[str] = field(default_factory=set)

    def key(self) -> str:
        """Digest of the found files; "" for none."""
        rows = json.dumps(sorted(self.found.items())).encode()
        return hashlib.sha256(rows).hexdigest()[:32] if self.found else ""

    def file(self, path: Path) -> str:
        place = os.path.realpath(path)
        if place not in self.found:
            self.found[place] = self.digests.of(Path(place))
        return place

    def yaml(self, path: Path, top: Path) -> None:
        """Add a YAML file, those that it includes, and what they name. `top`: the folder of the including one."""
        path = Path(self.file(path))
        if str(path) in self.yamls:
            return
        self.yamls.add(str(path))
        config = parse_yaml(path)
        for other in included_files(path, config):
            self.yaml(other, top)
        for keys, value in iterate_texts(config):
            if not isinstance(value, Function):
                self._text(value, (path.parent, top), data=any(key in DATA_KEYS for key in keys))
            elif value.file.is_file():
                self.file(value.file)

    def _text(self, text: str, bases: Iterable[Path], *, data: bool) -> None:
        """Add files that a text names, relative to the first of `bases` that has any."""
        if not text or len(text) > 1024 or "\n" in text or "\0" in text or text in (".", "..", "/"):
            return
        for base in dict.fromkeys(bases):
            matches = _matches(base, text, wild=data)
            for match in matches:
                files = [match] if match.is_file() else list(_below(match)) if data else []
                places = {self.file(file) for file in files}
                self.data |= places if data else set()
            if matches:
                return


def files_named_by(include_path: Sequence[str], name: str, digests: Digests) -> NamedFiles:
    """Return the files of an entry: a task, group or tag of these folders, or a YAML file. lm-eval's own have none."""
    named = NamedFiles(digests)
    waiting, seen = [name], set[str]()
    while waiting:
        one = waiting.pop()
        found = _defined(include_path, one, digests)
        if one in seen or found is None:
            continue
        seen.add(one)
        waiting += found.members
        if found.yaml:
            named.yaml(Path(found.yaml), Path(found.yaml).parent)
    return named


def _defined(include_path: Sequence[str], name: str, digests: Digests) -> TaskDefinition | None:
    if name.endswith((".yaml", ".yml")) and Path(name).is_file():
        return defined_by(Path(name))
    return digests.index(include_path).get(name)


def is_one_task(include_path: Sequence[str], name: str, digests: Digests) -> bool:
    """Return whether an entry of the suite's own is certainly one leaf task; False for a group, a tag, or an unknown name."""
    found = _defined(include_path, name, digests)
    if found is None or not found.yaml or found.members:
        return False
    config = merged_config(Path(found.yaml))
    return "group" not in config and isinstance(config.get("task", ""), str)


def task_modules(rows: Iterable[str]) -> set[str]:
    """Return the modules among the paths of rows below the folder of a YAML: a task's own code."""
    paths = set(rows)
    folders = tuple(f"{os.path.dirname(p)}/" for p in paths if p.endswith((".yaml", ".yml")))  # noqa: PTH120
    return {path for path in paths if path.endswith(".py") and path.startswith(folders)}


def hub_models(model: ModelOptions) -> dict[str, str]:
    """Return argument -> the model of the Hub that it names: an adapter, another tokenizer."""
    named = ((key, value) for key, value in model.model_args.items() if isinstance(value, str))
    return {k: v for k, v in named if k in PLACES and v.count("/") == 1 and not os.path.exists(v)}  # noqa: PTH110


def hf_home(env: Mapping[str, str]) -> Path:
    """Return the folder of everything that Hugging Face's libraries store."""
    return Path(env.get("HF_HOME") or expand_home(env.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface")


def hub_cache(env: Mapping[str, str]) -> Path:
    """Return the folder of the Hub's repositories, with their revisions."""
    return Path(env.get("HF_HUB_CACHE") or hf_home(env) / "hub")


def datasets_cache(env: Mapping[str, str]) -> Path:
    """Return the folder of the data sets that `datasets` has prepared."""
    return Path(env.get("HF_DATASETS_CACHE") or hf_home(env) / "datasets")


def prepared_data(name: str, env: Mapping[str, str]) -> Path:
    """Return where `datasets` stores prepared data of the Hub (datasets/naming.py, 5.2: snake case except for the owner)."""
    owner, slash, own = name.rpartition("/")
    own = re.sub(r"([a-z\d])([A-Z])", r"\1_\2", re.sub(r"([A-Z]+)([A-Z][a-z])", r"\1_\2", own)).lower()
    return datasets_cache(env) / f"{owner}{slash and '___'}{own}"


def _matches(base: Path, text: str, *, wild: bool) -> list[Path]:
    text = os.path.expanduser(text)  # noqa: PTH111 (`task_paths.full_path` loads from there, too)
    try:
        if wild and glob.has_magic(text):
            return sorted(Path(p) for p in glob.glob(str(base / text), recursive=True))  # noqa: PTH207
        there = base / text
        return [there] if there.exists() else []
    except (OSError, ValueError):
        return []


def _below(root: Path) -> Iterator[Path]:
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(f for f in folders if not f.startswith(HIDDEN_PREFIXES))
        yield from (Path(folder) / name for name in sorted(files))
