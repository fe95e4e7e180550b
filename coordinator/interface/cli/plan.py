"""`evalspan plan` and `evalspan priors`: predicted makespans, and the observations that predictions rest on."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from coordinator.decide.verdicts.paired import POWER
from coordinator.errors import OperatorError
from coordinator.interface.cli.app import (
    SettingsCommand,
    TableCommand,
    app,
    argument,
    command,
    option,
    print_text,
    print_to_stderr,
    report_write_errors,
    show_json,
    stdout_console,
)
from evaljobs.contract.paths import WorkPaths

if TYPE_CHECKING:
    from coordinator.site.config.schema import Config
    from evaljobs.contract.specs import SuiteSpec


priors = typer.Typer(
    no_args_is_help=True, help="Predicted run times of tasks, and the observations behind them."
)
app.add_typer(priors, name="priors")


@command()
class Plan(TableCommand):
    """Predict the makespan of a suite or an instance: lanes, lower bound, and other numbers of nodes.

    With --detect: how many documents of each task show such a change.

    Examples:

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
        from coordinator.decide.planning.instance import plan_instance, what_if
        from coordinator.results.report.comparisons import lane_table
        from coordinator.results.report.tables import print_parts

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
        from coordinator.decide.planning.instance import parse_instance
        from coordinator.intake.from_settings import chosen_suite
        from coordinator.results.report.detection import detection_of, find_flips, show_detection
        from coordinator.results.report.tables import print_parts

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
        from coordinator.site.config.toml import read_text

        known = {"instance", "as_json", "config", "work_dir", "detect", "power"}
        if typed := [f"--{name.replace('_', '-')}" for name in self.given if name not in known]:
            raise OperatorError(f"{', '.join(typed)}: for --suite; an --instance file has its own values")
        return read_text(file, 1 << 30)

    def _of_suite(self) -> str:
        """Return the suite's instance, saved if requested."""
        from coordinator.decide.planning import instance
        from coordinator.intake.from_settings import chosen_suite
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
    from coordinator.decide.planning import instance
    from coordinator.intake import from_settings, hub, request_sets
    from coordinator.intake.checkpoint import inspect_checkpoint

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
