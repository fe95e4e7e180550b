"""This evalspan's version, and the commit that it was built from or is a clone of.

Journals record it, so two versions with different code must not have the same name. If git refuses to read a clone (owned by
another user), a digest of the coordinator's code replaces the commit.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
from pathlib import Path

from coordinator.base.run_command import CommandError, run_command

ROOT = Path(__file__).resolve().parents[2]  # the clone, or the folder of installed packages
COMMIT_FILE = ROOT / "coordinator" / "commit.txt"  # written into a wheel and an sdist by hatch_build.py
GIT_SECONDS = 10.0


@functools.cache
def version_text() -> str:
    """Return text such as "evalspan 0.2.0 (commit 97ccac9a1b2c)"; "-dirty": uncommitted changes; no commit: "(code 1a2b…)"."""
    try:
        version = importlib.metadata.version("evalspan")
    except importlib.metadata.PackageNotFoundError:  # a copied folder
        version = "of unknown version"
    commit = _commit()
    return f"evalspan {version} ({f'commit {commit}' if commit else f'code {_digest()}'})"


def _digest() -> str:
    digest = hashlib.sha256()
    for file in sorted((ROOT / "coordinator").rglob("*.py")):
        digest.update(f"{file.name}\0".encode() + file.read_bytes())
    return digest.hexdigest()[:12]


def _commit() -> str:
    """Return the clone's commit, or the one that was built; "" if unknown."""
    if (ROOT / ".git").exists():
        words = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
        try:
            return run_command(words, seconds=GIT_SECONDS).strip()
        except CommandError:
            return ""
    try:
        return COMMIT_FILE.read_text().strip()
    except OSError:
        return ""
