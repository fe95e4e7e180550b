"""Inputs that only a run shows: files that a build or a score opened through Python, and the packages it imported.

Rule: inputs are rows, path -> digest. A file has the digest of its content, and a folder that was listed, `PATH/`, that
of its names. An installed package has one row, `package:NAME` -> its version and a digest of its RECORD; a package in
development has a row for each module. A folder of revisions has the digest of its files. So a process with the same paths and packages says what has changed.
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
from evaljobs.lmeval.source_files import HIDDEN, Digests, datasets_cache, hub_cache, prepared_data

Rows = Mapping[str, str]  # path, or package -> digest
PACKAGE: Final = "package:"

CHANGING: Final = "changed while it was read"  # the digest of such a file: equal to none
# Places of the machine, not of an evaluation; what lies in site-packages below them counts.
SYSTEM: Final = ("/proc", "/sys", "/dev", "/etc", "/run", "/usr", "/lib", "/lib64", "/bin", "/sbin")
PACKAGES: Final = ("site-packages", "dist-packages")
# Packages that decide an answer, whether or not a job of the CPU imports them.
ENGINES: Final = ("torch", "transformers", "tokenizers", "accelerate", "peft", "lm_eval")
LISTINGS: Final = ("os.listdir", "os.scandir")  # names of audit events
CODE: Final = (
    ".py",
    ".pyc",
    ".yaml",
    ".yml",
)  # suffixes of files that count by other rows where they are used
FINDERS: Final = ("importlib", "pkgutil")  # they list folders for modules, which have rows of their own
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

    def listed(self, path: object) -> None:
        by = sys._getframe(2).f_code.co_filename  # noqa: SLF001 (there is no public name for it)
        if isinstance(path, str | bytes | os.PathLike) and not any(finder in by for finder in FINDERS):
            self.opened.setdefault(f"{os.path.abspath(os.fsdecode(path))}/", 0)  # noqa: PTH100


_recorder: _Recorder | None = None


@functools.cache
def _listen() -> None:
    """Have each file that this process opens noted while a block is recorded. Python cannot remove an audit hook."""

    def noted(event: str, arguments: tuple[Any, ...]) -> None:
        if _recorder is not None:
            with contextlib.suppress(Exception):  # an audit hook that raises ends the opening
                if event == "open":
                    _recorder.note(*arguments)
                elif event in LISTINGS:
                    _recorder.listed(arguments[0] or ".")

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


def _add_rows(rows: dict[str, str], mine: _Recorder, before: set[str], places: _Places) -> None:
    """`before`: names of the modules that were there when the block began."""
    same: dict[str, bool] = {}  # path of a row -> it has not changed meanwhile
    for path, changed_at in mine.opened.items():
        kept = None if path in mine.written else places.row_of(path)
        if kept is not None:
            still = kept != path or path.endswith("/") or _changed_at(path) == changed_at
            same[kept] = still and same.get(kept, True)
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        kept = places.row_of(file) if isinstance(file, str) else None
        if kept is None:
            continue
        same.setdefault(kept, True)
        if name not in before and name.partition(".")[0] not in before and kept == file:
            del sys.modules[name]
    digests = Digests()
    rows |= {path: digest_of(path, digests) if kept else CHANGING for path, kept in same.items()}


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
        path = _source_of(path)
        parts = path.split("/")
        for number, part in enumerate(parts[:-1], 1):
            if part in PACKAGES:
                package = _packages("/".join(parts[:number])).get("/".join(parts[number:]))
                return package or (None if path.endswith("/") else path)
        there = os.path.isdir(path) if path.endswith("/") else os.path.isfile(path)  # noqa: PTH112, PTH113
        if path.endswith(".pyc") or path.startswith(self._left) or not there:
            return None
        young = path.startswith(self._temporary) and _changed_at(path) >= self._began
        return None if young else path


def _source_of(path: str) -> str:
    """The module that a compiled one was made of."""
    if "/__pycache__/" not in path:
        return path
    folder, _, name = path.rpartition("/__pycache__/")
    return f"{folder}/{name.split('.')[0]}.py"


@functools.lru_cache(maxsize=8)
def _packages(site: str) -> Mapping[str, str]:
    """Each file that packages say they have in a site-packages folder, relative to it -> the package's row."""
    found: dict[str, str] = {}
    for record in Path(site).glob("*.dist-info/RECORD"):
        name = record.parent.name.partition("-")[0]
        with contextlib.suppress(OSError, UnicodeError):
            lines = record.read_text().splitlines()
            found |= dict.fromkeys((line.partition(",")[0] for line in lines), f"{PACKAGE}{name}")
    return found


def package_rows(names: Iterable[str]) -> dict[str, str]:
    """Rows of packages that this process would import; those that are not installed have none."""
    rows = {f"{PACKAGE}{name}": digest_of(f"{PACKAGE}{name}") for name in names}
    return {key: digest for key, digest in rows.items() if digest != "-"}


def revision_rows(ids: Iterable[str], kind: str, env: Mapping[str, str] | None = None) -> dict[str, str]:
    """Rows of the revisions of data sets ("datasets") or models ("models") in the Hugging Face cache that `env` names.

    Of a data set that lies there without its repository: the folders of what was prepared of it. `env` None: this process'.
    """
    env = os.environ if env is None else env
    paths: list[str] = []
    for name in ids:
        refs = hub_cache(env) / f"{kind}--{name.replace('/', '--')}" / "refs"
        made = prepared_data(name, env).glob("*/*/") if kind == "datasets" else ()
        paths += [str(refs)] if refs.is_dir() else [f"{folder}/" for folder in made] or [str(refs)]
    return {path: digest_of(path) for path in paths}


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
    if path.endswith("/"):
        names = (p.name for p in place.iterdir() if p.suffix not in CODE)
        rows = [[name] for name in names if not name.startswith(HIDDEN)]
    else:
        rows = [[str(p.relative_to(place)), digests.of(p)] for p in place.rglob("*") if p.is_file()]
    return hashlib.sha256(json.dumps(sorted(rows)).encode()).hexdigest()


def _package_now(name: str, digests: Digests, search: Sequence[str]) -> str:
    for found in importlib.metadata.distributions(name=name, path=list(search)):
        place: Path = found._path  # type: ignore[attr-defined]  # noqa: SLF001 (there is no public name for it)
        if place.name.endswith(".dist-info"):
            version = place.name.removesuffix(".dist-info").partition("-")[2]
            return f"{version} {digests.of(place / 'RECORD')}"
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
