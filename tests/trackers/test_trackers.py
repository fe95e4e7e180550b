"""Laws of trackers: a tracker's own reader finds each score once, at the training step.

Each runs with the real package, and is skipped by name where that is not installed.
"""

from __future__ import annotations

import json
import struct
import sys
from pathlib import Path
from typing import Any

import pytest
from support.trainings import leave, point

from coordinator.errors import OperatorError
from coordinator.report.learning_curves import Point
from coordinator.trackers import TRACKERS, export_points, lm_eval_files, runs_of, values_of

POINTS = [point(10, 0.2), point(20, 0.6)]


def test_values_have_one_name_in_all_trackers():
    """Suite, task and metric; errors where known; makespan and GPU seconds beside them."""
    assert values_of(POINTS[0]) == {
        "mini/add/exact_match": 0.2,
        "mini/add/exact_match_stderr": 0.01,
        "mini/pages/word_perplexity": 9.8,
        "evalspan/makespan_seconds": 60.0,
        "evalspan/gpu_seconds": 1800.0,
    }


def test_a_point_of_other_requests_carries_a_mark_in_all_trackers():
    """`_differs` is 1 where a run's point is not comparable with the one before, whatever the order given."""

    def keyed(step: int, key: str) -> Point:
        made = point(step, 0.5)
        return made.model_copy(update={"scores": (made.scores[0].model_copy(update={"keys": (key, "s")}),)})

    (rows,) = runs_of([keyed(30, "b"), keyed(10, "a"), keyed(20, "b")]).values()
    assert [(r.step, r.values.get("mini/add/exact_match_differs")) for r in rows] == [
        (10, None),
        (20, 1.0),
        (30, None),
    ]


@pytest.mark.parametrize("name", TRACKERS)
def test_a_missing_package_is_an_operators_error(tmp_path, monkeypatch, name):
    """The error names the package to install; importing the adapter, or the command line, needs none."""
    packages = ("tensorboard", "wandb", "mlflow")
    for module in [*packages, *(m for m in sys.modules if m.startswith(packages))]:
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(OperatorError, match=rf"pip install 'evalspan\[{name}\]'"):
        export_points(TRACKERS[name], POINTS, tmp_path)


def test_each_training_and_suite_is_a_run():
    """Named after the checkpoints' folder, or the one above `checkpoints`; a given name takes its place."""
    other = point(10, 0.1, checkpoint="/runs/b/checkpoints/step-10")
    assert {n: len(rows) for n, rows in runs_of([*POINTS, other]).items()} == {"a-mini": 2, "b-mini": 1}
    assert {n: len(rows) for n, rows in runs_of(POINTS, "mine").items()} == {"mine-mini": 2}


def test_tensorboard_reads_the_scores_back(tmp_path):
    """Each value once, at its training step. Exporting one step leaves the other files untouched; a changed point replaces
    its own.
    """
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    def exported(*points: Point) -> tuple[list[tuple[int, float]], dict[str, int]]:
        (folder,) = export_points(TRACKERS["tensorboard"], points, tmp_path)
        read = EventAccumulator(str(folder))
        read.Reload()
        scalars = read.Scalars("mini/add/exact_match")
        assert scalars[0].wall_time == 1_700_000_070.0, "when its evaluation ended"
        files = {f.name: f.stat().st_mtime_ns for f in folder.iterdir()}
        return [(e.step, round(e.value, 6)) for e in scalars], files

    exported(POINTS[0])
    shown, before = exported(*POINTS)
    assert shown == [(10, 0.2), (20, 0.6)]
    assert exported(*POINTS) == exported(POINTS[1]) == (shown, before), "nothing new, nothing written"
    shown, files = exported(point(30, 0.7))
    assert shown == [(10, 0.2), (20, 0.6), (30, 0.7)]
    assert before.items() <= files.items()
    assert sorted(exported(point(20, 0.5))[0]) == [(10, 0.2), (20, 0.5), (30, 0.7)]
    exported(point(None, float("nan")))
    shown, _ = exported(point(None, float("nan")))
    assert [step for step, _ in shown].count(1_700_000_000) == 1


