"""The table of observations: nothing lost, nothing foreign taken in."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from support.written import observation

from priors import commands
from priors.table import RUNS, append, merge, read


def test_what_was_appended_is_read(tmp_path):
    """In order, from a file whose folder did not exist; no file is no observation."""
    path = tmp_path / "deep" / "observations.jsonl"
    assert read(path) == []
    append(path, [observation(0), observation(1, load_seconds=None)])
    append(path, [])
    append(path, [observation(2)])
    assert read(path) == [observation(0), observation(1, load_seconds=None), observation(2)]


def test_concurrent_writers_lose_nothing(tmp_path):
    """Eight processes append 25 times each: every line of every one is there, whole."""
    path = tmp_path / "observations.jsonl"
    code = (
        "import sys; from pathlib import Path;"
        "from priors.table import Observation, append;"
        "base = Observation.model_validate_json(sys.argv[2]);"
        "[append(Path(sys.argv[1]), [base.model_copy(update={'task': f'{sys.argv[3]}-{n}'})]) for n in range(25)]"
    )
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(path), observation().model_dump_json(), str(writer)]
        )
        for writer in range(8)
    ]
    assert [writer.wait(120) for writer in writers] == [0] * 8
    tasks = [one.task for one in read(path)]
    assert sorted(tasks) == sorted(f"{writer}-{number}" for writer in range(8) for number in range(25))


def test_a_whole_last_line_without_its_end_is_kept(tmp_path):
    """Only the newline was lost: the observation counts, before and after the next append."""
    path = tmp_path / "observations.jsonl"
    path.write_text(observation(0).model_dump_json())
    assert read(path) == [observation(0)]
    append(path, [observation(1)])
    assert read(path) == [observation(0), observation(1)]


@pytest.mark.parametrize("bad", ["{}", "not json", '{"task": "x"', "", "[1]"])
def test_a_corrupt_line_is_refused_by_number(tmp_path, bad):
    """Any line but a torn last one: ValueError with file and line."""
    path = tmp_path / "observations.jsonl"
    good = observation().model_dump_json()
    path.write_text(f"{good}\n{bad}\n{good}\n")
    with pytest.raises(ValueError, match=r"observations\.jsonl: line 2"):
        read(path)


def test_merging_twice_adds_once(tmp_path):
    """What the table holds is not added again; twins in one merge count once."""
    path = tmp_path / "observations.jsonl"
    append(path, [observation(0)])
    assert merge(path, [observation(0), observation(1), observation(1)]) == 1
    assert merge(path, [observation(0), observation(1)]) == 0
    assert read(path) == [observation(0), observation(1)]


def test_export_and_import_are_inverse(tmp_path):
    """`import` accepts all of `export`, as array or lines; a second time adds no line."""
    here, there, file = (tmp_path / name for name in ("here", "there", "file"))
    append(here, [observation(0), observation(1)])
    exported = commands.export(here)
    file.write_text(json.dumps(exported, indent=1))
    assert commands.import_file(there, file) == {"schema_version": 1, "read": 2, "added": 2}
    assert read(there) == read(here)
    file.write_text("\n".join(json.dumps(row) for row in exported))
    assert commands.import_file(there, file)["added"] == 0


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("dataset,docs\nmmlu,3\n", "line 1"),
        ("{}", "line 1"),
        ("[{}]", "line 1"),
        ("[\n{,]", "line 2"),
    ],
)
def test_a_foreign_file_is_refused_and_changes_nothing(tmp_path, text, place):
    """ValueError names the line; the table stays as it was."""
    path, file = tmp_path / "table", tmp_path / "file"
    append(path, [observation(0)])
    file.write_text(text)
    with pytest.raises(ValueError, match=place):
        commands.import_file(path, file)
    assert read(path) == [observation(0)]


def test_a_file_that_is_not_there_is_refused(tmp_path):
    """ValueError names the file."""
    with pytest.raises(ValueError, match="missing"):
        commands.import_file(tmp_path / "table", tmp_path / "missing")


def test_show_says_what_was_learnt(tmp_path):
    """A task twice as slow as others has twice their factor; rates are per hardware and engine."""
    path = tmp_path / "observations.jsonl"
    append(path, [observation(number) for number in range(6)])
    append(path, [observation(9, inference_seconds=25.0), observation(9, inference_seconds=25.0, at=2000.0)])
    shown = commands.show(path)
    assert shown["observations"] == 8
    rows = {row["task"]: row for row in shown["tasks"]}
    assert rows["task9"]["observations"] == 2
    assert rows["task9"]["factor"] == pytest.approx(
        25 / observation(0).inference_seconds * rows["task0"]["factor"]
    )
    (speed,) = shown["speeds"]
    assert (speed["hardware"], speed["engine"], speed["mode"]) == ("a100", "hf", "exact")
    assert speed["prefill_tokens_per_second"] == pytest.approx(8000, rel=0.3)
    assert json.loads(json.dumps(shown)) == shown
    assert commands.show(tmp_path / "none")["tasks"] == []


def test_a_table_of_before_modes_is_read_as_exact(tmp_path):
    """A line without a mode is an exact run."""
    path = tmp_path / "observations.jsonl"
    line = observation(0).model_dump(mode="json", exclude={"mode"})
    path.write_text(json.dumps(line) + "\n")
    append(path, [observation(1, mode="fast")])
    assert [one.mode for one in read(path)] == ["exact", "fast"]


def test_a_table_keeps_the_newest_runs_of_each_task_and_does_not_grow(tmp_path):
    """Of each task and place: a rare one loses nothing to a frequent one, a measured run nothing to answers used again."""
    path = tmp_path / "observations.jsonl"
    append(path, [observation(0, task="rare", hardware=hardware) for hardware in ("a100", "h100")])
    append(path, [observation(number, task="frequent") for number in range(3 * RUNS)])
    append(
        path, [observation(99, task="frequent", inference_seconds=0.0, at=5e9 + n) for n in range(3 * RUNS)]
    )
    found = read(path)
    assert [one.hardware for one in found if one.task == "rare"] == ["a100", "h100"]
    measured = [one.at for one in found if one.task == "frequent" and one.inference_seconds]
    assert measured == [observation(number).at for number in range(2 * RUNS, 3 * RUNS)]
    assert len(found) == 2 + 2 * RUNS
    assert [file.name for file in sorted(tmp_path.iterdir())] == [f".{path.name}.lock", path.name]


def test_a_corrupt_table_is_appended_to(tmp_path):
    """Nothing that a person may mend is dropped."""
    path = tmp_path / "observations.jsonl"
    path.write_text("not json\n")
    append(path, [observation(0)])
    assert path.read_text().splitlines() == ["not json", observation(0).model_dump_json()]
