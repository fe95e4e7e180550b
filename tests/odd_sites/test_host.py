"""Rung 2 for real: one job a node stages, hosts the trials and clears; the scores are lm-eval's."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from typing import Any

import pytest
from dev_cluster.api import Cluster, dev_cluster, unavailable
from dev_cluster.testing import unfinished

pytestmark = [pytest.mark.model, pytest.mark.slurm]


def logs(site: Any) -> str:
    return "\n".join(f"== {p}\n{p.read_text()[-1500:]}" for p in site.work.glob("*/logs/*.log"))


def finish(site: Any, *more: str) -> tuple[dict[str, Any], list[str]]:
    """Run the evaluation to its end; its results and the names of all of its jobs that were seen."""
    process = site.start(site.evaluate("--shards-per-task", "3", *more))
    seen: set[str] = set()
    end = time.monotonic() + 240
    while process.poll() is None:
        assert time.monotonic() < end, logs(site)
        seen.update(site.cluster.run_as_user(["squeue", "--noheader", "--format=%j"]).stdout.split())
    out, err = process.communicate()
    assert process.returncode == 0, f"{out}\n{err}\n{logs(site)}"
    ours = f"es-{site.root().name.rpartition('-')[2]}-"  # jobs of an earlier test may be completing still
    return json.loads(out), sorted(name for name in seen if name.startswith(ours))


def assert_each_shard_counts_once(site: Any) -> None:
    events = [json.loads(line) for line in (site.root() / "journal.jsonl").read_text().splitlines()]
    planned = [s for e in events if e["kind"] == "planned" for leaf in e["leaves"] for s in leaf["shards"]]
    counted = [s for e in events if e["kind"] == "shards-dumped" for s, _ in e["shards"]]
    assert Counter(counted) == Counter(planned)


def test_on_a_site_with_every_oddity_jobs_host_their_trials(
    odd_cluster: Cluster, make_site: Any, expected: dict[str, Any]
) -> None:
    """Private /dev/shm, whole nodes, GPU jobs only: it is noticed, hosts and CPU jobs alone are used, scores are equal."""
    site = make_site(odd_cluster)
    results, seen = finish(site)
    assert dict(results["results"]) == expected
    assert {name.split("-")[2] for name in seen} <= {"build", "host", "metric"}
    assert any("-host-" in name for name in seen)
    assert_each_shard_counts_once(site)
    assert unfinished(odd_cluster) == []
    report = json.loads((site.root() / "report.json").read_text())
    assert set(report["nodes"].values()) == {"host"}
    assert any("whole nodes (OverSubscribe=EXCLUSIVE)" in warning for warning in report["warnings"])
    outcomes = list((site.root() / "outcomes").glob("*-host-*.json"))
    staged = [json.loads(p.read_text()) for p in outcomes if p.name.endswith(".staged.json")]
    cleared = [json.loads(p.read_text()) for p in outcomes if p.name.endswith(".cleared.json")]
    assert {s["rung"] for s in staged} == {"shm"}
    assert len(cleared) == len(staged)
    assert all(c["freed_bytes"] > 0 for c in cleared)


@pytest.mark.skipif(not os.environ.get("EVALSPAN_LONG"), reason="scripts/try-sites runs these")
@pytest.mark.parametrize(
    "oddity", ["private_shm", "exclusive", "gpu_jobs_only", "cpu_memory_mb", "unnoticed"]
)
def test_each_oddity_alone(oddity: str, make_site: Any, expected: dict[str, Any]) -> None:
    """Each makes hosts of nodes, with equal scores; "unnoticed": a private /dev/shm that only the trials find out.

    "cpu_memory_mb": a precursor is given two CPUs, and the second trial of a node would wait for them.
    """
    reason = unavailable()
    if reason is not None:
        pytest.skip(reason)
    unnoticed = oddity == "unnoticed"
    shape: dict[str, Any] = {"private_shm" if unnoticed else oddity: True}
    if oddity == "cpu_memory_mb":
        shape = {
            "cpus": 4,
            "cpu_memory_mb": 450,
        }  # of the node's CPUs each trial has two, and a precursor would
    with dev_cluster(nodes=1, gpus=2, cpu_nodes=1, **shape) as cluster:
        site = make_site(cluster, more="[stage]\nhost_trials = false\n" if unnoticed else "")
        if oddity == "cpu_memory_mb":
            site.env |= {"EVALSPAN_TRIAL_CPUS": "2", "EVALSPAN_TRIAL_MEMORY_MB": "600"}
        results, seen = finish(site)
        assert dict(results["results"]) == expected
        assert any("-host-" in name for name in seen)
        assert any("-stage-" in name for name in seen) is unnoticed
        assert_each_shard_counts_once(site)
        assert unfinished(cluster) == []
        report = json.loads((site.root() / "report.json").read_text())
        assert set(report["nodes"].values()) == {"host"}
        assert any("one job that holds its GPUs" in warning for warning in report["warnings"])
