"""What the daemon costs and how soon it acts. Prints JSON; every figure was measured on this machine, now.

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
import json
import math
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from bench_daemon_lib.events import events, replay
from bench_daemon_lib.scale import ScaleError, scale
from chaos_lib.site import Place, Site, place
from dev_cluster.api import DevClusterError, unavailable

from evaljobs.contract.storage import read_frames

TASKS = 60
TICKS = os.sysconf("SC_CLK_TCK")
COMMANDS = ("sbatch", "squeue", "sinfo", "scancel", "scontrol")


# --- a daemon on Slurm -----------------------------------------------------------------------------------------------


def _count(site: Site) -> dict[str, int]:
    return {c: len(list((site.folder / f"marks-{c}").iterdir())) for c in COMMANDS}


def _cost(pid: int) -> tuple[float, float]:
    """CPU seconds so far, its ended children's included, and resident MB of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    status = dict(
        line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line
    )
    return sum(map(int, fields[11:15])) / TICKS, int(status["VmRSS"].split()[0]) / 1024


def _until(law: Any, what: str, seconds: float = 240) -> None:
    end = time.monotonic() + seconds
    while not law():
        if time.monotonic() > end:
            raise SystemExit(f"not within {seconds} s: {what}")
        time.sleep(0.02)


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
        "median": round(found[len(found) // 2], 4),
        "p95": round(found[math.ceil(0.95 * len(found)) - 1], 4),
        "max": round(found[-1], 4),
    }


def daemon(where: Place, idle_seconds: float, poll: float) -> dict[str, Any]:
    """One evaluation through a daemon, then silence; its own poll interval, as a site would have it."""
    site = Site.make(where, "bench")
    config = site.folder / "evalspan.toml"
    text = config.read_text().replace(
        "poll_seconds = 1.0", f'poll_seconds = {poll}\nkind = "slurm"\npartition = "gpu"'
    )
    config.write_text(text)
    for command in COMMANDS:
        site.wrap(command, 'mktemp "$ONCE/XXXXXXXX" >/dev/null\nexec "$REAL" "$@"')
    process = site.start_program("daemon")
    try:
        _until((site.work / "redis" / "address.json").exists, "the daemon's Redis")
        triggered = time.time()
        submit = site.start_program(
            "submit", str(site.folder / "tiny"), "--suite", str(site.folder / "chaos.toml")
        )
        submit.wait()
        spooled = time.time()
        _until(lambda: any(e["kind"] == "results-written" for e in site.events()), "results", 600)
        asked_at, asked = time.time(), _count(site)
        events = site.events()
        _until(lambda: not site.user(["squeue", "--noheader"]), "an empty queue")
        quiet = _count(site)
        before, _ = _cost(process.pid)
        time.sleep(idle_seconds)
        after, rss = _cost(process.pid)
        silent = _count(site)
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
        "submit_command_seconds": round(spooled - triggered, 2),
        "trigger_to_accepted_seconds": round(accepted - spooled, 2),
        "accepted_to_first_precursor_seconds": round(min(staged) - accepted, 2),
        "trigger_to_first_precursor_seconds": round(min(staged) - spooled, 2),
        "shard_to_next_seconds": gaps(site.work),
        "submissions": len(submitted),
        "submissions_per_node": round(len(of_nodes) / max(1, len(nodes)), 2),
        "polls_per_second_busy": round(polls / (asked_at - accepted), 3),
        "polls_per_second_idle": round(sum(silent[c] - quiet[c] for c in COMMANDS) / idle_seconds, 3),
        "commands": asked,
        "idle_cpu_percent": round(100 * (after - before) / idle_seconds, 2),
        "rss_mb": round(rss),
    }


def _scale(said: argparse.Namespace) -> int:
    """Exit status 1 where something was lost or the coordinator took a core; 2 where no cluster can be started."""
    why = unavailable()
    if why is not None:
        print(why, file=sys.stderr)
        return 2
    if said.keep is not None:
        said.keep.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the cluster is taken down
    try:
        found = scale({k: v for k, v in vars(said).items() if k != "keep"}, said.keep)
    except (DevClusterError, ScaleError) as error:
        print(error, file=sys.stderr)
        return 2 if isinstance(error, DevClusterError) else 1
    whole = found["evaluations_ended"] == said.evaluations and not found["wrong_count"]
    found["targets"] = {"nothing_lost": whole, "below_one_core": found["coordinator"]["cores"] < 1}
    print(json.dumps(rounded({"scale": found}), indent=1))
    return 0 if all(found["targets"].values()) else 1


def rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 4)
    if isinstance(value, dict):
        return {key: rounded(inner) for key, inner in value.items()}
    return [rounded(inner) for inner in value] if isinstance(value, list) else value


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/bench_daemon", description=__doc__)
    parser.add_argument("--events", type=int, default=100_000, help="of the journal that is replayed")
    parser.add_argument("--step-nodes", type=int, default=256, help="of `events` and `replay`; 8 GPUs each")
    parser.add_argument(
        "--idle", type=float, default=30.0, help="seconds that the idle daemon is watched for; 0: no daemon"
    )
    parser.add_argument("--poll", type=float, default=10.0, help="[cluster] poll_seconds")
    large = parser.add_argument_group("scale")
    large.add_argument("--scale", action="store_true", help="many evaluations on many synthetic GPUs")
    large.add_argument("--nodes", type=int, default=32)
    large.add_argument("--gpus", type=int, default=8, help="of each node")
    large.add_argument("--evaluations", type=int, default=20)
    large.add_argument("--tasks", type=int, default=TASKS)
    large.add_argument("--batches", type=int, default=24, help="of a task, on average; one document each")
    large.add_argument("--batch-seconds", type=float, default=1.0)
    large.add_argument("--nodes-each", type=int, default=2, help="[borrow] max_nodes: of one evaluation")
    large.add_argument("--slow", type=float, default=1.0, help="the first GPU takes so many times as long")
    large.add_argument("--seed", type=int, default=1)
    large.add_argument("--keep", type=Path, metavar="DIR", help="put the daemon's log there")
    said = parser.parse_args()
    if said.scale:
        return _scale(said)
    result: dict[str, Any] = {
        "events": events(said.step_nodes),
        "replay": replay(said.step_nodes, said.events),
        "slurm": None,
    }
    why = "not asked for" if said.idle <= 0 else unavailable()
    if why is None:
        with place() as where:
            result["slurm"] = daemon(where, said.idle, said.poll)
    else:
        result["slurm_skipped"] = why
    print(json.dumps(result, indent=1))
    return 0


sys.exit(main())
