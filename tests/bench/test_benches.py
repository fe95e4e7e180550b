"""Laws of the benches whose figures would mean nothing without them. Whole runs: docs/benchmarks.md."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from argparse import Namespace
from math import isclose
from pathlib import Path

import pytest
from bench import gpu as gpu_bench
from bench import held, months, peer_job, slurm, synthetic, world
from bench.portfolio import Portfolio, instance_text
from support.goldens import deep

from coordinator.decide.planning.instance import parse_instance
from coordinator.intake import request_sets
from coordinator.intake.checkpoint import inspect_checkpoint
from coordinator.intake.request_sets import find_request_sets
from evaljobs.scoring import score, worker
from evaljobs.trial.engines.protocol import Engine
from evaljobs.trial.shard_runner import RequestSet

GPU = Path(__file__).resolve().parents[2] / "scripts" / "bench_gpu"
ALONE = ["unshare", "--net", *(["--map-root-user"] if os.geteuid() else [])]


# --- bench_held ------------------------------------------------------------------------------------------------------


def test_each_second_of_a_slot_has_one_cause(tmp_path):
    """Two slots: one with a trial, one with two of two evaluations, by the records that evaluations leave."""
    causes = {"infer": 30.0, "imports": 6.0, "load": 2.0, "warm": 0.5, "wait": 0.0, "dump": 0.5, "other": 1.0}
    began = {"a-trial-local-a0.0": 100.0, "a-trial-local-a0.1": 102.0, "b-trial-local-a0.0": 143.0}
    for name, submitted in (("a", 99.0), ("b", 142.0)):
        own = {trial: at for trial, at in began.items() if trial.startswith(name)}
        gpus = [{"trial": trial, "started_at": at, "held": 40.0} | causes for trial, at in own.items()]
        report = {
            "status": "done",
            "warnings": [],
            "gpus": gpus,
            "tokens": {"computed": 3000, "generated": None},
        }
        report |= {"environment_bytes": 10, "environment_seconds": 0.5}
        job = f"{name}-trial-local-a0"
        events = [{"kind": "job-submitted", "job": job, "at": submitted}]
        events += [
            {"kind": "job-ended", "job": job, "index": int(trial[-1]), "at": at + 41.0}
            for trial, at in own.items()
        ]
        (tmp_path / name).mkdir()
        (tmp_path / name / "report.json").write_text(json.dumps(report))
        (tmp_path / name / "journal.jsonl").write_text("".join(json.dumps(e) + "\n" for e in events))
    found = held.measured([tmp_path / "a", tmp_path / "b"], 2)
    seconds = found["seconds"]
    assert found["total"] == sum(seconds.values()) == 2 * (184.0 - 99.0)
    assert (seconds["queue"], seconds["exit"], seconds["idle_tail"]) == (1.0 + 3.0, 3.0, 184.0 - 143.0)
    assert (seconds["between"], seconds["inference"]) == (2.0, 90.0)
    assert found["tokens"] == 2 * 3000
    costs = (found["total"] - seconds["inference"] - seconds["dump"]) / 2
    assert held.of_suite(found, 2, 300.0, 2)["over_fewest"] == pytest.approx(1 + costs / 600.0)


# --- bench_gpu; its parts that run whole evaluations take minutes: `scripts/bench_gpu --small` -------------------------


def gpu(*options: str) -> tuple[int, dict]:
    """Exit status and parts of a run in small, in a network namespace of its own, which reaches nothing."""
    may = shutil.which("unshare") and not subprocess.run([*ALONE, "true"], check=False).returncode
    argv = [*(ALONE if may else []), str(GPU), "--small", *options]
    before = set(Path("/dev/shm").glob("bench-gpu-*"))
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=500)
    assert set(Path("/dev/shm").glob("bench-gpu-*")) <= before, done.stderr
    return done.returncode, json.loads(done.stdout)["parts"]


@deep
def test_a_load_is_measured_without_network_and_leaves_nothing_in_memory(toy_model):
    """Seconds of staging and of a trial's start, from storage and from node memory; a part that cannot run is a line."""
    code, parts = gpu("--parts", "load", "vllm", "--model", str(toy_model))
    assert code == 0, parts
    assert len(parts["load"]["rows"]) == 4
    assert all(row["seconds"] > 0 for row in parts["load"]["rows"])
    assert parts["vllm"] == {"skipped": "no interpreter with vLLM was given (--vllm-python)"}


@deep
@pytest.mark.parametrize(
    ("checkpoint", "most", "error"),
    [("empty", "60", "config.json"), ("toy", "0.5", "timed out after 0.")],
)
def test_a_part_that_fails_or_is_past_its_time_is_named_and_the_others_go_on(
    tmp_path, toy_model, checkpoint, most, error
):
    """Its error, the next part's line, and exit status 1; its copies in memory end with it."""
    model = toy_model if checkpoint == "toy" else tmp_path
    code, parts = gpu("--parts", "load", "vllm", "--model", str(model), "--command-seconds", most)
    assert code == 1
    assert error in parts["load"]["error"]
    assert set(parts) == {"load", "vllm"}


