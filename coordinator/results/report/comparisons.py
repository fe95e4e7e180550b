"""Comparison tables of several evaluations for `compare`; and the lanes of `plan`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console

from coordinator.base.words import first_of, format_score
from coordinator.results.report.learning_curves import point_labels
from coordinator.results.report.row_verdicts import VERDICTS_NOTE, name_of, overall_of
from coordinator.results.report.scores import Difference, Evaluation, key_difference
from coordinator.results.report.tables import Parts, Sheet, print_parts
from evaljobs.contract.columns import DENSE

DIFFERENCE_WORDS: Mapping[str, str] = {
    "mode": "computed in another mode",
    "requests": "run with different prompts or settings",
    "score": "scored differently (gold answers, filters or metrics)",
}
LACKING = ("-", "not asked")  # stands in place of a value: it failed, or it was not its turn
INCOMPARABLE_MARK = "~"  # marks a value that is not comparable with its neighbour
TINTS = {"worse": "red", "better": "green"}  # of verdicts


def show_differences(console: Console, found: Iterable[tuple[str, str, str]]) -> None:
    """Print a line per reason. `found`: the scores that are not comparable, with which others, how they differ, an example."""
    alike: dict[tuple[str, str], dict[str, None]] = {}
    for where, what, name in found:
        alike.setdefault((where, what), {})[name] = None
    for (where, what), names in alike.items():
        print_line(console, f"{INCOMPARABLE_MARK} {where}: {what}: {', '.join(names)}", "yellow")


def describe_difference(what: str, before: int | None, after: int | None) -> str:
    """Describe how scores differ. `before`, `after`: documents."""
    if what == "requests" and before is not None and after is not None and before != after:
        return f"over {after} documents, not {before}"
    return DIFFERENCE_WORDS[what]


def comparison_rows(made: Sequence[Evaluation], *, dense: bool = False) -> list[dict[str, Any]]:
    """Return a row per task and metric of evaluations: each value, and last minus first. `dense`: include dense signals.

    `differs`: how each evaluation differs from the first ("mode", "requests" or "score").
    """
    scores = [
        {(s.task, f"{s.metric},{s.filter}"): s for s in one.scores if dense or s.filter != DENSE}
        for one in made
    ]
    names = dict.fromkeys(name for column in scores for name in column)
    tasks = list(dict.fromkeys(task for task, _ in names))
    rows = []
    for task, metric in sorted(names, key=lambda name: tasks.index(name[0])):
        found = [column.get((task, metric)) for column in scores]
        first, last = found[0], found[-1]
        differs: list[Difference] = [
            "mode"
            if one.mode != made[0].mode
            else key_difference(first.keys, score.keys)
            if first and score
            else ""
            for one, score in zip(made, found, strict=True)
        ]
        change = None if first is None or last is None else last.value - first.value
        values, documents, stderrs, versions, shots = (
            [getattr(score, name, None) for score in found]
            for name in ("value", "documents", "stderr", "version", "n_shot")
        )
        rows.append(
            {
                "task": task,
                "metric": metric,
                "higher_is_better": next(s.higher_is_better for s in found if s is not None),
                "leaves": [*made[-1].groups.get(task, ())],  # of a group
                "values": values,
                "change": change,
                "differs": differs,
                "documents": documents,
                "stderrs": stderrs,
                "versions": versions,
                "n_shot": shots,
                "not_asked": [
                    score is None and one.leaves_out(task) for one, score in zip(made, found, strict=True)
                ],
            }
        )
    return rows


def heads_of(points: Sequence[Evaluation]) -> list[str]:
    """Return a short, unique heading for each evaluation."""
    names = point_labels(points)
    plain = all(p.step is not None and name == p.label for p, name in zip(points, names, strict=True))
    return [f"step {name}" for name in names] if plain else names


def show_comparison(
    console: Console, heads: Sequence[str], ids: Sequence[str], rows: Sequence[Mapping[str, Any]]
) -> None:
    """Print a row per score: a column per evaluation, and how the last compares with the first; then the evaluations' ids.

    `rows`: from `comparison_rows`, with verdicts.
    """
    sheet = Sheet("", "score", *heads, "change (two-sided 95 %)", "verdict", turns=True)
    for row in rows:
        said = ["", *(v["verdict"] for v in row["verdicts"])]
        values = (
            LACKING[row["not_asked"][i]]
            if value is None
            else f"{format_score(value)}{INCOMPARABLE_MARK if what else ''}{_short(said[i], i, len(heads))}"
            for i, (value, what) in enumerate(zip(row["values"], row["differs"], strict=True))
        )
        last = (row["verdicts"] or [{"verdict": "", "words": "-"}])[-1]  # none of one evaluation
        change = "-" if row["change"] is None else format_score(row["change"], "+")
        if "reach" in last:
            change += f" ± {format_score(last['reach'])}"
        style = TINTS.get(last["verdict"], "")
        sheet.add(name_of(row), *values, change, last["words"], style=style)
    print_parts(console, sheet, "")
    for whole in overall_of(rows)[-1:]:
        if whole["tasks"] > 1:
            print_line(console, f"overall: {whole['words']}", TINTS.get(whole["verdict"], ""))
    for head, evaluation in zip(heads, ids, strict=True):
        print_line(console, f"{head}: {evaluation}")
    differs = [
        (
            f"{head} is not comparable with {heads[0]}",
            describe_difference(what, row["documents"][0], row["documents"][i]),
            row["task"] + _other_facts(row, i),
        )
        for row in rows
        for i, (head, what) in enumerate(zip(heads, row["differs"], strict=True))
        if what
    ]
    show_differences(console, differs)
    verdicts = {v["verdict"] for row in rows for v in row["verdicts"]}
    if verdicts & {"better", "worse", "no evidence"}:
        print_line(console, VERDICTS_NOTE, "dim")


def _short(verdict: str, i: int, count: int) -> str:
    """Return the suffix of a value between the first column and the last, which shows its verdict separately."""
    return f" {verdict}" if 0 < i < count - 1 and verdict in ("better", "worse") else ""


def _other_facts(row: Mapping[str, Any], i: int) -> str:
    """Return version and n-shot of column `i` in parentheses if they are known and differ from the first column's."""
    parts = []
    for facts, text in ((row["versions"], "version {}, not {}"), (row["n_shot"], "{}-shot, not {}-shot")):
        if None not in (facts[0], facts[i]) and facts[0] != facts[i]:
            parts.append(text.format(facts[i], facts[0]))
    return f" ({'; '.join(parts)})" if parts else ""


