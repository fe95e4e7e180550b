"""Laws of scripts/bench_gpu, in small on a CPU. Its parts that run whole evaluations take minutes: `scripts/bench_gpu --small`."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
from bench import gpu_load
from bench.gpu_parts import Ran, difference, make_model

from coordinator.intake.checkpoint import inspect

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "bench_gpu"
ALONE = ["unshare", "--net", *(["--map-root-user"] if os.geteuid() else [])]


def bench(out: Path, *options: str) -> tuple[int, dict[str, Any], str]:
    """Exit status, JSON and table of a run in small, in a network namespace of its own, which reaches nothing."""
    own = (
        ALONE
        if shutil.which("unshare") and not subprocess.run([*ALONE, "true"], check=False).returncode
        else []
    )
    argv = [*own, str(SCRIPT), "--small", "--out", str(out), *options]
    before = set(Path("/dev/shm").glob("bench-gpu-*"))
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=500)
    assert set(Path("/dev/shm").glob("bench-gpu-*")) <= before, done.stderr
    assert done.stdout == (out / "bench_gpu.md").read_text(), done.stderr
    return done.returncode, json.loads((out / "bench_gpu.json").read_text()), done.stdout


def test_a_load_is_measured_without_network_and_leaves_nothing_in_memory(tmp_path, toy_model):
    """Seconds of every way but those that this machine refuses; a part that cannot run is a line."""
    code, report, table = bench(tmp_path, "--parts", "load", "vllm", "--model", str(toy_model))
    assert code == 0, table
    rows = {row["what"]: row for row in report["parts"]["load"]["rows"]}
    assert any(what.endswith(gpu_load.PRODUCT) for what in rows)
    assert all(row["seconds"] > 0 or row["figure"].startswith("refused") for row in rows.values())
    assert "| vllm | not run |  | no interpreter with vLLM was given (--vllm-python) |" in table


def test_a_part_that_fails_is_named_and_the_others_go_on(tmp_path):
    """A folder without a model: its error in the table, the next part's line, and exit status 1."""
    code, report, table = bench(tmp_path, "--parts", "load", "vllm", "--model", str(tmp_path))
    assert code == 1
    assert "config.json" in report["parts"]["load"]["error"]
    assert "| load | **failed** |" in table
    assert "| vllm | not run |" in table


def test_a_part_past_its_time_is_ended(tmp_path, toy_model):
    """Its processes and its copies in memory end with it."""
    code, report, _ = bench(tmp_path, "--parts", "load", "--model", str(toy_model), "--part-seconds", "0.5")
    assert code == 1
    assert report["parts"]["load"]["error"] == "took longer than 0.5 s"


def test_the_model_that_is_made_is_a_checkpoint_in_bfloat16(tmp_path):
    """Without --model: one that evalspan takes, of two bytes a parameter, with room for five shots."""
    make_model(Namespace(model=str(tmp_path / "model"), size="tiny"))
    assert inspect(tmp_path / "model").files
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert (config["dtype"], config["max_position_embeddings"]) == ("bfloat16", 4096)


@pytest.mark.parametrize("readers", [1, 4])
def test_pinned_buffers_bring_every_byte(tmp_path, monkeypatch, readers):
    """Files of several buffers' size, one after the other."""
    monkeypatch.setattr(gpu_load, "CHUNK", 1000)
    whole = [os.urandom(size) for size in (2500, 1, 1000)]
    files = [tmp_path / str(number) for number in range(3)]
    for file, data in zip(files, whole, strict=True):
        file.write_bytes(data)
    assert bytes(gpu_load.pinned(files, "cpu", readers).numpy()) == b"".join(whole)


def test_the_first_other_digit_is_shown():
    """Of two runs over the same documents: how many differ, by how much, and the first of them."""
    theirs = Ran(
        1.0, {"a": {"acc": 0.5}}, {("a", 0): ["-1.5", "False"], ("a", 1): ["-2.0", "True", "-3.0", "False"]}
    )
    assert difference("digits", theirs, theirs, due=True)["met"]
    ours = theirs._replace(answers={**theirs.answers, ("a", 1): ["-2.0", "True", "-1.0", "False"]})
    found = difference("digits", ours, theirs, due=True)
    assert not found["met"]
    assert (found["other_answers"], found["worst"], found["other_choices"], found["other_scores"]) == (
        1,
        2.0,
        1,
        0,
    )
    assert found["figure"].endswith("first: a document 1, '-1.0' and '-3.0'")
