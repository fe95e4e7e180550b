"""Laws of `check-nodes` on a real Slurm: nodes made bad are found, by whatever they do, and others are not accused."""

from __future__ import annotations

import faulthandler
import json
import os
import random
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from dev_cluster.api import Cluster
from dev_cluster.testing import unfinished, wait_until
from support.fake_cluster import fake_node
from support.goldens import deep
from support.sites import cluster, on_cluster

from coordinator.decide.allocation import cordons
from coordinator.decide.allocation.allocate import Demand, Limits, allocate
from coordinator.errors import OperatorError
from coordinator.operations.node_check.checker import CheckedNode, choose_nodes, write_report
from coordinator.operations.node_check.pairing import (
    Pairing,
    PairTest,
    Verdict,
    hardware_trouble,
    judge_round,
    outcome_of_test,
    slow_gathers,
    slow_nodes,
)
from evaljobs import node_check

NODES = {f"n{i}" for i in range(1, 6)}
# What Python imports at its start on each node. Processes of a test alone have several tasks.
FAULTS = """
import os, signal, time
fault = os.environ.get("FAULT", "") if "SLURM_STEP_ID" in os.environ else ""
if fault:
    import torch, torch.distributed as dist
    real = torch.matmul
    def product(a, b):
        made = real(a, b)
        made[0, 0] += 1
        return made
    def slow(a, b):
        return [real(a, b) for _ in range(4)][0]
    own = {"product": product, "slow": slow}
    torch.matmul = own.get(fault, real)
    if fault not in own:
        dist.all_gather = {"dead": lambda *_: os.kill(os.getpid(), signal.SIGKILL), "hang": lambda *_: time.sleep(3600)}[fault]
"""


@pytest.fixture(scope="module")
def five() -> Iterator[Cluster]:
    with cluster(nodes=5, gpus=1, cpu_nodes=0) as made:
        yield made


def ask(cluster: Cluster, faults: dict[str, str]) -> tuple[int, dict[str, Any], Path]:
    """Exit code and JSON of a check, and its work folder. `faults`: by node."""
    folder = cluster.user_dir / f"check-{'-'.join(faults.values())}"
    folder.mkdir()
    folder.chmod(0o777)
    (folder / "sitecustomize.py").write_text(FAULTS)
    cases = "".join(f"{node}) export FAULT={fault};; " for node, fault in faults.items())
    env = {
        "CLUSTER_KIND": "slurm",
        "CLUSTER_PARTITION": "gpu",
        "TRIAL_DEVICE": "cpu",
        "TRIAL_PROLOGUE": f"export PYTHONPATH={folder}:$PYTHONPATH; case $SLURMD_NODENAME in {cases} esac",
    }
    done = cluster.run_as_user(
        [cluster.python, "-m", "coordinator", "check-nodes", "--json", "--work-dir", folder / "work"],
        env={f"EVALSPAN_{name}": value for name, value in env.items()},
        timeout=550,
    )
    assert done.returncode in (0, 1), done.stderr
    return done.returncode, json.loads(done.stdout), folder / "work"


@pytest.mark.slurm
@pytest.mark.parametrize(
    "faults",
    [
        pytest.param({"n2": "product", "n4": "dead"}, id="a wrong checksum, and a death in the collective"),
        pytest.param({"n3": "slow"}, id="much slower", marks=deep),
        pytest.param({"n3": "hang"}, id="hangs in the collective", marks=deep),
    ],
)
def test_nodes_made_bad_are_found_and_remembered(five: Cluster, faults: dict[str, str]) -> None:
    """They alone are accused, in at most three rounds; later evaluations know; nothing is left."""
    code, told, work = ask(five, faults)
    verdicts = {n["node"]: n["verdict"] for n in told["nodes"]}
    assert verdicts == {n: "bad" if n in faults else "ok" for n in NODES}, told
    assert (code, set(told["exclude"]), told["undetermined"]) == (1, set(faults), False)
    assert 2 <= told["rounds"] <= 3
    assert cordons.read_node_failures(work / "nodes.json", time.time()).keys() == faults.keys()
    wait_until(lambda: not unfinished(five), "jobs of a check end")
    assert five.run_as_user(["find", work / "cache" / "nodes", "-type", "f"]).stdout == ""


