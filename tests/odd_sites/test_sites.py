"""Whole evaluations on sites with what production has: the scores are lm-eval's, each shard counts once, nothing is left."""

from __future__ import annotations

import importlib.util
import json
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from dev_cluster import accounting, real_site
from dev_cluster.spec import DevClusterError
from dev_cluster.testing import unfinished, wait_until
from support.sites import LONG, Site, cluster

from evaljobs.contract.archived_files import files_in, read_bytes

pytestmark = [pytest.mark.model, pytest.mark.slurm]
PYSLURM = importlib.util.find_spec("pyslurm")
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
OUT_OF_MEMORY = "it had 150 MB, and the next asks for 300 MB: set {} = 300"
SMALL_JOBS = {"EVALSPAN_TRIAL_MEMORY_MB": "150", "EVALSPAN_METRIC_MEMORY_MB": "150"}
MORE_MEMORY = [OUT_OF_MEMORY.format(f"[{section}] memory_mb") for section in ("trial", "metric")]


@dataclass(frozen=True, kw_only=True)
class Row:
    """A site, what evalspan is told there, and what its report must and must not warn of."""

    shape: dict[str, Any] = field(default_factory=dict)
    options: tuple[str, ...] = ()  # of `evalspan eval`
    settings: str = ""  # more of evalspan.toml
    env: dict[str, str] = field(default_factory=dict)
    hosts: tuple[str, ...] = ()  # kinds of jobs on GPUs, where one job a node hosts its trials
    warns: list[str] = field(default_factory=list)
    silent: str = "\0"


def qos(name, **shape):
    return Row(shape={"accounting": True, **shape}, options=("--qos", name))


HOSTED = {"hosts": ("host",), "warns": ["one job that holds its GPUs"]}
SITES = {
    "cgroups": Row(shape={"cgroups": True}),
    "max-wall": qos("short"),
    "max-jobs": qos("few-jobs"),
    "max-jobs-two-nodes": qos("few-jobs", nodes=2),
    "max-submit": qos("few-submits"),
    "group-cpus": qos("few-cpus"),
    "gpus-of-a-user": qos("few-gpus"),
    "max-time": Row(shape={"max_time": 60}),
    "max-time-enforced": Row(shape={"max_time": 60, "part_limits": "ALL"}),
    "untyped-gpus": Row(shape={"untyped_gres": True}),
    "mixed-nodes": Row(shape={"mixed": True, "nodes": 4}),
    "reservation": Row(shape={"reservation": True, "nodes": 2}),
    "power-saving": Row(shape={"power_save": True}, settings="[nodes]\nwake = true\n"),
    "no-arrays": Row(shape={"max_array": 1}),
    "requests": Row(shape={"mixed": True, "nodes": 4}, settings=REQUESTS),
    "private-shm": Row(shape={"private_shm": True}, **HOSTED),
    "exclusive": Row(shape={"exclusive": True}, **HOSTED),
    "gpu-jobs-only": Row(shape={"gpu_jobs_only": True}, **HOSTED),
    # a private /dev/shm that only the trials find out
    "unnoticed": Row(
        shape={"private_shm": True},
        settings="[stage]\nhost_trials = false\n",
        **HOSTED | {"hosts": ("host", "stage")},
    ),
    # of the node's CPUs each trial has two, and a precursor would have two: the second trial would wait for them
    "cpu-memory": Row(
        shape={"cpus": 4, "cpu_memory_mb": 450},
        env={"EVALSPAN_TRIAL_CPUS": "2", "EVALSPAN_TRIAL_MEMORY_MB": "600"},
        **HOSTED,
    ),
    # jobs that the kernel ended ask for more memory, each setting is named with what would do, and no node rests
    "out-of-memory": Row(shape={"cgroups": True}, env=SMALL_JOBS, warns=MORE_MEMORY, silent="back-off"),
    "out-of-memory-hosted": Row(
        shape={"cgroups": True, "exclusive": True}, env=SMALL_JOBS, warns=MORE_MEMORY, silent="back-off"
    ),
}


@dataclass
class Run:
    """An evaluation that was started, and the jobs of it that were seen: kind -> (time limit, node asked for)."""

    site: Site
    process: subprocess.Popen[str]
    seen: dict[str, tuple[str, str]] = field(default_factory=dict)

    def look(self):
        shown = self.site.cluster.run_as_user(["squeue", "--noheader", "--format=%j %l %n"]).stdout
        self.seen |= {w[0]: (w[1], w[-1]) for row in shown.splitlines() if (w := row.split())}
        return self.process.poll() is not None

    def finish(self, expected):
        """Its report, once it has ended with lm-eval's scores."""
        try:
            wait_until(self.look, "its end", 420)
        except AssertionError:
            status = self.site.run(self.site.command("status")).stdout
            raise AssertionError(f"{status}\n{self.site.logs()}") from None
        finally:
            self.process.kill()
        out, err = self.process.communicate()
        assert self.process.returncode == 0, f"{out}\n{err}"
        assert dict(json.loads(out)["results"]) == expected
        root = self.site.root()
        self.site.counted_once()
        assert unfinished(self.site.cluster) == []
        ours = f"es-{root.name.rpartition('-')[2]}-"  # jobs of an earlier test may be completing still
        self.seen = {
            name.removeprefix(ours): told for name, told in self.seen.items() if name.startswith(ours)
        }
        return dict(json.loads((root / "report.json").read_text()))

    @property
    def kinds(self):
        return {name.partition("-")[0] for name in self.seen}

    def outcomes(self, kind):
        return [json.loads(read_bytes(p)) for p in files_in(self.site.root() / "outcomes", f"*.{kind}.json")]


