"""The listing of `evalspan status` in a terminal of any width, and the log files of a job or shard.

Rule: an evaluation's id is never cut, since people copy it. Where a row does not fit, each
evaluation takes two lines.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from rich import box
from rich.console import Console
from rich.table import Table

from coordinator.evaluation.state import State
from coordinator.intake.pending import Shown
from coordinator.report.render import by_reason, seconds
from evaljobs.contract.outcomes import OUTCOME, Failed
from evaljobs.contract.paths import EvaluationPaths

COLUMNS = ("evaluation", "stage", "shards", "trials", "scored", "age")


def failed_jobs(paths: EvaluationPaths) -> dict[str, str]:
    """Job or trial -> its error line, by their outcome files; retried ones included."""
    found = {}
    for file in sorted(paths.outcomes.glob("*.failed.json")) if paths.outcomes.is_dir() else ():
        try:
            outcome = OUTCOME.validate_json(file.read_bytes())
        except (OSError, ValidationError):
            continue
        if isinstance(outcome, Failed):
            found[outcome.name] = outcome.error
    return found


def logs_of(state: State, paths: EvaluationPaths, what: str | None) -> list[Path]:
    """Log files that `what` names: (part of) a job's or trial's name, or a shard of the trial."""
    files = sorted(paths.logs.glob("*.log"))
    if what is None:
        return files
    shards = [s for name, s in state.shards.by_name.items() if what in (name, name.replace("|", " "))]
    trials = {Path(s.frame.file).stem for s in shards if s.frame is not None}
    jobs = {info.job.log: info for info in state.jobs.by_name.values()}
    chosen = [f for f in files if what in f.name]
    for pattern, info in jobs.items():
        for member, trial in enumerate(info.trials):
            if trial in trials or trial == what:
                chosen.append(Path(pattern.replace("%i", str(member))))
    return sorted({f for f in chosen if f.exists()})


def show_status(console: Console, rows: Sequence[Mapping[str, Any]]) -> None:
    """Print a row per evaluation, then what went wrong."""
    if not rows:
        console.print(
            "no evaluations here yet: `evalspan submit` or `evalspan eval` starts one", soft_wrap=True
        )
        return
    cells = [_cells(row) for row in rows]
    widths = [max(len(c[i]) for c in [*cells, COLUMNS]) for i in range(len(COLUMNS))]
    if sum(widths) + 3 * len(widths) > console.width:
        for evaluation, *figures in cells:
            console.print(evaluation, style="bold", soft_wrap=True, highlight=False, markup=False)
            said = ", ".join(f for f in _said(figures) if f)
            console.print(f"  {said}", highlight=False, markup=False)
    else:
        table = Table(*COLUMNS, header_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
        for cell in cells:
            table.add_row(*cell)
        console.print(table)
    for row in rows:
        for what, style in _troubles(row):
            console.print(f"{row['evaluation_id']}: {what}", style=style, soft_wrap=True, markup=False)


def show_gate(console: Console, at_gate: Shown, now: float) -> None:
    """Print pending checkpoints and refused ones, each with its reason. `now`: unix seconds."""
    lines = [
        (w.checkpoint, w.suite, f"waits, {seconds(max(0.0, now - w.since))} by now: {w.why}", "yellow")
        for w in at_gate.waiting
    ]
    lines += [
        (r.checkpoint, r.suite, f"refused {seconds(max(0.0, now - r.at))} ago: {r.why}", "red")
        for r in at_gate.refused
    ]
    for checkpoint, suite, what, style in lines:
        said = f"{checkpoint} (suite {suite}): {what}"
        console.print(said, style=style, soft_wrap=True, highlight=False, markup=False)


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    shards = f"{row['shards_done']}/{row['shards']}" if row["shards"] else "-"
    scored = f"{row['scored']}/{row['entries']}"
    age = seconds(row["age_seconds"])
    return row["evaluation_id"], row["stage"], shards, str(row["trials"]), scored, age


def _said(figures: Sequence[str]) -> Iterable[str]:
    stage, shards, trials, scored, age = figures
    return (stage, f"{shards} shards" if shards != "-" else "", f"{trials} trials" if trials != "0" else "",
            f"{scored} scored", age)  # fmt: skip


def _troubles(row: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    """What went wrong, worst first, with its colour."""
    if row["fault"] is not None:
        yield row["fault"], "red"
    for name, why in {**by_reason(row["errors"]), **row["nodes_aside"]}.items():
        yield f"{name}: {why}", "red"
    if row["waits_seconds"] is not None:
        yield f"all nodes are in back-off: it waits for {seconds(row['waits_seconds'])} more", "red"
    for name, why in row["held_jobs"].items():
        yield f"{name}: {why}", "yellow"
    for name, why in row["stragglers"].items():
        yield f"{name} {why}", "yellow"
    for name, why in row["failed_jobs"].items():
        yield (
            f"{name} failed and was made up for: {why}"
            if row["stage"] in ("ended", "cancelled")
            else f"{name}: {why}",
            "yellow",
        )
    for name, why in row["trackers"].items():
        yield f"not in {name}: {why} (`evalspan export --left` tries again)", "yellow"
