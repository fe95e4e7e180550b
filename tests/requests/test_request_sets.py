"""Request sets: built once, kept, and refused where they no longer fit."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.exactness.pipeline import TASKS, Case, our_run

from evaljobs.contract.outcomes import Built, Failed
from evaljobs.contract.paths import batch_index_file, request_set_manifest
from evaljobs.contract.specs import (
    BatchIndex,
    BuildSpec,
    ModelOptions,
    RequestSetManifest,
    SuiteSpec,
    TaskEntry,
)
from evaljobs.contract.storage import read_record, write_record
from evaljobs.errors import OperatorError
from evaljobs.requests import build
from evaljobs.trial.shard_runner import RequestSet


def spec(model_dir: Path, folder: Path, task: str = "toy_choice", **changes: Any) -> BuildSpec:
    suite = {"include_path": (str(TASKS),)} | changes.pop("suite", {})
    options = {"batch_size": 4, "evaluation_dir": str(folder / "evaluation")} | changes
    return BuildSpec(
        name="build",
        suite=SuiteSpec(name="s", tasks=(TaskEntry(name=task),), **suite),
        entry=0,
        model_dir=str(model_dir),
        model=ModelOptions(),
        out_dir=str(folder / "sets"),
        **options,
    )


def snapshot(folder: Path) -> dict[str, int]:
    return {str(p): p.stat().st_mtime_ns for p in folder.rglob("*") if p.is_file()}


@pytest.mark.model
@pytest.mark.parametrize("task", ["toy_choice", "toy_letters", "toy_mutual", "toy_sums", "toy_pages"])
def test_batches_hold_every_piece_once_in_length_order(task: str, model_dir: Path, tmp_path: Path) -> None:
    """At any size, batches partition requests and windows, with their costs and documents."""
    built = build.build(spec(model_dir, tmp_path, task))
    folder = Path(built.sets[task])
    head, pieces = build.read_requests(folder)
    wanted = sorted((p.index, p.window) for p in pieces)
    for size in (1, 3, 4, 1000):
        build.add_batches(folder, size)
        there = RequestSet(folder, size)
        batches = list(there.batches(0, len(there.index.requests)))
        assert sorted((p.index, p.window) for b in batches for p in b.pieces) == wanted
        assert [len(b.pieces) for b in batches] == list(there.index.requests)
        assert [tuple(sorted({p.document for p in b.pieces})) for b in batches] == list(there.index.documents)
        assert len(there.index.offsets) == len(batches) + 1
        if head.digests.keys() != {"loglikelihood_rolling"}:
            longest = [max(p.length for p in b.pieces) for b in batches]
            assert all(a >= b for a, b in itertools.pairwise(longest))


@pytest.mark.model
def test_a_manifest_counts_documents_requests_and_tokens(model_dir: Path, tmp_path: Path) -> None:
    """Clones for repeats count as requests; the cap on generated tokens is that of the settings."""
    built = build.build(spec(model_dir, tmp_path, "toy_programs"))
    manifest = read_record(request_set_manifest(built.sets["toy_programs"]), RequestSetManifest)
    assert (manifest.documents, manifest.requests, manifest.repeats) == (16, 32, 2)
    assert manifest.generation_cap_tokens == 32 * 8
    assert manifest.executes
    assert not manifest.sampled
    sampled = build.build(spec(model_dir, tmp_path / "2", "toy_sampled")).sets["toy_sampled"]
    other = read_record(request_set_manifest(sampled), RequestSetManifest)
    assert other.sampled
    assert not other.executes


@pytest.mark.model
def test_what_is_built_is_kept(model_dir: Path, tmp_path: Path) -> None:
    """A second build touches no file and loads no task; a new size adds its batches."""
    auto = build.build(spec(model_dir, tmp_path, batch_size="auto"))
    place = Path(auto.sets["toy_choice"])
    assert not list(place.glob("batches-*"))
    before = snapshot(tmp_path / "sets")
    four = build.build(spec(model_dir, tmp_path, batch_size=4))
    after = snapshot(tmp_path / "sets")
    assert before.items() <= after.items()
    assert {Path(p).name for p in after.keys() - before.keys()} == {"batches-4.jsonl", "batches-4.index.json"}
    gone = spec(model_dir, tmp_path, batch_size=4).model_copy(update={"model_dir": "/nowhere"})
    again = build.build(gone)
    assert again.sets == four.sets == auto.sets
    assert snapshot(tmp_path / "sets") == after


@pytest.mark.model
def test_a_set_is_built_again_where_a_file_that_its_build_read_has_changed(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that no setting names, in the same folder of sets: another checkpoint asks for the same one."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))  # files of temporary folders are no inputs
    tasks, words = tmp_path / "tasks", tmp_path / "outside" / "words.txt"
    for place in (tasks, words.parent, tmp_path / "tmp"):
        place.mkdir()
    words.write_text("the river")
    (tasks / "load.py").write_text(
        "import datasets\n\n\ndef rows(**_):\n"
        f"    return {{'test': datasets.Dataset.from_list([{{'q': open({str(words)!r}).read()}}])}}\n"
    )
    (tasks / "own.yaml").write_text(
        "task: own\ncustom_dataset: !function load.rows\ntest_split: test\noutput_type: multiple_choice\n"
        "doc_to_text: '{{q}}'\ndoc_to_target: 0\ndoc_to_choice: ['no', 'yes']\nmetric_list: [{metric: acc}]\n"
    )
    own = spec(model_dir, tmp_path / "work" / "sets", "own", suite={"include_path": (str(tasks),)})
    first = build.build(own).sets
    assert build.build(own).sets == first
    words.write_text("the forest")
    assert build.build(own).sets != first


@pytest.mark.model
def test_drawn_answers_are_of_one_seed_and_greedy_ones_of_any(model_dir: Path, tmp_path: Path) -> None:
    """Answers are used again under equal keys."""

    def key(task: str, seed: int) -> str:
        built = build.build(spec(model_dir, tmp_path / f"{task}-{seed}", task, suite={"seed": seed}))
        return read_record(request_set_manifest(built.sets[task]), RequestSetManifest).key

    assert key("toy_sampled", 1) != key("toy_sampled", 2)
    assert key("toy_sums", 1) == key("toy_sums", 2)


@pytest.mark.model
def test_the_same_set_comes_out_of_another_checkpoint_with_the_same_tokenizer(
    model_dir: Path, tmp_path: Path
) -> None:
    """Keys do not depend on where the checkpoint lies; they do on settings that change a prompt."""
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in model_dir.iterdir():
        if file.suffix != ".safetensors":
            (copy / file.name).write_bytes(file.read_bytes())
    keys = []
    for number, (model, suite) in enumerate(
        [(model_dir, {}), (copy, {}), (model_dir, {"system_instruction": "Be brief."})]
    ):
        built = build.build(spec(model, tmp_path / str(number), suite=suite))
        keys.append(read_record(request_set_manifest(built.sets["toy_choice"]), RequestSetManifest).key)
    assert keys[0] == keys[1]
    assert keys[0] != keys[2]


@pytest.mark.model
def test_a_checkpoint_that_was_deleted_is_called_that(tmp_path: Path) -> None:
    """The error says so, not that a hub lacks a model of this name."""
    with pytest.raises(OperatorError, match="step-1 is gone: the checkpoint was deleted while it was needed"):
        build.build(spec(tmp_path / "step-1", tmp_path))


@pytest.mark.model
def test_an_unknown_task_names_the_nearest(model_dir: Path, tmp_path: Path) -> None:
    """The error lists the nearest names."""
    with pytest.raises(OperatorError, match="nearest: toy_choice"):
        build.build(spec(model_dir, tmp_path, "toy_choise"))


@pytest.mark.model
def test_a_data_set_that_is_not_here_says_to_prepare(model_dir: Path, tmp_path: Path) -> None:
    """Offline, a hub data set outside the cache is an operator's error, in the job's outcome."""
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "hub.yaml").write_text(
        "task: toy_hub\ndataset_path: example/has_no_such_data_set\ntest_split: test\n"
        "output_type: multiple_choice\ndoc_to_text: '{{q}}'\ndoc_to_target: a\ndoc_to_choice: ['no', 'yes']\n"
    )
    given = spec(model_dir, tmp_path, "toy_hub", suite={"include_path": (str(tmp_path / "tasks"),)})
    write_record(tmp_path / "spec.json", given)
    done = subprocess.run(
        [sys.executable, "-m", "evaljobs", "build", str(tmp_path / "spec.json")],
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1, done.stderr
    failed = read_record(tmp_path / "evaluation" / "outcomes" / "build.failed.json", Failed)
    assert failed.blame == "operator"
    assert "evalspan prepare" in failed.error


@pytest.mark.model
def test_the_build_command_leaves_an_outcome_and_no_noise(model_dir: Path, tmp_path: Path) -> None:
    """`python -m evaljobs build` of several specs: an outcome each, no progress bars."""
    for number, task in enumerate(("toy_choice", "toy_sums")):
        given = spec(model_dir, tmp_path / task, task).model_copy(
            update={"name": f"b{number}", "evaluation_dir": str(tmp_path / "evaluation")}
        )
        write_record(tmp_path / f"{number}.json", given)
    done = subprocess.run(
        [sys.executable, "-m", "evaljobs", "build", str(tmp_path / "0.json"), str(tmp_path / "1.json")],
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "it/s" not in done.stdout + done.stderr
    for number in range(2):
        built = read_record(tmp_path / "evaluation" / "outcomes" / f"b{number}.built.json", Built)
        [place] = built.sets.values()
        assert read_record(batch_index_file(place, 4), BatchIndex).batch_size == 4


@pytest.mark.model
def test_scores_do_not_depend_on_who_built_the_set(model_dir: Path, tmp_path: Path) -> None:
    """A set built earlier, in another process's name, gives the same scores."""
    case = Case(task="toy_choice", entry={"limit": 8})
    first = our_run(model_dir, case, 4, 2, tmp_path / "1", sets=tmp_path / "sets")
    second = our_run(model_dir, case, 4, 3, tmp_path / "2", sets=tmp_path / "sets")
    assert first == second
