"""Laws of a run's inputs: each file and package that it used has a row that tells of each change; keys of named files; data.

The table of all inputs: support/inputs/edits.py.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

from evaljobs.errors import OperatorError
from evaljobs.lmeval import shown_inputs, source_files
from evaljobs.lmeval.present_data import made_anew
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


# --- source keys: which files a suite's entry names ---------------------------------------------------------------------


def test_files_that_change_after_the_submission_are_refused(tmp_path: Path) -> None:
    """By the build and by the score: neither prompts nor gold answers are another evaluation's."""
    lines = "task: one\ndataset_path: json\ndataset_kwargs: {data_files: rows.jsonl}\n"
    (tmp_path / "one.yaml").write_text(lines)
    (tmp_path / "rows.jsonl").write_text('{"q": 1}\n')
    source, _ = source_files.entry_files([str(tmp_path)], "one", source_files.Digests())
    source_files.unchanged([str(tmp_path)], "one", source, None)
    (tmp_path / "rows.jsonl").write_text("{}\n")
    with pytest.raises(OperatorError, match="changed after its evaluation was submitted"):
        source_files.unchanged([str(tmp_path)], "one", source, None)


def test_a_group_a_tag_and_an_unknown_name_are_not_one_task(tmp_path: Path) -> None:
    """What lm-eval ships counts by its own file; a task's YAML file counts as its task."""
    for name, text in (
        ("leaf", "task: leaf\ntag: marked\n"),
        ("other", "task: other\ntag: marked\n"),
        ("both", "group: both\ntask: [leaf, other]\n"),
    ):
        (tmp_path / f"{name}.yaml").write_text(text)
    shipped = {
        "theirs": source_files.Shipped(tmp_path / "leaf.yaml"),
        "their_tag": source_files.Shipped(None, ("theirs",)),
    }
    names = ["leaf", "both", "marked", "unknown", "theirs", "their_tag"]
    names += [str(tmp_path / "other.yaml"), str(tmp_path / "both.yaml")]
    digests = source_files.Digests()
    single = [n for n in names if source_files.is_one_task([str(tmp_path)], n, digests, shipped.get)]
    assert single == ["leaf", "theirs", str(tmp_path / "other.yaml")]


@pytest.mark.parametrize("loader", sorted(source_files.LOADERS))
def test_other_data_that_a_loader_of_files_prepared_change_no_key(loader: str, tmp_path: Path) -> None:
    """`datasets` keeps all that `json` has read in one folder: it is no revision of a suite's own files."""
    (tmp_path / "one.yaml").write_text(f"task: one\ndataset_path: {loader}\n")
    asked = [str(tmp_path)], "one", source_files.Digests()
    env = {"HF_HOME": str(tmp_path / "hf")}
    before = source_files.entry_files(*asked, env=env)
    (tmp_path / "hf" / "datasets" / loader / "default-0123" / "0.0.0" / "4567").mkdir(parents=True)
    assert source_files.entry_files(*asked, env=env) == before


def test_every_loader_of_files_that_datasets_has_is_known() -> None:
    from datasets.packaged_modules import _PACKAGED_DATASETS_MODULES as PACKAGED

    assert set(PACKAGED) <= source_files.LOADERS


def test_large_files_are_hashed_once_and_anew_when_size_or_time_changes(tmp_path: Path) -> None:
    data, cache = tmp_path / "data.bin", tmp_path / "digests.json"
    data.write_bytes(b"a" * source_files.REMEMBERED_BYTES)
    first = source_files.Digests(cache)
    digest = first.of(data)
    first.keep()
    assert str(data) in cache.read_text()
    cache.write_text(cache.read_text().replace(digest, "remembered"))
    assert source_files.Digests(cache).of(data) == "remembered"
    data.write_bytes(b"b" * source_files.REMEMBERED_BYTES)
    assert source_files.Digests(cache).of(data) not in (digest, "remembered")


# --- data: a run gets those of now, and leaves nothing of what it made of them --------------------------------------------


@pytest.mark.model
def test_data_are_those_of_now_and_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a file whose size and mtime are kept, and of functions that read what `datasets` does not see."""
    import datasets

    for name in ("tmp", "cache"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    file, cache, word = tmp_path / "rows.jsonl", str(tmp_path / "cache"), tmp_path / "word.txt"
    seen = []
    for value in ("one", "two"):
        was = file.stat() if file.exists() else None
        file.write_text(f'{{"q": "{value}"}}\n')
        if was is not None:
            os.utime(file, ns=(was.st_atime_ns, was.st_mtime_ns))
        word.write_text(value)
        with made_anew():
            rows = datasets.load_dataset("json", data_files=str(file), split="train", cache_dir=cache)
            rows = rows.map(lambda row: {"w": word.read_text(), **row})
            made = datasets.Dataset.from_generator(lambda: ({"g": word.read_text()} for _ in range(1)))
        seen.append((rows[0]["q"], rows[0]["w"], made[0]["g"]))
        assert list((tmp_path / "tmp").iterdir()) == []
    assert seen == [("one",) * 3, ("two",) * 3]
