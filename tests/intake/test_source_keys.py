"""Laws of model arguments in a source key: a local file or folder counts by its contents, wherever it is typed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from coordinator.errors import OperatorError
from coordinator.intake.source_keys import _named_by, check_adapter, with_full_paths
from evaljobs.contract.specs import ModelOptions


@pytest.mark.parametrize(
    ("key", "typed"),
    [("peft", "adapter"), ("peft", "./adapter"), ("peft", "~/adapter"), ("other", "runs/../adapter")],
)
def test_a_folder_trained_again_is_another_model(tmp_path: Path, monkeypatch, key: str, typed: str) -> None:
    """However its path is written."""
    monkeypatch.setenv("HOME", str(tmp_path))
    weights = tmp_path / "adapter" / "adapter.safetensors"
    weights.parent.mkdir()
    (tmp_path / "runs").mkdir()
    keys = set()
    for content in (b"first", b"second"):
        save_file({"w": torch.tensor(list(content))}, weights)
        arguments = with_full_paths({key: typed}, tmp_path)
        assert arguments == {key: str(weights.parent)}
        keys.add(_named_by(ModelOptions(model_args=arguments), {}))
    assert len(keys - {""}) == 2


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


def test_an_adapter_that_is_not_there_is_refused(tmp_path: Path, monkeypatch) -> None:
    """Before any trial: it would fail on each node, one after the other. An id of the Hub is not looked up."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    for named in ("adapter", "./adapter", str(tmp_path / "adapter"), "lab/adapter", ""):
        check_adapter(ModelOptions(model_args={"peft": named}))
    check_adapter(ModelOptions(engine="vllm", model_args={"peft": "gone"}))
    for named, why in {
        "gone": "there is no folder",
        "empty": "adapter_config.json",
        "/runs/gone": "/runs/gone",
    }.items():
        with pytest.raises(OperatorError, match=why):
            check_adapter(ModelOptions(model_args={"peft": named}))
