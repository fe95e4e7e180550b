"""Inputs that only a run reveals: what a build or a score opened, tried to open, or listed, and the packages it imported.

Rule: inputs are rows, path -> digest. A file has the digest of its content, "-" if it is missing, and a listed folder,
`PATH/`, that of its names. Forked children count; files that the run made itself do not. An installed package has one row,
`package:NAME` -> its version and a digest of its RECORD; a package in development has a row for each module. A folder of
revisions has the digest of its files. So a process with the same paths and packages can tell what has changed. Limits:
docs/evaluating/suites.md. Called from `requests.build`, `scoring.score`, `run`, and by the coordinator.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import importlib.metadata
import json
import os
import sys
import sysconfig
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, Final

from evaljobs.contract.paths import shown_file
from evaljobs.lmeval.source_files import Digests, datasets_cache, hf_home, hub_cache, prepared_data

Rows = Mapping[str, str]  # path, or package -> digest
PACKAGE: Final = "package:"
FAILED_BUILD_FILE: Final = "shown-failed.json"  # rows of an entry's last failed build

CHANGING_DIGEST: Final = "changed while it was read"  # digest of such a file, which equals none
# Locations of the machine, not of an evaluation; site-packages below them count.
SYSTEM_FOLDERS: Final = (
    "/proc",
    "/sys",
    "/dev/fd",
    "/etc",
    "/run",
    "/usr",
    "/lib",
    "/lib64",
    "/bin",
    "/sbin",
)
# Below ~/.cache; Hugging Face's cache counts by revisions.
CACHE_FOLDERS: Final = ("torch", "triton", "vllm", "matplotlib")
PACKAGES: Final = ("site-packages", "dist-packages")
# Packages that decide an answer, whether or not a job of the CPU imports them.
ENGINES: Final = ("torch", "transformers", "tokenizers", "accelerate", "peft", "lm_eval")
EVENTS: Final = {
    "open": 0,
    "os.rename": 1,
    "os.listdir": 0,
    "os.scandir": 0,
}  # audit event -> number of its path
# Names that appear and disappear: compiled modules, and files on NFS that are removed while open.
PASSING_NAMES: Final = ("__pycache__", ".nfs")
# They list folders for modules and data with rows of their own; the library's helpers list for their caller.
FINDERS: Final = ("importlib", "pkgutil", f"{Path(__file__).parents[1]}/")
HELPER_FILES: Final = ("/pathlib.py", "/pathlib/", "/glob.py", "/os.py", "<frozen os>")


class _Recorder:
    """A list of opened files, in the order of all processes: each appends to one file in memory, inherited by forks.

    A line: path, and its ctime in ns when opened, -1 for a missing one, or null if it was opened for writing.
    """

    def __init__(self) -> None:
        self._list = os.memfd_create("evalspan-inputs")
        fcntl.fcntl(self._list, fcntl.F_SETFL, os.O_APPEND)
        self._made = os.fstat(self._list)
        self._seen: set[tuple[str, bool]] = set()  # path, and whether it was written

    def _add(self, place: str, changed_at: int | None) -> None:
        known = (place, changed_at is None)
        # a child may have closed the files that it inherited
        if known not in self._seen and os.path.samestat(self._made, os.fstat(self._list)):
            self._seen.add(known)
            os.write(self._list, json.dumps([place, changed_at]).encode() + b"\n")

    def note(self, event: str, arguments: tuple[Any, ...]) -> None:
        path = arguments[EVENTS[event]]
        if isinstance(path, int):
            return  # a descriptor: its file was opened before
        name = os.fsdecode(path or ".")
        place = os.path.abspath(name)  # noqa: PTH100 (links stay: the link itself may move)
        if event == "open":
            self._opened(place, arguments[2], certain=arguments[1] is not None or os.path.isabs(name))  # noqa: PTH117
        elif event == "os.rename":
            self._add(place, None)
        elif not any(map(_caller(sys._getframe(2)).__contains__, FINDERS)):  # noqa: SLF001 (there is no public name for it)
            self._add(f"{place}/", 0)

    def _opened(self, place: str, flags: int, *, certain: bool) -> None:
        """Record an opened path. `certain`: it is not relative to a folder's descriptor."""
        access, anew = flags & os.O_ACCMODE, flags & (os.O_TRUNC | os.O_EXCL)
        if access != os.O_WRONLY and not anew and (place, False) not in self._seen:
            changed_at = _changed_at(place)
            if changed_at >= 0 or (certain and not flags & os.O_CREAT):
                self._add(place, changed_at)
        if access != os.O_RDONLY or anew:
            self._add(place, None)

    def read(self) -> tuple[dict[str, int], set[str]]:
        """Return path -> its ctime when first opened, of files that the run had not written before; and the written ones."""
        opened: dict[str, int] = {}
        own, written = set[str](), set[str]()
        with open(self._list, "rb") as lines:  # noqa: PTH123 (a descriptor)
            lines.seek(0)
            for line in lines:
                place, changed_at = json.loads(line)
                if changed_at is None:
                    own |= {place} - opened.keys()
                    written.add(place)
                elif place not in own:
                    opened.setdefault(place, changed_at)
        return opened, written


