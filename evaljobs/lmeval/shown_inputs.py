"""Inputs that only a run shows: files that a build or a score opened through Python, and the packages it imported.

Rule: inputs are rows, path -> digest. A file has the digest of its content. An installed package has one row,
`package:NAME` -> its version and a digest of its RECORD; a package in development has a row for each module. A folder
of revisions has the digest of its files. So a process with the same paths and packages says what has changed.
What C or Rust code opens is not seen. Called from `requests.build`, `scoring.score`, `run`, and by the coordinator.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import json
import os
import sys
import sysconfig
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from evaljobs.contract.paths import shown_file
from evaljobs.lmeval.source_files import Digests, datasets_cache, hub_cache

Rows = Mapping[str, str]  # path, or package -> digest
PACKAGE: Final = "package:"

CHANGING: Final = "changed while it was read"  # the digest of such a file: equal to none
# Places of the machine, not of an evaluation; what lies in site-packages below them counts.
SYSTEM: Final = ("/proc", "/sys", "/dev", "/etc", "/run", "/usr", "/lib", "/lib64", "/bin", "/sbin")
PACKAGES: Final = ("site-packages", "dist-packages")
# Packages that decide an answer, whether or not a job of the CPU imports them.
ENGINES: Final = ("torch", "transformers", "tokenizers", "accelerate", "peft", "lm_eval")
WRITES: Final = os.O_WRONLY | os.O_RDWR | os.O_CREAT


@dataclass(slots=True)
class _Recorder:
    opened: dict[str, int] = field(default_factory=dict)  # path -> ctime in ns when it was opened first
    written: set[str] = field(default_factory=set)

    def note(self, path: object, mode: object, flags: int) -> None:
        if not isinstance(path, str | bytes | os.PathLike):
            return  # a descriptor: its file was opened before
        place = os.path.abspath(os.fsdecode(path))  # noqa: PTH100 (links stay: the link itself may move)
        if flags & WRITES or (isinstance(mode, str) and mode[:1] in "wax"):
            self.written.add(place)
        elif place not in self.opened:
            with contextlib.suppress(OSError):
                self.opened[place] = os.stat(place).st_ctime_ns  # noqa: PTH116 (called at each open)


_recorder: _Recorder | None = None


@functools.cache
def _listen() -> None:
    """Have each file that this process opens noted while a block is recorded. Python cannot remove an audit hook."""

    def noted(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and _recorder is not None:
            with contextlib.suppress(Exception):  # an audit hook that raises ends the opening
                _recorder.note(*arguments)

    sys.addaudithook(noted)


@contextlib.contextmanager
def recorded(rows: dict[str, str], *, leave_out: Iterable[str | Path] = ()) -> Iterator[None]:
    """Add to `rows` what the block opens, and at its end all that is imported. One block at a time in a process.

    `leave_out`: folders that count in other ways: the work folder, the checkpoint. Modules of the user that the
    block has imported are forgotten at its end, so that the next task imports its own.
    """
    global _recorder  # noqa: PLW0603 (an audit hook has no other way)
    _listen()
    before, began = set(sys.modules), _now_on_disk()
    _recorder = mine = _Recorder()
    try:
        yield
    finally:
        _recorder = None
        _add_rows(rows, mine, before, _Places(leave_out, began))


def _row(key: str, digests: Digests) -> tuple[str, str]:
    """A row as `_Places` names it: of a package by its RECORD, or of a file."""
    return (
        _package_row(Path(key), digests)
        if key.endswith(".dist-info/RECORD")
        else (key, digests.of(Path(key)))
    )


def _package_row(record: Path, digests: Digests) -> tuple[str, str]:
    name, _, version = record.parent.name.removesuffix(".dist-info").partition("-")
    return f"{PACKAGE}{name}", f"{version} {digests.of(record)}"


def _add_rows(rows: dict[str, str], mine: _Recorder, before: set[str], places: _Places) -> None:
    """`before`: names of the modules that were there when the block began."""
    digests = Digests()
    for path, changed_at in mine.opened.items():
        kept = None if path in mine.written else places.row_of(path)
        if kept is not None:
            same = kept != path or _changed_at(path) == changed_at
            key, digest = _row(kept, digests)
            rows[key] = digest if same else CHANGING
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        kept = places.row_of(file) if isinstance(file, str) else None
        if kept is None:
            continue
        rows.setdefault(*_row(kept, digests))
        if name not in before and name.partition(".")[0] not in before and kept == file:
            del sys.modules[name]


def _now_on_disk() -> int:
    """The time, in ns, by the clock of the temporary folder's file system."""
    with tempfile.NamedTemporaryFile() as file:
        return os.fstat(file.fileno()).st_ctime_ns


def _changed_at(path: str) -> int:
    with contextlib.suppress(OSError):
        return os.stat(path).st_ctime_ns  # noqa: PTH116
    return -1


