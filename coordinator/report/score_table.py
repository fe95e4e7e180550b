"""Tables for `compare` (evaluations side by side) and `plan` (lanes), for a terminal of any width.

Rule: figures are never cut: where columns do not fit, a row becomes lines. A drop counts beyond two
standard errors of the difference.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from coordinator.report.keys import MARK, WHAT, difference, keys_of
from coordinator.report.render import plain_table


def comparison(columns: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row per task and metric: each evaluation's value, last minus first, and "real drop?".

    A drop is real beyond two standard errors of the difference, and only where requests and scoring
    are the same. `differs`: how each evaluation differs from the first ("requests" or "score").
    """
    scores = [column["results"] for column in columns]
    rows = []
    for task in dict.fromkeys(t for s in scores for t in s):
        for metric in dict.fromkeys(
            k for s in scores for k, v in s.get(task, {}).items() if _is_metric(k, v)
        ):
            name, _, which = metric.partition(",")
            values = [s.get(task, {}).get(metric) for s in scores]
            ends = [s.get(task, {}).get(f"{name}_stderr,{which}") for s in (scores[0], scores[-1])]
            spread = sum(e * e for e in ends if isinstance(e, float)) ** 0.5
            change = values[-1] - values[0] if values[0] is not None and values[-1] is not None else None
            higher = columns[-1].get("higher_is_better", {}).get(task, {}).get(name, True)
            drop = change is not None and (change < 0 if higher else change > 0)
            keys = [keys_of(column, task) for column in columns]
            differs = [difference(keys[0], key) for key in keys]
            regressed = drop and change is not None and abs(change) > 2 * spread and not differs[-1]
            rows.append(
                {
                    "task": task,
                    "metric": metric,
                    "values": values,
                    "change": change,
                    "regressed": regressed,
                    "differs": differs,
                }
            )
    return rows


def _is_metric(key: str, value: Any) -> bool:
    return "," in key and not key.partition(",")[0].endswith("_stderr") and isinstance(value, int | float)


def show_comparison(console: Console, names: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> None:
    """Print a row per score: a column per evaluation (the digest of its id), and the change overall."""
    digests = [name.rsplit("-", 1)[-1] for name in names]
    cells = [_cells(row) for row in rows]
    heads = ("task", "metric", *digests, "change")
    widths = [max(len(c[i]) for c in [*cells, heads]) for i in range(len(heads))]
    if sum(widths) + 2 * len(widths) + 2 > console.width:
        for row, (task, metric, *values, change) in zip(rows, cells, strict=True):
            style = "red" if row["regressed"] else ""
            console.print(f"{task} {metric}", style=style, soft_wrap=True, highlight=False, markup=False)
            console.print(f"    {' -> '.join(values)}", style=style, highlight=False, markup=False)
            console.print(f"    {change}", style=style, highlight=False, markup=False)
        _show_differences(console, digests, rows)
        return
    table = plain_table()
    for i, head in enumerate(heads):
        table.add_column(head, justify="left" if i < 2 else "right", no_wrap=True)
    for row, cell in zip(rows, cells, strict=True):
        table.add_row(*cell, style="red" if row["regressed"] else "")
    console.print(table)
    _show_differences(console, digests, rows)


def _show_differences(console: Console, names: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> None:
    """Print a line per evaluation and kind of difference from the first one: the tasks concerned."""
    alike: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        for name, what in zip(names, row["differs"], strict=True):
            tasks = alike.setdefault((name, what), []) if what else []
            if row["task"] not in tasks:
                tasks.append(row["task"])
    for (name, what), tasks in alike.items():
        text = f"{MARK} in {name} {', '.join(tasks)} {WHAT[what]} than in {names[0]}: not comparable"
        console.print(text, style="yellow", highlight=False, markup=False)


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    marks = [MARK if what else "" for what in row["differs"]]
    values = ["-" if v is None else f"{v:.4f}{mark}" for v, mark in zip(row["values"], marks, strict=True)]
    change = "-" if row["change"] is None else f"{row['change']:+.4f}"
    return row["task"], row["metric"], *values, change + (" !" if row["regressed"] else "")


def lane_table(lanes: Sequence[Mapping[str, Any]]) -> Table:
    """A row per group of GPUs that run the same data sets, with each GPU's number of shards."""
    alike: dict[tuple[str, ...], list[tuple[int, int]]] = {}
    for lane in lanes:
        names = tuple(dict.fromkeys(str(s["dataset"]) for s in lane["shards"]))
        alike.setdefault(names, []).append((int(lane["gpu"]), len(lane["shards"])))
    table = plain_table()
    table.add_column("GPUs", no_wrap=True)
    table.add_column("shards each", justify="right", no_wrap=True)
    table.add_column("data sets, in order", overflow="fold")
    for names, members in alike.items():
        counts = sorted({count for _, count in members})
        each = str(counts[0]) if len(counts) == 1 else f"{counts[0]}-{counts[-1]}"
        more = f" and {len(names) - 8} more" if len(names) > 8 else ""
        table.add_row(_ranges([gpu for gpu, _ in members]), each, ", ".join(names[:8]) + more)
    return table


def _ranges(numbers: Sequence[int]) -> str:
    """0-2,5 of 0, 1, 2 and 5."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    ranges = [str(a) if a == b else f"{a}-{b}" for a, b in runs]
    return ",".join(ranges[:4]) + (",..." if len(ranges) > 4 else "")