def _caller(frame: FrameType | None) -> str:
    """Return the file whose code lists a folder, through any helper of the library."""
    while frame is not None and any(helper in frame.f_code.co_filename for helper in HELPER_FILES):
        frame = frame.f_back
    return "" if frame is None else frame.f_code.co_filename


_recorder: _Recorder | None = None


@functools.cache
def _listen() -> None:
    """Record each file that this process opens while a block is recorded. Python cannot remove an audit hook."""

    def noted(event: str, arguments: tuple[Any, ...]) -> None:
        if _recorder is not None and event in EVENTS:
            with contextlib.suppress(Exception):  # an exception from an audit hook would abort the opening
                _recorder.note(event, arguments)

    sys.addaudithook(noted)


@contextlib.contextmanager
def record_inputs(rows: dict[str, str], *, leave_out: Iterable[str | Path] = ()) -> Iterator[None]:
    """Add to `rows` what the block opens, and at its end everything imported. One block at a time per process.

    `leave_out`: folders that count in other ways: the work folder, the checkpoint. Modules of the user that the block has
    imported are forgotten at its end, so that the next task imports its own.
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
    """Add the rows of a block. `before`: names of the modules loaded when it began."""
    same: dict[str, bool] = {}  # path of a row -> it has not changed meanwhile
    opened, written = mine.read()
    for path, changed_at in opened.items():
        still = path.endswith("/") or _changed_at(path) == changed_at
        if path in written and not still and changed_at >= 0:
            continue  # the run changed it
        kept = places.row_of(path, missing=changed_at < 0)
        if kept is not None:
            same[kept] = (still or kept != path or path in written) and same.get(kept, True)
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        kept = places.row_of(file) if isinstance(file, str) else None
        if kept is None:
            continue
        same.setdefault(kept, True)
        if name not in before and name.partition(".")[0] not in before and kept == file:
            del sys.modules[name]
    digests = Digests()
    rows |= {path: digest_of(path, digests) if kept else CHANGING_DIGEST for path, kept in same.items()}


def _now_on_disk() -> int:
    """Return the time, in ns, by the clock of the temporary folder's file system."""
    with tempfile.NamedTemporaryFile() as file:
        return os.fstat(file.fileno()).st_ctime_ns


def _changed_at(path: str) -> int:
    with contextlib.suppress(OSError):
        return os.stat(path).st_ctime_ns  # noqa: PTH116
    return -1


class _Places:
    """Decides which files count as inputs, and under which path."""

    def __init__(self, leave_out: Iterable[str | Path], began: int) -> None:
        """Exclude folders. `began`: ns; younger files in the temporary folder were made by the run itself."""
        env = os.environ
        self._began = began
        home = env.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")  # noqa: PTH111
        hub = (hf_home(env), hub_cache(env), datasets_cache(env), env.get("HF_MODULES_CACHE"))
        caches = (*(f"{home}/{name}" for name in CACHE_FOLDERS), *hub)
        left = [str(p) for p in (*leave_out, *SYSTEM_FOLDERS, *caches, sysconfig.get_path("stdlib")) if p]
        left += [os.path.realpath(place) for place in left]
        self._left = tuple({f"{place}/" for place in left})
        self._temporary = f"{os.path.realpath(tempfile.gettempdir())}/"

    def row_of(self, path: str, *, missing: bool = False) -> str | None:
        """Return the path of this file's row; None: it is not an input. `missing`: it was when it was opened."""
        path = _source_of(path)
        there = os.path.isdir(path) if path.endswith("/") else os.path.isfile(path)  # noqa: PTH112, PTH113
        absent = not there and (missing or path.endswith("/")) and not os.path.lexists(path)
        parts = path.split("/")
        for number, part in enumerate(parts[:-1], 1):
            if part in PACKAGES:
                package = _packages("/".join(parts[:number])).get("/".join(parts[number:]))
                return package or (path if there and not path.endswith("/") else None)
        if path.endswith(".pyc") or path.startswith(self._left) or not (there or absent):
            return None
        made_at = _changed_at(os.path.dirname(path) if absent else path)  # noqa: PTH120
        young = path.startswith(self._temporary) and (made_at >= self._began or made_at < 0)
        return None if young else path