@deep
@pytest.mark.slurm
def test_a_daemon_checks_a_node_before_its_use(five: Cluster, toy_model: Path) -> None:
    """One with wrong products runs nothing, however an evaluation wants all nodes, and is cordoned for a day; the others run it."""
    prologue = f"export PYTHONPATH={five.user_dir}/before:$PYTHONPATH; case $SLURMD_NODENAME in n2) export FAULT=product;; esac"
    more = f"partition = 'gpu'\nkind = 'slurm'\n[nodes]\ncheck = true\ninclude = ['n[1-2]']\n[watch]\nsuites = ['{five.user_dir}/before/toys.toml']\n"
    site = on_cluster(five, "before", toy_model, more=more)
    (site.folder / "sitecustomize.py").write_text(FAULTS)
    site.env["EVALSPAN_TRIAL_PROLOGUE"] = prologue
    told = site.run(site.command("submit", str(site.model), "--suite", str(site.suite), "--json"))
    assert told.returncode == 0, told.stderr
    done = site.run(site.command("daemon", "--until-idle"), timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    jobs = [e["job"] for e in site.events() if e["kind"] == "job-intended"]
    assert {job["node"] for job in jobs if job.get("node")} == {"n1"}
    assert cordons.read_cordons(site.work / "nodes.json", time.time() + 23 * 3600).keys() == {"n2"}
    assert cordons.checked_nodes(site.work / "nodes.json", time.time()) == {"n1", "n2"}


# --- what records say ------------------------------------------------------------------------------------------------------


def left(node: str, **fields: object) -> dict[str, Any]:
    record = {
        "node": node,
        "local": 0,
        "trouble": "",
        "together": "",
        "lost": "",
        "done": True,
        "device": "H100",
    }
    return {**record, "rates": {"matmul": 4.0}, **fields}


@pytest.mark.parametrize(
    ("records", "ran", "passed", "why"),
    [
        ([left("a"), left("b")], True, True, ""),
        ([left("a")], True, False, "no answer of b"),
        ([left("a", together="reset by peer"), left("b", done=False)], True, False, "b did not end the all-gather"),
        ([left("a", together="wrong values"), left("b")], True, False, "a: wrong values"),
        ([left("a", together="timeout"), left("b", together="a measurement failed: x")], True, False, "b: a measurement"),
        ([left("a", lost="EADDRINUSE"), left("b", together="timeout")], True, None, "EADDRINUSE"),
        ([], False, None, "said"),
    ],
)  # fmt: skip
def test_a_test_passes_fails_or_says_nothing(
    records: list[dict[str, Any]], ran: bool, passed: bool | None, why: str
) -> None:
    """Only what took place accuses; which process saw what is said."""
    found = outcome_of_test(PairTest(world=("a", "b"), records=records, ran=ran, said="said"))
    assert found.passed is passed
    assert found.why.startswith(why)


def test_slow_is_far_below_the_median_of_like_devices_in_a_round() -> None:
    """Of two the slower one; other devices are no yardstick."""
    usual = [left(n) for n in "abc"]
    slow = left("d", rates={"matmul": 1.0})
    assert slow_nodes([*usual, slow]).keys() == slow_nodes([usual[0], slow]).keys() == {"d"}
    assert not slow_nodes(
        [*usual, left("d", rates={"matmul": 2.0}), left("e", rates={"matmul": 0.1}, device="T4")]
    )
    assert slow_gathers({("a", "b"): 9.0, ("c", "d"): 8.0, ("e", "f"): 1.9}).keys() == {("e", "f")}


def simulated(node: str, partner: str, bad: str, fault: str, rate: float) -> dict[str, Any]:
    """A node's record of a test where a node is bad."""
    if node != bad:
        cut = "reset by peer" if partner == bad and fault in ("dead", "hang") else ""
        return left(node, rates={"matmul": rate}, together=cut, gathered=rate)
    own = {"product": {"trouble": "wrong product"}, "slow": {"rates": {"matmul": rate / 4}}}
    return left(node, **{"rates": {"matmul": rate}, **own.get(fault, {"done": False})})


@pytest.mark.parametrize("fault", ["product", "slow", "dead", "hang"])
def test_each_fault_is_found_for_each_of_a_hundred_seeds(fault: str) -> None:
    """In 64 simulated nodes whose rates scatter by a fifth: the bad one alone is accused, in two rounds."""
    for seed in range(100):
        draw = random.Random(seed)
        pairing, slow = Pairing(draw.sample([f"n{i}" for i in range(64)], 64)), set[str]()
        bad = draw.choice(pairing.nodes)
        while worlds := pairing.worlds():
            held = []
            for one, other in worlds:
                both = ((one, other), (other, one))
                records = [simulated(*each, bad, fault, draw.uniform(0.8, 1.2)) for each in both]
                held.append(PairTest(world=(one, other), records=records))
            judge_round(pairing, held, slow)
        assert (set(pairing.bad), len(pairing.good)) == ({bad}, 63)
        assert pairing.rounds <= 2


@pytest.mark.parametrize(
    ("came", "bad"), [("79, pid=1, GPU has fallen off the bus", True), ("13, x", False), ("", False)]
)
def test_an_xid_of_the_gpu_accuses_a_node_where_it_came_while_the_check_ran(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, came: str, bad: bool
) -> None:
    """By the rules of diagnosis; an older one, and one of the program, do not."""
    kernel, line = tmp_path / "kernel", "[{}.0] NVRM: Xid (PCI:0000:3b:00): {}\n"
    kernel.write_text(line.format(1, "79, old"))
    command = tmp_path / "dmesg"
    command.write_text(
        f"#!/bin/sh\ncat {kernel}\n"
        + (
            f"printf '%s' '{line.format(2, came)}' > {kernel}.new; cat {kernel}.new >> {kernel}\n"
            if came
            else ""
        )
    )
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert node_check.main([str(tmp_path), "--seconds", "60"]) == 0
    faulthandler.cancel_dump_traceback_later()
    (record,) = (json.loads(file.read_text()) for file in tmp_path.glob("*.json"))
    assert ("79" in hardware_trouble(record)) == bad


def test_nodes_in_use_are_left_out_unless_they_are_named() -> None:
    """So are those that are down; a hostlist without a node is refused."""
    nodes = [fake_node(f"n{i}", gpus=2) for i in range(3)]
    nodes = [nodes[0], replace(nodes[1], gpus_free=1), replace(nodes[2], usable=False)]
    chosen, others = choose_nodes(nodes, [])
    assert ([n.name for n in chosen], others.keys()) == (["n0"], {"n1", "n2"})
    assert [n.name for n in choose_nodes(nodes, ["n[0-1]"])[0]] == ["n0", "n1"]
    with pytest.raises(OperatorError, match="n7"):
        choose_nodes(nodes, ["n7"])


# --- what is remembered ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("verdicts", "cordoned", "hours"),
    [
        ({"a": "ok", "b": "bad"}, {"b": 24}, {"a": 24, "b": 24}),
        ({"a": "bad"}, {"a": 24}, {"a": 24}),
        ({"a": "ok", "b": "suspect"}, {"b": 1}, {"a": 24, "b": 1}),
        ({"a": "suspect", "b": "suspect"}, {}, {"a": 1, "b": 1}),
        ({"a": "not checked", "b": "ok"}, {}, {"a": 1 / 6, "b": 24}),
    ],
)
def test_a_check_before_use_keeps_a_bad_node_away(
    tmp_path: Path, verdicts: dict[str, Verdict], cordoned: dict[str, float], hours: dict[str, float]
) -> None:
    """For a day; for an hour where only other nodes' passing accuses it. A check that was not held keeps no node away."""
    path, now = tmp_path / "nodes.json", 1000.0
    write_report([CheckedNode(node=n, verdict=v, why="w") for n, v in verdicts.items()], path, now)
    assert cordons.read_cordons(path, now) == {n: now + 3600 * h for n, h in cordoned.items()}
    for node, until in hours.items():
        assert node in cordons.checked_nodes(path, now + 3600 * until - 1)
        assert node not in cordons.checked_nodes(path, now + 3600 * until)
    assert cordons.read_node_failures(path, now).keys() == {
        n for n, v in verdicts.items() if v in ("bad", "suspect")
    }