def test_wandb_offline_holds_the_scores(tmp_path, monkeypatch):
    """An offline run with a stable id, whose file holds each value with its training step."""
    pytest.importorskip("wandb")
    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_DIR"):
        monkeypatch.delenv(name, raising=False)
    from coordinator.trackers.wandb import STEP, run_id

    (folder,) = export_points(TRACKERS["wandb"], POINTS, tmp_path)
    (file,) = folder.glob("*.wandb")
    assert run_id("evalspan", "a-mini") in file.name
    rows = _wandb_history(file)
    assert [(r[STEP], r["mini/add/exact_match"]) for r in rows] == [(10, 0.2), (20, 0.6)]
    assert all(r["evalspan/gpu_seconds"] == 1800.0 for r in rows)


def _wandb_history(file: Path) -> list[dict[str, Any]]:
    """The history rows of an offline run: LevelDB's log format after a header of 7 bytes."""
    from wandb.proto import wandb_internal_pb2

    data, at, parts, rows = file.read_bytes(), 7, b"", []
    while at + 7 <= len(data):
        left = 32768 - at % 32768  # records do not span blocks
        if left < 7:
            at += left
            continue
        _crc, length, kind = struct.unpack_from("<IHB", data, at)
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # full, last
            record = wandb_internal_pb2.Record()
            record.ParseFromString(parts)
            parts = b""
            if record.WhichOneof("record_type") == "history":
                rows.append(
                    {i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in record.history.item}
                )
    return rows


def test_lm_evals_own_helpers_read_our_files(tmp_path):
    """Names, dates and hashes as lm_eval makes them; a second export writes the same files."""
    utils = pytest.importorskip("lm_eval.utils")
    paths = leave(tmp_path / "work", 10, 0.25)
    written = lm_eval_files.write(paths.root, tmp_path / "out")
    assert lm_eval_files.write(paths.root, tmp_path / "out") == written
    names = [str(p) for p in (tmp_path / "out" / "__runs__a__step-10").iterdir()]
    (samples,) = utils.get_sample_results_filenames(names)
    (result,) = utils.get_results_filenames(names)
    assert utils.get_file_task_name(Path(samples).name) == "add"
    assert f"results_{utils.get_file_datetime(samples)}.json" == Path(result).name
    assert utils.get_latest_filename([result]) == result
    read = json.loads((written[-1]).read_text())
    assert read["results"]["add"]["exact_match,none"] == 0.25
    assert read["task_hashes"] == {"add": utils.hash_string("abc")}
    assert read["model_name_sanitized"] == utils.sanitize_model_name("/runs/a/step-10")


def test_a_checkpoints_tokenizer_is_described_as_by_lm_eval(tmp_path):
    """Tokens with their ids, the longest context, the chat template; empty where the checkpoint is
    gone.
    """
    assert lm_eval_files.tokenizer_facts(tmp_path) == {}
    assert lm_eval_files.chat_template(tmp_path) is None
    settings = {
        "eos_token": {"content": "<end>"},
        "bos_token": "<begin>",
        "pad_token": None,
        "chat_template": "{{a}}",
    }
    tokens = [{"id": 7, "content": "<end>"}, {"id": 3, "content": "<begin>"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": tokens}))
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 512}))
    assert lm_eval_files.tokenizer_facts(tmp_path) == {
        "tokenizer_eos_token": ["<end>", "7"],
        "tokenizer_bos_token": ["<begin>", "3"],
        "eot_token_id": 7,
        "max_length": 512,
    }
    assert lm_eval_files.chat_template(tmp_path) == "{{a}}"
    (tmp_path / "chat_template.jinja").write_text("{{b}}")
    assert lm_eval_files.chat_template(tmp_path) == "{{b}}", "transformers prefers the file"
