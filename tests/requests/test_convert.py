"""Checkpoints in training's own format: a real DCP checkpoint, converted by a real command, scored like its original."""

import json
import shutil
import sys
from pathlib import Path

import pytest
from support.sites import WATCHED

from coordinator.intake.checkpoint import CheckpointError, inspect_checkpoint, is_hugging_face
from evaljobs.contract.paths import EvaluationPaths
from evaljobs.contract.specs import ConvertSpec
from evaljobs.requests import convert

TO_DCP = """
import sys, torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
dcp.save(load_file(sys.argv[1] + "/model.safetensors"), checkpoint_id=sys.argv[2], no_dist=True)
"""
TO_HF = """
import pathlib, shutil, sys, tempfile, torch
from safetensors.torch import save_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
template, source, target = map(pathlib.Path, sys.argv[1:])
for file in template.iterdir():
    if file.name != "model.safetensors":
        shutil.copy(file, target / file.name)
with tempfile.NamedTemporaryFile() as whole:
    dcp_to_torch_save(source, whole.name)
    save_file(torch.load(whole.name), target / "model.safetensors", metadata={"format": "pt"})
"""


@pytest.mark.model
def test_a_dcp_checkpoint_is_converted_once_and_scores_like_its_original(site, expected):
    """Same digits as lm-eval on the original; reported by the announced folder; nothing converted is left."""
    raw = site.folder / "run" / "step-7"
    (site.folder / "to_dcp.py").write_text(TO_DCP)
    (site.folder / "to_hf.py").write_text(TO_HF)
    made = site.run([sys.executable, str(site.folder / "to_dcp.py"), str(site.model), str(raw)])
    assert made.returncode == 0
    settings = Path(site.env["EVALSPAN_CONFIG"])
    command = f"{sys.executable} {site.folder}/to_hf.py {site.model} {{src}} {{dst}}"
    settings.write_text(f'{settings.read_text()}\n[checkpoint]\nconvert = "{command}"\n')
    done = site.run(site.command("daemon", "--until-idle"))
    assert done.returncode == 0, done.stderr
    assert dict(site.results()["results"]) == {task: expected[task] for task in WATCHED}
    report = json.loads((site.root() / "report.json").read_text())
    assert (report["checkpoint"], report["step"]) == (str(raw), 7)
    assert not list((site.work / "converted").iterdir()), "cleared with its last evaluation"
    assert not list(raw.glob(".evalspan-pin-*"))


@pytest.mark.parametrize(
    ("script", "blame", "words"),
    [
        ("cp -r $2 $1/copy", "", ""),
        ("echo half > $1/model.safetensors; exit 3", "operator", "exited with status 3"),
        ("echo half > $1/model.safetensors; kill -9 $$", "retry", "signal 9"),
        ("echo more >> $2/weights.pt", "operator", "changed after"),
    ],
)
def test_a_conversion_runs_once_and_one_that_fails_leaves_no_result(tmp_path, script, blame, words):
    """Files of a result bear the source's date, and a result that is there is used as it is. Whatever a failed command wrote is
    gone, and the failure says who must act. `.metadata` is written last: without it a folder is still being saved."""
    program, raw, paths = tmp_path / "convert", tmp_path / "raw", EvaluationPaths(tmp_path / "e")
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    raw.mkdir()
    (raw / "weights.pt").write_bytes(b"w" * 100)
    (raw / "__0_0.distcp").write_bytes(b"x")
    command = f"{program} {{dst}} {{src}}"
    with pytest.raises(CheckpointError, match="metadata"):
        inspect_checkpoint(raw, convert=command)
    (raw / ".metadata").write_bytes(b"m")
    assert not is_hugging_face(raw)
    source = inspect_checkpoint(raw, convert=command)
    assert source.digest != inspect_checkpoint(raw, convert="another {src} {dst}").digest
    paths.outcomes.mkdir(parents=True)
    out = tmp_path / "converted" / "d"
    spec = ConvertSpec(
        name="c", evaluation_dir=str(paths.root), source=source, command=command, out_dir=str(out)
    )
    assert convert.main(spec) == bool(blame)
    if blame:
        found = json.loads(paths.outcome("failed", "c").read_text())
        assert (found["blame"], words in found["error"]) == (blame, True), found["error"]
        assert not [p for p in out.parent.iterdir() if p.is_dir()]
        return
    newest = max(f.mtime_ns for f in source.files)
    assert (out / "copy" / "weights.pt").stat().st_mtime_ns == newest
    shutil.rmtree(raw)
    assert convert.main(spec) == 0
