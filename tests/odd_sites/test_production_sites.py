"""Whole evaluations on sites with what production has: cgroups, accounts, limits, odd nodes; the scores are lm-eval's."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from dev_cluster import accounting, real_site
from dev_cluster.spec import DevClusterError
from dev_cluster.testing import unfinished
from support.sites import cluster

pytestmark = [pytest.mark.model, pytest.mark.slurm]

# name -> (shape of the cluster, options of `evalspan eval`)
SITES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "cgroups": ({"cgroups": True}, []),
    "max-wall": ({"accounting": True}, ["--qos", "short"]),
    "max-jobs": ({"accounting": True}, ["--qos", "few-jobs"]),
    "max-submit": ({"accounting": True}, ["--qos", "few-submits"]),
    "group-cpus": ({"accounting": True}, ["--qos", "few-cpus"]),
    "gpus-of-a-user": ({"accounting": True}, ["--qos", "few-gpus"]),
    "max-time": ({"max_time": 60}, []),
    "max-time-enforced": ({"max_time": 60, "part_limits": "ALL"}, []),
    "untyped-gpus": ({"untyped_gres": True}, []),
    "mixed-nodes": ({"mixed": True, "nodes": 4}, []),
    "reservation": ({"reservation": True, "nodes": 2}, []),
    "power-saving": ({"power_save": True}, []),  # with [nodes] wake
    "no-arrays": ({"max_array": 1}, []),
}
ALL = ({"cgroups": True, "accounting": True, "max_time": 60, "part_limits": "ALL"}, ["--qos", "short"])


def evaluate(
    shape: dict[str, Any],
    options: list[str],
    make_site: Any,
    expected: dict[str, Any],
    memory_mb: int | None = None,
) -> list[str]:
    """A whole evaluation there: its scores equal `expected`, and nothing is left. Returns its warnings.

    `memory_mb`: that trials, builds and metric workers ask for at first.
    """
    if shape.get("accounting"):
        try:
            accounting.check_machine()
        except DevClusterError as error:
            pytest.skip(str(error))
    if shape.get("cgroups") and not real_site.CGROUP_V1.is_dir():
        pytest.skip("cgroup v1 is not mounted")
    with cluster(**{"nodes": 1, "gpus": 2, "cpu_nodes": 1, "cpus": 8, **shape}) as site_cluster:
        site = make_site(site_cluster, more="[nodes]\nwake = true\n" if shape.get("power_save") else "")
        if memory_mb is not None:
            site.env |= dict.fromkeys(
                ("EVALSPAN_TRIAL_MEMORY_MB", "EVALSPAN_METRIC_MEMORY_MB"), str(memory_mb)
            )
        process = site.start(site.evaluate("--shards-per-task", "3", *options))
        try:
            out, err = process.communicate(timeout=240)
        except subprocess.TimeoutExpired:
            queue = site_cluster.run_as_user(["squeue", "-o", "%i %j %T %r %l"]).stdout
            queue += site_cluster.run_as_user(["sinfo", "--list-reasons"]).stdout
            status = site.run(site.command("status")).stdout
            process.kill()
            raise AssertionError(
                f"not ended in 240 s\n{queue}\n{status}\n{process.communicate()[1]}"
            ) from None
        assert process.returncode == 0, f"{out}\n{err}"
        assert dict(json.loads(out)["results"]) == expected
        assert unfinished(site_cluster) == []
        report = json.loads(site.run(site.command("report", site.root().name, "--json")).stdout)
    assert not list(Path("/sys/fs/cgroup").glob("*/slurm_n*/uid_*"))
    return list(report["warnings"])


@pytest.mark.skipif(not os.environ.get("EVALSPAN_LONG"), reason="scripts/try-sites runs these")
@pytest.mark.parametrize("name", list(SITES))
def test_each_site(name: str, make_site: Any, expected: dict[str, Any]) -> None:
    evaluate(*SITES[name], make_site, expected)


def test_a_site_with_cgroups_accounts_and_limits(make_site: Any, expected: dict[str, Any]) -> None:
    evaluate(*ALL, make_site, expected)


@pytest.mark.skipif(not os.environ.get("EVALSPAN_LONG"), reason="scripts/try-sites runs these")
@pytest.mark.parametrize("hosted", [False, True])
def test_jobs_that_the_kernel_ends_for_lack_of_memory_get_more(
    hosted: bool, make_site: Any, expected: dict[str, Any]
) -> None:
    """Builds, trials and workers that ask for 150 MB: each setting is named with what would do, and no node rests."""
    warnings = evaluate({"cgroups": True, "exclusive": hosted}, [], make_site, expected, memory_mb=150)
    for setting in ("[trial] memory_mb", "[metric] memory_mb"):
        assert any(f"it had 150 MB, and the next asks for 300 MB: set {setting} = 300" in w for w in warnings)
    assert not any("back-off" in warning for warning in warnings), warnings
