"""What the daemon costs and how soon it acts.

`events`: CPU milliseconds that the state machine takes for an event of an evaluation on 256 nodes of 8 GPUs, 2,048 trials ever.
`replay`: seconds until a coordinator that was killed has its state again from a journal of about `--events` events of such a one.
`slurm`: a daemon on a development cluster: seconds from the trigger to the precursor's submission (and of those the
gate's, which waits for a checkpoint that has stopped changing), submissions per node, what it asks of the controller
(its commands are counted by wrappers), seconds from a shard to the next one on its GPU, and its CPU share and memory when nothing is left to do.
`scale` (--scale, and nothing else then): many evaluations on one daemon and a cluster of many nodes, with an engine that
holds its GPU for drawn seconds; every document must be scored once, and the coordinator must stay below one core.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import sys
import time
from pathlib import Path
from typing import Any

from chaos_lib.site import Place, Site, place
from dev_cluster.api import unavailable
from dev_cluster.testing import wait_until

from bench.events import events, replay
from bench.harness import command, option
from bench.scale import scale
from bench.synthetic_run import COMMANDS, count_commands, counted
from evaljobs.contract.storage import read_frames

TASKS = 60
TICKS = os.sysconf("SC_CLK_TCK")


# --- a daemon on Slurm -----------------------------------------------------------------------------------------------


def _cost(pid: int) -> tuple[float, float]:
    """CPU seconds so far, its ended children's included, and resident MB of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    status = dict(
        line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line
    )
    return sum(map(int, fields[11:15])) / TICKS, int(status["VmRSS"].split()[0]) / 1024


def gaps(work: Path) -> dict[str, Any]:
    """Seconds between a shard's last answer and the next shard's start on the same trial, its dump between them."""
    found = []
    for file in work.glob("*/responses/*.frames"):
        spans = sorted((head.started_at, head.seconds) for _, head in read_frames(file, 0))
        found += [start - (before + lasted) for (before, lasted), (start, _) in itertools.pairwise(spans)]
    found.sort()
    if not found:
        return {"shards": 0}
    return {
        "shards": len(found),
        "median": found[len(found) // 2],
        "p95": found[math.ceil(0.95 * len(found)) - 1],
        "max": found[-1],
    }


def daemon(where: Place, idle_seconds: float, poll: float) -> dict[str, Any]:
    """One evaluation through a daemon, then silence; its own poll interval, as a site would have it."""
    site = Site.make(where, "bench")
    config = site.folder / "evalspan.toml"
    config.write_text(config.read_text().replace("poll_seconds = 1.0", f"poll_seconds = {poll}"))
    site = site.as_daemon()
    count_commands(site)
    process = site.start_program("daemon")
    try:
        wait_until((site.work / "redis" / "address.json").exists, "the daemon's Redis")
        triggered = time.time()
        site.start_program(
            "submit", str(site.folder / "tiny"), "--suite", str(site.folder / "chaos.toml")
        ).wait()
        spooled = time.time()
        wait_until(lambda: any(e["kind"] == "results-written" for e in site.events()), "results", 600)
        asked_at, asked = time.time(), counted(site)
        events = site.events()
        wait_until(lambda: not site.user(["squeue", "--noheader"]), "an empty queue")
        quiet = counted(site)
        before, _ = _cost(process.pid)
        time.sleep(idle_seconds)
        after, rss = _cost(process.pid)
        silent = counted(site)
    finally:
        process.kill()
        process.wait()
    accepted = next(e["at"] for e in events if e["kind"] == "accepted")
    staged = [e["at"] for e in events if e["kind"] == "job-submitted" and "-stage-" in e["job"]]
    nodes = {o["node"] for e in events if e["kind"] == "nodes-offered" for o in e["offers"]}
    submitted = [e for e in events if e["kind"] == "job-submitted"]
    of_nodes = [e for e in submitted if "-stage-" in e["job"] or "-trial-" in e["job"]]
    polls = sum(asked[c] for c in ("squeue", "sinfo"))
    return {
        "poll_seconds": poll,
        "submit_command_seconds": spooled - triggered,
        "trigger_to_accepted_seconds": accepted - spooled,
        "accepted_to_first_precursor_seconds": min(staged) - accepted,
        "trigger_to_first_precursor_seconds": min(staged) - spooled,
        "shard_to_next_seconds": gaps(site.work),
        "submissions": len(submitted),
        "submissions_per_node": len(of_nodes) / max(1, len(nodes)),
        "polls_per_second_busy": polls / (asked_at - accepted),
        "polls_per_second_idle": sum(silent[c] - quiet[c] for c in COMMANDS) / idle_seconds,
        "commands": asked,
        "idle_cpu_percent": 100 * (after - before) / idle_seconds,
        "rss_mb": round(rss),
    }


def measure(said: argparse.Namespace) -> tuple[dict[str, Any], bool]:
    if said.scale:
        if said.keep is not None:
            said.keep.mkdir(parents=True, exist_ok=True)
        found = scale({k: v for k, v in vars(said).items() if k != "keep"}, said.keep)
        whole = found["evaluations_ended"] == said.evaluations and not found["wrong_count"]
        found["targets"] = {"nothing_lost": whole, "below_one_core": found["coordinator"]["cores"] < 1}
        return {"scale": found}, all(found["targets"].values())
    result: dict[str, Any] = {
        "events": events(said.step_nodes),
        "replay": replay(said.step_nodes, said.events),
        "slurm": None,
    }
    if (why := "not asked for" if said.idle <= 0 else unavailable()) is not None:
        return result | {"slurm_skipped": why}, True
    with place() as where:
        result["slurm"] = daemon(where, said.idle, said.poll)
    return result, True


OPTIONS = (
    option("--events", 100_000, "of the journal that is replayed"),
    option("--step-nodes", 256, "of `events` and `replay`; 8 GPUs each"),
    option("--idle", 30.0, "seconds that the idle daemon is watched for; 0: no daemon"),
    option("--poll", 10.0, "[cluster] poll_seconds"),
    option("--scale", False, "many evaluations on many synthetic GPUs", action="store_true"),
    option("--nodes", 32, "scale: nodes"),
    option("--gpus", 8, "scale: of each node"),
    option("--evaluations", 20, "scale: evaluations at once"),
    option("--tasks", TASKS, "scale: of an evaluation"),
    option("--batches", 24, "scale: of a task, on average; one document each"),
    option("--batch-seconds", 1.0, "scale: of a batch, on average"),
    option("--nodes-each", 2, "scale: [borrow] max_nodes, of one evaluation"),
    option("--slow", 1.0, "scale: the first GPU takes so many times as long"),
    option("--seed", 1, "scale: of what is drawn"),
    option("--keep", says="scale: put the daemon's log and costs.json there", metavar="DIR", type=Path),
)
if __name__ == "__main__":
    sys.exit(command("bench_daemon", __doc__, measure, *OPTIONS, slurm=lambda said: said.scale))
