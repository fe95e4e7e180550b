"""Laws of a run's inputs: each file and package that it used has a row that tells of each change; keys of named files; data.

The table of all inputs: support/inputs/edits.py.
"""

import contextlib
import glob
import importlib
import multiprocessing
import os
import random
import shutil
import sys
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest

from evaljobs.lmeval import shown_inputs, source_files
from evaljobs.lmeval.present_data import prepare_afresh
from evaljobs.lmeval.shown_inputs import (
    CHANGING_DIGEST,
    changed_paths,
    merge_rows,
    record_inputs,
    rows_in_words,
)
from evaljobs.lmeval.task_paths import LOADERS

GRADELIB = "package:gradelib"


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A user's folder and an installed package, both on sys.path, and another folder for temporary files."""
    for name in (
        "own/parts",
        "site-packages/gradelib",
        "site-packages/gradelib-1.0.dist-info",
        "work",
        "tmp",
    ):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "own/asking.py").write_text("import gradelib\nWORD = 'river'\n")
    for name in ("words.txt", "parts/one.txt"):
        (tmp_path / "own" / name).write_text("river\n")
    (tmp_path / "site-packages/gradelib/__init__.py").write_text("SCALE = 1\n")
    record = "gradelib/__init__.py,sha256=x,10\ngradelib-1.0.dist-info/RECORD,,\n"
    (tmp_path / "site-packages/gradelib-1.0.dist-info/RECORD").write_text(record)
    for name in ("own", "site-packages"):
        monkeypatch.syspath_prepend(str(tmp_path / name))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    shown_inputs._packages.cache_clear()
    yield tmp_path
    for name in ("asking", "gradelib"):
        sys.modules.pop(name, None)


def run(place, *, fails=False):
    """Rows of a block that imports, reads and writes."""
    rows = {}
    with (
        pytest.raises(ValueError) if fails else nullcontext(),
        record_inputs(rows, leave_out=[place / "work"]),
    ):
        importlib.import_module("asking")
        (place / "own/words.txt").read_text()
        assert [*(place / "own/parts").glob("*.txt")]
        for name in ("work/notes.txt", "tmp/scratch.txt", "own/out.txt"):
            (place / name).write_text("made by the run\n")
            (place / name).read_text()
        Path("/proc/self/status").read_text()
        if fails:
            raise ValueError
    return {p: digest for p, digest in rows.items() if p.startswith(str(place)) or p == GRADELIB}


@pytest.mark.parametrize("fails", [False, True])
def test_a_run_shows_what_it_read_and_imported_and_not_what_it_made(place, fails):
    """Also where it ends by an exception, as a build does at lm-eval's first request."""
    rows = run(place, fails=fails)
    assert rows.keys() == {GRADELIB, *(str(place / "own" / n) for n in ("asking.py", "words.txt"))} | {
        f"{place}/own/parts/"
    }
    assert rows_in_words(GRADELIB) == "package gradelib"
    assert changed_paths(rows) == []


def test_the_next_task_imports_its_own_modules(place):
    """A module of the user does not outlive the run that imported it; an installed package does."""
    run(place)
    assert "asking" not in sys.modules
    assert "gradelib" in sys.modules
    assert str(place / "own/asking.py") in run(place)


def test_each_change_is_told(place):
    """Content with size and mtime kept; another version of a package; a file that is gone, or that a listed folder has anew.
    A touch is no change, nor a folder of compiled modules there.
    """
    rows, words, parts = run(place), place / "own/words.txt", place / "own/parts"
    os.utime(words)
    (parts / "__pycache__").mkdir()
    assert changed_paths(rows) == []
    (parts / "two.txt").write_text("")
    assert changed_paths(rows) == [f"{parts}/"]
    (parts / "two.txt").unlink()
    was = words.stat()
    words.write_text("ocean\n")
    os.utime(words, ns=(was.st_atime_ns, was.st_mtime_ns))
    assert changed_paths(rows) == [str(words)]
    words.write_text("river\n")
    assert changed_paths(rows) == []
    info = place / "site-packages/gradelib-1.0.dist-info"
    info.rename(info.with_name("gradelib-2.0.dist-info"))
    (place / "own/asking.py").unlink()
    assert changed_paths(rows) == [str(place / "own/asking.py"), GRADELIB]


