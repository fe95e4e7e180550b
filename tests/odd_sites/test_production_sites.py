"""Whole evaluations on sites with what production has: cgroups, accounts, limits, odd nodes; the scores are lm-eval's."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from dev_cluster import accounting, real_site
from dev_cluster.spec import DevClusterError
from dev_cluster.testing import unfinished, wait_until
from support.sites import cluster

pytestmark = [pytest.mark.model, pytest.mark.slurm]
PYSLURM = importlib.util.find_spec("pyslurm")

# name -> (shape of the cluster, options of `evalspan eval`)
SITES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "cgroups": ({"cgroups": True}, []),
    "max-wall": ({"accounting": True}, ["--qos", "short"]),
    "max-jobs": ({"accounting": True}, ["--qos", "few-jobs"]),
    "max-jobs-two-nodes": ({"accounting": True, "nodes": 2}, ["--qos", "few-jobs"]),
    "max-submit": ({"accounting": True}, ["--qos", "few-submits"]),
    "group-cpus": ({"accounting": True}, ["--qos", "few-cpus"]),
    "gpus-of-a-user": ({"accounting": True}, ["--qos", "few-gpus"]),
    "max-time": ({"max_time": 60}, []),
    "max-time-enforced": ({"max_time": 60, "part_limits": "ALL"}, []),
    "untyped-gpus": ({"untyped_gres": True}, []),
    "mixed-nodes": ({"mixed": True, "nodes": 4}, []),
    "reservation": ({"reservation": True, "nodes": 2}, []),
    "power-saving": ({"power_save": True}, []),
    "no-arrays": ({"max_array": 1}, []),
    "requests": ({"mixed": True, "nodes": 4}, []),
}
REQUESTS = """
[slurm]
gpu_request = "--gpus-per-node={type}:{n}"
[slurm.precursor]
partition = "spare"
[slurm.metric]
extra_args = ["--nice=7"]
[nodes]
gpu_types = ["a100"]
exclude = ["n1,gpu-node-of-the-very-long-named-cluster-in-building-12-n[0003]"]
"""
SETTINGS = {"power-saving": "[nodes]\nwake = true\n", "requests": REQUESTS}  # name -> more settings
QUEUE = ["squeue", "-o", "%i %j %T %r %l"]
ALL = ({"cgroups": True, "accounting": True, "max_time": 60, "part_limits": "ALL"}, ["--qos", "short"])


def finished(site: Any, process: subprocess.Popen[str], expected: dict[str, Any]) -> None:
    """The evaluation ends with lm-eval's scores and leaves no job."""
    try:
        out, err = process.communicate(timeout=420)
    except subprocess.TimeoutExpired:
        shown = [site.cluster.run_as_user(argv).stdout for argv in (QUEUE, ["sinfo", "--list-reasons"])]
        shown.append(site.run(site.command("status")).stdout)
        process.kill()
        raise AssertionError("\n".join(["not ended in 420 s", *shown, process.communicate()[1]])) from None
    assert process.returncode == 0, f"{out}\n{err}"
    assert dict(json.loads(out)["results"]) == expected
    assert unfinished(site.cluster) == []


def evaluate(
    shape: dict[str, Any],
    options: list[str],
    make_site: Any,
    expected: dict[str, Any],
    *,
    settings: str = "",
    memory_mb: int | None = None,
) -> list[str]:
    """A whole evaluation there: its scores equal `expected`, and nothing is left. Returns its warnings.

    `settings`: more of evalspan.toml. `memory_mb`: that trials, builds and metric workers ask for at first.
    """
    if shape.get("accounting"):
        try:
            accounting.check_machine()
        except DevClusterError as error:
            pytest.skip(str(error))
    if shape.get("cgroups") and not real_site.CGROUP_V1.is_dir():
        pytest.skip("cgroup v1 is not mounted")
    with cluster(**{"nodes": 1, "gpus": 2, "cpu_nodes": 1, "cpus": 8, **shape}) as site_cluster:
        site = make_site(site_cluster, more=settings)
        if memory_mb is not None:
            site.env |= dict.fromkeys(
                ("EVALSPAN_TRIAL_MEMORY_MB", "EVALSPAN_METRIC_MEMORY_MB"), str(memory_mb)
            )
        finished(site, site.start(site.evaluate("--shards-per-task", "3", *options)), expected)
        report = json.loads(site.run(site.command("report", site.root().name, "--json")).stdout)
    if shape.get("cgroups"):
        assert not list(Path("/sys/fs/cgroup").glob("*/slurm_n*/uid_*"))
    return list(report["warnings"])


@pytest.mark.skipif(not os.environ.get("EVALSPAN_LONG"), reason="scripts/try-sites runs these")
@pytest.mark.parametrize("name", list(SITES))
def test_each_site(name: str, make_site: Any, expected: dict[str, Any]) -> None:
    evaluate(*SITES[name], make_site, expected, settings=SETTINGS.get(name, ""))


