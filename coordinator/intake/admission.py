"""Checks what a notice names: suites and folders of a member must be allowed by the operator's settings.

Rule: a suite or a checkpoint may run code. So a member of the group that shares the work folder names a shipped
suite, or one of `[watch] suites`, and a checkpoint below `[watch] roots` or a watched folder. The work folder's own
user names any. Called by `service`.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path

from coordinator.config import toml
from coordinator.config.schema import Config, WatchConfig
from coordinator.errors import OperatorError
from coordinator.intake import suites
from coordinator.intake.inbox import Notice
from evaljobs.contract.specs import SuiteSpec


class NotAdmittedError(OperatorError):
    """A notice names what the settings do not allow: a refusal for good."""


def no_place(config: Config) -> str:
    """What becomes of members' checkpoints where no folder for them is set; "" where one is, or there are no members."""
    if config.shared_group is None or config.watch.roots or config.watch.folders:
        return ""
    return "neither [watch] roots nor folders is set: checkpoints of members of shared_group will be refused"


def missing_places(watch: WatchConfig) -> list[str]:
    """A sentence for each folder of `[watch]` that is not there; a glob may match later."""
    return [
        f"[watch] {key}: {place} does not exist"
        for key, places in (("roots", watch.roots), ("folders", watch.folders))
        for place in places
        if not any(char in str(place) for char in "*?[") and not may_be_there(place)
    ]


def may_be_there(place: str | Path) -> bool:
    """False where there is no such path. True where storage fails or denies access: the path may exist."""
    try:
        Path(place).stat()
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return False
    except OSError as error:
        return error.errno not in (errno.ENAMETOOLONG, errno.ELOOP)
    return True


def loaded_suites(watch: WatchConfig, source: Callable[[str], str] = lambda _key: "") -> list[SuiteSpec]:
    """The suites that `[watch]` names. OperatorError names the key; `source`: key -> "FILE, line N"."""
    try:
        suite_files(watch)
    except OperatorError as error:
        raise OperatorError(f"{source('suites')}: {error}".removeprefix(": ")) from error
    found = []
    for key, named in [*(("suites", str(s)) for s in watch.suites), ("suite", watch.suite)]:
        try:
            found += [suites.load_suite(named)] if named is not None else []
        except OperatorError as error:
            raise OperatorError(f"{source(key)}: [watch] {key}: {error}".removeprefix(": ")) from error
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


def admitted_suite(
    notice: Notice, watch: WatchConfig, files: Mapping[str, str], *, own: bool = False
) -> str | SuiteSpec:
    """The suite, shipped suite or suite file of a notice; `files`: from `suite_files`. `own`: any of these. NotAdmittedError."""
    name = notice.suite
    if notice.spec is not None:
        if own:
            return notice.spec
        raise NotAdmittedError("a notice names a suite and holds none: list its file in [watch] suites")
    if name == "default":
        if watch.suite is None:
            raise OperatorError("no suite was named and [watch] suite is not set")
        return watch.suite
    if name in files:
        return files[name]
    if name in files.values() or (own and toml.is_file_name(name)):
        return name
    if toml.is_file_name(name):
        raise NotAdmittedError(
            f"a notice names a suite, not a file: list the file in [watch] suites and announce {Path(name).stem!r}"
        )
    if name not in suites.names():
        there = f"[watch] suites has: {', '.join(sorted(files))}" if files else "[watch] suites is not set"
        raise NotAdmittedError(f"no suite named {name!r}: {there}; shipped: {', '.join(suites.names())}")
    return name


def check_place(checkpoint: str, watch: WatchConfig) -> None:
    """NotAdmittedError unless the resolved folder is below `[watch] roots` or `folders`."""
    roots = (*watch.roots, *watch.folders)
    try:
        place = Path(checkpoint).resolve()
        if any(_is_below(place, root) for root in roots):
            return
    except (OSError, RuntimeError, ValueError) as error:  # links in a circle, a name with a NUL
        raise NotAdmittedError(f"{checkpoint}: no folder that can be looked up ({error})") from error
    named = f"any of [watch] roots and folders ({', '.join(map(str, roots))})" if roots else "[watch] roots"
    raise NotAdmittedError(
        f"{place} is not below {named}: set roots to the folder that training writes its checkpoints to and start the daemon anew"
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
