"""The table of observations: nothing lost, nothing foreign taken in."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from support.records import observation

from priors import commands, table
from priors.table import append, merge, read


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


@pytest.mark.parametrize("cut", [1, 20, -2])
def test_a_torn_last_line_is_tolerated_and_mended(tmp_path, cut):
    """Readers skip the half line of a killed writer; the next append removes it."""
    path = tmp_path / "observations.jsonl"
    append(path, [observation(0)])
    torn = observation(1).model_dump_json().encode()[:cut]
    with path.open("ab") as file:
        file.write(torn)
    assert read(path) == [observation(0)]
    append(path, [observation(2)])
    assert read(path) == [observation(0), observation(2)]


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


def test_show_and_fit_say_what_was_learnt(tmp_path):
    """A task twice as slow as others has a factor above 1; rates are per hardware and engine."""
    path = tmp_path / "observations.jsonl"
    append(path, [observation(number) for number in range(6)])
    append(path, [observation(9, inference_seconds=25.0), observation(9, inference_seconds=25.0, at=2000.0)])
    shown = commands.show(path)
    assert shown["observations"] == 8
    slow = next(row for row in shown["tasks"] if row["task"] == "task9")
    assert slow["observations"] == 2
    assert slow["factor"] > 1.4
    (speed,) = commands.fit(path)["speeds"]
    assert (speed["hardware"], speed["engine"], speed["observations"]) == ("a100", "hf", 8)
    assert speed["prefill_tokens_per_second"] == pytest.approx(8000, rel=0.3)
    assert json.loads(json.dumps(shown)) == shown
    assert commands.show(tmp_path / "none")["tasks"] == []


def test_a_table_of_before_modes_is_read_as_exact_and_exact_runs_are_written_as_before(tmp_path):
    """So that an older version reads a table without fast runs."""
    path = tmp_path / "observations.jsonl"
    line = observation(0).model_dump_json()
    assert "mode" not in json.loads(line)
    path.write_text(line + "\n")
    append(path, [observation(1, mode="fast")])
    assert [one.mode for one in read(path)] == ["exact", "fast"]
    assert [one["mode"] for one in commands.show(path)["tasks"]] == ["exact", "fast"]
    assert [one["mode"] for one in commands.fit(path)["speeds"]] == ["exact", "fast"]


def test_a_table_keeps_the_newest_runs_of_each_task_and_does_not_grow(tmp_path, monkeypatch):
    """Of each task and place: a rare one loses nothing to a frequent one."""
    monkeypatch.setattr(table, "SPAN_BYTES", 4096)
    path = tmp_path / "observations.jsonl"
    append(path, [observation(0, task="rare", hardware=hardware) for hardware in ("a100", "h100")])
    sizes = []
    for number in range(12 * table.KEPT):
        append(path, [observation(number, task="frequent")])
        sizes.append(path.stat().st_size)
    found = read(path)
    assert [one.hardware for one in found if one.task == "rare"] == ["a100", "h100"]
    newest = [one.at for one in found if one.task == "frequent"][-table.KEPT :]
    assert newest == [1000.0 + number for number in range(11 * table.KEPT, 12 * table.KEPT)]
    half = len(sizes) // 2
    assert max(sizes[half:]) <= max(sizes[:half])
    assert list(tmp_path.iterdir()) == [path]


def test_what_is_appended_while_a_table_is_shortened_is_not_lost(tmp_path):
    """Four processes append and shorten it at once: the last run of each is there, and every line is whole."""
    path = tmp_path / "observations.jsonl"
    code = (
        "import sys; from pathlib import Path; from priors import table; table.SPAN_BYTES = 2048;"
        "base = table.Observation.model_validate_json(sys.argv[2]);"
        "[table.append(Path(sys.argv[1]), [base.model_copy(update={'task': sys.argv[3], 'at': float(n)})])"
        " for n in range(100)]"
    )
    words = [sys.executable, "-c", code, str(path), observation().model_dump_json()]
    writers = [subprocess.Popen([*words, str(writer)]) for writer in range(4)]
    assert [writer.wait(120) for writer in writers] == [0] * 4
    for writer in range(4):
        mine = [one.at for one in read(path) if one.task == str(writer)]
        assert mine[-table.KEPT :] == [float(n) for n in range(100 - table.KEPT, 100)]
