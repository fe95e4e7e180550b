"""A model named by its Hub id: fetched from a server on this machine and evaluated."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support import sites
from support.hub_server import COMMIT, serving
from support.toys import expected

pytestmark = pytest.mark.model

ENTRIES = {"toy_choice": {"limit": 8}}


def test_a_hub_id_gives_the_scores_of_the_folder(tmp_path: Path, toy_model: Path) -> None:
    """lm-eval's own digits; the evaluation has the model's name, and no step of a commit's hash."""
    site = sites.local(tmp_path, toy_model, "--slots", "1", entries=ENTRIES)
    with serving({"lab/tiny-llama": toy_model}) as hub:
        site.env |= {"HF_HOME": str(tmp_path / "hf"), "HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0"}
        site.model = Path("lab/tiny-llama")
        refused = [
            site.run(site.command(c, str(site.model), "--suite", "quikstart")) for c in ("eval", "submit")
        ]
        assert [done.returncode for done in refused] == [2, 2]
        assert not hub.fetched, "a wrong suite is refused before a model is fetched"
        try:
            done = site.run(site.evaluate())
        finally:
            site.end_workers()
    assert done.returncode == 0, done.stderr
    assert "Fetching" not in done.stderr, "progress bars are a terminal's"
    assert f"lab/tiny-llama: fetching revision {COMMIT[:8]}, " in done.stderr
    assert site.results()["results"] == expected(toy_model, ENTRIES)
    record = json.loads((site.root() / "evaluation.json").read_text())
    assert record["evaluation_id"].startswith("tiny-llama-toys-")
    assert record["checkpoint"]["step"] is None
    assert site.run(site.evaluate()).returncode == 0, "the server is gone: the cache has it"
    assert len(list(site.work.glob("*/evaluation.json"))) == 1


def test_request_sets_need_no_weights(tmp_path: Path, toy_model: Path) -> None:
    """`prepare`, `validate` and `plan` fetch config and tokenizer; the sets are those of the whole folder."""
    site = sites.local(tmp_path, toy_model, entries=ENTRIES)
    with serving({"lab/tiny-llama": toy_model}) as hub:
        site.env |= {"HF_HOME": str(tmp_path / "hf"), "HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0"}
        commands = [
            site.command(c, "--suite", str(site.suite), "--tokenizer", "lab/tiny-llama")
            for c in ("prepare", "validate", "plan")
        ]
        ran = [site.run(command) for command in commands]
        assert [done.returncode for done in ran] == [0, 0, 0], ran
        assert hub.fetched
        assert not [file for file in hub.fetched if file.endswith((".safetensors", ".bin"))]
    assert "the weights of lab/tiny-llama" in ran[1].stdout
    whole = site.run(site.command("validate", "--suite", str(site.suite), "--tokenizer", str(toy_model)))
    assert "1 of 1 tasks are built" in whole.stdout
