"""Lists a folder that other users may fill: a bounded number of names at each look, and every name in its turn.

Rule: a look costs the same for a million files as for MOST. Called by what reads notices and commands.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

MOST = 200  # files of one look of a daemon: a checkpoint that is not whole costs a millisecond
ALL = 100_000  # files of one look of a command, which looks once
MOST_BAD = 100  # unreadable files (`*.bad`) that are kept for a person to read


class Turns:
    """Names of a folder's `*.json` files, from look to look."""

    def __init__(self, folder: Path, most: int = MOST) -> None:
        self.folder = folder
        self.most = most
        self.bad = 0  # `*.bad` files that this round has seen
        self._entries: Iterator[os.DirEntry[str]] | None = None

    def look(self) -> list[Path]:
        """The next files, `most` at most, sorted by name: where the folder holds no more, all of it. OSError.

        A folder that is not there has none.
        """
        found: list[Path] = []
        if self._entries is None:
            try:
                self._entries, self.bad = os.scandir(self.folder), 0
            except (FileNotFoundError, NotADirectoryError):
                return found
        seen = 0
        for entry in islice(self._entries, self.most):
            seen += 1
            self.bad += entry.name.endswith(".bad")
            if entry.name.endswith(".json"):
                found.append(self.folder / entry.name)
        if seen < self.most:
            self._entries = None  # the round is over, and its folder is closed
        return sorted(found)

    def keeps_bad(self) -> bool:
        """May one more file be kept as `*.bad`?"""
        self.bad += 1
        return self.bad <= MOST_BAD
