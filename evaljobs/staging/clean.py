"""The `clean` verb: remove unused copies: `python -m evaljobs clean [--root DIR …] [--all]`.

Rules: only names that evalspan makes in this user's own home are removed; all else is reported and left alone. A copy
that a living precursor holds or a trial reads stays, unless `--all`. A trial keeps what it has mapped until it ends.
Shared memory of engines that died is removed, too.

Called by `python -m evaljobs`. Run as root, it cleans root's own home and no other user's.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from evaljobs.staging import owned_files, segments, store
from evaljobs.staging.owned_files import Refused
from evaljobs.staging.store import Home

READER_PATIENCE = 2.0  # seconds that a trial gets to finish opening files before the copy is removed


@dataclass(frozen=True, slots=True, kw_only=True)
class Cleaned:
    """What was done below one root. `kept`: copies in use; `problems`: what was left alone, and why."""

    root: str
    freed_bytes: int = 0
    removed: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()


def clean(root: str | Path, *, everything: bool = False, patience: float = READER_PATIENCE) -> Cleaned:
    """Remove copies below `root` that are not in use; with `everything` all: a living precursor sees it, and ends.

    Cleans all homes of this user, and names what is not ours at the name of one.
    """
    done = Cleaned(root=str(root))
    try:
        parent = owned_files.open_root(root)
    except Refused as error:
        return Cleaned(root=str(root), problems=(str(error),))
    try:
        names = dict.fromkeys([*store.homes(parent, every_uid=True), store.home_name(os.geteuid())])
    finally:
        os.close(parent)
    for name in names:
        try:
            with store.locked_home(root, name=name) as home:
                done = _and(done, _clean(home, str(root), everything=everything, patience=patience))
        except FileNotFoundError:
            continue
        except (Refused, TimeoutError) as error:
            done = _and(done, Cleaned(root=str(root), problems=(str(error),)))
    return done


def _and(one: Cleaned, other: Cleaned) -> Cleaned:
    return Cleaned(
        root=one.root,
        freed_bytes=one.freed_bytes + other.freed_bytes,
        removed=one.removed + other.removed,
        kept=one.kept + other.kept,
        problems=one.problems + other.problems,
    )


def _clean(home: Home, root: str, *, everything: bool, patience: float) -> Cleaned:
    freed, removed, kept, problems = 0, [], [], []
    for name in owned_files.names_in(home.fd):
        retired = name.startswith(store.RETIRED)
        if not retired and not store.DIGEST.fullmatch(name):
            problems.append(f"{home.path / name} is none of evalspan's names: it was left alone")
            continue
        try:
            left = (
                name if retired else store.retire_unused(home, name, even_used=everything, patience=patience)
            )
            if left is None:
                kept.append(name)
            else:
                freed += owned_files.remove_tree(home.fd, left)
                removed.append(name)
        except (Refused, OSError) as error:
            problems.append(str(error))
    return Cleaned(
        root=root, freed_bytes=freed, removed=tuple(removed), kept=tuple(kept), problems=tuple(problems)
    )


def clean_main(argv: Sequence[str]) -> int:
    """The `clean` verb: prints one JSON object a root. Exit status 1 where something was left alone."""
    parser = argparse.ArgumentParser(prog="python -m evaljobs clean", description=__doc__)
    parser.add_argument("--root", action="append", help="default: /dev/shm")
    parser.add_argument("--all", action="store_true", help="copies in use, too")
    chosen = parser.parse_args(argv)
    status = 0
    segments.sweep()
    for root in chosen.root or ["/dev/shm"]:
        done = clean(root, everything=chosen.all)
        with contextlib.suppress(BrokenPipeError):
            sys.stdout.write(json.dumps(asdict(done)) + "\n")
        status |= bool(done.problems)
    return int(status)
