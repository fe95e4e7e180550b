"""Source keys: which files a suite's entry names. The table of all inputs: support/inputs/edits.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from evaljobs.errors import OperatorError
from evaljobs.lmeval import source_files


def test_files_that_change_after_the_submission_are_refused(tmp_path: Path) -> None:
    """By the build and by the score: neither prompts nor gold answers are another evaluation's."""
    (tmp_path / "one.yaml").write_text(
        "task: one\ndataset_path: json\ndataset_kwargs: {data_files: rows.jsonl}\n"
    )
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
