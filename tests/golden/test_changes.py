"""A golden changes by a decision alone."""

from __future__ import annotations

import re
import subprocess

import pytest
from support.goldens import HERE


def test_each_commit_that_changes_a_golden_names_a_decision() -> None:
    """A person who reads the history finds why a score, a field, a job or an exit code is another one."""
    words = ["git", "log", "--diff-filter=MD", "--format=%h %B%x00", "--", "*.json", "*/*.csv", ":!texts"]
    done = subprocess.run(words, cwd=HERE, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip("not a clone: the history is not here")
    unnamed = [
        m for m in done.stdout.split("\0") if m.strip() and not re.search(r"\bdecision \d", m, re.IGNORECASE)
    ]
    assert unnamed == []