def test_failures_are_kept_once_for_a_week_and_beside_cordons(tmp_path: Path) -> None:
    """The last of a node; told again they are not counted again."""
    path, seen = tmp_path / "nodes.json", cordons.Failure(at=100.0, why="Xid 79", seen_by="e1")
    cordons.cordon_nodes(path, ["n1"], 500.0, 100.0)
    for _ in range(2):
        cordons.record_node_failures(path, [("n1", seen), ("n2", seen)], 100.0)
    many = [("n2", cordons.Failure(at=100.0 + i, why="", seen_by="e2")) for i in range(30)]
    cordons.record_node_failures(path, many, 130.0)
    cordons.cordon_nodes(path, ["n3"], 500.0, 130.0)
    assert cordons.read_cordons(path, 130.0).keys() == {"n1", "n3"}
    kept = cordons.read_node_failures(path, 130.0)
    assert (kept["n1"], len(kept["n2"])) == ((seen,), cordons.MOST_FAILURES)
    assert cordons.read_node_failures(path, 131.0 + cordons.RECENT_SECONDS) == {}


def _remember(path: Path, who: int) -> None:
    for n in range(20):
        cordons.record_node_failures(
            path, [(f"n{who}-{n}", cordons.Failure(at=100.0, why="", seen_by="e"))], 100.0
        )
        cordons.cordon_nodes(path, [f"c{who}-{n}"], 500.0, 100.0)
        cordons.require_node_check(path, {f"k{who}-{n}": 500.0}, 100.0)


def test_what_several_processes_remember_at_once_is_all_kept(tmp_path: Path) -> None:
    path = tmp_path / "nodes.json"
    with ProcessPoolExecutor(4) as pool:
        for done in [pool.submit(_remember, path, who) for who in range(4)]:
            done.result()
    found = (
        cordons.read_node_failures(path, 100.0),
        cordons.read_cordons(path, 100.0),
        cordons.checked_nodes(path, 100.0),
    )
    assert [len(each) for each in found] == [80] * 3


def test_nodes_with_fewer_failures_are_offered_first() -> None:
    """Before larger ones; one with failures is still offered where no other is left."""
    nodes = [fake_node(n, gpus=g) for n, g in (("a", 8), ("b", 4), ("c", 4))]
    for gpus, expected in ((4, ["c"]), (8, ["c", "b"]), (16, ["c", "b", "a"])):
        asked = Demand(evaluation_id="e", priority=0, accepted_at=0, gpus=gpus, gpus_per_trial=1, in_use={})
        offered = allocate(nodes, [asked], Limits(), gpus_in_use=0, failures={"a": 2, "b": 1})["e"]
        assert [o.node for o in offered] == expected