def _source_of(path: str) -> str:
    """Return the module that a compiled one was made from."""
    if "/__pycache__/" not in path:
        return path
    folder, _, name = path.rpartition("/__pycache__/")
    return f"{folder}/{name.split('.')[0]}.py"


@functools.lru_cache(maxsize=8)
def _packages(site: str) -> Mapping[str, str]:
    """Return each file that packages list in a site-packages folder, relative to it -> the package's row."""
    found: dict[str, str] = {}
    for record in Path(site).glob("*.dist-info/RECORD"):
        name = record.parent.name.partition("-")[0]
        with contextlib.suppress(OSError, UnicodeError):
            lines = record.read_text().splitlines()
            found |= dict.fromkeys((line.partition(",")[0] for line in lines), f"{PACKAGE}{name}")
    return found


def package_rows(names: Iterable[str]) -> dict[str, str]:
    """Return rows of packages that this process would import, except those not installed."""
    rows = {f"{PACKAGE}{name}": digest_of(f"{PACKAGE}{name}") for name in names}
    return {key: digest for key, digest in rows.items() if digest != "-"}


def revision_rows(ids: Iterable[str], kind: str, env: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return rows of the revisions of data sets ("datasets") or models ("models") in the Hugging Face cache of `env`.

    For a data set without its repository there: the folders prepared from it. `env` None: this process's.
    """
    env = os.environ if env is None else env
    paths: list[str] = []
    for name in ids:
        refs = hub_cache(env) / f"{kind}--{name.replace('/', '--')}" / "refs"
        made = prepared_data(name, env).glob("*/*/") if kind == "datasets" else ()
        paths += [str(refs)] if refs.is_dir() else [f"{folder}/" for folder in made] or [str(refs)]
    return {path: digest_of(path) for path in paths}


def digest_of(path: str, digests: Digests | None = None, search: Sequence[str] | None = None) -> str:
    """Return the current digest of a row's file, package, or folder's files; "-" if missing.

    `search`: folders of packages, in order of precedence; None: sys.path.
    """
    digests = digests or Digests()
    if path.startswith(PACKAGE):
        return _package_now(path.removeprefix(PACKAGE), digests, sys.path if search is None else search)
    place = Path(path)
    if not place.is_dir():
        return digests.of(place)
    if path.endswith("/"):
        rows = [[p.name] for p in place.iterdir() if not p.name.startswith(PASSING_NAMES)]
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
    """Return the rows of a build; None if they are missing. `name`: as in the manifests of the request set."""
    try:
        found: dict[str, str] | None = json.loads(shown_file(folder, name).read_bytes()) if name else None
    except (OSError, ValueError):
        return None
    return found


def merge_rows(several: Iterable[Rows]) -> dict[str, str]:
    """Merge rows of several runs; a file that differs between two of them has changed meanwhile."""
    found: dict[str, str] = {}
    for rows in several:
        for path, digest in rows.items():
            found[path] = digest if found.get(path, digest) == digest else CHANGING_DIGEST
    return found


def changed_paths(rows: Rows) -> list[str]:
    """Return paths whose digest has changed, sorted."""
    digests = Digests()
    return sorted(path for path, digest in rows.items() if digest_of(path, digests) != digest)


def rows_in_words(path: str) -> str:
    """Describe a row's path for a reader."""
    if path.startswith(PACKAGE):
        return f"package {path.removeprefix(PACKAGE)}"
    folder, _, file = path.rpartition("/")
    name = folder.rpartition("/")[2]
    if file == "refs" and "--" in name:
        return f"the revision of {name.partition('--')[2].replace('--', '/')}"
    return path


def main(arguments: list[str]) -> int:
    """Run `python -m evaljobs changed FILE`: print the current digests of the paths in a JSON list, as JSON."""
    digests = Digests()
    paths: list[str] = json.loads(Path(arguments[0]).read_bytes())
    sys.stdout.write(json.dumps({path: digest_of(path, digests) for path in paths}) + "\n")
    return 0
