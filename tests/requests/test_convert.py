"""Checkpoints in training's own format: a real DCP checkpoint, converted by a real command, scored like its original."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from support.sites import WATCHED

from coordinator.intake.checkpoint import CheckpointError, inspect_raw, is_hugging_face
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
def test_a_dcp_checkpoint_is_converted_once_and_scores_like_its_original(
    site: Any, expected: dict[str, Any]
) -> None:
    """Same digits as lm-eval on the original; reported by the announced folder; nothing converted is left."""
    raw = site.folder / "run" / "step-7"
    (site.folder / "to_dcp.py").write_text(TO_DCP)
    (site.folder / "to_hf.py").write_text(TO_HF)
    assert (
        site.run([sys.executable, str(site.folder / "to_dcp.py"), str(site.model), str(raw)]).returncode == 0
    )
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


def spec_of(folder: Path, command: str) -> ConvertSpec:
    raw = folder / "raw"
    raw.mkdir()
    (raw / "weights.pt").write_bytes(b"w" * 100)
    EvaluationPaths(folder / "e").outcomes.mkdir(parents=True)
    return ConvertSpec(
        name="c",
        evaluation_dir=str(folder / "e"),
        source=inspect_raw(raw, convert=command),
        command=command,
        out_dir=str(folder / "converted" / "d"),
    )


def failure(folder: Path) -> tuple[str, str]:
    found = json.loads(EvaluationPaths(folder / "e").outcome("failed", "c").read_text())
    return found["blame"], found["error"]


@pytest.mark.parametrize(
    ("script", "blame", "words"),
    [
        ("echo half > $1/model.safetensors; exit 3", "operator", "exit status 3"),
        ("echo half > $1/model.safetensors; kill -9 $$", "retry", "signal 9"),
        ("echo more >> $0.raw/weights.pt", "operator", "changed after"),
    ],
)
def test_a_conversion_that_fails_leaves_no_result(
    tmp_path: Path, script: str, blame: str, words: str
) -> None:
    """Whatever a failed command wrote is gone, and the failure says who must act."""
    program = tmp_path / "convert"
    program.write_text(f"#!/bin/sh\n{script.replace('$0.raw', str(tmp_path / 'raw'))}\n")
    program.chmod(0o755)
    spec = spec_of(tmp_path, f"{program} {{dst}} {{src}}")
    assert convert.main(spec) == 1
    got, error = failure(tmp_path)
    assert (got, words in error) == (blame, True), error
    assert not [p for p in (tmp_path / "converted").iterdir() if p.is_dir()]


def test_a_second_conversion_takes_the_first_ones_result(tmp_path: Path) -> None:
    """A result that is there is used as it is: the command runs once, and its files bear the source's date."""
    spec = spec_of(tmp_path, "cp -r {src} {dst}/copy")
    assert convert.main(spec) == 0
    made = Path(spec.out_dir) / "copy" / "weights.pt"
    assert made.stat().st_mtime_ns == spec.source.files[0].mtime_ns
    shutil.rmtree(spec.source.source)
    assert convert.main(spec) == 0


def test_an_incomplete_dcp_folder_is_not_taken(tmp_path: Path) -> None:
    """`.metadata` is written last: without it the folder is still being saved. A hub folder needs no conversion."""
    (tmp_path / "__0_0.distcp").write_bytes(b"x")
    with pytest.raises(CheckpointError, match="metadata"):
        inspect_raw(tmp_path, convert="c {src} {dst}")
    (tmp_path / ".metadata").write_bytes(b"m")
    assert inspect_raw(tmp_path, convert="a").digest != inspect_raw(tmp_path, convert="b").digest
    assert not is_hugging_face(tmp_path)
