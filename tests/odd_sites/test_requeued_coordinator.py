"""The coordinator as a Slurm job with its own Redis, requeued for as long as Slurm holds a job back: trials go on."""

import logging
import os
import time
from pathlib import Path

import pytest
from dev_cluster import real_site
from dev_cluster.testing import state, unfinished, wait_state, wait_until
from support.sites import cluster
from support.toys import cluster_tasks

from coordinator.runtime.journal import read_events
from evaljobs.contract.outcomes import TrialEnded
from evaljobs.contract.storage import read_frames, read_record
from evaljobs.queue.redis_client import Link, QueueUnavailable
from evaljobs.queue.work_queue import WorkQueue

pytestmark = [
    pytest.mark.model,
    pytest.mark.slurm,
    pytest.mark.skipif(not os.environ.get("EVALSPAN_LONG"), reason="scripts/try-sites runs these"),
]
log = logging.getLogger(__name__)
SHARDS = 240
# more generation than two trials do in half an hour on two cores
TASK = """include: {tasks}/sums.yaml
task: toy_long
repeats: 1
dataset_kwargs: {{rows: 24000, seed: 5}}
generation_kwargs: {{until: ["Q:"], do_sample: false, max_gen_toks: 200}}
"""
SUITE = """name = "long"
include_path = ["{folder}/tasks"]
batch_size = 8
[[task]]
name = "toy_long"
"""


@pytest.fixture(scope="module")
def strict():
    """A job's processes end with it, so its Redis does: proctrack/cgroup."""
    if not real_site.CGROUP_V1.is_dir():
        pytest.skip("cgroup v1 is not mounted")
    with cluster(nodes=1, gpus=2, cpu_nodes=1, cpus=8, cgroups=True) as made:
        yield made


def furnish(site):
    texts = {
        "long.toml": SUITE.format(folder=site.folder),
        "tasks/long.yaml": TASK.format(tasks=cluster_tasks(site.cluster)),
        "bin/evalspan": f'#!/bin/sh\nexec {site.cluster.python} -m coordinator "$@"\n',
    }
    site.cluster.run_as_user(["mkdir", site.folder / "tasks"], check=True)
    for name, text in texts.items():
        site.cluster.run_as_user(["tee", site.folder / name], input=text, check=True)
    site.cluster.run_as_user(["chmod", "755", site.folder / "bin/evalspan"], check=True)


def submit(site):
    """The evaluation by `evaluate.sbatch`; the id of the coordinator's job."""
    script = Path(site.cluster.repo) / "scripts" / "evaluate.sbatch"
    options = ["--parsable", "-p", "cpu", "--mem=2G", f"--output={site.folder}/coordinator.log"]
    asked = [script, site.model, site.folder / "long.toml", "--partition", "gpu", "--work-dir", site.work]
    env = {"EVALSPAN_CONFIG": site.env["EVALSPAN_CONFIG"], "EVALSPAN_BIN": str(site.folder / "bin/evalspan")}
    more = ["--shards-per-task", str(SHARDS)]
    argv = ["sbatch", *options, *map(str, asked), *more]
    return site.cluster.run_as_user(argv, cwd=site.folder, env=env, check=True).stdout.strip()


def heads(site):
    """Trial -> its records."""
    files = site.work.glob("*/responses/*.frames")
    return {file.name: [head for _, head in read_frames(file)] for file in files}


def redis_answers(site):
    try:
        WorkQueue(Link(site.work / "redis" / "address.json"), site.root().name).snapshot()
    except QueueUnavailable:
        return False
    return True


def busy(records, since, until):
    """Seconds of this span in which the trial ran shards that it dumped."""
    ends = [(head.started_at, head.started_at + head.seconds) for head in records]
    return sum(max(0.0, min(end, until) - max(start, since)) for start, end in ends)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("gap", [121, 540])
def test_trials_infer_while_the_coordinator_is_requeued(gap, strict, make_site):
    """No trial is lost, none is believed hung, and its GPU idles at most 5 % of the time without Redis."""
    site = make_site(strict)
    furnish(site)
    job = submit(site)
    try:
        begun = lambda: len(heads(site)) == 2 and all(heads(site).values())  # noqa: E731
        going = ("PENDING", "CONFIGURING", "RUNNING", "UNKNOWN")
        wait_until(lambda: begun() or state(strict, job) not in going, "both trials dump", 400)
        assert begun(), (site.folder / "coordinator.log").read_text()
        strict.run_as_user(["scontrol", "requeue", job], check=True)
        wait_until(lambda: not redis_answers(site), "Redis ends with the coordinator's job")
        gone = time.time()
        wait_state(strict, job, "PENDING")
        strict.run_as_user(["scontrol", "update", f"jobid={job}", f"StartTime=now+{gap}"], check=True)
        wait_until(lambda: redis_answers(site), "the coordinator is back", gap + 200)
        back = time.time()
        after = lambda: all(h[-1].started_at > back for h in heads(site).values())  # noqa: E731
        wait_until(after, "each trial has begun and dumped one more shard", 200)
        records = heads(site)
        events = list(read_events(site.root() / "journal.jsonl"))
        kinds = [event.kind for event in events]
        assert kinds.count("restarted") == 1
        assert len(records) == 2, "no third trial was needed"
        assert not {"trial-hung", "job-not-submitted"} & set(kinds)
        assert not list(site.work.glob("*/outcomes/*trial-ended*"))
        assert not list(site.work.glob("*/outcomes/*failed*"))
        assert sum(map(len, records.values())) < SHARDS, "shards are left"
    finally:
        strict.run_as_user(["scancel", job])
    wait_until(lambda: unfinished(strict) == [], "the cancelled evaluation's jobs have ended")
    ended = [read_record(place, TrialEnded) for place in site.work.glob("*/outcomes/*trial-ended*")]
    idle = 1 - sum(busy(h, gone, back) for h in records.values()) / (2 * (back - gone))
    ran = [head.shard for h in records.values() for head in h]
    figures = (
        f"Redis away for {back - gone:.0f} s; GPUs idle {100 * idle:.1f} % of it; seconds that trials waited "
        f"{[round(e.wait_seconds, 1) for e in ended]}; shards {len(ran)}, run twice {len(ran) - len(set(ran))}"
    )
    log.warning(figures)
    assert len(ended) == 2
    assert back - gone >= gap
    assert idle <= 0.05, figures
