"""`evalspan ls` and `validate`: nothing is cut at any width, and nothing is built or submitted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.toys import TASKS, config_text, suite_text


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("ls")
    (made / "evalspan.toml").write_text(config_text())
    (made / "toys.toml").write_text(suite_text("toys", {"toy_choice": {"limit": 5}, "toy_sums": {}}))
    (made / "typo.toml").write_text(suite_text("typo", {"toy_chioce": {}}))
    return made


def typed(folder: Path, *arguments: str, width: int = 120) -> subprocess.CompletedProcess[str]:
    program = str(Path(sys.executable).parent / "evalspan")
    env = {**os.environ, "NO_COLOR": "1", "COLUMNS": str(width), "HF_HOME": str(folder / "hf")}
    return subprocess.run(
        [program, *arguments, "--work-dir", str(folder / "work")],
        cwd=folder, env=env, capture_output=True, text=True, check=False, timeout=400,
    )  # fmt: skip


def test_suites_tasks_and_groups_are_listed_with_what_they_hold(folder: Path) -> None:
    """Each count is stated, at each width; the second call reads the list of the first."""
    for width in (80, 120, 200):
        done = typed(folder, "ls", "-s", "toys.toml", width=width)
        assert done.returncode == 0, done.stderr
        assert max(map(len, done.stdout.splitlines())) <= width
        text = " ".join(done.stdout.replace(",", "").replace(";", "").split())
        assert "quickstart_hellaswag 0-shot ≤ 32 documents multiple choice acc acc_norm local data" in text
        assert "to fetch: Rowan/hellaswag" in text
        assert "toy_choice 0-shot" in text
        assert "6 of 6 suites" in done.stderr
    (cached,) = (folder / "work" / "cache").glob("*-catalogue.json")
    before = cached.stat()
    done = typed(folder, "ls", "tasks", "arc_*")
    assert cached.stat() == before
    lines = done.stdout.splitlines()
    assert any(line.split() == ["arc_easy", "multiple", "choice", "acc,", "acc_norm;", "allenai/ai2_arc", "ARC-Easy"] for line in lines)  # fmt: skip
    assert f"{len(lines)} of 13,1" in done.stderr
    groups = json.loads(typed(folder, "ls", "groups", "glue", "--json").stdout)["groups"]
    assert next(g for g in groups if g["name"] == "glue")["members"][:2] == ["cola", "mnli"]


def test_a_name_that_matches_nothing_gives_the_nearest(folder: Path) -> None:
    done = typed(folder, "ls", "helaswag")
    assert done.returncode == 2
    assert "(nearest: hellaswag, " in done.stderr
    assert typed(folder, "ls", "qqqqqq").stderr.rstrip().endswith("'qqqqqq'")  # none is near
    done = typed(folder, "ls", "suite", "core")
    assert done.returncode == 2
    assert "suites, tasks, groups" in done.stderr


@pytest.mark.parametrize(
    ("suite", "says"),
    [
        ("toys.toml", ""),
        ("typo.toml", "'toy_chioce' (nearest: toy_choice"),
        ("core", "run `evalspan prepare --suite core --work-dir "),
        ("mt_bench", "has tasks that a judge scores"),
        ("none.toml", "no suite file none.toml"),
    ],
)
def test_validate_says_what_eval_would_say(folder: Path, suite: str, says: str) -> None:
    """Exit code 0 with what it holds, or 2 with one line; nothing is built, no service is started."""
    done = typed(folder, "validate", "--suite", suite)
    assert done.returncode == (2 if says else 0), done.stderr
    assert says in done.stderr
    if not says:
        assert "toy_choice" in done.stdout
        assert "toys is valid; not checked: whether the cluster takes its jobs, the checkpoint" in done.stdout
    assert {p.name for p in (folder / "work").iterdir()} <= {"cache"}


def test_tasks_without_a_suite_file_are_validated_by_the_options_of_eval(folder: Path) -> None:
    """In lm_eval's spelling, too; where none is known, the line says how a task of one's own is named."""
    words = ("validate", "--tasks", "toy_choice", "--include_path", str(TASKS), "--limit", "4")
    done = typed(folder, *words)
    assert done.returncode == 0, done.stderr
    assert "toy_choice-limit4 is valid" in done.stdout
    assert done.stderr.startswith("asking lm-eval for the suite's tasks\n"), "a sign of life in a pipe"
    assert "toy_choice-limit4-fast is valid" in typed(folder, *words, "--mode", "fast").stdout
    done = typed(folder, "validate", "--tasks", "toy_choice")
    assert done.returncode == 2
    assert done.stderr.rstrip().endswith("; a task of your own: --include-path FOLDER, or name its YAML file")
    assert "say --suite NAME or --tasks NAME,NAME" in typed(folder, "validate").stderr


def test_every_task_that_cannot_run_is_named(folder: Path) -> None:
    """One with its reason, the others by name."""
    (folder / "bad").mkdir()
    for name in "abc":
        text = f"task: {name}\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {name}.jsonl}}}}\n"
        (folder / "bad" / f"{name}.yaml").write_text(text)
    (folder / "bad.toml").write_text(suite_text("bad", {"c": {}, "a": {}, "b": {}}, "bad"))
    done = typed(folder, "validate", "--suite", "bad.toml")
    assert done.returncode == 2
    assert f"no such file or folder: {folder / 'bad' / 'a.jsonl'}" in done.stderr
    assert "(tasks that cannot run either: b, c)" in done.stderr


def test_prepare_without_internet_names_the_data_set(
    folder: Path, toy_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one line without a class of the program's."""
    (folder / "hub").mkdir()
    (folder / "hub" / "a.yaml").write_text("task: a\ndataset_path: lab/rows\ntest_split: test\n")
    (folder / "hub.toml").write_text(suite_text("hub", {"a": {}}, "hub"))
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "0")
    done = typed(folder, "prepare", "--suite", "hub.toml", "--tokenizer", str(toy_model))
    assert done.returncode == 2
    assert done.stderr.startswith("fetching data and building requests of a (1 of 1)\n")
    assert "(http://127.0.0.1:9 does not answer: Connection refused)" in " ".join(done.stderr.split())
    assert "evalspan: a could not be built: the data set of task a could not be fetched (" in done.stderr
    assert done.stderr.rstrip().endswith("run the same command on a machine with internet")


def test_validate_takes_a_checkpoint_that_eval_would_convert(folder: Path, tmp_path: Path) -> None:
    """In training's own format, by [checkpoint] convert."""
    (tmp_path / "model.pt").write_bytes(b"weights")
    text = config_text() + '\n[checkpoint]\nconvert = "python c.py {src} {dst}"\n'
    (tmp_path / "raw.toml").write_text(text)
    raw = ("--tokenizer", str(tmp_path), "--config", str(tmp_path / "raw.toml"))
    done = typed(folder, "validate", "--suite", "toys.toml", *raw)
    assert done.returncode == 0, done.stderr
    assert "the checkpoint" not in done.stdout


def test_validate_counts_request_sets_of_a_checkpoint(folder: Path, toy_model: Path) -> None:
    done = typed(folder, "validate", "--suite", "toys.toml", "--tokenizer", str(toy_model))
    assert done.returncode == 0, done.stderr
    assert "request sets: 0 of 2 tasks are built" in done.stdout
    done = typed(folder, "validate", "--suite", "toys.toml", "--tokenizer", str(TASKS))
    assert done.returncode == 2
    assert "no config.json" in done.stderr