def opened(name, flags):
    os.close(os.open(name, flags))


def tried(name):
    with contextlib.suppress(OSError):
        open(name).close()  # noqa: PTH123


def cached(name):
    """Made by the run where it is missing, and read where it is there."""
    tried(name)
    Path(name).write_text("made of what the run read\n")


LOOKS = {  # look of a run -> the row, and the edit that it tells of; None: no row
    "a file": (lambda: Path("words.txt").read_text(), "words.txt", "words.txt"),
    "a file for reading and writing": (lambda: open("words.txt", "r+").close(), "words.txt", "words.txt"),  # noqa: PTH123
    "a file for reading and appending": (lambda: open("words.txt", "a+").close(), "words.txt", "words.txt"),  # noqa: PTH123
    "a file mapped for writing": (lambda: np.memmap("words.txt", dtype="uint8"), "words.txt", "words.txt"),
    "a file that it would create": (lambda: opened("words.txt", os.O_RDWR | os.O_CREAT), "words.txt", "words.txt"),
    "a missing file": (lambda: tried("late.txt"), "late.txt", "late.txt"),
    "a file of a missing folder": (lambda: tried("new/late.txt"), "new/late.txt", "new/late.txt"),
    "a missing file that the run makes": (lambda: cached("made.txt"), "made.txt", "made.txt"),
    "modules of a folder": (lambda: [*Path("parts").glob("*.py")], "parts/", "parts/new.py"),
    "YAMLs of a folder": (lambda: glob.glob("parts/*.yaml"), "parts/", "parts/new.yaml"),  # noqa: PTH207
    "all names of a folder": (lambda: os.listdir("parts"), "parts/", "parts/.hidden"),  # noqa: PTH208
    "a folder's folders": (lambda: [*Path().rglob("*.txt")], "parts/", "parts/new.txt"),
    "a missing folder": (lambda: [*os.walk("new")], "new/", "new/one.txt"),
    "a file that it wrote before": (lambda: (Path("made.txt").write_text("a\n"), Path("made.txt").read_text()), None, "made.txt"),
    "a file that it put in place": (lambda: (Path("made").write_text("a\n"), Path("made").rename("made.txt"), tried("made.txt")), None, "made.txt"),
    "a file that it reads and changes": (lambda: (tried("words.txt"), Path("words.txt").write_text("b\n")), None, "words.txt"),
    "a file appended to": (lambda: open("words.txt", "a").close(), None, "words.txt"),  # noqa: PTH123
    "a missing temporary file": (lambda: tried("../tmp/late.txt"), None, "../tmp/late.txt"),
}  # fmt: skip


def in_a_child(look):
    """That ends as a killed one does: without a word to its parent."""
    child = multiprocessing.get_context("fork").Process(target=lambda: (look(), os._exit(0)))
    child.start()
    child.join()
    assert child.exitcode == 0


@pytest.mark.parametrize("where", [lambda look: look(), in_a_child], ids=["itself", "forked child"])
def test_what_a_run_opened_tried_to_open_or_listed_is_an_input(place, monkeypatch, where):
    """In whichever process of it; what the run itself made is none."""
    rows = {}
    for name in LOOKS:
        shutil.copytree(place / "own", place / name)
    with record_inputs(rows):
        for name, (look, _, _) in LOOKS.items():
            monkeypatch.chdir(place / name)
            where(look)
    assert changed_paths(rows) == []
    for name, (_, row, edited) in LOOKS.items():
        (place / name / edited).parent.mkdir(exist_ok=True)
        (place / name / edited).write_text("edited\n")
        told = {path for path in changed_paths(rows) if path.startswith(f"{place / name}/")}
        assert told == ({f"{place / name}/{row}"} if row else set()), name


def test_a_file_that_changes_while_it_is_read_equals_none(place):
    words, rows = place / "own/words.txt", dict[str, str]()
    with record_inputs(rows):
        words.read_text()
        os.system(f"echo ocean > {words}")  # noqa: S605 (another process)
    assert rows[str(words)] == CHANGING_DIGEST
    assert changed_paths(rows) == [str(words)]


def test_two_runs_that_saw_different_contents_equal_none():
    assert merge_rows([{"/a": "1", "/b": "2"}, {"/a": "1", "/b": "3"}]) == {"/a": "1", "/b": CHANGING_DIGEST}


