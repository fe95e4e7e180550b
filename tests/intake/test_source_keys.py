"""Laws of source keys: a local file or folder that a model argument names counts by its contents, wherever it is typed."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.node_memory import safetensors
from support.simulated.parts import SITE, record

from coordinator.errors import OperatorError
from coordinator.evaluation.records import evaluation_id
from coordinator.intake.source_keys import _named_by, check_adapter, inputs_of, with_full_paths
from evaljobs.contract.specs import ModelOptions


@pytest.mark.parametrize(
    ("key", "typed"),
    [("peft", "adapter"), ("peft", "./adapter"), ("peft", "~/adapter"), ("other", "runs/../adapter")],
)
def test_a_folder_trained_again_is_another_model(tmp_path: Path, monkeypatch, key: str, typed: str) -> None:
    """However its path is written."""
    monkeypatch.setenv("HOME", str(tmp_path))
    weights = tmp_path / "adapter" / "adapter_model.safetensors"
    weights.parent.mkdir()
    (tmp_path / "runs").mkdir()
    keys = set()
    for content in (b"first", b"other"):
        safetensors(weights, {"a": content})
        os.utime(weights, ns=(0, 0))
        arguments = with_full_paths({key: typed}, tmp_path)
        assert arguments == {key: str(weights.parent)}
        keys.add(_named_by(ModelOptions(model_args=arguments), {}))
    assert len(keys - {""}) == 2
    weights.write_bytes(b"half")
    with pytest.raises(OperatorError, match=f"{key} in .* cannot be read"):
        _named_by(ModelOptions(model_args=arguments), {})


def test_other_values_stay_as_they_are(tmp_path: Path) -> None:
    """Also beside a folder of that name; and ids of the Hub."""
    (tmp_path / "float32").mkdir()
    arguments = {
        "dtype": "float32",
        "peft": "lab/adapter",
        "tokenizer": "",
        "n": 3,
        "x": "a" * 5000,
        "y": "/",
    }
    assert with_full_paths(arguments, tmp_path) == arguments


def test_only_a_folder_without_an_adapter_is_refused(tmp_path: Path, monkeypatch) -> None:
    """Before any trial: it would fail on each node, one after the other. An id of the Hub is not looked up."""
    monkeypatch.chdir(tmp_path)
    for name in ("empty", "adapter"):
        (tmp_path / name).mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    for named in ("adapter", "./adapter", str(tmp_path / "adapter"), "lab/adapter", ""):
        check_adapter(ModelOptions(model_args={"peft": named}))
    check_adapter(ModelOptions(engine="vllm", model_args={"peft": "gone"}))
    with pytest.raises(OperatorError, match=r"adapter_config\.json"):
        check_adapter(ModelOptions(model_args={"peft": "empty"}))


@pytest.mark.parametrize("changed", [{"worker_env": {"GRADE": "2"}}, {"command": "module load b"}])
def test_another_environment_of_trials_is_another_evaluation(tmp_path: Path, changed: dict[str, Any]) -> None:
    """Another value of a variable; another prologue, container or Python of [trial]: a task may compute with it."""
    site = replace(SITE, work_dir=str(tmp_path), worker_env={"GRADE": "1"}, command="module load a")
    of, model = record(), ModelOptions()
    inputs = [inputs_of(of.suite, model, s, "0.4", lambda *_: None) for s in (site, replace(site, **changed))]
    assert len({evaluation_id(of.checkpoint, of.suite, model, inputs=each) for each in inputs}) == 2
