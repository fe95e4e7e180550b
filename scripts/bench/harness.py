"""What benches and chaos campaigns share: options, figures with targets, one line of JSON on stdout, the exit status.

Rule: exit status 0 means that every target was met, 1 that one was missed or a run broke, 2 that the command cannot run here.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import sys
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from dev_cluster.api import DevClusterError, unavailable

ROOT = Path(__file__).resolve().parents[2]
Option = tuple[str, dict[str, Any]]
Options = argparse.Namespace


class RunError(Exception):
    """A measured run did not end as it should; the message says where to look."""


def option(name: str, default: Any = None, text: str | None = None, **more: Any) -> Option:
    """An option of a command, with its help text; its type is its default's unless `type` is given."""
    if not {"type", "action"} & more.keys():
        more["type"] = type(default)
    return name, {"default": default, "help": text, **more}


def command(
    name: str,
    doc: str | None,
    measure: Callable[[Options], tuple[dict[str, Any], bool]],
    *known: Option,
    argv: Sequence[str] | None = None,
    slurm: bool | Callable[[Options], bool] = False,
) -> int:
    """Parse the options, measure, print: `measure` returns the row to print and whether all is well.

    `slurm`: whether the command needs a development cluster (with these options).
    """
    parser = argparse.ArgumentParser(
        prog=f"scripts/{name}", description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for flag, more in known:
        parser.add_argument(flag, **more)
    options = parser.parse_args(argv)
    if (slurm(options) if callable(slurm) else slurm) and (reason := unavailable()) is not None:
        say(reason)
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that a cluster is taken down
    try:
        found, well = measure(options)
    except (DevClusterError, RunError) as error:
        say(str(error))
        return 2 if isinstance(error, DevClusterError) else 1
    print(json.dumps({"bench": name, **rounded(found)}))
    return 0 if well else 1


def say(text: str) -> None:
    """A line of progress, on stderr."""
    print(text, file=sys.stderr, flush=True)


def rounded(value: Any) -> Any:
    """Floats to four digits, or to four significant ones where the value is small; all else as it is."""
    if isinstance(value, float):
        return round(value, 4) if abs(value) >= 0.1 else float(f"{value:.4g}")
    if isinstance(value, dict):
        return {key: rounded(inner) for key, inner in value.items()}
    return [rounded(inner) for inner in value] if isinstance(value, (list, tuple)) else value


def row(what: str, value: float, target: float, *, at_least: bool = False, **more: Any) -> dict[str, Any]:
    """A value beside its target, which it may not exceed (or fall short of, where `at_least`)."""
    met = value >= target if at_least else value <= target
    return {"what": what, "value": value, "target": target, "met": met, **more}


def targets(rows: list[dict[str, Any]], **figures: Any) -> tuple[dict[str, Any], bool]:
    """What a bench with targets returns."""
    return {**figures, "targets": rows}, all(r["met"] for r in rows)


def spread(values: Collection[float]) -> dict[str, float]:
    """Median, 95th and 99th percentile, and maximum; zeros of no values."""
    ordered = sorted(values) or [0.0]
    p95, p99 = (ordered[min(len(ordered) - 1, int(share * len(ordered)))] for share in (0.95, 0.99))
    return {"median": statistics.median(ordered), "p95": p95, "p99": p99, "max": ordered[-1]}


def timed(work: Callable[[], object]) -> float:
    """Seconds that the call takes."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started