def test_the_revisions_of_a_data_set_are_a_row(tmp_path):
    """By the cache that the variables of the job name; without its repository, by what was prepared of it."""
    made = tmp_path / "datasets/org___my_rows-2/default/0.0.0"  # of org/MyRows-2, as `datasets` names it
    (made / "one").mkdir(parents=True)
    rows = shown_inputs.revision_rows(["org/MyRows-2"], "datasets", {"HF_HOME": str(tmp_path)})
    assert changed_paths(rows) == []
    (made / "two").mkdir()
    assert changed_paths(rows) == [f"{made}/"]
    refs = tmp_path / "hub/datasets--org--MyRows-2/refs"
    refs.mkdir(parents=True)
    (refs / "main").write_text("a" * 40)
    rows = shown_inputs.revision_rows(["org/MyRows-2"], "datasets", {"HF_HOME": str(tmp_path)})
    assert changed_paths(rows) == []
    (refs / "main").write_text("b" * 40)
    assert [rows_in_words(path) for path in changed_paths(rows)] == ["the revision of org/MyRows-2"]


# --- source keys: which files a suite's entry names ---------------------------------------------------------------------


def test_a_group_a_tag_and_an_unknown_name_are_not_one_task(tmp_path):
    """A task's YAML file counts as its task."""
    for name, text in (
        ("leaf", "task: leaf\ntag: marked\n"),
        ("other", "task: other\ntag: marked\n"),
        ("both", "group: both\ntask: [leaf, other]\n"),
    ):
        (tmp_path / f"{name}.yaml").write_text(text)
    names = ["leaf", "both", "marked", "unknown", str(tmp_path / "other.yaml"), str(tmp_path / "both.yaml")]
    digests = source_files.Digests()
    single = [n for n in names if source_files.is_one_task([str(tmp_path)], n, digests)]
    assert single == ["leaf", str(tmp_path / "other.yaml")]


def test_a_copy_of_a_folder_is_another_suite(tmp_path):
    """What its modules import and read is known by path, from a build: an edit of the copy is none of the first folder."""
    folders = [tmp_path / name for name in ("one", "two")]
    for folder in folders:
        folder.mkdir()
        (folder / "own.yaml").write_text("task: own\n")
    keys = {source_files.files_named_by([str(f)], "own", source_files.Digests()).key() for f in folders}
    assert len(keys) == 2


def test_every_loader_of_files_that_datasets_has_is_known():
    from datasets.packaged_modules import _PACKAGED_DATASETS_MODULES as PACKAGED

    assert set(PACKAGED) <= LOADERS


def test_large_files_are_hashed_once_and_anew_when_size_or_time_changes(tmp_path):
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
def test_data_are_those_of_now_and_nothing_is_left(tmp_path, monkeypatch):
    """Of a file whose size and mtime are kept, and of functions that read what `datasets` does not see. What a build that was
    killed the day before left goes, too."""
    import datasets

    for name in ("tmp/evalspan-data-x/made", "cache"):
        (tmp_path / name).mkdir(parents=True)
    os.utime(tmp_path / "tmp/evalspan-data-x", (1.0, 1.0))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    file, cache, word = tmp_path / "rows.jsonl", str(tmp_path / "cache"), tmp_path / "word.txt"
    seen = []
    for value in ("one", "two"):
        was = file.stat() if file.exists() else None
        file.write_text(f'{{"q": "{value}"}}\n')
        if was is not None:
            os.utime(file, ns=(was.st_atime_ns, was.st_mtime_ns))
        word.write_text(value)
        with prepare_afresh():
            rows = datasets.load_dataset("json", data_files=str(file), split="train", cache_dir=cache)
            drawn = [rows.map(lambda row: {"r": random.random(), **row})["r"][0] for _ in range(2)]
            rows = rows.map(lambda row: {"w": word.read_text(), **row})
            made = datasets.Dataset.from_generator(lambda: ({"g": word.read_text()} for _ in range(1)))
        seen.append((rows[0]["q"], rows[0]["w"], made[0]["g"]))
        assert drawn[0] == drawn[1]  # as in a process of lm_eval: GPQA shuffles its answers in a `map`
        assert list((tmp_path / "tmp").iterdir()) == []
    assert seen == [("one",) * 3, ("two",) * 3]
