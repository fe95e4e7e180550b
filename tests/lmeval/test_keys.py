"""Three keys: which work an edit of a suite's inputs calls for, and that no other is done."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.exactness.edits import EDITS, ORDER, Edit, Keys, decided, keys_now, write_suite

from evaljobs.errors import OperatorError
from evaljobs.lmeval import source_files

pytestmark = pytest.mark.model


@pytest.mark.parametrize("edit", EDITS, ids=lambda edit: edit.name)
def test_an_edit_calls_for_its_own_work_and_no_more(edit: Edit, model_dir: Path, tmp_path: Path) -> None:
    """No work for equal bytes; a build, a score or a GPU for what has changed."""
    asked = write_suite(tmp_path)
    before = keys_now(tmp_path, asked, model_dir)
    assert before.leaves.keys() == {"choose", "count"}
    assert decided(before, keys_now(tmp_path, edit.apply(tmp_path, asked), model_dir, before)) == edit.work


def test_at_least_forty_edits_of_each_kind_are_held() -> None:
    assert len({edit.name for edit in EDITS}) >= 40
    assert {edit.work for edit in EDITS} == set(ORDER)


@settings(max_examples=15)
@given(
    chosen=st.lists(
        st.sampled_from(EDITS),
        min_size=2,
        max_size=4,
        unique_by=lambda e: (e.file, e.old) if e.old else e.name,
    )
)
def test_edits_together_call_for_the_most_of_their_works(chosen: list[Edit], model_dir: Path) -> None:
    """And taking them back calls for nothing: the first evaluation is found again."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        asked = write_suite(folder)
        before = keys_now(folder, asked, model_dir)
        edited = asked
        for edit in sorted(chosen, key=lambda e: e.more is None):  # edits of whole files come first
            try:
                edited = edit.apply(folder, edited)
            except AssertionError:
                return  # two of them edit the same words
        after = keys_now(folder, edited, model_dir, before)
        most = max((edit.work for edit in chosen), key=ORDER.index)
        assert decided(before, after) == most
        assert keys_now(folder, write_suite(folder), model_dir, before) == Keys(
            evaluation=before.evaluation, folder=before.folder, engine=before.engine, leaves={}
        )


def test_files_that_change_after_the_submission_are_refused(tmp_path: Path) -> None:
    """By the build and by the score: neither prompts nor gold answers are another evaluation's."""
    asked = write_suite(tmp_path)
    source, _ = source_files.entry_files(asked.suite.include_path, "both", source_files.Digests())
    source_files.unchanged(asked.suite.include_path, "both", source, None)
    (tmp_path / "tasks" / "data" / "few.jsonl").write_text("{}\n")
    with pytest.raises(OperatorError, match="changed after its evaluation was submitted"):
        source_files.unchanged(asked.suite.include_path, "both", source, None)


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
