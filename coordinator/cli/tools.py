"""`evalspan plan | priors | compare | diff | gate | clean | worker`: tools beside evaluations."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from coordinator.cli.app import (
    HTML,
    REQUIRED,
    SettingsCommand,
    TableCommand,
    app,
    argument,
    command,
    flag,
    option,
    print_text,
    print_to_stderr,
    report_write_errors,
    show_json,
    stdout_console,
)
from coordinator.errors import ExitCode, OperatorError
from coordinator.verdicts.paired import POWER
from evaljobs.contract.paths import WorkPaths

if TYPE_CHECKING:
    from coordinator.config.schema import Config
    from evaljobs.contract.specs import SuiteSpec

priors = typer.Typer(
    no_args_is_help=True, help="Predicted run times of tasks, and the observations behind them."
)
app.add_typer(priors, name="priors")


@command()
class Plan(TableCommand):
    """Predict the makespan of a suite or an instance: lanes, lower bound, and other numbers of nodes.

    With --detect: how many documents of each task show such a change. Examples:

    evalspan plan --suite core --nodes 4 --model-size 7b --hardware a100

    evalspan plan --suite core --detect 0.01

    evalspan plan --instance instance.json --json
    """

    instance: Path | None = option("A planning instance (JSON).", "--instance")
    suite: str | None = option("Or: a suite's name or file.", "--suite", "-s")
    nodes: int = option("Nodes.", min=1, default=1)
    gpus_per_node: int = option("GPUs of a node.", min=1, default=8)
    cpu_slots: int = option("CPU slots per node for metrics.", min=1, default=16)
    model_size: str = option('Parameters, e.g. "7b".', default="7b")
    hardware: str = option('GPU type, or "cpu".', default="a100")
    tokenizer: str | None = option("Checkpoint, or its Hub id, with prepared request sets.")
    save_instance: Path | None = option("With --suite: write its instance to this file, for --instance.")
    detect: float | None = option("Change of a score: how many documents show it, and what today's show.")
    power: float = option("With --detect: probability of seeing the change.", default=POWER)

    def run(self) -> None:
        from coordinator.planning.instance import plan_instance, what_if
        from coordinator.report.comparisons import lane_table
        from coordinator.report.tables import print_parts

        if (self.instance is None) == (self.suite is None):
            raise OperatorError("name an --instance file or a --suite")
        self._check_detect()
        text = self._of_suite() if self.instance is None else self._of_file(self.instance)
        if self.detect is not None:
            self._show_detection(text, self.detect)
            return
        try:
            made, more = plan_instance(text), what_if(text)
        except ValueError as error:
            raise OperatorError(f"{self.instance or self.suite}: {error}") from error
        if self.as_json:
            show_json(made if self.instance is not None else {**made, "what_if": more})
            return
        bound, makespan = made["lower_bound_seconds"], made["planned_makespan_seconds"]
        said = f"planned makespan {makespan:.1f} s, lower bound {bound:.1f} s, ratio {makespan / bound:.4f}"
        print_parts(stdout_console(), said, "", lane_table(made["lanes"]), "", more["sentence"])

    def _check_detect(self) -> None:
        if self.detect is None and "power" in self.given:
            raise OperatorError("--power is of --detect CHANGE")
        if self.detect is not None and not 0 < self.detect < 1:
            raise OperatorError(
                f"--detect is a change of a score between 0 and 1, such as 0.01, not {self.detect:g}"
            )
        if not 0.5 <= self.power < 1:
            raise OperatorError(
                f"--power is a probability from 0.5 to below 1, such as 0.8, not {self.power:g}"
            )

    def _show_detection(self, text: str, change: float) -> None:
        """Of the instance's data sets; of a suite by the flips of its evaluations in the work folder."""
        from coordinator.intake.from_settings import chosen_suite
        from coordinator.planning.instance import parse_instance
        from coordinator.report.detection import detection_of, find_flips, show_detection
        from coordinator.report.tables import print_parts

        try:
            sets = [one.model_dump() for one in parse_instance(text).datasets]
        except ValueError as error:
            raise OperatorError(f"{self.instance or self.suite}: {error}") from error
        flips = {}
        if self.suite is not None:
            settings = self.settings()
            flips = find_flips(settings.work_dir, chosen_suite(settings, self.suite).name)
        found = detection_of(sets, flips, change, self.power)
        if self.as_json:
            show_json(found)
        else:
            print_parts(stdout_console(), *show_detection(found))

    def _of_file(self, file: Path) -> str:
        """Read an instance file. Raise OperatorError if an option that describes a suite's run was given."""
        known = {"instance", "as_json", "config", "work_dir", "detect", "power"}
        if typed := [f"--{name.replace('_', '-')}" for name in self.given if name not in known]:
            raise OperatorError(f"{', '.join(typed)}: for --suite; an --instance file has its own values")
        try:
            return file.read_text()
        except OSError as error:
            raise OperatorError(f"{file}: {error.strerror}") from error

    def _of_suite(self) -> str:
        """Return the suite's instance, saved if requested."""
        from coordinator.intake.from_settings import chosen_suite
        from coordinator.planning import instance
        from priors.table import read_observations

        settings = self.settings()
        loaded = chosen_suite(settings, str(self.suite))
        size: dict[str, Any] = {
            "model_parameters": instance.parse_parameters(self.model_size),
            "hardware": self.hardware,
            "gpus_per_node": self.gpus_per_node,
        }
        sets = {} if self.tokenizer is None else _sets_at_hand(settings, loaded, self.tokenizer)
        try:
            history = read_observations(WorkPaths(settings.work_dir).observations)
            instance.check_hardware(self.hardware, history)
            gpus = settings.trial.gpus_per_trial
            if gpus == 1 and (gpus := instance.gpus_per_trial(**size)) > 1:
                print_text(
                    f"a trial takes {gpus} GPUs for the weights ([trial] gpus_per_trial states it)", err=True
                )
            made = instance.instance_of_suite(
                loaded,
                sets,
                history,
                engine=settings.trial.engine,
                gpus_per_trial=gpus,
                nodes=self.nodes,
                cpu_slots=self.cpu_slots,
                **size,
            )
        except ValueError as error:
            raise OperatorError(str(error)) from error
        text = json.dumps(made, indent=1)
        if (path := self.save_instance) is not None:
            with report_write_errors(path):
                path.write_text(text + "\n", encoding="utf-8")
            print_text(f"wrote {path}: `evalspan plan --instance {path}`", err=True)
        return text


