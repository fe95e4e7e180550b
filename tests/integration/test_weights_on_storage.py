"""Weights that change while an evaluation runs: no score is of other weights than were announced."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from support import sites

pytestmark = pytest.mark.model

TASK = """task: mine
custom_dataset: !function load.rows
test_split: test
output_type: multiple_choice
doc_to_text: "{{q}}"
doc_to_target: a
doc_to_choice: ["no", "yes"]
metric_list:
  - {metric: acc, aggregation: mean, higher_is_better: true}
"""
LOAD = """import pathlib
import datasets


def rows(**_):  # a training writes while requests are built
    pathlib.Path("{weights}").write_bytes(pathlib.Path("{new}").read_bytes())
    return {{"test": datasets.Dataset.from_list([{{"q": f"river {{i}} breaks", "a": i % 2}} for i in range(8)])}}
"""


def test_weights_written_while_requests_are_built_are_not_scored(tmp_path: Path, toy_model: Path) -> None:
    """Without staging the trial finds it before it loads; the evaluation fails in one line that says what to type."""
    model = shutil.copytree(toy_model, tmp_path / "model")
    site = sites.local(tmp_path, model, "--slots", "1", more="\n[stage]\nenabled = false\n")
    weights, new, tasks = model / "model.safetensors", tmp_path / "new", tmp_path / "mine"
    data = weights.read_bytes()
    header = 8 + int.from_bytes(data[:8], "little")
    new.write_bytes(data[:header] + bytes(len(data) - header))
    tasks.mkdir()
    (tasks / "mine.yaml").write_text(TASK)
    (tasks / "load.py").write_text(LOAD.format(weights=weights, new=new))
    site.suite.write_text('name = "mine"\ninclude_path = ["mine"]\nbatch_size = 4\n[[task]]\nname = "mine"\n')
    try:
        done = site.run(site.evaluate())
    finally:
        site.stop_redis()
    assert done.returncode == 1, done.stderr
    (failed,) = site.results()["failed"].values()
    assert f"{weights} was written to after it was announced" in failed
    assert "evaluate it again" in failed
    assert "\n" not in failed
