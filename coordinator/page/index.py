"""The data of a work folder's first page: its trainings, the newest first, and its evaluations. Pure.

Rule: a training is the folder of its checkpoints, with one suite in one mode. All that is said of it stands in the summaries
of its evaluations; whether a score has changed, in the paired test that `compare` shows.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

from coordinator.base.words import about
from coordinator.evaluation.records import checkpoint_name
from coordinator.page.training import short_names
from coordinator.runtime.summary import Halt, Summary

# fields of a summary in the list of evaluations
SUMMARY = {
    "evaluation_id", "suite", "step", "scored", "entries", "shards_done", "shards", "accepted_at", "makespan_seconds",
}  # fmt: skip
MOST_LINES = 12  # of a sparkline; with more scores it is their mean
Changes = Callable[[Summary, Summary], Mapping[str, Mapping[str, Any]] | None]
"""(evaluation, a later one) -> score name -> its "verdict" and others; None: not known yet."""


def training_of(summary: Summary) -> tuple[str, str, str]:
    """(folder of the checkpoints, suite, mode)."""
    return str(PurePosixPath(summary.checkpoint).parent), summary.suite, summary.mode


def label_of(summary: Summary) -> str:
    """As of a point on a curve."""
    return str(summary.step) if summary.step is not None else checkpoint_name(summary.checkpoint)


def in_order(summaries: Iterable[Summary]) -> list[Summary]:
    """Evaluations of one training by its checkpoints, of each the latest one."""
    latest = {s.checkpoint: s for s in sorted(summaries, key=lambda s: s.accepted_at)}
    return sorted(latest.values(), key=lambda s: (s.step is None, s.step or 0, s.accepted_at))


def standing(summary: Summary, halt: Halt | None, now: float) -> tuple[str, str]:
    """(done | failed | cancelled | stopped | running, the same in words as `status` says it)."""
    if halt is not None:
        return "stopped", halt.text
    if summary.ended_at is not None:
        missed = summary.entries - summary.scored
        failed = f"failed: {missed} task{'s' * (missed != 1)}"
        said = failed if summary.result == "failed" and missed else summary.fell_to_chance or summary.result
        return summary.result, said
    done = f", {100 * summary.shards_done // summary.shards} %" if summary.shards else ""
    known = summary.done_at is not None and summary.trials
    left = f", {about(max((summary.done_at or 0.0) - now, 0.0))} left" if known else ""
    return "running", f"{summary.stage}{done}{left}"


def index_data(
    begun: Sequence[tuple[Summary, Halt | None]], ended: Sequence[Summary], changes: Changes, now: float
) -> dict[str, Any]:
    """`begun`: those that have not ended, oldest first; `ended`: the newest first."""
    every = [*begun, *((s, None) for s in ended)]
    stands = {s.evaluation_id: standing(s, halt, now) for s, halt in every}
    groups: dict[tuple[str, str, str], list[Summary]] = defaultdict(list)
    for summary, _ in every:
        groups[training_of(summary)].append(summary)
    names = short_names([folder for folder, _, _ in groups])
    newest_first = sorted(groups, key=lambda key: -max(s.accepted_at for s in groups[key]))
    going = sum(halt is None for _, halt in begun)
    return {
        "kind": "index",
        "running": going,
        "halted": len(begun) - going,
        "evaluations": [
            s.model_dump(include=SUMMARY)
            | {"folder": training_of(s)[0], "gpu_seconds": sum(s.gpu_seconds.values()) or None}
            | dict(zip(("word", "status"), stands[s.evaluation_id], strict=True))
            for s, _ in every
        ],
        "trainings": [_training(key, names, in_order(groups[key]), stands, changes) for key in newest_first],
    }


def _training(
    key: tuple[str, str, str],
    names: Mapping[str, str],
    members: Sequence[Summary],
    stands: Mapping[str, tuple[str, str]],
    changes: Changes,
) -> dict[str, Any]:
    """`lines`: name -> values over `scored`, the checkpoints that have scores; `states`: of those that are not done."""
    folder, suite, mode = key
    scored = [s for s in members if s.ended_at is not None and s.scores]
    found = changes(scored[-2], scored[-1]) if len(scored) > 1 else {}
    states = [[s.evaluation_id, label_of(s), *stands[s.evaluation_id]] for s in members]
    return {
        "folder": folder,
        "name": names[folder],
        "suite": suite,
        "mode": mode,
        "checkpoints": len(members),
        "scored": [[s.evaluation_id, label_of(s)] for s in scored],
        "lines": _lines(scored),
        "changes": found
        and {
            word: [n for n, said in found.items() if said["verdict"] == word] for word in ("worse", "better")
        },
        "gpu_seconds": sum(sum(s.gpu_seconds.values()) for s in members),
        "states": [state for state in reversed(states) if state[2:] != ["done", "done"]],
        "accepted_at": max(s.accepted_at for s in members),
    }


def _lines(scored: Sequence[Summary]) -> dict[str, list[float | None]]:
    """The main scores of which higher is better: each of a group or task, or their mean where they are many."""
    values = [{v.task: v.value for v in s.main_scores if v.higher_is_better} for s in scored]
    names = list(values[-1]) if values else []
    if len(names) <= MOST_LINES:
        return {name: [each.get(name) for each in values] for name in names}
    whole = [[each[name] for name in names] if each.keys() >= set(names) else [] for each in values]
    return {f"mean of {len(names)} scores": [sum(v) / len(v) if v else None for v in whole]}
