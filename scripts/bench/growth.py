"""What a daemon's process, Redis and work folder hold, and whether it grows with the evaluations that have ended.

Rule: a measure grows where the confidence interval of its slope (Theil-Sen with Sen's interval from Kendall's statistic)
lies above 0. The intervals of all measures together hold with CONFIDENCE.
"""

from __future__ import annotations

import gc
import itertools
import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from evaljobs.contract.paths import WorkPaths
from evaljobs.queue import redis_client

CONFIDENCE = 0.95
SMALL_SHARE = 0.01  # of a measure's level: growth over 1,000 evaluations that is named, and passed
Sample = dict[str, float]


def holdings(work: WorkPaths) -> Sample:
    """What this process holds now, and what is in Redis and in the work folder outside of evaluations' own folders."""
    gc.collect()
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    found: Sample = {
        "descriptors": len(list(Path("/proc/self/fd").iterdir())),
        "threads": len(list(Path("/proc/self/task").iterdir())),
        "children": sum(len(f.read_text().split()) for f in Path("/proc/self/task").glob("*/children")),
        "resident_mb": resident / 2**20,
        "python_blocks": sys.getallocatedblocks(),
    }
    with redis_client.connect(work.redis_address) as client:
        info: dict[str, Any] = client.info()  # type: ignore[assignment]
        found["redis_mb"] = info["used_memory"] / 2**20
        found["redis_clients"] = info["connected_clients"]
        keys = list(client.scan_iter(count=1000))
    found["redis_keys"] = len(keys)
    return found | folder(work)


def folder(work: WorkPaths) -> Sample:
    """Files and bytes of the work folder outside of evaluations' folders, and bytes of single files in it."""
    files = size = 0
    for place, folders, names in os.walk(work.root):
        if Path(place) == work.root:
            folders[:] = [name for name in folders if not (work.root / name / "journal.jsonl").exists()]
        files += len(names) + len(folders)
        size += sum(_size(Path(place, name)) for name in names)
    single = {
        "pending": work.pending,
        "watched": work.watched,
        "observations": work.observations,
        "digests": work.digests,
        "redis_log": work.redis / "valkey.log",
    }
    rest = size - _size(work.observations)
    return {
        "work_inodes": files,
        "rest_kb": rest / 1024,
        **{f"{name}_kb": _size(path) / 1024 for name, path in single.items()},
    }


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


# --- slopes -----------------------------------------------------------------------------------------------------------


def grown(rows: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """By measure: its slope over the last half of `rows`, which have "ended", the number of ended evaluations."""
    half = rows[len(rows) // 2 :]
    names = [name for name in half[0] if name not in ("ended", "at", "process")]
    at = [row["ended"] for row in half]
    return {name: slope(at, [row[name] for row in half], len(names)) for name in names}


def slope(at: Sequence[float], values: Sequence[float], measures: int = 1) -> dict[str, Any]:
    """Theil-Sen slope of `values` for 1,000 evaluations, its interval, and the verdict.

    `measures`: among how many the error is shared (Bonferroni).
    """
    pairs = list(itertools.combinations(range(len(at)), 2))
    slopes = sorted(1000 * (values[j] - values[i]) / (at[j] - at[i]) for i, j in pairs)
    count = len(values)
    ties = [values.count(value) for value in set(values)]
    variance = (count * (count - 1) * (2 * count + 5) - sum(t * (t - 1) * (2 * t + 5) for t in ties)) / 18
    z = statistics.NormalDist().inv_cdf(1 - (1 - CONFIDENCE) / 2 / measures)
    reach = z * variance**0.5
    low = slopes[max(0, int((len(slopes) - reach) / 2))]
    high = slopes[min(len(slopes) - 1, int((len(slopes) + reach) / 2) + 1)]
    level, middle = statistics.median(values), statistics.median(slopes)
    share = middle / level if level else 0.0
    return {
        "level": level,
        "per_1000": middle,
        "interval": [low, high],
        "zero": low <= 0,
        "share_per_1000": share,
        "met": low <= 0 or share < SMALL_SHARE,
    }