def _sets_at_hand(settings: Config, suite: SuiteSpec, tokenizer: str) -> dict[str, dict[str, Any]]:
    """Return request sets of the suite that are prepared for this tokenizer: entry -> {leaf task: its set}."""
    from coordinator.intake import from_settings, hub, request_sets
    from coordinator.intake.checkpoint import inspect_checkpoint
    from coordinator.planning import instance

    site = from_settings.site_of(settings)
    folder = hub.local_folder(tokenizer, print_to_stderr, allow_bin=True, weights=False)
    model = from_settings.model_options(settings)
    inputs = from_settings.inputs_for(site, from_settings.lm_eval_version(settings, site))(suite, model)
    held = request_sets.sets_at_hand(suite, inspect_checkpoint(folder, weights=False), model, inputs, site)
    cuts = {task.name: instance.cut_name(suite, entry) for entry, task in enumerate(suite.tasks)}
    return {
        name: request_sets.read_request_sets(folders, dict.fromkeys(folders, cuts[name]))
        for name, folders in held.items()
    }


class _Priors(SettingsCommand):
    def _show(self, what: Callable[..., Any], *more: Any) -> None:
        try:
            show_json(what(WorkPaths(self.settings().work_dir).observations, *more))
        except (ValueError, OSError) as error:
            raise OperatorError(str(error)) from error


@command(group=priors)
class Show(_Priors):
    """Print observed run times by task, and the next plan's predictions.

    Example:

    evalspan priors show
    """

    def run(self) -> None:
        from priors.commands import show_priors

        self._show(show_priors)


@command(group=priors)
class Import(_Priors):
    """Add the observations of another work folder's file. A corrupt file is refused with its line.

    Example:

    evalspan priors import other-work/priors/observations.jsonl
    """

    file: Path = argument("Its priors/observations.jsonl.")

    def run(self) -> None:
        from priors.commands import import_observations

        self._show(import_observations, self.file)


@command(group=priors)
class Export(_Priors):
    """Print all observations as JSON.

    Example:

    evalspan priors export
    """

    def run(self) -> None:
        from priors.commands import export_observations

        self._show(export_observations)


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
        from coordinator.cli.series import write_page
        from coordinator.page import read
        from coordinator.report.comparisons import heads_of, show_comparison
        from coordinator.report.pairs import compare_evaluations
        from coordinator.report.verdicts import overall_of
        from coordinator.runtime.summaries import find_record

        settings = self.there()
        if len(self.evaluations) < 2:
            raise OperatorError("name at least two evaluations; `evalspan report` prints one")
        if self.html is not None:
            write_page(
                self.html,
                read.comparison_contents(settings, self.evaluations, mixed=self.mixed, dense=self.dense),
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
        from coordinator.monitor.gate import gate_evaluation, read_policy
        from coordinator.verdicts.gate import outcome_of

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
        from coordinator.report.columns import sample_file
        from coordinator.report.flips import COLUMNS, find_flips
        from coordinator.report.tables import Sheet, print_parts
        from coordinator.runtime.summaries import find_record

        settings = self.there()
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


@command()
class Clean(TableCommand):
    """Remove unused weights from this node's memory; only files written by evalspan.

    Example:

    evalspan clean
    """

    everything: bool = flag("Also remove copies that are in use.", "--all")

    def run(self) -> None:
        from coordinator.intake.from_settings import site_of
        from coordinator.report.render import format_bytes

        settings = self.settings()
        argv = [*site_of(settings).worker_command, "-m", "evaljobs", "clean", *["--all"] * self.everything]
        for root in settings.stage.roots:
            argv += ["--root", root]
        done = subprocess.run(argv, check=False, stdout=subprocess.PIPE, text=True)
        roots = [json.loads(line) for line in done.stdout.splitlines()]
        if self.as_json:
            show_json({"schema_version": 1, "roots": roots})
            roots = []
        for one in roots:
            count = len(one["removed"])
            said = (
                f"removed {count} checkpoint{'' if count == 1 else 's'}, {format_bytes(one['freed_bytes'])}"
            )
            print_text(f"{one['root']}: {said}")
            for name in one["kept"]:
                print_text(
                    f"  kept {name}: a precursor holds it or a trial reads it (--all removes it as well)"
                )
            for problem in one["problems"]:
                print_text(f"  left alone: {problem}", "yellow")
        if done.returncode != 0:
            raise typer.Exit(done.returncode)


@command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
class Worker(SettingsCommand):
    """Run a metric worker in addition to those that the coordinator starts, and exit with its exit code.

    Additional arguments are passed on.

    Example:

    evalspan worker --work-dir /shared/evalspan-work
    """

    def run(self) -> None:
        from coordinator.intake.from_settings import site_of

        site = site_of(self.settings())
        argv = [*site.worker_command, "-m", "evaljobs", "worker", "--redis-file"]
        argv += [str(site.paths.redis_address), "--work-dir", site.work_dir, *self.rest]
        raise typer.Exit(subprocess.run(argv, check=False).returncode)
