"""Laws of what a run shows: each file and package that it used has a row, and a row tells of each change."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

from evaljobs.lmeval import shown_inputs
from evaljobs.lmeval.shown_inputs import CHANGING, changed, in_words, merged, recorded

GRADELIB = "package:gradelib"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A user's folder and an installed package, both on sys.path, and another folder for temporary files."""
    for name in ("own", "site-packages/gradelib", "site-packages/gradelib-1.0.dist-info", "work", "tmp"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "own/asking.py").write_text("import gradelib\nWORD = 'river'\n")
    (tmp_path / "own/words.txt").write_text("river\n")
    (tmp_path / "site-packages/gradelib/__init__.py").write_text("SCALE = 1\n")
    record = "gradelib/__init__.py,sha256=x,10\ngradelib-1.0.dist-info/RECORD,,\n"
    (tmp_path / "site-packages/gradelib-1.0.dist-info/RECORD").write_text(record)
    for name in ("own", "site-packages"):
        monkeypatch.syspath_prepend(str(tmp_path / name))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    shown_inputs._records.cache_clear()
    yield tmp_path
    for name in ("asking", "gradelib"):
        sys.modules.pop(name, None)


def run(place: Path, *, fails: bool = False) -> dict[str, str]:
    """Rows of a block that imports, reads and writes."""
    rows: dict[str, str] = {}
    with pytest.raises(ValueError) if fails else nullcontext(), recorded(rows, leave_out=[place / "work"]):
        importlib.import_module("asking")
        (place / "own/words.txt").read_text()
        for name in ("work/notes.txt", "tmp/scratch.txt", "own/out.txt"):
            (place / name).write_text("made by the run\n")
            (place / name).read_text()
        Path("/proc/self/status").read_text()
        if fails:
            raise ValueError
    return {p: digest for p, digest in rows.items() if p.startswith(str(place)) or p == GRADELIB}


@pytest.mark.parametrize("fails", [False, True])
def test_a_run_shows_what_it_read_and_imported_and_not_what_it_made(place: Path, fails: bool) -> None:
    """Also where it ends by an exception, as a build does at lm-eval's first request."""
    rows = run(place, fails=fails)
    assert rows.keys() == {str(place / "own/asking.py"), str(place / "own/words.txt"), GRADELIB}
    assert in_words(GRADELIB) == "package gradelib"
    assert changed(rows) == []


def test_the_next_task_imports_its_own_modules(place: Path) -> None:
    """A module of the user does not outlive the run that imported it; an installed package does."""
    run(place)
    assert "asking" not in sys.modules
    assert "gradelib" in sys.modules
    assert str(place / "own/asking.py") in run(place)


def test_each_change_is_told(place: Path) -> None:
    """Content with size and mtime kept; another version of a package; a file that is gone. A touch is no change."""
    rows, words = run(place), place / "own/words.txt"
    os.utime(words)
    assert changed(rows) == []
    was = words.stat()
    words.write_text("ocean\n")
    os.utime(words, ns=(was.st_atime_ns, was.st_mtime_ns))
    assert changed(rows) == [str(words)]
    words.write_text("river\n")
    assert changed(rows) == []
    info = place / "site-packages/gradelib-1.0.dist-info"
    info.rename(info.with_name("gradelib-2.0.dist-info"))
    (place / "own/asking.py").unlink()
    assert changed(rows) == [str(place / "own/asking.py"), GRADELIB]


def test_a_file_that_changes_while_it_is_read_equals_none(place: Path) -> None:
    words, rows = place / "own/words.txt", dict[str, str]()
    with recorded(rows):
        words.read_text()
        os.system(f"echo ocean > {words}")  # noqa: S605 (another process)
    assert rows[str(words)] == CHANGING
    assert changed(rows) == [str(words)]


def test_two_runs_that_saw_different_contents_equal_none() -> None:
    assert merged([{"/a": "1", "/b": "2"}, {"/a": "1", "/b": "3"}]) == {"/a": "1", "/b": CHANGING}


def test_the_revisions_of_a_data_set_are_a_row(tmp_path: Path) -> None:
    """By the cache that the variables of the job name."""
    refs = tmp_path / "hub/datasets--org--rows/refs"
    refs.mkdir(parents=True)
    (refs / "main").write_text("a" * 40)
    rows = shown_inputs.revision_rows(["org/rows"], "datasets", {"HF_HOME": str(tmp_path)})
    assert changed(rows) == []
    (refs / "main").write_text("b" * 40)
    assert [in_words(path) for path in changed(rows)] == ["the revision of org/rows"]
