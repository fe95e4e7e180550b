"""The bench's portfolio in small: every runner is given the same drawn seconds."""

from __future__ import annotations

import json
import subprocess
import sys
from math import isclose

import pytest
from bench import folder, peer_job
from bench import slurm as bench
from bench.portfolio import INSTANCE, Portfolio

from coordinator.intake.request_sets import found
from coordinator.planning.instance import parse_instance
from coordinator.planning.make_plan import read_sets
from evaljobs.trial.shard_runner import RequestSet


@pytest.fixture(scope="module")
def portfolio():
    return Portfolio(INSTANCE.read_text(), scale=20.0, sigma=0.3, seed=1)


def test_every_runner_infers_the_same_seconds(portfolio):
    """GPU seconds of our batches, of one job a set and of num-worker tasks have one sum, set by set the same."""
    ours = [sum(one.seconds) for one in portfolio.sets]
    assert all(isclose(a, b, rel_tol=1e-9) for a, b in zip(ours, portfolio.per_dataset(), strict=True))
    assert isclose(sum(ours), sum(portfolio.num_worker()), rel_tol=1e-9)
    assert len(portfolio.num_worker()) == portfolio.instance.gpus


def test_scaling_scales_the_bound(portfolio):
    """The bound of a scaled draw is the bound of the draw, divided: the same seed draws the same run."""
    whole = Portfolio(INSTANCE.read_text(), scale=1.0, sigma=0.3, seed=1)
    assert isclose(whole.bound().seconds, 20 * portfolio.bound().seconds, rel_tol=1e-9)


def test_request_sets_are_whole_for_coordinator_and_trial(portfolio, tmp_path):
    """A set that the bench writes is found, read by the planner, and holds each batch's true seconds as its text."""
    one = next(s for s in portfolio.sets if s.name == "humaneval")
    folder.write_set(one, tmp_path)
    sets = found(tmp_path, "1", None)
    manifest, index = read_sets(sets, {"humaneval": "1"})["humaneval"]
    assert manifest.executes
    assert manifest.documents == len(one.seconds) == len(index.documents)
    texts = [
        p.context for b in RequestSet(sets["humaneval"], 1).batches(0, len(one.seconds)) for p in b.pieces
    ]
    assert [float(text) for text in texts] == pytest.approx(one.seconds, abs=1e-6)


def test_a_peers_job_leaves_its_account(tmp_path):
    """It prepares, reads, loads, infers and scores, in the standard library alone."""
    for part in ("jobs", "done"):
        (tmp_path / part).mkdir()
    job = {"preprocess": 0.01, "storage": 0.01, "load": 0.01, "infer": 0.02, "metric": 0.01}
    (tmp_path / "jobs" / "000").write_text(json.dumps(job))
    argv = [sys.executable, "-I", "-S", peer_job.__file__, str(tmp_path), "000"]
    subprocess.run(argv, env={"SLURMD_NODENAME": "n1"}, check=True, timeout=120)
    account = json.loads((tmp_path / "done" / "000").read_text())
    assert account["inferred"] - account["started"] >= 0.05
    assert account["ended"] - account["inferred"] >= 0.01
    assert not list((tmp_path / "reading" / "n1").iterdir())


def test_a_target_is_judged_in_its_own_direction():
    """At most so far above the bound, at least so much faster than a peer; a run left out is not judged."""
    rows = bench.judged(
        {"evalspan": {"makespan_seconds": 10.5}, "per_dataset": {"makespan_seconds": 20.0}}, 10.0
    )
    assert {row["what"]: row["met"] for row in rows} == {"over_bound": True, "over_per_dataset": False}


@pytest.mark.parametrize("gpus", [8, 32])
def test_shipped_instances_are_instances(gpus):
    """Both files parse, with 63 sets and as many GPUs as their name says."""
    instance = parse_instance(INSTANCE.with_name(f"portfolio63_{gpus}gpus.instance.json").read_text())
    assert instance.gpus == gpus
    assert len(instance.datasets) == 63
