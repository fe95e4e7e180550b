"""Checks what a notice names: suites and folders must be allowed by the operator's settings.

Rule: any user with access to Redis or the spool folder can write a notice, a member of the group a
submission, and a suite or a checkpoint may run code. So these name a suite, or a file of `[watch]
suites`, and a checkpoint below `[watch] roots` or a watched folder. Called by `service`.
"""

from __future__ import annotations

import errno
import shlex
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path

from coordinator.config import toml
from coordinator.config.schema import WatchConfig
from coordinator.errors import OperatorError
from coordinator.intake import suites
from evaljobs.contract.specs import SuiteSpec


class NotAdmittedError(OperatorError):
    """A notice names what the settings do not allow: a refusal for good."""


def no_place(watch: WatchConfig) -> str:
    """What becomes of the hook's checkpoints where no folder for them is set; "" where one is."""
    if watch.roots or watch.folders:
        return ""
    return "neither [watch] roots nor folders is set: checkpoints that the hook announces will be refused"


def missing_places(watch: WatchConfig) -> list[str]:
    """A sentence for each folder of `[watch]` that is not there; a glob may match later."""
    places = [("roots", p) for p in watch.roots] + [("folders", p) for p in watch.folders]
    return [
        f"[watch] {key}: {place} does not exist"
        for key, place in places
        if not any(char in str(place) for char in "*?[") and not may_be_there(place)
    ]


def may_be_there(place: str | Path) -> bool:
    """False where there is no such path. True where storage fails or denies access: the path may exist."""
    try:
        Path(place).stat()
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return False
    except OSError as error:
        return error.errno != errno.ENAMETOOLONG
    return True


def loaded_suites(watch: WatchConfig, line_of: Callable[[str], str] = lambda _key: "") -> list[SuiteSpec]:
    """The suites that `[watch]` names. OperatorError names the key; `line_of`: key -> "FILE, line N: "."""
    try:
        suite_files(watch)
    except OperatorError as error:
        raise OperatorError(f"{line_of('suites')}{error}") from error
    found = []
    for key, named in [*(("suites", str(s)) for s in watch.suites), ("suite", watch.suite)]:
        try:
            found += [suites.load_suite(named)] if named is not None else []
        except OperatorError as error:
            raise OperatorError(f"{line_of(key)}[watch] {key}: {error}") from error
    return found


def suite_files(watch: WatchConfig) -> dict[str, str]:
    """Name in a notice -> suite file of `[watch]`. OperatorError where a name means two suites."""
    shipped = dict.fromkeys((*suites.names(), "default"), "a shipped suite")
    found: dict[str, str] = {}
    for file in map(str, watch.suites):
        name = Path(file).stem
        if other := shipped.get(name) or found.get(name):
            raise OperatorError(
                f"[watch] suites: a notice would name {file} {name!r}, as it does {other}: rename the file"
            )
        found[name] = file
    if watch.suite is not None and toml.is_file_name(watch.suite) and Path(watch.suite).stem not in shipped:
        found.setdefault(Path(watch.suite).stem, watch.suite)
    return found


def admitted_suite(name: str, watch: WatchConfig, files: Mapping[str, str]) -> str:
    """The shipped suite or suite file of that name; `files`: from `suite_files`. NotAdmittedError."""
    if name == "default":
        if watch.suite is None:
            raise OperatorError("no suite was named and [watch] suite is not set")
        return watch.suite
    if name in files:
        return files[name]
    if name in files.values():
        return name
    if toml.is_file_name(name):
        raise NotAdmittedError(
            f"a notice names a suite, not a file: list the file in [watch] suites and announce {Path(name).stem!r}"
        )
    if name not in suites.names():
        there = f"[watch] suites has: {', '.join(sorted(files))}" if files else "[watch] suites is not set"
        raise NotAdmittedError(f"no suite named {name!r}: {there}; shipped: {', '.join(suites.names())}")
    return name


def check_place(checkpoint: str, watch: WatchConfig, *, submitted: bool = False) -> None:
    """NotAdmittedError unless the resolved folder is below `[watch] roots` or `folders`. `submitted`: by a member."""
    roots = (*watch.roots, *watch.folders)
    try:
        place = Path(checkpoint).resolve()
        if any(_is_below(place, root) for root in roots):
            return
    except (OSError, RuntimeError, ValueError) as error:  # links in a circle, a name with a NUL
        raise NotAdmittedError(f"{checkpoint}: no folder that can be looked up ({error})") from error
    named = f"any of [watch] roots and folders ({', '.join(map(str, roots))})" if roots else "[watch] roots"
    other = f", or evaluate this one: `evalspan submit {shlex.quote(str(place))} --suite NAME`"
    raise NotAdmittedError(
        f"{place} is not below {named}: set roots to the folder that training writes its checkpoints to and start the daemon anew"
        f"{'' if submitted else other}"
    )


def _is_below(place: Path, root: Path) -> bool:
    """Is `place` below `root`? A glob is matched part by part from its first pattern on."""
    parts = root.parts
    fixed = next((i for i, part in enumerate(parts) if any(c in part for c in "*?[")), len(parts))
    base, patterns = Path(*parts[:fixed]).resolve().parts, parts[fixed:]
    below = place.parts[len(base) :]
    return (
        place.parts[: len(base)] == base
        and len(below) >= len(patterns)
        and all(map(fnmatchcase, below, patterns))
    )
