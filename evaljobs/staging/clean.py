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
from pathlib import Path
from typing import Any

from evaljobs.staging import segments, store
from evaljobs.staging.store import Refused

READER_PATIENCE = 2.0  # seconds that a trial gets to finish opening files before the copy is removed


def clean(root: str | Path, *, everything: bool = False, patience: float = READER_PATIENCE) -> dict[str, Any]:
    """Remove copies below `root` that are not in use; with `everything` all: a living precursor sees it, and ends.

    What was done, as `clean` prints it; `kept`: copies in use; `problems`: what was left alone, and why.
    """
    found: dict[str, int | None] = {}
    problems = []
    try:
        with store.locked_home(root) as home:
            found = store.remove_unused(home, even_used=everything, patience=patience)
            strange = [path for path in home.iterdir() if path.name not in found]
            problems = [f"{path} is none of evalspan's names: it was left alone" for path in strange]
    except FileNotFoundError:
        pass
    except (Refused, OSError) as error:
        problems = [str(error)]
    return {
        "root": str(root),
        "freed_bytes": sum(freed or 0 for freed in found.values()),
        "removed": [name for name, freed in found.items() if freed is not None],
        "kept": [name for name, freed in found.items() if freed is None],
        "problems": problems,
    }


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
            sys.stdout.write(json.dumps(done) + "\n")
        status |= bool(done["problems"])
    return int(status)
