"""Laws of model arguments in a source key: a local file or folder counts by its contents, wherever it is typed."""

from __future__ import annotations

from pathlib import Path

import pytest

from coordinator.intake.source_keys import _named_by, with_full_paths
from evaljobs.contract.specs import ModelOptions
from evaljobs.lmeval.source_files import Digests


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
        weights.write_bytes(content)
        arguments = with_full_paths({key: typed}, tmp_path)
        assert arguments == {key: str(weights.parent)}
        keys.add(_named_by(ModelOptions(model_args=arguments), Digests(None)))
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