class _Places:
    """Which files count as inputs, and under which path."""

    def __init__(self, leave_out: Iterable[str | Path], began: int) -> None:
        """`began`: ns; files of the temporary folder that are younger were made by the run itself."""
        env = os.environ
        self._began = began
        home = env.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")  # noqa: PTH111
        caches = (home, hub_cache(env), datasets_cache(env), env.get("HF_HOME"), env.get("HF_MODULES_CACHE"))
        left = [str(p) for p in (*leave_out, *SYSTEM, *caches, sysconfig.get_path("stdlib")) if p]
        left += [os.path.realpath(place) for place in left]
        self._left = tuple({f"{place}/" for place in left})
        self._temporary = f"{os.path.realpath(tempfile.gettempdir())}/"

    def row_of(self, path: str) -> str | None:
        """The path of the row that stands for this file; None: it is no input."""
        parts = path.split("/")
        for number, part in enumerate(parts):
            if part in PACKAGES and number + 1 < len(parts):
                record = _record_of("/".join(parts[: number + 1]), *parts[number + 1 :])
                return record or _source_of(path)
        path = _source_of(path)
        if path.endswith(".pyc") or path.startswith(self._left) or not os.path.isfile(path):  # noqa: PTH113
            return None
        young = path.startswith(self._temporary) and _changed_at(path) >= self._began
        return None if young else path


def _source_of(path: str) -> str:
    """The module that a compiled one was made of."""
    if "/__pycache__/" not in path:
        return path
    folder, _, name = path.rpartition("/__pycache__/")
    return f"{folder}/{name.split('.')[0]}.py"


def _record_of(site: str, top: str, *below: str) -> str | None:
    """The RECORD file of the installed package that has this module or file; None: no package says so."""
    records, name = _records(site), _module(top)
    return records.get(f"{name}/{_module(below[0])}" if below else name) or records.get(name)


def _module(file: str) -> str:
    return file.partition(".")[0].lower()


@functools.lru_cache(maxsize=8)
def _records(site: str) -> Mapping[str, str]:
    """The first one and the first two parts of each path in a site-packages folder -> RECORD of its package.

    Two parts, since several packages share the folders of a namespace, such as `nvidia`.
    """
    found: dict[str, str] = {}
    for record in Path(site).glob("*.dist-info/RECORD"):
        with contextlib.suppress(OSError, UnicodeError):
            for line in record.read_text().splitlines():
                parts = [_module(part) for part in line.partition(",")[0].split("/")[:2]]
                found[parts[0]] = found["/".join(parts)] = str(record)
    return found


def package_rows(names: Iterable[str]) -> dict[str, str]:
    """Rows of packages that this process would import; those that are not installed have none."""
    rows = {f"{PACKAGE}{name}": digest_of(f"{PACKAGE}{name}") for name in names}
    return {key: digest for key, digest in rows.items() if digest != "-"}


def revision_rows(ids: Iterable[str], kind: str, env: Mapping[str, str] | None = None) -> dict[str, str]:
    """Rows of the revisions of data sets ("datasets") or models ("models") in the Hugging Face cache that `env` names.

    `env` None: this process'.
    """
    cache = hub_cache(os.environ if env is None else env)
    folders = (cache / f"{kind}--{name.replace('/', '--')}" / "refs" for name in ids)
    return {str(folder): digest_of(str(folder)) for folder in folders}


def digest_of(path: str, digests: Digests | None = None, search: Sequence[str] | None = None) -> str:
    """Digest of a row's file, package, or folder's files, as it is now; "-" where there is none.

    `search`: folders of packages, the first has precedence; None: sys.path.
    """
    digests = digests or Digests()
    if path.startswith(PACKAGE):
        return _package_now(path.removeprefix(PACKAGE), digests, sys.path if search is None else search)
    place = Path(path)
    if not place.is_dir():
        return digests.of(place)
    files = sorted(p for p in place.rglob("*") if p.is_file())
    rows = [[str(p.relative_to(place)), digests.of(p)] for p in files]
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()


def _package_now(name: str, digests: Digests, search: Sequence[str]) -> str:
    for found in importlib.metadata.distributions(name=name, path=list(search)):
        place: Path = found._path  # type: ignore[attr-defined]  # noqa: SLF001 (there is no public name for it)
        if place.name.endswith(".dist-info"):
            return _package_row(place / "RECORD", digests)[1]
    return "-"


def rows_of_set(folder: str | Path, name: str) -> dict[str, str] | None:
    """The rows that a build showed; None where they are not there. `name`: as in the manifests of the request set."""
    try:
        found: dict[str, str] | None = json.loads(shown_file(folder, name).read_bytes()) if name else None
    except (OSError, ValueError):
        return None
    return found


def merged(several: Iterable[Rows]) -> dict[str, str]:
    """Rows of several runs as one; a file that differs between two of them has changed meanwhile."""
    found: dict[str, str] = {}
    for rows in several:
        for path, digest in rows.items():
            found[path] = digest if found.get(path, digest) == digest else CHANGING
    return found


def changed(rows: Rows, digests: Digests | None = None) -> list[str]:
    """Paths whose digest now is not that of their row, sorted."""
    digests = digests or Digests()
    return sorted(path for path, digest in rows.items() if digest_of(path, digests) != digest)


def in_words(path: str) -> str:
    """A row's path as a person reads it."""
    if path.startswith(PACKAGE):
        return f"package {path.removeprefix(PACKAGE)}"
    folder, _, file = path.rpartition("/")
    name = folder.rpartition("/")[2]
    if file == "refs" and "--" in name:
        return f"the revision of {name.partition('--')[2].replace('--', '/')}"
    return path


def main(arguments: list[str]) -> int:
    """`python -m evaljobs changed FILE`: the digests now of the paths in a JSON list, as JSON."""
    digests = Digests()
    paths: list[str] = json.loads(Path(arguments[0]).read_bytes())
    sys.stdout.write(json.dumps({path: digest_of(path, digests) for path in paths}) + "\n")
    return 0
