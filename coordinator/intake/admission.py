"""Checks of notices: the operator's settings must allow the suites and folders of members.

Rule: a suite or a checkpoint may run code. A member of the group that shares the work folder may therefore only name a
shipped suite or one of `[watch] suites`, and a checkpoint below `[watch] roots` or a watched folder. The work folder's own
user may name any. Called by `service`.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path

from coordinator.errors import OperatorError
from coordinator.intake import suites
from coordinator.intake.inbox import Notice
from coordinator.site.config import toml
from coordinator.site.config.schema import Config, WatchConfig
from evaljobs.contract.specs import SuiteSpec


class NotAdmittedError(OperatorError):
    """A notice names something that the settings do not allow; it is refused for good."""


def refusal_of_place(config: Config) -> str:
    """Return a warning if members have no folder for their checkpoints; "" if one is set, or there are no members."""
    if config.shared_group is None or config.watch.roots or config.watch.folders:
        return ""
    return "neither [watch] roots nor folders is set: checkpoints of members of shared_group will be refused"


def missing_places(watch: WatchConfig) -> list[str]:
    """Return a sentence for each folder of `[watch]` that is missing; a glob may match later."""
    return [
        f"[watch] {key}: {place} does not exist"
        for key, places in (("roots", watch.roots), ("folders", watch.folders))
        for place in places
        if not any(char in str(place) for char in "*?[") and not may_exist(place)
    ]


def may_exist(place: str | Path) -> bool:
    """Return False if the path does not exist. True if storage fails or denies access, since it may exist."""
    try:
        Path(place).stat()
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return False
    except OSError as error:
        return error.errno not in (errno.ENAMETOOLONG, errno.ELOOP)
    return True


def loaded_suites(watch: WatchConfig, source: Callable[[str], str] = lambda _key: "") -> list[SuiteSpec]:
    """Return the suites that `[watch]` names. Raise OperatorError, which names the key; `source`: key -> "FILE, line N"."""
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
    """Return name in a notice -> suite file of `[watch]`. Raise OperatorError if a name means two suites."""
    shipped = dict.fromkeys((*suites.suite_names(), "default"), "a shipped suite")
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
    """Return the suite or suite file of a notice; `files`: from `suite_files`. `own`: allow any. Raise NotAdmittedError."""
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
    if name not in suites.suite_names():
        there = f"[watch] suites has: {', '.join(sorted(files))}" if files else "[watch] suites is not set"
        raise NotAdmittedError(
            f"no suite named {name!r}: {there}; shipped: {', '.join(suites.suite_names())}"
        )
    return name


def check_place(checkpoint: str, watch: WatchConfig) -> None:
    """Raise NotAdmittedError unless the resolved folder is below `[watch] roots` or `folders`."""
    roots = (*watch.roots, *watch.folders)
    try:
        place = Path(checkpoint).resolve()
        if any(_is_below(place, root) for root in roots):
            return
    except (OSError, RuntimeError, ValueError) as error:  # circular links, a name with a NUL
        raise NotAdmittedError(f"{checkpoint}: not a valid path ({error})") from error
    named = f"any of [watch] roots and folders ({', '.join(map(str, roots))})" if roots else "[watch] roots"
    raise NotAdmittedError(
        f"{place} is not below {named}: set roots to the folder that training writes its checkpoints to and restart the daemon"
    )


def _is_below(place: Path, root: Path) -> bool:
    """Return whether `place` is below `root`. A glob is matched component by component from its first pattern on."""
    parts = root.parts
    fixed = next((i for i, part in enumerate(parts) if any(c in part for c in "*?[")), len(parts))
    base, patterns = Path(*parts[:fixed]).resolve().parts, parts[fixed:]
    below = place.parts[len(base) :]
    return (
        place.parts[: len(base)] == base
        and len(below) >= len(patterns)
        and all(map(fnmatchcase, below, patterns))
    )
