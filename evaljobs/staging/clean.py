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
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from evaljobs.staging import owned_files, segments, store
from evaljobs.staging.owned_files import Refused

READER_PATIENCE = 2.0  # seconds that a trial gets to finish opening files before the copy is removed


@dataclass(frozen=True, slots=True, kw_only=True)
class Cleaned:
    """What was done below one root. `kept`: copies in use; `problems`: what was left alone, and why."""

    root: str
    freed_bytes: int
    removed: tuple[str, ...]
    kept: tuple[str, ...]
    problems: tuple[str, ...]


def clean(root: str | Path, *, everything: bool = False, patience: float = READER_PATIENCE) -> Cleaned:
    """Remove copies below `root` that are not in use; with `everything` all: a living precursor sees it, and ends."""
    freed, removed, kept, problems = 0, [], [], []
    try:
        with store.locked_home(root) as home:
            for name in owned_files.names_in(home.fd):
                left: str | None = name
                try:
                    if not name.startswith(store.RETIRED):
                        if not store.DIGEST.fullmatch(name):
                            problems.append(
                                f"{home.path / name} is none of evalspan's names: it was left alone"
                            )
                            continue
                        left = store.retire_unused(home, name, even_used=everything, patience=patience)
                    if left is None:
                        kept.append(name)
                    else:
                        freed += owned_files.remove_tree(home.fd, left)
                        removed.append(name)
                except (Refused, OSError) as error:
                    problems.append(str(error))
    except FileNotFoundError:
        pass
    except (Refused, TimeoutError) as error:
        problems.append(str(error))
    return Cleaned(
        root=str(root),
        freed_bytes=freed,
        removed=tuple(removed),
        kept=tuple(kept),
        problems=tuple(problems),
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
