"""Goldens: what users see today, written down once; a difference fails, and its first lines are shown."""

from __future__ import annotations

import difflib
import json
import os
from dataclasses import dataclass
from pathlib import Path

import pytest

HERE = Path(__file__).parents[1] / "golden"
LINES = 40  # of a difference that are shown

# Goldens that take a language model or minutes are compared by `scripts/check --golden` alone.
long = pytest.mark.skipif(not os.environ.get("EVALSPAN_GOLDEN"), reason="scripts/check --golden runs this")

# What takes a minute for a law that other tests hold in small.
deep = pytest.mark.skipif(not os.environ.get("EVALSPAN_DEEP"), reason="scripts/check --deep runs this")


@dataclass
class Goldens:
    """The files of tests/golden, compared with what was found or written anew."""

    write: bool

    def check(self, name, found):
        """Fail where `found` is not what the file `name` holds: a text as it is, else JSON with one value a line.

        `name`: relative to tests/golden, such as "scores/exact-1-3.json".
        """
        place = HERE / name
        now = found if isinstance(found, str) else json.dumps(found, indent=1, sort_keys=True) + "\n"
        if self.write:
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(now)
            return
        known = place.read_text() if place.exists() else ""
        if now != known:
            lines = difflib.unified_diff(
                known.splitlines(), now.splitlines(), "golden", "now", n=1, lineterm=""
            )
            shown = list(lines)
            more = [f"… {len(shown) - LINES} more lines"] if len(shown) > LINES else []
            pytest.fail("\n".join([f"{name} differs:", *shown[:LINES], *more]), pytrace=False)
