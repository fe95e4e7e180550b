"""Hub ids as checkpoints, against a server on this machine that speaks the Hub's routes."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.hub_server import CLOSED, COMMIT, Hub, serving
from support.node_memory import make_checkpoint

from coordinator.evaluation.records import checkpoint_name, is_snapshot
from coordinator.intake import hub as intake

ASK = """
import json, sys
from coordinator.errors import EvalspanError
from coordinator.intake.hub import local_folder
said = []
try:
    folder = local_folder(
        sys.argv[1], said.append, allow_bin="allow_bin" in sys.argv, weights="tokenizer" not in sys.argv
    )
except EvalspanError as error:
    folder, said = None, [str(error)]
print(json.dumps([folder, said]))
"""


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    """`lab/tiny` holds what repositories hold beside a model; `lab/old` has .bin weights alone."""
    tiny, old = make_checkpoint(tmp_path / "tiny", shards=2), make_checkpoint(tmp_path / "old", shards=1)
    for name in ("README.md", "consolidated.safetensors", "onnx/model.onnx", "pytorch_model.bin"):
        (tiny / name).parent.mkdir(exist_ok=True)
        (tiny / name).write_bytes(b"x" * 999)
    (old / "model.safetensors").rename(old / "pytorch_model.bin")
    with serving({"lab/tiny": tiny, "lab/old": old, **dict.fromkeys(CLOSED, tiny)}) as made:
        yield made


def asked(hub: Hub, text: str, *more: str, folder: Path, **env: str) -> tuple[str | None, str]:
    """The folder, None where it was refused, and what was said. `folder`: the current one, and the cache's."""
    place = {"HF_HOME": str(folder / "hf"), "HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0"}
    env = {**os.environ, **place, **env}
    argv = [sys.executable, "-c", ASK, text, *more]
    done = subprocess.run(argv, cwd=folder, env=env, capture_output=True, text=True, check=True, timeout=60)
    found, said = json.loads(done.stdout)
    assert len(said) <= 1
    return found, "".join(said)


def test_a_signature_in_an_address_is_not_shown() -> None:
    said = "403 for https://cdn/x?X-Amz-Signature=abc&y=1 (Request ID: 3)"
    assert intake.SIGNED.sub("?…", said) == "403 for https://cdn/x?… (Request ID: 3)"


CONFIG = {"config.json", "tokenizer.json", "model.safetensors.index.json"}
SHARDS = [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]


@pytest.mark.parametrize("text", ["lab/tiny", "lab/tiny@step1000", f"lab/tiny@{COMMIT}"])
def test_a_model_is_fetched_once_and_then_taken_from_the_cache(hub: Hub, tmp_path: Path, text: str) -> None:
    """Only files that an evaluation reads; without internet the same command means the same folder. A snapshot that is not
    whole, as tokenizers leave one, is fetched; without internet the message says what it lacks."""
    folder, said = asked(hub, text, folder=tmp_path)
    place = tmp_path / "hf" / "hub"
    assert folder == str(place / "models--lab--tiny" / "snapshots" / COMMIT)
    assert said.startswith(f"{text}: fetching revision {COMMIT[:8]}, 5 files, ")
    assert said.endswith(str(place))
    assert set(hub.fetched) == CONFIG | set(SHARDS) == {p.name for p in Path(folder).iterdir()}
    again, said = asked(hub, text, folder=tmp_path, HF_HUB_OFFLINE="1")
    assert again == folder
    assert said == f"{text}: revision {COMMIT[:8]} from the Hugging Face cache, {folder}"
    if "@" not in text:
        (Path(folder) / SHARDS[1]).unlink()
        refused, said = asked(hub, text, folder=tmp_path, HF_HUB_OFFLINE="1")
        assert refused is None
        assert f"{SHARDS[1]}, which is not there" in said
        assert "`hf download lab/tiny`" in said
        whole, said = asked(hub, text, folder=tmp_path)
        assert (whole, "fetching" in said) == (folder, True)
        assert (Path(folder) / SHARDS[1]).exists()


def test_config_and_tokenizer_are_fetched_without_the_weights(hub: Hub, tmp_path: Path) -> None:
    """Their size is said; the snapshot serves the next such command without internet. One for weights goes on, also for
    .bin weights where the settings allow them."""
    folder, said = asked(hub, "lab/tiny", "tokenizer", folder=tmp_path)
    assert f"fetching revision {COMMIT[:8]} without its weights (4 MB), 3 files, " in said
    assert set(hub.fetched) == CONFIG
    assert asked(hub, "lab/tiny", "tokenizer", folder=tmp_path, HF_HUB_OFFLINE="1")[0] == folder
    assert asked(hub, "lab/tiny", folder=tmp_path)[0] == folder
    assert SHARDS[0] in hub.fetched
    assert "fetching" in asked(hub, "lab/old", "allow_bin", folder=tmp_path)[1]
    assert "pytorch_model.bin" in hub.fetched


def test_a_folder_has_precedence_over_an_id(hub: Hub, tmp_path: Path) -> None:
    """Also a mistyped name in an existing folder asks no server."""
    shutil.copytree(tmp_path / "tiny", tmp_path / "lab" / "tiny")
    assert asked(hub, "lab/tiny", folder=tmp_path) == ("lab/tiny", "")
    assert "a folder has no revisions" in asked(hub, "lab/tiny@step1000", folder=tmp_path)[1]
    folder, said = asked(hub, "lab/tinny", folder=tmp_path)
    assert folder is None
    assert re.search("no such folder.*lab/tinny@main", said)
    for path in ("/no/where", "./lab/none", "runs/a/b", "one", "a--b/c"):
        assert asked(hub, path, folder=tmp_path) == (path, "")


@given(st.from_regex(intake.HUB_ID, fullmatch=True).filter(lambda t: "--" not in t), st.booleans())
def test_a_snapshot_is_named_by_its_model(text: str, slash: bool) -> None:
    name = text.partition("@")[0]
    source = f"/cache/hub/models--{name.replace('/', '--')}/snapshots/{COMMIT}{'/' * slash}"
    assert is_snapshot(source)
    assert checkpoint_name(source) == name.rpartition("/")[2]
    assert checkpoint_name(f"/runs/7b/step-1000{'/' * slash}") == "step-1000"
    assert not is_snapshot("/runs/7b/snapshots/step-1000")
