"""Every refusal that a user can meet: what is typed over which site, the exit code, and the line."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.goldens import HERE
from support.hub_server import CLOSED, serving
from support.node_memory import make_checkpoint

RUNNER = Path(__file__).with_name("run_rows.py")
# What a refusal tells a user to look at or to type: `commands`, --options, [tables], 'values', $SITE/places, variables,
# lines of a file, settings and file names.
FACT = re.compile(
    r"`[^`]+`|--[a-z][a-z-]+|\[[a-z.]+\](?: [a-z_]+)?|'[^' ]+'|\$[A-Z_]+[/\w.-]*\w|\bline \d+|\b[a-z]+_[a-z_]+\b|\b[\w-]+\.(?:toml|ya?ml|json|safetensors|bin)\b"
)


def facts_of(text):
    return sorted(set(FACT.findall(text)))


def said(folder):
    """Row → exit code and text."""
    tiny, old = (make_checkpoint(folder / name, shards=1, size=512) for name in ("tiny", "old"))
    (old / "model.safetensors").rename(old / "pytorch_model.bin")
    (folder / "empty").mkdir()
    (folder / "empty" / "README.md").write_text("x")
    models = {"lab/tiny": tiny, "lab/old": old, "lab/empty": folder / "empty", **dict.fromkeys(CLOSED, tiny)}
    with serving(models) as hub:
        env = {**os.environ, "HUB": hub.url, "PYTHONHASHSEED": "0"}
        argv = [sys.executable, str(RUNNER), str(folder)]
        done = subprocess.run(argv, env=env, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout)


@pytest.mark.timeout(1800)  # each row is a process
def test_refusals(tmp_path, goldens):
    """A wrong input keeps its exit code, and its line names the same files and settings and what to type."""
    found, place = said(tmp_path), HERE / "refusals.json"
    known = {} if goldens.write or not place.exists() else json.loads(place.read_text())
    rows = {
        name: {
            "exit": code,
            "says": [fact for fact in known.get(name, {}).get("says", facts_of(text)) if fact in text],
        }
        for name, (code, text) in found.items()
    }
    goldens.check("refusals.json", rows)
    texts = (f"## {name} → {code}\n{text}\n" for name, (code, text) in found.items())
    goldens.check("texts/refusals.txt", "\n".join(texts))  # a change of a text is seen in a commit
