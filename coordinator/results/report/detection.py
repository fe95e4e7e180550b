"""Documents that show a given change of each task of a suite, and the change that today's documents show.

Rule: of a work folder's evaluations of the suite, the last neighbours of each training say how many answers differ between two
checkpoints; a task that none of them has counts as two independent answers, right half of the time.
"""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import RenderableType

from coordinator.decide.verdicts.paired import ALPHA
from coordinator.decide.verdicts.screening import (
    WORST_FLIPS,
    detectable_change,
    documents_needed,
    errors_needed,
)
from coordinator.errors import OperatorError
from coordinator.results.report.learning_curves import current_points
from coordinator.results.report.load_series import find_heads, load_documents
from coordinator.results.report.pairs import score_differences
from coordinator.results.report.scores import Evaluation
from coordinator.results.report.tables import Parts, Sheet
from coordinator.results.report.training_files import by_training
from evaljobs.contract.columns import DENSE
from evaljobs.errors import OperatorError as DamagedError

log = logging.getLogger(__name__)

PAIRS = 5  # neighbours of a training, the last ones, whose flips count


def find_flips(work_dir: Path, suite: str) -> dict[str, float]:
    """Return the mean square of a document's difference between neighbouring checkpoints, by task or group, for its first score.

    Empty if no training of the work folder has two evaluations of the suite.
    """
    try:
        heads = find_heads(work_dir, "*", suite, mixed=True)
    except OperatorError:
        return {}
    seen: dict[str, list[float]] = defaultdict(list)
    groups: dict[str, list[tuple[str, int]]] = {}
    for training in by_training(heads).values():
        scored = [point for point in current_points(load_documents(work_dir, training)) if point.scores]
        for before, after in list(pairwise(scored))[-PAIRS:]:
            for task, flips in _flips_of(work_dir, before, after).items():
                seen[task].append(flips)
        for point in scored[-1:]:
            sizes = {score.task: score.documents or 0 for score in point.scores}
            groups |= {
                name: [(task, sizes.get(task, 0)) for task in leaves] for name, leaves in point.groups.items()
            }
    found = {task: fmean(each) for task, each in seen.items()}
    for name, leaves in groups.items():
        known = [(found[task], size) for task, size in leaves if task in found]
        total = sum(size for _, size in known)
        if name not in found and total:
            found[name] = sum(flips * size for flips, size in known) / total
    return found


def _flips_of(work_dir: Path, before: Evaluation, after: Evaluation) -> dict[str, float]:
    """Return the flips of each task's first score that is a share and can be compared."""
    try:
        compared = score_differences(work_dir, before.evaluation_id, after.evaluation_id)
    except (OSError, ValueError, OperatorError, DamagedError) as error:
        log.warning("%s and %s are not compared: %s", before.evaluation_id, after.evaluation_id, error)
        return {}
    found: dict[str, float] = {}
    for score in after.scores:
        one = compared.get(score.name)
        if score.filter != DENSE and one is not None and not isinstance(one, str) and one.span <= 1:
            found.setdefault(score.task, one.variance * one.documents + one.difference**2)
    return found


def detection_of(
    data_sets: Iterable[Mapping[str, Any]], flips: Mapping[str, float], change: float, power: float
) -> dict[str, Any]:
    """Return what JSON shows: a row for each data set of a planning instance, and the change that the mean of all shows.

    A task none of whose documents differed counts as though three had (the 95 % end of the rule of three).
    """
    rows = []
    for one in data_sets:
        size, seen = int(one["docs"]), flips.get(one["name"])
        share = WORST_FLIPS if seen is None else max(seen, 3 / size)
        needed = math.ceil(documents_needed(change, share, power=power))
        rows.append(
            {
                "task": one["name"],
                "documents": size,
                "flips": seen,
                "variance": share / size,
                "needed": needed,
                "detectable": detectable_change(size, share, power=power),
                "gpu_seconds": one["gpu_seconds"],
                "gpu_seconds_needed": one["gpu_seconds"] * min(1.0, needed / size),
            }
        )
    error = math.sqrt(sum(row["variance"] for row in rows)) / len(rows)
    return {
        "schema_version": 1,
        "change": change,
        "level": ALPHA,
        "power": power,
        "tasks": rows,
        "detectable_mean": errors_needed(ALPHA, power) * error,
        "gpu_seconds": sum(row["gpu_seconds"] for row in rows),
        "gpu_seconds_needed": sum(row["gpu_seconds_needed"] for row in rows),
    }


def show_detection(found: Mapping[str, Any]) -> Iterator[RenderableType]:
    """Yield parts to print: a row for each task, then the sums."""
    change = f"{found['change']:g}"
    sheet = Sheet("", "task", "documents", "flips", f"needed for {change}", "detects", "GPU s", "of needed")
    for row in found["tasks"]:
        flips = "not known" if row["flips"] is None else f"{row['flips']:.1%}".replace("%", " %")
        few = row["needed"] > row["documents"]
        sheet.add(
            row["task"],
            f"{row['documents']:,}",
            flips,
            f"{row['needed']:,}",
            f"{row['detectable']:.4f}",
            f"{row['gpu_seconds']:.1f}",
            "all" if few else f"{row['gpu_seconds_needed']:.1f}",
            style="yellow" if few else "",
        )
    yield sheet
    yield ""
    small = sum(row["needed"] > row["documents"] for row in found["tasks"])
    yield Parts(
        f"{small} of {len(found['tasks'])} tasks have too few documents to show a change of {change} with power {found['power']:g}",
        f"the mean of all tasks shows {found['detectable_mean']:.4f}",
        f"{found['gpu_seconds_needed']:.0f} of {found['gpu_seconds']:.0f} GPU s for the documents needed",
    )
    if any(row["flips"] is None for row in found["tasks"]):
        yield Parts(
            "flips not known: no two checkpoints of a training have this task, so the worst case counts: independent answers, "
            "half of them right"
        )
