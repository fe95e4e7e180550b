"""`evalspan report | export | serve`: scores and costs of an evaluation or a whole training; their pages."""

from __future__ import annotations

import json
import os
import sys
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import typer

from coordinator.errors import EvalspanError, OperatorError
from coordinator.interface.cli.app import (
    EVALUATION,
    HTML,
    VERBOSE,
    SettingsCommand,
    TableCommand,
    TerminalMessages,
    argument,
    command,
    flag,
    option,
    print_text,
    report_write_errors,
    show_json,
    stdout_console,
)

if TYPE_CHECKING:
    from coordinator.interface.page.page_contents import PageContents
    from coordinator.results.report.learning_curves import Series
    from coordinator.results.report.scores import Evaluation, Head
    from coordinator.results.report.training import Training
    from coordinator.site.config.schema import Config

FILE_FORMATS = ("csv", "json")  # single-file formats of `export`
# parts of lm-eval's results that `report --json` adds to the scores
OF_SCORES = ("groups", "versions", "n-shot", "higher_is_better", "n-samples", "dense")


class _Scores(SettingsCommand):
    """A command about one evaluation, or the checkpoints of a training."""

    evaluation: str | None = argument(EVALUATION, None)
    series: str | None = option(
        "All checkpoints in this folder, or matching this glob of folders.", "--series"
    )
    suite: str | None = option("With --series: this suite only.", "--suite", "-s")
    mixed: bool = flag("With --series: evaluations in exact and fast mode together.", "--mixed")
    gpu_hour_price: float | None = option("Price of a GPU hour, in any currency.", "--gpu-hour-price", min=0)

    def priced(self) -> Config:
        return self.there({"gpu_hour_price": self.gpu_hour_price})

    def check_one(self) -> None:
        if (self.evaluation is None) == (self.series is None):
            raise OperatorError("name an evaluation, or pass --series FOLDER")

    def heads(self, settings: Config) -> list[Head]:
        """Return the evaluations of the series."""
        from coordinator.results.report.load_series import find_heads

        return find_heads(settings.work_dir, self.series or "", self.suite, mixed=self.mixed)

    def made(self, settings: Config, *, scores: bool, dense: bool) -> tuple[Series, list[Training]]:
        """Return the requested series, and the state of each training. `scores`: the points' scores are needed."""
        from coordinator.results.report import training_files
        from coordinator.results.report.load_series import is_folder, read_document
        from coordinator.runtime.known_evaluations import find_folder

        if self.series is None:
            one = read_document(find_folder(settings, self.evaluation or ""))
            return training_files.series_of([one], settings).shown(dense=dense), []
        shown = sys.stderr.isatty()
        with TerminalMessages().busy("reading and comparing the checkpoints") if shown else nullcontext():
            heads = self.heads(settings)
            made = [
                training_files.judge_training(settings, of, whole=is_folder(self.series), scores=scores)
                for of in training_files.by_training(heads).values()
            ]
            series = made[0][1]
            if len(made) > 1:
                series = training_files.join_trainings(settings, heads)
        return series.shown(dense=dense), [training for training, _ in made]