@pytest.fixture
def begin(make_site):
    """Starts an evaluation on a cluster, as a row says."""

    def made(on, row=Row(), pause=0):
        site = make_site(on, more=row.settings)
        site.env |= row.env
        if pause:
            site.pause_a_trial(after=pause)
        return Run(site, site.start(site.evaluate("--shards-per-task", "3", *row.options)))

    return made


def evaluate(row, begin, expected):
    if row.shape.get("accounting"):
        try:
            accounting.check_machine()
        except DevClusterError as error:
            pytest.skip(str(error))
    if row.shape.get("cgroups") and not real_site.CGROUP_V1.is_dir():
        pytest.skip("cgroup v1 is not mounted")
    with cluster(**{"nodes": 1, "gpus": 2, "cpu_nodes": 1, "cpus": 8, **row.shape}) as made:
        run = begin(made, row)
        report = run.finish(expected)
    assert not row.hosts or run.kinds & {"host", "stage"} == set(row.hosts)
    assert not row.hosts or set(report["nodes"].values()) == {"host"}
    for words in row.warns:
        assert any(words in warning for warning in report["warnings"]), report["warnings"]
    assert not any(row.silent in warning for warning in report["warnings"]), report["warnings"]
    assert not list(Path("/sys/fs/cgroup").glob("*/slurm_n*/uid_*"))
    return run


@LONG
@pytest.mark.parametrize("name", SITES)
def test_each_site(name, begin, expected):
    evaluate(SITES[name], begin, expected)


def test_on_a_site_with_every_oddity_jobs_host_their_trials(odd_cluster, begin, expected):
    """Private /dev/shm, whole nodes, GPU jobs only: it is noticed, hosts and CPU jobs alone are used, scores are equal."""
    run = begin(odd_cluster)
    report = run.finish(expected)
    assert {"host"} <= run.kinds <= {"build", "host", "metric"}
    assert set(report["nodes"].values()) == {"host"}
    assert any("whole nodes (OverSubscribe=EXCLUSIVE)" in warning for warning in report["warnings"])
    staged, cleared = run.outcomes("staged"), run.outcomes("cleared")
    assert {s["rung"] for s in staged} == {"shm"}
    assert len(cleared) == len(staged)
    assert all(c["freed_bytes"] > 0 for c in cleared)


def test_a_tight_site_with_cgroups_accounts_and_limits(strict_cluster, begin, expected):
    """With the default limits of hours; nothing is sent to the node that is too small; scores are equal."""
    run = begin(strict_cluster, Row(options=("--qos", "short")))
    run.finish(expected)
    assert run.kinds >= {"build", "stage", "trial"}
    assert not any("-n1-" in name for name in run.seen), run.seen
    assert all(len(limit) <= len("59:00") or limit == "1:00:00" for limit, _ in run.seen.values()), run.seen


@LONG
def test_each_site_of_short_jobs_keeps_staged_weights(begin, expected):
    """Jobs end after two minutes, and a trial stands still for longer: the checkpoint leaves storage once."""
    with cluster(nodes=1, gpus=1, cpu_nodes=1, cpus=8, max_time=2) as made:
        run = begin(made, pause=1)
        run.finish(expected)
        staged = run.outcomes("staged")
        assert len(staged) > 1
        assert sum(o["storage_bytes"] > 0 for o in staged) == 1, staged
        assert sum(o["freed_bytes"] > 0 for o in run.outcomes("cleared")) == 1


@LONG
def test_each_site_with_a_node_that_launches_nothing(begin, expected):
    """Slurm ends builds on c1 before they begin: they are made on c2, and no message names a log that is not there."""
    with cluster(nodes=1, gpus=2, cpu_nodes=2, cpus=8) as made:
        spool = made.dir / "spool" / "c1"
        spool.rename(spool.with_name("c1.away"))
        spool.touch()
        warnings = begin(made).finish(expected)["warnings"]
        assert any("c1 could not launch" in warning for warning in warnings), warnings


@LONG
def test_each_site_whose_nodes_are_drained_at_the_start(begin, expected):
    """An evaluation is accepted, says what it waits for, and runs once the nodes are back."""
    with cluster(nodes=1, gpus=2, cpu_nodes=1, cpus=8) as made:
        made.update("nodename=n1", "state=drain", "reason=new driver")
        run = begin(made)
        try:
            status = run.site.command("status")
            wait_until(lambda: "n1 is drained (new driver)" in run.site.run(status).stdout)
            made.update("nodename=n1", "state=resume")
            run.finish(expected)
        finally:
            run.process.kill()


@pytest.mark.skipif(PYSLURM is None, reason="pyslurm is not installed: it builds on Slurm 25.11 alone")
def test_an_evaluation_through_pyslurm_gives_the_scores_of_lm_eval(plain_cluster, begin, expected):
    """No job is left, and `doctor` names what goes through commands."""
    assert PYSLURM is not None
    path = f"{Path(str(PYSLURM.origin)).parents[1]}:{plain_cluster.user_env['PYTHONPATH']}"
    run = begin(plain_cluster, Row(settings='api = "pyslurm"\n', env={"PYTHONPATH": path}))
    run.finish(expected)
    checked = run.site.run(run.site.command("doctor", "--cluster", "slurm", "--partition", "gpu"))
    assert "scancel" in checked.stdout, checked.stdout + checked.stderr
