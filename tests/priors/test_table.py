"""The table of observations: nothing lost, nothing foreign taken in."""

import json
import subprocess
import sys

import pytest
from support.written import observation

from priors import commands
from priors.table import RATIO_RUNS, append_observations, merge_observations, read_observations

GOOD = observation().model_dump_json()


@pytest.fixture
def path(tmp_path):
    """Of a table that does not exist yet, in a folder that does not."""
    return tmp_path / "deep" / "observations.jsonl"


def test_what_was_appended_is_read(path):
    """In order; no file is no observation; what a table holds is merged once; a line of before modes is an exact run."""
    assert read_observations(path) == []
    append_observations(path, [observation(0), observation(1, load_seconds=None)])
    append_observations(path, [])
    assert merge_observations(path, [observation(0), observation(2), observation(2)]) == 1
    assert merge_observations(path, [observation(0), observation(2)]) == 0
    assert read_observations(path) == [observation(0), observation(1, load_seconds=None), observation(2)]
    path.write_text(json.dumps(observation().model_dump(mode="json", exclude={"mode"})))
    append_observations(path, [observation(1, mode="fast")])
    assert [one.mode for one in read_observations(path)] == ["exact", "fast"]


def test_concurrent_writers_lose_nothing(path):
    """Four processes append 50 times each: every line of every one is there, whole."""
    code = (
        "import sys; from pathlib import Path;"
        "from priors.table import Observation, append_observations;"
        "base = Observation.model_validate_json(sys.argv[2]);"
        "[append_observations(Path(sys.argv[1]), [base.model_copy(update={'task': f'{sys.argv[3]}-{n}'})]) for n in range(50)]"
    )
    writers = [subprocess.Popen([sys.executable, "-c", code, path, GOOD, str(writer)]) for writer in range(4)]
    assert [writer.wait(120) for writer in writers] == [0] * 4
    tasks = [one.task for one in read_observations(path)]
    assert sorted(tasks) == sorted(f"{writer}-{number}" for writer in range(4) for number in range(50))


def test_export_and_import_are_inverse(tmp_path):
    """`import` accepts all of `export`, as array or lines; a second time adds no line."""
    here, there, file = (tmp_path / name for name in ("here", "there", "file"))
    append_observations(here, [observation(0), observation(1)])
    exported = commands.export_observations(here)
    file.write_text(json.dumps(exported, indent=1))
    assert commands.import_observations(there, file) == {"schema_version": 1, "read": 2, "added": 2}
    assert read_observations(there) == read_observations(here)
    file.write_text("\n".join(json.dumps(row) for row in exported))
    assert commands.import_observations(there, file)["added"] == 0


@pytest.mark.parametrize(
    ("text", "place"),
    [
        *(
            (f"{GOOD}\n{bad}\n{GOOD}\n", r"file: line 2")
            for bad in ("{}", "not json", '{"task": "x"', "", "[1]")
        ),
        ("dataset,docs\nmmlu,3\n", "line 1"),
        ("{}", "line 1"),
        ("[{}]", "line 1"),
        ("[\n{,]", "line 2"),
        (None, "file: No such file"),
    ],
)
def test_a_foreign_file_is_refused_and_changes_nothing(path, tmp_path, text, place):
    """ValueError names file and line, of a file that is not there the file; the table stays as it was. A table with such a
    line is refused as well, and appended to: nothing that a person may mend is dropped."""
    append_observations(path, [observation(0)])
    file = tmp_path / "file"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ValueError, match=place):
        commands.import_observations(path, file)
    assert read_observations(path) == [observation(0)]
    if text is not None and not text.startswith("["):
        with pytest.raises(ValueError, match=place):
            read_observations(file)
        append_observations(file, [observation(0)])
        assert file.read_text() == f"{text.rstrip()}\n{GOOD}\n"


def test_show_says_what_was_learnt(path):
    """A task twice as slow as others has twice their factor; rates are per hardware and engine."""
    assert commands.show_priors(path)["tasks"] == []
    append_observations(path, [observation(number) for number in range(6)])
    append_observations(
        path, [observation(9, inference_seconds=25.0), observation(9, inference_seconds=25.0, at=2000.0)]
    )
    shown = commands.show_priors(path)
    assert shown["observations"] == 8
    rows = {row["task"]: row for row in shown["tasks"]}
    assert rows["task9"]["observations"] == 2
    assert rows["task9"]["factor"] == pytest.approx(2 * rows["task0"]["factor"])
    (speed,) = shown["speeds"]
    assert (speed["hardware"], speed["engine"], speed["mode"]) == ("a100", "hf", "exact")
    assert speed["prefill_tokens_per_second"] == pytest.approx(8000, rel=0.3)
    assert json.loads(json.dumps(shown)) == shown


def test_a_table_keeps_the_newest_runs_of_each_task_and_does_not_grow(path):
    """Of each task and place: a rare one loses nothing to a frequent one, a measured run nothing to answers used again."""
    append_observations(
        path, [observation(0, task="rare", hardware=hardware) for hardware in ("a100", "h100")]
    )
    append_observations(path, [observation(number, task="frequent") for number in range(3 * RATIO_RUNS)])
    append_observations(
        path,
        [observation(99, task="frequent", inference_seconds=0.0, at=5e9 + n) for n in range(3 * RATIO_RUNS)],
    )
    found = read_observations(path)
    assert [one.hardware for one in found if one.task == "rare"] == ["a100", "h100"]
    measured = [one.at for one in found if one.task == "frequent" and one.inference_seconds]
    assert measured == [observation(number).at for number in range(2 * RATIO_RUNS, 3 * RATIO_RUNS)]
    assert len(found) == 2 + 2 * RATIO_RUNS
    assert [file.name for file in sorted(path.parent.iterdir())] == [f".{path.name}.lock", path.name]