@command()
class Report(_Scores, TableCommand):
    """Print an evaluation's makespan and scores; with --series, learning curves over checkpoints.

    A series shows since when a score is worse.

    Examples:

    evalspan report step-1000-core-1a2b3c4d

    evalspan report --series runs/7b --gpu-hour-price 2.10

    evalspan report --series runs/7b --signal

    evalspan report step-1000-core-1a2b3c4d --html report.html
    """

    dense: bool = flag("Include dense signals: gold bits per byte and probability, margin.", "--dense")
    as_csv: bool = flag("Print CSV: a line per checkpoint and score.", "--csv")
    whole: bool = flag("With --series: all checkpoints, and a chart of every score.", "--all")
    signal: bool = flag("With --series: signal and noise of each task, and what it takes.", "--signal")
    html: Path | None = HTML
    trace: Path | None = option("Write the jobs' spans as a Chrome trace (for Perfetto).", "--trace")
    verbose: bool = VERBOSE

    def run(self) -> None:
        settings = self.priced()
        self.check_one()
        self.refuse_csv_with_json(as_csv=self.as_csv)
        if self.signal and (self.series is None or self.html is not None or self.as_csv):
            raise OperatorError("--signal is of --series FOLDER, without --html and --csv")
        if self.html is not None or self.trace is not None:
            self._write(settings)
        elif self.series is not None or self.as_csv:
            scores = self.as_csv or self.as_json or self.signal
            series, trainings = self.made(settings, scores=scores, dense=self.dense)
            if self.signal:
                self._show_signals(settings, series)
            else:
                self._show_series(series, trainings)
        else:
            self._show(settings)

    def _write(self, settings: Config) -> None:
        from coordinator.interface.page import page_contents

        if self.as_csv or self.as_json:
            raise OperatorError("--html and --trace cannot be combined with --csv or --json")
        if self.series is not None and self.trace is not None:
            raise OperatorError("--trace is for a single evaluation: name it, and omit --series")
        name = self.evaluation or ""
        if self.html is not None:
            one = self.series is None
            write_page(
                self.html,
                page_contents.evaluation_contents(settings, name)
                if one
                else page_contents.trainings_contents(
                    settings, self.heads(settings), self.series or "", dense=self.dense
                ),
            )
        if self.trace is not None:
            write_trace(settings, name, self.trace)

    def _show_signals(self, settings: Config, series: Series) -> None:
        from coordinator.results.report.series_screen import slot_of
        from coordinator.results.report.signals import seconds_of, show_signals, signals_of
        from coordinator.results.report.tables import print_parts

        rows = signals_of(series, seconds_of(settings.work_dir, series.points))
        if self.as_json:
            show_json({"schema_version": 1, "signals": rows})
        else:
            print_parts(stdout_console(), *show_signals(rows, slot_of(series.points)))

    def _show_series(self, series: Series, trainings: list[Training]) -> None:
        from coordinator.results.report.learning_curves import to_csv, to_json
        from coordinator.results.report.series_screen import show_series, without_step

        if self.as_csv:
            sys.stdout.writelines(to_csv(series))
        elif self.as_json:
            known = [training.model_dump(mode="json") for training in trainings]
            sys.stdout.writelines(to_json(series, {"trainings": known}))
        else:
            show_series(stdout_console(), series, trainings, whole=self.whole)
            if missing := without_step(series.points):
                print_text(missing, "yellow", err=True)

    def _show(self, settings: Config) -> None:
        from coordinator import api
        from coordinator.interface.cli.screen.training_standings import training_lines
        from coordinator.results.report.render import show_report
        from coordinator.results.report.scores import screen_in, with_signals
        from coordinator.results.report.tables import print_parts
        from coordinator.runtime.summary import failed_job
        from evaljobs.contract.paths import EvaluationPaths

        found = api.results(self.evaluation or "", config=self.config, work_dir=self.work_dir)
        made, results = found.report, found.raw
        if self.dense:
            results = with_signals(results)
        if self.as_json:
            more = {key: results.get(key, {}) for key in OF_SCORES} | screen_in(results)
            show_json({**made.model_dump(mode="json"), "scores": results.get("results", {}), **more})
        else:
            known = made.makespan_seconds is not None
            job = failed_job(EvaluationPaths(found.folder), found)
            price = settings.gpu_hour_price
            show_report(
                stdout_console(), made, results, price, ran=known, verbose=self.verbose, failed_job=job
            )
            print_parts(stdout_console(), *training_lines(settings, made.evaluation_id))