def test_the_model_that_is_made_is_a_checkpoint_in_bfloat16(tmp_path):
    """Without --model: one that evalspan takes, of two bytes a parameter, with room for five shots."""
    gpu_bench.make_model(Namespace(model=str(tmp_path / "model"), small=True))
    assert inspect_checkpoint(tmp_path / "model").files
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert (config["dtype"], config["max_position_embeddings"]) == ("bfloat16", 4096)


def test_the_first_other_digit_is_shown():
    """Of two runs over the same documents: how many differ, and the first of them."""
    answers = {("a", 0): ["-1.5", "False"], ("a", 1): ["-2.0", "True", "-3.0", "False"]}
    theirs = gpu_bench.Ran(1.0, {"a": {"acc": 0.5}}, answers)
    assert gpu_bench.difference(theirs, theirs, due=True)["met"]
    ours = theirs._replace(answers={**answers, ("a", 1): ["-2.0", "True", "-1.0", "False"]})
    found = gpu_bench.difference(ours, theirs, due=True)
    wanted = {"met": False, "other_answers": 1, "other_scores": [], "first": ["a", 1, "-1.0", "-3.0"]}
    assert {key: found[key] for key in wanted} == wanted


# --- the portfolio in small --------------------------------------------------------------------------------------------


def test_every_runner_is_given_the_same_drawn_seconds(tmp_path):
    """GPU seconds of our batches, of one job a set and of num-worker tasks have one sum, set by set the same. The bound of
    a scaled draw is the bound of the draw, divided. A set that the bench writes is found, read by the planner, and
    holds each batch's true seconds as its text. The shipped instance has 63 sets, on as many GPUs as are asked for.
    """
    shipped = [parse_instance(instance_text(gpus)) for gpus in (8, 32)]
    assert [(one.gpus, len(one.datasets)) for one in shipped] == [(8, 63), (32, 63)]
    drawn = Portfolio(scale=20.0, sigma=0.3, seed=1)
    ours = [sum(one.seconds) for one in drawn.sets]
    assert ours == pytest.approx(drawn.per_dataset(), rel=1e-9)
    assert isclose(sum(ours), sum(drawn.num_worker()), rel_tol=1e-9)
    assert len(drawn.num_worker()) == drawn.instance.gpus
    whole = Portfolio(scale=1.0, sigma=0.3, seed=1)
    assert isclose(whole.bound().seconds, 20 * drawn.bound().seconds, rel_tol=1e-9)
    one = next(s for s in drawn.sets if s.name == "humaneval")
    world.write_set(one, tmp_path)
    sets, count = find_request_sets(tmp_path, "1", None), len(one.seconds)
    manifest, index = request_sets.read_request_sets(sets, {"humaneval": "1"})["humaneval"]
    assert (manifest.executes, manifest.documents, len(index.documents)) == (True, count, count)
    batches = RequestSet(sets["humaneval"], 1).batches(0, count)
    assert [float(p.context) for b in batches for p in b.pieces] == pytest.approx(one.seconds, abs=1e-6)


def test_the_synthetic_engine_has_what_a_trial_asks_of_an_engine():
    """All but the probes of batch_size = "auto"."""
    engine, asked = synthetic.SyntheticEngine(0.0), {name for name in vars(Engine) if name[0] != "_"}
    lacks = {name for name in asked if not hasattr(engine, name)}
    assert lacks == {"probe_batch_size", "probe_token_budget", "fix_batch_size"}


def test_the_synthetic_metrics_have_what_a_worker_asks_of_the_real_ones():
    text = Path(str(worker.__file__)).read_text()
    asked = set(re.findall(r"(?:metric|scoring\.score\"\))\.(\w+)\(", text))
    assert asked <= vars(score).keys() & vars(synthetic).keys()
    assert "perform_metric_job" in asked


def test_what_a_daemon_holds_is_judged_within_its_longest_life():
    """A restart frees memory: a fall between two lives hides no growth within one."""
    rows = [
        {"life": life, "ended": 10 * number, "seconds": [3.0, 4.0], "real_seconds": [], "memory": memory}
        for number, (life, memory) in enumerate([*((1, 90.0 + n) for n in range(20)), *((2, 50.0),) * 4])
    ]
    found, well = months.judge(rows, 240)
    assert (well, found["targets"][0]["which"], found["lives"]) == (False, ["memory"], 2)
    assert found["slopes"]["memory"]["per_1000"] == pytest.approx(100)


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
    ours = {"makespan_seconds": 10.5, "tail_fraction": 0.04}
    rows = slurm.judged({"evalspan": ours, "per_dataset": {"makespan_seconds": 20.0}}, 10.0)
    met = {"over_bound": True, "tail / makespan": False, "over_per_dataset": False}
    assert {row["what"]: row["met"] for row in rows} == met


def test_the_tail_begins_with_the_first_gpu_without_a_shard():
    """Two shards on one GPU, one on each other; of a GPU that had two trials the second counts."""
    shards = [{"trial": f"t{i}", "started_at": 0.0, "seconds": 9.0 + i % 2} for i in range(32)]
    shards += [
        {"trial": "t0", "started_at": 9.0, "seconds": 1.5},
        {"trial": "gone", "started_at": 0.0, "seconds": 1.0},
    ]
    assert slurm.tail_seconds(shards) == 10.5 - 9.0
