"""The source key of a suite entry: a digest of all local files behind its requests and scores.

Rule: files count by content, so touching one changes nothing; a file of over 16 MiB beside a module counts by size and
time of change. A file that may not matter counts,
too: a key that changes without need costs CPU seconds, since requests and responses are found again
by their own digests. The coordinator computes the key before a submission; a build and a score
compute it again and refuse files that changed. Imports no lm_eval.
"""

from __future__ import annotations

import ast
import contextlib
import glob
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from evaljobs.contract.names import PLACES
from evaljobs.contract.paths import WorkPaths
from evaljobs.contract.specs import ModelOptions, SuiteSpec
from evaljobs.contract.storage import write_atomic
from evaljobs.errors import OperatorError
from evaljobs.lmeval.task_yaml import (
    Defined,
    Function,
    included,
    index_of,
    merged_config,
    names_in,
    parsed,
    texts,
)

REMEMBERED_BYTES = 1 << 20  # bytes; larger files are hashed once per size, mtime, ctime and inode
NEIGHBOUR_BYTES = 16 << 20  # bytes; larger files beside a module count by size and mtime
MOST_NEIGHBOURS = 10_000  # most files counted in one folder that a module's text names
DATA_KEYS = ("data_files", "data_dir", "dataset_path")  # their values may be folders or globs
HIDDEN = (".", "__pycache__")
# loaders of files, by their names in `datasets`: such a dataset_path names no data set of the Hub
LOADERS = frozenset(
    (
        "arrow", "audiofolder", "cache", "conll", "csv", "eval", "fasta", "fastq", "genbank", "harbor",
        "hdf5", "iceberg", "imagefolder", "json", "lance", "meshfolder", "mmcif", "niftifolder",
        "pandas", "parquet", "pdb", "pdffolder", "text", "tsfile", "videofolder", "vortex",
        "webdataset", "xml",
    )
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Shipped:
    """One of lm-eval's own tasks, groups or tags: its YAML (None for a tag), a tag's names."""

    path: Path | None
    members: tuple[str, ...] = ()


Lookup = Callable[[str], Shipped | None]


class Digests:
    """sha256 of files' contents; those of large files are kept in `cache` by size, mtime, ctime and inode."""

    def __init__(self, cache: Path | None = None) -> None:
        self._cache = cache
        self._known: dict[str, list[Any]] = {}
        self._here: dict[Path, str] = {}  # a Digests lives for one look at a suite
        self._fresh = False
        self._indexes: dict[tuple[str, ...], dict[str, Defined]] = {}
        if cache is not None:
            with contextlib.suppress(OSError, ValueError):
                self._known = dict(json.loads(cache.read_bytes()))

    def of(self, path: Path) -> str:
        """Digest of one file; "-" where it cannot be read: the job that reads it reports the error."""
        if path not in self._here:
            self._here[path] = self._of(path)
        return self._here[path]

    def _of(self, path: Path) -> str:
        try:
            stat = path.stat()
            # ctime: an edit may restore the size and the mtime, but not that
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

    def index(self, folders: Sequence[str]) -> dict[str, Defined]:
        """Tasks, groups and tags that these folders define, read once."""
        if tuple(folders) not in self._indexes:
            self._indexes[tuple(folders)] = index_of(folders)
        return self._indexes[tuple(folders)]

    def keep(self) -> None:
        """Write new digests to the cache; where the disk refuses, the next caller hashes again."""
        if self._cache is not None and self._fresh:
            with contextlib.suppress(OSError):
                write_atomic(self._cache, json.dumps(self._known).encode())
            self._fresh = False


def no_shipped(_name: str) -> Shipped | None:
    """A lookup without lm-eval's own tasks, for callers that need the suite's folders alone."""
    return None


def entry_files(
    include_path: Sequence[str],
    name: str,
    digests: Digests,
    shipped: Lookup = no_shipped,
    env: Mapping[str, str] | None = None,
) -> tuple[str, str]:
    """Two digests of an entry's files: the suite's own, and those of the installation.

    The first is the same on every machine that sees the suite's folders. The second covers lm-eval's
    own tasks, and revisions in the Hugging Face cache, whose place is in `env`. Installed modules are
    shown by the build. `name`: a task, group or tag, or a YAML file.
    """
    own, theirs = _reached(include_path, name, digests, shipped)
    for path, config in sorted(own.hub | theirs.hub):
        theirs.found[f"hub:{path}:{config}"] = _revision(path, config, env or os.environ)
    return own.digest(), theirs.digest()


def is_one_task(
    include_path: Sequence[str], name: str, digests: Digests, shipped: Lookup = no_shipped
) -> bool:
    """Is it certain that an entry is one leaf task? Not of a group, a tag, or a name that is not found."""
    if name.endswith((".yaml", ".yml")) and Path(name).is_file():
        return _holds_none(Path(name))
    found = digests.index(include_path).get(name) or shipped(name)
    return found is not None and not found.members and found.path is not None and _holds_none(found.path)


def _holds_none(path: Path) -> bool:
    config = merged_config(path)
    return "group" not in config and isinstance(config.get("task", ""), str)


def unchanged(include_path: Sequence[str], name: str, source: str, cache: Path | None) -> None:
    """Raise OperatorError where the suite's own files differ from `source` ("": not checked)."""
    if not source:
        return
    digests = Digests(cache)
    now, _ = entry_files(include_path, name, digests)
    digests.keep()
    if now != source:
        raise OperatorError(
            f"the files of task {name} changed after its evaluation was submitted: submit it again (`evalspan eval` or "
            "`evalspan submit`); answers to prompts that are still the same are used again"
        )


@contextlib.contextmanager
def unchanged_meanwhile(suite: SuiteSpec, entry: int, source: str, work: WorkPaths) -> Iterator[None]:
    """`unchanged` of a suite's entry before and after the block."""
    asked = (suite.include_path, suite.tasks[entry].name, source, work.digests)
    unchanged(*asked)
    yield
    unchanged(*asked)


def local_names(include_path: Sequence[str], digests: Digests) -> set[str]:
    """Names of the tasks, groups and tags that these folders define."""
    return set(digests.index(include_path))


def files_of(include_path: Sequence[str], name: str, shipped: Lookup = no_shipped) -> list[tuple[Path, str]]:
    """Files of an entry with their digests, without its data, which count as documents."""
    closures = _reached(include_path, name, Digests(), shipped)
    found = (pair for one in closures for pair in one.found.items() if pair[0] not in one.data)
    return sorted((Path(place), digest) for place, digest in found)


def hub_sets(include_path: Sequence[str], name: str, shipped: Lookup = no_shipped) -> set[str]:
    """Data sets of the Hub that an entry's tasks name."""
    return {path for one in _reached(include_path, name, Digests(), shipped) for path, _config in one.hub}


def hub_models(model: ModelOptions) -> dict[str, str]:
    """Argument -> the model of the Hub that it names: an adapter, another tokenizer."""
    named = ((key, value) for key, value in model.model_args.items() if isinstance(value, str))
    return {k: v for k, v in named if k in PLACES and v.count("/") == 1 and not os.path.exists(v)}  # noqa: PTH110


def paths_of(include_path: Sequence[str], name: str, shipped: Lookup = no_shipped) -> set[str]:
    """Real paths of an entry's files and data: those of its source key."""
    return {path for one in _reached(include_path, name, Digests(), shipped) for path in one.found}


def _reached(
    include_path: Sequence[str], name: str, digests: Digests, shipped: Lookup
) -> tuple[_Closure, _Closure]:
    own, theirs = _Closure(include_path, digests), _Closure((), digests)
    waiting, seen = [name], set[str]()
    while waiting:
        task = waiting.pop()
        if task in seen:
            continue
        seen.add(task)
        found = own.enter(task)
        if found is None and (entry := shipped(task)) is not None:
            found = [*entry.members, *(theirs.enter_file(entry.path) if entry.path is not None else ())]
        waiting += found or []
    return own, theirs


def _hf_home(env: Mapping[str, str]) -> Path:
    return Path(
        env.get("HF_HOME") or Path(env.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "huggingface"
    )


def hub_cache(env: Mapping[str, str]) -> Path:
    """Folder of the Hub's repositories, with their revisions."""
    return Path(env.get("HF_HUB_CACHE") or _hf_home(env) / "hub")


def datasets_cache(env: Mapping[str, str]) -> Path:
    """Folder of the data sets that `datasets` has prepared."""
    return Path(env.get("HF_DATASETS_CACHE") or _hf_home(env) / "datasets")


def _revision(path: str, config: str, env: Mapping[str, str]) -> str:
    """A data set's cached state: the commits of its references, else its prepared versions."""
    hub = hub_cache(env) / f"datasets--{path.replace('/', '--')}" / "refs"
    prepared = datasets_cache(env) / path.replace("/", "___")
    with contextlib.suppress(OSError):
        if commits := sorted((ref.name, ref.read_text()) for ref in hub.iterdir() if ref.is_file()):
            return json.dumps(commits)
    versions = (p for p in prepared.glob(f"{config or '*'}/*/*") if p.is_dir())
    return json.dumps(sorted(str(p.relative_to(prepared)) for p in versions))


@dataclass(slots=True)
class _Closure:
    """All files reached from an entry, each once."""

    include_path: Sequence[str]
    digests: Digests
    found: dict[str, str] = field(default_factory=dict)
    data: set[str] = field(default_factory=set)  # the found files that a YAML file names as data
    hub: set[tuple[str, str]] = field(default_factory=set)  # (data set, configuration) not in a local folder
    visited: set[Path] = field(default_factory=set)

    def digest(self) -> str:
        """Digest of the found files, each by its path relative to the include folder that holds it."""
        rows = sorted([self._place(name), digest] for name, digest in self.found.items())
        return hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:32] if rows else ""

    def _place(self, name: str) -> str:
        for number, folder in enumerate(self.include_path):
            if Path(name).is_relative_to(folder):
                return f"{number}:{Path(name).relative_to(folder)}"
        return name

    def enter(self, name: str) -> list[str] | None:
        """Add a task, group or tag of the suite. Returns the names that it holds, or None."""
        if name.endswith((".yaml", ".yml")) and Path(name).is_file():
            return self.enter_file(Path(name))
        found = self.digests.index(self.include_path).get(name)
        if found is None:
            return None
        return found.members if found.path is None else [*found.members, *self.enter_file(found.path)]

    def enter_file(self, path: Path) -> list[str]:
        """Add a YAML file and the files that it names. Returns the names of its tasks."""
        self._yaml(path, path.parent)
        config = merged_config(path)
        data = config.get("dataset_path")
        if isinstance(data, str) and data not in LOADERS and not _matches(path.parent, data, wild=True):
            self.hub.add((data, str(config.get("dataset_name") or "")))
        return list(names_in(config.get("task"))) if "group" in config else []

    def file(self, path: Path) -> None:
        place = os.path.realpath(path)
        if place not in self.found:
            self.found[place] = self.digests.of(Path(place))

    def _yaml(self, path: Path, top: Path) -> None:
        path = path.resolve()
        if path in self.visited:
            return
        self.visited.add(path)
        self.file(path)
        config = parsed(path)
        for other in included(path, config):
            self._yaml(other, top)
        for keys, value in texts(config):
            if not isinstance(value, Function):
                self._named(value, (path.parent, top), data=any(key in DATA_KEYS for key in keys))
            elif value.file.is_file():
                self.module(value.file, value.yaml.parent)

    def _named(self, text: str, bases: Iterable[Path], *, data: bool) -> None:
        """Files that a text names, relative to the first of `bases` that has any."""
        if not text or len(text) > 1024 or "\n" in text or "\0" in text or text in (".", "..", "/"):
            return
        for base in dict.fromkeys(bases):
            matches = _matches(base, text, wild=data)
            for match in matches:
                files = [match] if match.is_file() else list(_below(match)) if data else []
                for file in files:
                    self.file(file)
                if data:
                    self.data |= {os.path.realpath(file) for file in files}
            if matches:
                return

    def neighbours(self, root: Path, *, deep: bool = True) -> None:
        """Files that a module may read without naming them; large ones count by size and mtime."""
        paths = _below(root) if deep else (p for p in sorted(root.iterdir()) if p.is_file())
        for number, path in enumerate(paths):
            if number >= MOST_NEIGHBOURS:
                break
            if path.name.startswith(".") or path.suffix in (".py", ".pyc", ".yaml", ".yml"):
                continue
            with contextlib.suppress(OSError):
                stat = path.stat()
                if stat.st_size <= NEIGHBOUR_BYTES:
                    self.file(path)
                else:
                    self.found.setdefault(os.path.realpath(path), f"{stat.st_size} {stat.st_mtime_ns}")

    def module(self, path: Path, root: Path) -> None:
        """Add a Python file, its local imports, the files beside it and those that it names."""
        path = path.resolve()
        if path in self.visited:
            return
        self.visited.add(path)
        self.file(path)
        try:
            tree = ast.parse(path.read_bytes())
        except (OSError, SyntaxError, ValueError):
            return
        self.neighbours(path.parent, deep=False)
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                self._text_of_module(node.value, path.parent)
            for module, level in _imported(node):
                self._import(module, level, path, root)

    def _text_of_module(self, text: str, folder: Path) -> None:
        if not text or len(text) > 256 or "\n" in text or "\0" in text or text.startswith((".", "/")):
            return
        for match in _matches(folder, text, wild=False):
            self.file(match) if match.is_file() else self.neighbours(match)

    def _import(self, module: str, level: int, path: Path, root: Path) -> None:
        if level:
            bases = [path.parents[level - 1]]
        else:
            above = [p for p in path.parents if p == root or p.is_relative_to(root)]
            bases = list(dict.fromkeys([path.parent, *above]))
        there = _module_file(bases, module)
        if there is not None:
            self.module(there, root)


def _imported(node: ast.AST) -> Iterator[tuple[str, int]]:
    """(module, level of a relative import): of `from a import b` both `a` and `a.b`."""
    if isinstance(node, ast.Import):
        yield from ((alias.name, 0) for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        module = node.module or ""
        yield module, node.level
        yield from ((f"{module}.{alias.name}".lstrip("."), node.level) for alias in node.names)


def _module_file(bases: Iterable[Path], module: str) -> Path | None:
    """The first file of this module below one of `bases`."""
    relative = module.replace(".", "/")
    places = (p for base in bases for p in (base / f"{relative}.py", base / relative / "__init__.py"))
    return next((place for place in places if module and place.is_file()), None)


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
        folders[:] = sorted(f for f in folders if not f.startswith(HIDDEN))
        yield from (Path(folder) / name for name in sorted(files))