@command()
class Export(_Scores):
    """Write scores, makespan, GPU seconds and cost, at their training steps, into a tracker or files.

    A second export adds only new points. `lm-eval` writes lm_eval's own files, `parquet` a row for each document.

    Examples:

    evalspan export --series runs/7b --to tensorboard --out tb

    evalspan export --series runs/7b --to csv --out curve.csv

    evalspan export step-1000-core-1a2b3c4d --to lm-eval --out results

    evalspan export --series runs/7b --to parquet --out documents.parquet

    evalspan export --left
    """

    to: Literal["tensorboard", "wandb", "mlflow", "csv", "json", "parquet", "lm-eval"] | None = option(
        "What to write."
    )
    out: Path | None = option("Folder to write to; for csv and json a file (default: stdout).", "--out", "-o")
    left: bool = flag("Export what the trackers of the settings lack.", "--left")
    name: str | None = option("The tracker's run (default: the checkpoints' folder).", "--run")
    project: str = option("W&B project, MLflow experiment.", default="evalspan")

    def run(self) -> None:
        from coordinator.runtime.known_evaluations import find_record

        settings = self.priced()
        if self.left:
            _export_left(settings)
            return
        if self.to is None or (self.out is None and self.to not in FILE_FORMATS):
            raise OperatorError(
                f"pass --to and --out FOLDER, or --left ({' and '.join(FILE_FORMATS)} need no --out)"
            )
        self.check_one()
        if self.to == "wandb" and self.evaluation is not None:
            # W&B syncs only the last of several offline runs of one id, so the whole training is written
            record, _ = find_record(settings, self.evaluation)
            self.series, self.suite = str(Path(record.checkpoint.announced).parent), record.suite.name
        found, _ = self.made(settings, scores=True, dense=True)
        done = [p for p in found.points if p.status not in ("open", "unreadable")]
        if not done:
            raise OperatorError("none of these evaluations has ended yet: there is nothing to export")
        try:
            written = self._write(self.to, settings, found, done)
        except OSError as error:
            raise OperatorError(
                f"{error.filename or self.out or 'stdout'}: {error.strerror or error}"
            ) from error
        for path in written:
            print_text(str(path))
        if running := len(found.points) - len(done):
            typer.echo(f"{running} still running: export again when they have ended", err=True)

    def _write(self, to: str, settings: Config, found: Series, done: list[Evaluation]) -> list[Path]:
        """Return files and folders written below `out`, or the file `out`; none for standard output."""
        from coordinator.results.report.learning_curves import to_csv, to_json
        from coordinator.results.trackers import TRACKERS, export_points, lm_eval_files, parquet_file

        text = to_csv(found) if to == "csv" else to_json(found)
        if (out := self.out) is None:
            sys.stdout.writelines(text)
            return []
        if to in FILE_FORMATS:
            file = out if out.suffix == f".{to}" and not out.is_dir() else out / f"series.{to}"
            file.parent.mkdir(parents=True, exist_ok=True)
            with file.open("w") as lines:
                lines.writelines(text)
            return [file]
        new = not out.exists()
        if to == "parquet":
            file = out if out.suffix == ".parquet" and not out.is_dir() else out / "documents.parquet"
            file.parent.mkdir(parents=True, exist_ok=True)
            return [parquet_file.write_documents(settings.work_dir, done, file)]
        out.mkdir(parents=True, exist_ok=True)
        try:
            if to == "lm-eval":
                return [
                    f
                    for p in done
                    for f in lm_eval_files.write_lm_eval_files(settings.work_dir / p.evaluation_id, out)
                ]
            return export_points(TRACKERS[to], done, out, run=self.name, project=self.project)
        except OperatorError:
            if new:
                with suppress(OSError):  # not empty: it contains earlier output
                    out.rmdir()
            raise


def _export_left(settings: Config) -> None:
    from coordinator.results.trackers import live

    if not live.targets_of(settings):
        raise OperatorError("no tracker is configured: set one in [trackers] of evalspan.toml")
    if errors := live.export_left(settings):
        raise EvalspanError("; ".join(errors))


# --- pages as files, and their server ---------------------------------------------------------------------------------


def write_page(file: Path, contents: PageContents) -> None:
    from coordinator.interface.page.html import render_page

    text = render_page(*contents)
    _save(file, text)
    print_text(f"wrote {file} ({len(text) / 1e6:.1f} MB): open it in a browser", err=True)


def write_trace(settings: Config, name: str, file: Path) -> None:
    from coordinator.interface.page.evaluation import trace_events
    from coordinator.interface.page.page_contents import evaluation_and_results

    _save(file, json.dumps(trace_events(evaluation_and_results(settings, name)[0]), allow_nan=False))
    print_text(f"wrote {file}: open it in https://ui.perfetto.dev or chrome://tracing", err=True)


def _save(file: Path, text: str) -> None:
    from evaljobs.contract.storage import write_atomic

    if not file.parent.is_dir():
        raise OperatorError(f"{file}: the folder {file.parent} does not exist")
    write = write_atomic if file.is_file() or not file.exists() else Path.write_bytes  # no device is replaced
    with report_write_errors(file):
        write(file, text.encode("utf-8", "replace"))


@command()
class Serve(SettingsCommand):
    """Show evaluations, trainings and comparisons in a browser, kept up to date; changes no evaluation.

    Examples:

    evalspan serve

    evalspan serve --port 8421

    ssh -L 8421:127.0.0.1:8421 LOGIN_NODE
    """

    port: int = option("On 127.0.0.1; 0: any free one.", min=0, max=65535, default=0)
    unix: Path | None = option("Or: a Unix socket, which only you can open.", "--unix")

    def run(self) -> None:
        from coordinator.site.config import loading

        try:
            from coordinator.interface.page import server
        except ImportError as error:
            raise OperatorError(
                f"`evalspan serve` needs {error.name}: pip install 'evalspan[web]'"
            ) from error

        # creates and checks no folder
        settings = loading.load_config(self.config, os.environ, {"work_dir": self.work_dir})
        if self.unix is not None and self.port:
            raise OperatorError("--port and --unix cannot be combined: a Unix socket has no port")
        if not settings.work_dir.is_dir():
            raise OperatorError(f"the work folder {settings.work_dir} does not exist: pass --work-dir")
        server.serve_pages(settings, port=self.port, unix=self.unix, say=print_text)
