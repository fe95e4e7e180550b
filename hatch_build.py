"""Build hook: writes the commit into the wheel and the sdist, as coordinator/commit.txt, for `evalspan --version`.

An editable install has none: the clone's own git says it. A wheel that is built from an sdist takes over its file.
"""

from __future__ import annotations

import subprocess
from pathlib import Path
from tempfile import mkstemp
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PLACE = "coordinator/commit.txt"


class CommitHook(BuildHookInterface[Any]):
    """Adds the file to what is built; nothing is written into the clone."""

    made: Path | None = None

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        root = Path(self.root)
        if version == "editable" or not (root / ".git").exists():
            return
        words = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
        try:
            commit = subprocess.run(words, check=True, capture_output=True, text=True).stdout.strip()
        except (OSError, subprocess.CalledProcessError):
            return
        _, name = mkstemp(suffix=".txt")
        self.made = Path(name)
        self.made.write_text(commit + "\n")
        self.made.chmod(0o644)
        build_data["force_include"][name] = PLACE

    def finalize(self, _version: str, _build_data: dict[str, Any], _artifact: str) -> None:
        if self.made is not None:
            self.made.unlink(missing_ok=True)
