"""Several checkpoints at once on a site that runs four jobs of a user, with `init`'s own settings and daemon line."""

import json
import logging
import os
import re
import shlex
import shutil
import time
import tomllib
from pathlib import Path

import pytest
from dev_cluster import accounting
from dev_cluster.spec import DevClusterError
from dev_cluster.testing import sbatch, unfinished, wait_state, wait_until
from support.sites import cluster
from support.toys import make_readable, toy_model

pytestmark = [
    pytest.mark.model,
    pytest.mark.slurm,
    pytest.mark.skipif(not os.environ.get("EVALSPAN_LONG"), reason="scripts/try-sites runs this"),
]
log = logging.getLogger(__name__)
SHAPE = {
    "nodes": 4,
    "gpus": 2,
    "cpu_nodes": 1,
    "cpus": 8,
    "memory_mb": 16000,
    "untyped_gres": True,
    "accounting": True,
    "demand_account": True,
    "max_time": 20,
    "part_limits": "ALL",
}
AT_ONCE = 3
TIMES_LONGER = 3  # than a lone evaluation, each of three at once


class Folder:
    """The ordinary user's folder, with checkpoints of different weights, what `init` wrote, and its daemon."""

    def __init__(self, site, models):
        self.site, self.path = site, Path(site.user_dir) / "evaluations"
        site.run_as_user(["mkdir", "-p", self.path / "bin"], check=True)
        for seed in range(4 + AT_ONCE):
            to = self.path / f"step-{seed}"
            site.run_as_user(["mkdir", to], check=True)
            for file in toy_model(models, seed).iterdir():  # the user cannot read root's temporary folders
                shutil.copyfile(file, to / file.name)
            make_readable(to.iterdir())
        program = f'#!/bin/sh\nexec {site.python} -m coordinator "$@"\n'
        site.run_as_user(["tee", self.path / "bin/evalspan"], input=program, check=True)
        site.run_as_user(["chmod", "755", self.path / "bin/evalspan"], check=True)
        self.env = {
            "NO_COLOR": "1",
            "EVALSPAN_BIN": str(self.path / "bin/evalspan"),
            "EVALSPAN_TRIAL_DEVICE": "cpu",
        }

    def evalspan(self, *words, **env):
        argv = [self.path / "bin/evalspan", *words]
        done = self.site.run_as_user(argv, cwd=self.path, env=self.env | env)
        assert done.returncode == 0, f"{words}: {done.stdout}\n{done.stderr}"
        return done.stdout

    def start_daemon(self):
        """By the line that `init` prints, word for word: a new one, which has met no limit yet."""
        said = self.evalspan("init", "--force")  # finds the account that the site demands, and the limit
        (line,) = re.findall(r"then the daemon: `(sbatch [^`]*)`", said)
        argv = ["sbatch", "--parsable", *shlex.split(line)[1:]]
        job = self.site.run_as_user(argv, cwd=self.path, env=self.env, check=True).stdout.strip()
        wait_until(lambda: "daemon: running" in self.evalspan("status"), "the daemon runs", 60)
        return job

    def settings(self):
        """Those of `init` that keep to the limit."""
        made = tomllib.loads((self.path / "evalspan.toml").read_text())
        return made["borrow"], made["metric"], made["stage"]

    def submit(self, seed):
        told = self.evalspan("submit", f"step-{seed}", "--suite", "quickstart", "--json")
        return str(json.loads(told)["evaluation_id"])

    def ended(self, name):
        return (self.path / "evalspan-work" / name / "results.json").exists()


def timed(folder, *seeds, deadline_s=1500):
    """Seconds from each one's submission to its results."""
    began, names = {}, []
    for seed in seeds:
        at = time.time()
        names.append(folder.submit(seed))
        began[names[-1]] = at
    took = {}

    def over():
        for name in names:
            if name not in took and folder.ended(name):
                took[name] = time.time() - began[name]
        return len(took) == len(names)

    try:
        wait_until(over, f"{names} are scored, not only {took}", deadline_s)
    except AssertionError:
        log.warning("%s\n%s", queue(folder.site), folder.evalspan("status"))
        raise
    return [round(took[name], 1) for name in names]


def queue(site):
    return site.run_as_user(["squeue", "-o", "%i %j %T %r %l %M"]).stdout


def hand_over(folder, job, seed):
    """While jobs of the user's own leave the evaluation no place, the daemon is told that its time is over. Its successor, which
    runs at once, before the evaluation's jobs that wait.
    """
    site = folder.site
    others = [sbatch(site, "sleep 600", "--partition=cpu", "--account=research") for _ in range(3)]
    for other in others:
        wait_state(site, other, "RUNNING")
    name = folder.submit(seed)
    wait_until(lambda: re.search(r" es-.* QOSMaxJobsPerUserLimit", queue(site)), "a job waits for it", 300)
    site.run_as_user(["scancel", "--batch", "--signal=USR1", job], check=True)
    wait_state(site, job, "COMPLETED")
    said = (folder.path / "evalspan-daemon.log").read_text()
    (successor,) = re.findall(r"job (\d+) goes on", said)
    wait_state(site, successor, "RUNNING")
    site.run_as_user(["scancel", *others], check=True)
    wait_until(lambda: folder.ended(name), f"{name} is scored", 600)
    return str(successor)


@pytest.mark.timeout(3600)
def test_each_site_scores_several_checkpoints_under_a_limit_on_jobs(tmp_path):
    """Three at once take at most three times a lone evaluation's time, and the daemon's line of `init` runs as printed.

    Its successor gets its place, though another job waits for the limit.
    """
    try:
        accounting.check_machine()
    except DevClusterError as error:
        pytest.skip(str(error))
    with cluster(**SHAPE) as site:
        accounting.set_default_qos(site.record, "four-jobs")
        folder = Folder(site, tmp_path)
        job = folder.start_daemon()
        try:
            assert folder.settings() == ({"max_gpus": 1}, {"workers": 1}, {"prefetch": 0})
            (first,), (lone,) = timed(folder, 0), timed(folder, 1)
            site.run_as_user(["scancel", job])
            wait_until(lambda: unfinished(site) == [], "the first daemon's jobs are gone")
            job = folder.start_daemon()
            assert folder.settings() == ({"max_gpus": 1}, {"workers": 1}, {"prefetch": 0})
            began = time.time()
            several = timed(folder, *range(2, 2 + AT_ONCE))
            total = round(time.time() - began, 1)
            (again,) = timed(folder, 2 + AT_ONCE)
            said = "first %s s, lone ones %s and %s s, three at once %s s, all in %s s"
            log.warning(said, first, lone, again, several, total)
            job = hand_over(folder, job, 3 + AT_ONCE)
        finally:
            site.run_as_user(["scancel", job])
        wait_until(lambda: unfinished(site) == [], "its jobs are gone")
        assert max(several) <= TIMES_LONGER * min(lone, again), (first, lone, again, several)
        assert total <= lone + again + max(lone, again), (lone, again, total)
