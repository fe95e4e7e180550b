"""Law of data: a run gets the data of now, and leaves nothing of what it made of them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from evaljobs.lmeval.present_data import made_anew


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
