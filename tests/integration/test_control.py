"""Commands to a running evaluation on a real Slurm: a pause gives its nodes back, a resumption loses no answer, and of two
evaluations the one of the higher priority has the nodes."""

import json
import signal

import pytest
from dev_cluster.testing import wait_until

pytestmark = [pytest.mark.model, pytest.mark.slurm]


@pytest.fixture
def daemon(slurm_site):
    """A function that starts the daemon, or restarts it; the last one is ended with the test."""
    started = []

    def stop():
        for process in started[-1:]:
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=60)

    def start():
        stop()
        started.append(slurm_site.start(slurm_site.command("daemon")))
        wait_until(lambda: started[-1].poll() is not None or status(slurm_site)["daemon"], "the daemon")
        assert started[-1].poll() is None, started[-1].communicate()

    yield start
    stop()
    slurm_site.end_workers()


def on_gpus(cluster):
    """Names of jobs that wait for the partition of GPUs, or run there; workers of finished answers may run on others."""
    states = "--states=PENDING,CONFIGURING,RUNNING,SUSPENDED"
    queue = ["squeue", "--noheader", "--partition=gpu", states, "--format=%j"]
    return cluster.run_as_user(queue, check=True).stdout.split()


def status(site, name=None):
    """What `status --json` says, also of one evaluation; no daemon before there is a work folder."""
    done = site.run(site.command("status", "--json"))
    told = json.loads(done.stdout) if done.returncode == 0 else {"daemon": None}
    return told if name is None else next(row for row in told["evaluations"] if row["evaluation_id"] == name)


def typed(site, *words):
    done = site.run(site.command(*words))
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def until_ended(site, name):
    wait_until(lambda: status(site, name)["stage"] == "ended", f"the end of {name}", 400)


def submitted(site, *more):
    return typed(site, "submit", str(site.model), "--suite", str(site.suite), *more)


def test_a_pause_gives_the_nodes_back_and_a_resumption_ends_with_the_scores_of_lm_eval(
    slurm_site, daemon, expected
):
    """Typed in mid-inference; it outlives a restart of the daemon, and each shard, answered before or after, counts once."""
    slurm_site.pause_a_trial(after=1)
    slurm_site.env["EVALSPAN_BORROW_MAX_GPUS"] = "1"  # no other trial answers the rest meanwhile
    daemon()
    name = submitted(slurm_site)
    wait_until((slurm_site.folder / "paused").exists, "a trial in mid-inference", 240)
    typed(slurm_site, "pause", name, "--reason", "a deadline")
    wait_until(lambda: on_gpus(slurm_site.cluster) == [], "no job is left on nodes with GPUs", 120)
    wait_until(lambda: status(slurm_site, name)["stage"] == "paused", "its status says so")
    daemon()
    assert "a deadline" in typed(slurm_site, "status", name)
    assert on_gpus(slurm_site.cluster) == []
    typed(slurm_site, "resume", name)
    until_ended(slurm_site, name)
    assert slurm_site.results()["results"] == expected
    slurm_site.counted_once()


def first_use_of_a_node(site, name):
    """When the first job on a node with GPUs was intended, as its journal says; none yet: 0."""
    times = [
        event["at"]
        for event in site.events(site.work / name)
        if event["kind"] == "job-intended" and event["job"]["purpose"] in ("stage", "trial", "host")
    ]
    return min(times, default=0)


def test_the_next_free_nodes_go_to_the_evaluation_of_the_higher_priority(slurm_site, daemon):
    """Of two that wait, the older one would be first: it is lowered, or the other raised, below and beyond where it was."""
    cluster = slurm_site.cluster
    full = [
        "sbatch",
        "--parsable",
        "--output=/dev/null",
        "--partition=gpu",
        "--exclusive",
        "--wrap=sleep 600",
    ]
    jobs = [
        cluster.run_as_user([*full, f"--nodelist={node}"], check=True).stdout.strip() for node in ("n1", "n2")
    ]
    daemon()
    older, younger = (submitted(slurm_site, f"--limit={count}") for count in (3, 4))
    wait_until(
        lambda: all(status(slurm_site, name)["stage"] == "waits" for name in (older, younger)), "both wait"
    )
    typed(slurm_site, "priority", older, "5")
    typed(slurm_site, "priority", older, "-1")
    wait_until(
        lambda: (
            [e["priority"] for e in slurm_site.events(slurm_site.work / older) if "priority" in e] == [5, -1]
        ),
        "the daemon has obeyed",
    )
    cluster.run_as_user(["scancel", *jobs], check=True)
    for name in (older, younger):
        until_ended(slurm_site, name)
    assert 0 < first_use_of_a_node(slurm_site, younger) < first_use_of_a_node(slurm_site, older)