def test_a_site_with_cgroups_accounts_and_limits(make_site: Any, expected: dict[str, Any]) -> None:
    evaluate(*ALL, make_site, expected)


@pytest.mark.skipif(not os.environ.get("EVALSPAN_LONG"), reason="scripts/try-sites runs this")
def test_each_site_of_short_jobs_keeps_staged_weights(make_site: Any, expected: dict[str, Any]) -> None:
    """Jobs end after two minutes, and a trial stands still for longer: the checkpoint leaves storage once."""
    with cluster(nodes=1, gpus=1, cpu_nodes=1, cpus=8, max_time=2) as site_cluster:
        site = make_site(site_cluster)
        site.pause_a_trial(after=1)
        finished(site, site.start(site.evaluate("--shards-per-task", "3")), expected)
        outcomes = [json.loads(p.read_text()) for p in (site.root() / "outcomes").glob("*-stage-*.json")]
        staged = [o for o in outcomes if o["kind"] == "staged"]
        assert len(staged) > 1
        assert sum(o["storage_bytes"] > 0 for o in staged) == 1, outcomes
        assert sum(o["kind"] == "cleared" and o["freed_bytes"] > 0 for o in outcomes) == 1, outcomes


@pytest.mark.skipif(not os.environ.get("EVALSPAN_LONG"), reason="scripts/try-sites runs these")
@pytest.mark.parametrize("hosted", [False, True])
def test_each_site_gives_jobs_that_the_kernel_ended_more_memory(
    hosted: bool, make_site: Any, expected: dict[str, Any]
) -> None:
    """Builds, trials and workers that ask for 150 MB: each setting is named with what would do, and no node rests."""
    warnings = evaluate({"cgroups": True, "exclusive": hosted}, [], make_site, expected, memory_mb=150)
    for setting in ("[trial] memory_mb", "[metric] memory_mb"):
        assert any(f"it had 150 MB, and the next asks for 300 MB: set {setting} = 300" in w for w in warnings)
    assert not any("back-off" in warning for warning in warnings), warnings


@pytest.mark.skipif(not os.environ.get("EVALSPAN_LONG"), reason="scripts/try-sites runs this")
def test_each_site_with_a_node_that_launches_nothing(make_site: Any, expected: dict[str, Any]) -> None:
    """Slurm ends builds on c1 before they begin: they are made on c2, and no message names a log that is not there."""
    with cluster(nodes=1, gpus=2, cpu_nodes=2, cpus=8) as site_cluster:
        spool = site_cluster.dir / "spool" / "c1"
        spool.rename(spool.with_name("c1.away"))
        spool.touch()
        site = make_site(site_cluster)
        finished(site, site.start(site.evaluate("--shards-per-task", "3")), expected)
        warnings = json.loads((site.root() / "report.json").read_text())["warnings"]
        assert any("c1 could not launch" in warning for warning in warnings), warnings


@pytest.mark.skipif(not os.environ.get("EVALSPAN_LONG"), reason="scripts/try-sites runs this")
def test_each_site_whose_nodes_are_drained_at_the_start(make_site: Any, expected: dict[str, Any]) -> None:
    """An evaluation is accepted, says what it waits for, and runs once the nodes are back."""
    with cluster(nodes=1, gpus=2, cpu_nodes=1, cpus=8) as site_cluster:
        site_cluster.update("nodename=n1", "state=drain", "reason=new driver")
        site = make_site(site_cluster)
        process = site.start(site.evaluate("--shards-per-task", "3"))
        try:
            wait_until(lambda: "n1 is drained (new driver)" in site.run(site.command("status")).stdout)
            site_cluster.update("nodename=n1", "state=resume")
            finished(site, process, expected)
        finally:
            process.kill()


@pytest.mark.skipif(PYSLURM is None, reason="pyslurm is not installed: it builds on Slurm 25.11 alone")
def test_an_evaluation_through_pyslurm_gives_the_scores_of_lm_eval(
    make_site: Any, expected: dict[str, Any]
) -> None:
    """No job is left, and `doctor` names what goes through commands."""
    assert PYSLURM is not None
    with cluster(nodes=2, gpus=2, cpu_nodes=1, cpus=8) as real:
        site = make_site(real, more='api = "pyslurm"\n')
        site.env["PYTHONPATH"] = f"{Path(str(PYSLURM.origin)).parents[1]}:{site.env['PYTHONPATH']}"
        finished(site, site.start(site.evaluate("--shards-per-task", "3")), expected)
        checked = site.run(site.command("doctor", "--cluster", "slurm", "--partition", "gpu"))
        assert "scancel" in checked.stdout, checked.stdout + checked.stderr
