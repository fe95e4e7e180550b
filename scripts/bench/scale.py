"""So many evaluations on so many synthetic GPUs at once: what was lost, and what it cost the coordinator.

Rule: what is counted is read from the disk after the run: the score jobs' own specs say which records were scored, and
the records say which documents they answer.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

from dev_cluster.api import dev_cluster

from bench.synthetic_run import compile_all, counted, run
from evaljobs.contract.outcomes import OUTCOME
from evaljobs.contract.paths import EvaluationPaths, request_set_manifest
from evaljobs.contract.specs import SPEC, RequestSetManifest, ScoreSpec
from evaljobs.contract.storage import read_frame, read_frames, read_record

CPU_NODES = 2
PATIENCE_SECONDS = 3600


def scale(said: dict[str, Any], keep: Path | None = None) -> dict[str, Any]:
    """Run it on a cluster of its own. `said`: nodes, gpus, slow and what bench.folder takes. `keep`: a place for logs."""
    compile_all()
    with dev_cluster(nodes=said["nodes"], gpus=said["gpus"], cpu_nodes=CPU_NODES) as cluster:
        slow = f"{cluster.gpu_nodes[0]}/0:{said['slow']}"
        log = keep / "daemon.log" if keep is not None else None
        site, costs, started = run(cluster, "scale", said, slow=slow, log=log, seconds=PATIENCE_SECONDS)
        if keep is not None:
            (keep / "costs.json").write_text(json.dumps(costs, indent=1))
        asked = counted(site)
        return {
            **{key: said[key] for key in ("nodes", "gpus", "evaluations", "tasks")},
            **figures(site.work, started),
            "coordinator": costs,
            "commands": asked,
            "polls_per_second": (asked["squeue"] + asked["sinfo"]) / costs["busy_seconds"],
            "left": site.wait_clean(60),
        }


def figures(work: Path, started: float) -> dict[str, Any]:
    """What the folders of all evaluations show."""
    totals: Counter[str] = Counter()
    wrong: list[str] = []
    submissions: dict[tuple[str, str], int] = {}
    spans: list[tuple[float, float]] = []
    ended = []
    stragglers: set[str] = set()
    for journal in sorted(work.glob("*/journal.jsonl")):
        paths = EvaluationPaths(journal.parent)
        counted, found = checked(paths)
        totals.update(counted)
        wrong += [f"{journal.parent.name}: {what}" for what in found]
        events = [json.loads(line) for line in journal.read_bytes().splitlines()]
        totals["events"] += len(events)
        stragglers |= {t for e in events if e["kind"] == "stragglers-found" for t in e["trials"]}
        totals["evaluations_ended"] += any(e["kind"] == "results-written" for e in events)
        ended += [e["at"] for e in events if e["kind"] == "results-written"]
        for event in events:
            if event["kind"] == "job-submitted" and ("-stage-" in event["job"] or "-trial-" in event["job"]):
                node = event["job"].split("-stage-" if "-stage-" in event["job"] else "-trial-")[-1]
                key = (journal.parent.name, node.rpartition("-")[0])
                submissions[key] = submissions.get(key, 0) + 1
        for file in paths.responses.glob("*.frames"):
            heads = [head for _, head in read_frames(file, 0)]
            totals["shards_run"] += len(heads)
            totals["trials"] += 1
            if heads:
                ends = [head.started_at + head.seconds for head in heads]
                spans.append((min(head.started_at for head in heads), max(ends)))
    return {
        **totals,
        "trials_with_work": len(spans),
        "wrong": wrong[:20],
        "wrong_count": len(wrong),
        "makespan_seconds": max(ended, default=started) - started,
        "stragglers": sorted(stragglers),
        "trials_at_once": at_once(spans),
        "submissions_per_node_and_evaluation": {
            "mean": sum(submissions.values()) / max(1, len(submissions)),
            "most": max(submissions.values(), default=0),
        },
    }


def checked(paths: EvaluationPaths) -> tuple[Counter[str], list[str]]:
    """An evaluation's tasks and documents, and what is wrong: each task has one score, made of each document once."""
    counted: Counter[str] = Counter()
    wrong: list[str] = []
    scored: dict[int, list[str]] = defaultdict(list)
    for file in paths.outcomes.glob("*.scored.json"):
        outcome = OUTCOME.validate_json(file.read_bytes())
        if outcome.kind == "scored":
            scored[outcome.entry].append(outcome.name)
    suite = json.loads(paths.evaluation.read_text())["suite"]
    results = json.loads(paths.results.read_text()) if paths.results.exists() else {"results": {}}
    wrong += [f"{name} failed: {why}" for name, why in results.get("failed", {}).items()]
    for entry, task in enumerate(suite["tasks"]):
        counted["tasks"] += 1
        if len(scored[entry]) != 1 or task["name"] not in results["results"]:
            wrong.append(f"{task['name']} was scored {len(scored[entry])} times")
            continue
        spec = SPEC.validate_json(paths.spec(scored[entry][0]).read_bytes())
        assert isinstance(spec, ScoreSpec)
        for leaf, frames in spec.frames.items():
            manifest = read_record(request_set_manifest(spec.request_sets[leaf]), RequestSetManifest)
            answers = Counter(
                index for frame in frames for index, _ in read_frame(paths.responses, frame).responses
            )
            counted["documents"] += len(answers)
            counted["shards"] += len(frames)
            if answers != Counter(range(manifest.documents)):
                wrong.append(
                    f"{leaf}: {len(answers)} of {manifest.documents} documents, or some of them twice"
                )
    return counted, wrong


def at_once(spans: list[tuple[float, float]]) -> int:
    """Most of the spans that hold one moment."""
    moments = sorted([(start, 1) for start, _ in spans] + [(end, -1) for _, end in spans])
    now = most = 0
    for _, change in moments:
        now += change
        most = max(most, now)
    return most
