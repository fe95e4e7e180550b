"""`evalspan compare`, `gate` and `diff`: differences between evaluations."""

from __future__ import annotations

import csv
import json
import sys
from dataclasses import asdict
from pathlib import Path

import typer

from coordinator.errors import ExitCode, OperatorError
from coordinator.interface.cli.app import (
    HTML,
    REQUIRED,
    TableCommand,
    argument,
    command,
    flag,
    option,
    print_text,
    show_json,
    stdout_console,
)


@command()
class Compare(TableCommand):
    """Print scores of several evaluations side by side, and compare each with the first: better, worse, no evidence.

    Example:

    evalspan compare step-1000-core-1a2b3c4d step-2000-core-5e6f7a8b
    """

    evaluations: list[str] = argument("Two or more evaluation ids; the first is the baseline.")
    mixed: bool = flag("Also compare scores computed in different modes.")
    dense: bool = flag("Also compare dense signals: gold bits per byte and probability, margin.", "--dense")
    html: Path | None = HTML

    def run(self) -> None:
        from coordinator.interface.cli.series import write_page
        from coordinator.interface.page import page_contents
        from coordinator.results.report.comparisons import heads_of, show_comparison
        from coordinator.results.report.pairs import compare_evaluations
        from coordinator.results.report.row_verdicts import overall_of
        from coordinator.runtime.known_evaluations import find_record

        settings = self.there()
        if len(self.evaluations) < 2:
            raise OperatorError("name at least two evaluations; `evalspan report` prints one")
        if self.html is not None:
            write_page(
                self.html,
                page_contents.comparison_contents(
                    settings, self.evaluations, mixed=self.mixed, dense=self.dense
                ),
            )
            return
        ids = [find_record(settings, name)[0].evaluation_id for name in self.evaluations]
        points, rows = compare_evaluations(settings.work_dir, ids, mixed=self.mixed, dense=self.dense)
        heads = heads_of(points)
        if self.as_json:
            known = {"rows": rows, "overall": overall_of(rows), "headings": heads}
            show_json({"schema_version": 1, "evaluations": ids, **known})
        else:
            show_comparison(stdout_console(), heads, ids, rows)


@command()
class Gate(TableCommand):
    """Check a checkpoint against a baseline by the rules of a policy file; prints a line per rule and score.

    Example:

    evalspan gate step-2000-core-5e6f7a8b --policy policy.toml
    """

    evaluation: str = argument("Evaluation id.")
    policy: Path = option("TOML file of rules.", "--policy", default=REQUIRED)
    baseline: str | None = option(
        '"previous" or "best" checkpoint, or an evaluation id; default: the policy\'s.', "--baseline"
    )
    mixed: bool = flag("Also compare scores computed in different modes.")

    def run(self) -> None:
        from coordinator.decide.verdicts.gate import outcome_of
        from coordinator.operations.monitor.gate import gate_evaluation, read_policy

        policy = read_policy(self.policy)
        rulings, (first, last) = gate_evaluation(
            self.there(), self.evaluation, policy, self.baseline, mixed=self.mixed
        )
        outcome = outcome_of(rulings)
        if self.as_json:
            ids = {"schema_version": 1, "evaluation": last, "baseline": first, "outcome": outcome}
            show_json({**ids, "rules": [asdict(one) for one in rulings]})
        else:
            for one in rulings:
                print_text(one.line)
            print_text(f"{outcome}: {last} against {first}")
        if outcome != "pass":
            failed = any(one.has_failed for one in rulings)
            raise typer.Exit(ExitCode.FAILED if failed else ExitCode.UNDECIDED)


@command()
class Diff(TableCommand):
    """Print the documents of a task that two evaluations answer differently: question, answers, margins.

    Example:

    evalspan diff step-1000-core-1a2b3c4d step-2000-core-5e6f7a8b --task hellaswag --flips
    """

    first: str = argument("Evaluation id.")
    second: str = argument("Evaluation id of the later one.")
    task: str = option("Leaf task.", "--task", default=REQUIRED)
    flips: bool = flag("Only those whose metrics changed.", "--flips")
    csv: bool = flag("Print a CSV line per document.", "--csv")

    def run(self) -> None:
        from coordinator.results.report.flips import COLUMNS, find_flips
        from coordinator.results.report.stored_documents import sample_file
        from coordinator.results.report.tables import Sheet, print_parts
        from coordinator.runtime.known_evaluations import find_record

        settings = self.there()
        self.refuse_csv_with_json(as_csv=self.csv)
        found = [find_record(settings, name) for name in (self.first, self.second)]
        for record, paths in found:
            if sample_file(paths, self.task) is None:
                raise OperatorError(
                    f"{record.evaluation_id} has no samples of {self.task}: name one of its leaf tasks "
                    f"(`evalspan report {record.evaluation_id}` lists them), or they were pruned"
                )
        rows = list(find_flips(found[0][1], found[1][1], self.task, scored=self.flips))
        if self.as_json:
            show_json(
                {
                    "schema_version": 1,
                    "evaluations": [r.evaluation_id for r, _ in found],
                    "task": self.task,
                    "documents": rows,
                }
            )
        elif self.csv:
            writer = csv.writer(sys.stdout)
            writer.writerow(COLUMNS)
            writer.writerows(
                [json.dumps(v) if isinstance(v, dict) else v for v in map(row.get, COLUMNS)] for row in rows
            )
        else:
            sheet = Sheet("", "document", "question", "right", "before", "after", "margin", "metrics")
            for row in rows:
                margins = (row["margin_before"], row["margin_after"])
                sheet.add(
                    str(row["doc_id"]) + ("" if row["filter"] == "none" else f" {row['filter']}"),
                    _brief(row["question"].rpartition("\n\n")[2]),  # the few-shot examples precede it
                    *(_brief(row[name]) for name in ("right", "before", "after")),
                    "-" if None in margins else f"{margins[0]:+.2f} -> {margins[1]:+.2f}",
                    ", ".join(
                        f"{m} {a:g} -> {b:g}"
                        for m, (a, b) in row["metrics"].items()
                        if a != b and None not in (a, b)
                    )
                    or "-",
                )
            print_parts(
                stdout_console(), sheet, f"{len(rows)} documents of {self.task} are answered differently"
            )


def _brief(text: str) -> str:
    line = " ".join(str(text).split())
    return line if len(line) <= 60 else f"{line[:57]}…"