def print_line(console: Console, text: str, style: str = "") -> None:
    """Print a line."""
    print_parts(console, Parts(text, style=style))


def lane_table(lanes: Sequence[Mapping[str, Any]]) -> Sheet:
    """Return a row per group of GPUs that run the same data sets, with each GPU's number of shards."""
    alike: dict[tuple[str, ...], list[tuple[int, int]]] = {}
    for lane in lanes:
        names = tuple(dict.fromkeys(str(s["dataset"]) for s in lane["shards"]))
        alike.setdefault(names, []).append((int(lane["gpu"]), len(lane["shards"])))
    sheet = Sheet("", "GPUs", "shards each", "data sets, in order")
    for names, members in alike.items():
        counts = sorted({count for _, count in members})
        each = str(counts[0]) if len(counts) == 1 else f"{counts[0]}-{counts[-1]}"
        sheet.add(_ranges([gpu for gpu, _ in members]), each, Parts(first_of(names, 8)))
    return sheet


def _ranges(numbers: Sequence[int]) -> str:
    """Format 0, 1, 2 and 5 as 0-2,5."""
    runs: dict[int, list[int]] = {}
    for place, number in enumerate(sorted(numbers)):
        runs.setdefault(number - place, []).append(number)
    ranges = [str(r[0]) if len(r) == 1 else f"{r[0]}-{r[-1]}" for r in runs.values()]
    return ",".join(ranges[:4]) + (",..." if len(ranges) > 4 else "")
