"""`evalspan report | export`: scores and costs of one evaluation, or of all checkpoints of a training."""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from coordinator.cli.app import (
    CONFIG,
    HTML,
    JSON,
    ONE_EVALUATION,
    VERBOSE,
    WORK_DIR,
    app,
    say,
    settings_there,
    show_json,
    stdout,
)
from coordinator.errors import EvalspanError, OperatorError

if TYPE_CHECKING:
    from coordinator.config.schema import Config
    from coordinator.report.learning_curves import Point, Series

SERIES = Annotated[
    str | None,
    typer.Option("--series", help="All checkpoints in this folder, or that this glob of folders matches."),
]
SUITE = Annotated[str | None, typer.Option("--suite", "-s", help="With --series: of this suite only.")]
MIXED = Annotated[
    bool, typer.Option("--mixed", help="With --series: evaluations in exact and fast mode together.")
]
PRICE = Annotated[
    float | None,
    typer.Option("--gpu-hour-price", min=0, help="Cost of a GPU hour, any currency."),
]

FILES = ("csv", "json")  # formats of `export` that are one file
# parts of lm-eval's results that `report --json` gives beside the scores
OF_SCORES = ("groups", "versions", "n-shot", "higher_is_better", "n-samples")


@app.command()
def report(
    evaluation: ONE_EVALUATION = None,
    series: SERIES = None,
    suite: SUITE = None,
    mixed: MIXED = False,
    gpu_hour_price: PRICE = None,
    config: CONFIG = None,
    work_dir: WORK_DIR = None,
    as_csv: Annotated[
        bool, typer.Option("--csv", help="Print CSV: a line per checkpoint and score.")
    ] = False,
    html: HTML = None,
    trace: Annotated[
        Path | None, typer.Option("--trace", help="Write the jobs' spans as a Chrome trace (for Perfetto).")
    ] = None,
    verbose: VERBOSE = False,
    as_json: JSON = False,
) -> None:
    """Print an evaluation's makespan and scores; with --series, learning curves over checkpoints.

    A drop between two checkpoints beyond two standard errors is flagged. Examples:

    evalspan report step-1000-core-1a2b3c4d

    evalspan report --series runs/7b --gpu-hour-price 2.10

    evalspan report step-1000-core-1a2b3c4d --html report.html
    """
    from coordinator import api
    from coordinator.report.render import show

    settings = settings_there(config, work_dir, {"gpu_hour_price": gpu_hour_price})
    if (evaluation is None) == (series is None):
        raise OperatorError("name an evaluation, or say --series FOLDER")
    if html is not None or trace is not None:
        if as_csv or as_json:
            raise OperatorError("say --html or --trace without --csv and --json")
        _write_files(settings, evaluation, series, suite, html, trace, mixed=mixed)
        return
    if series is not None or as_csv:
        _show_series(
            _points(settings, evaluation, series, suite, mixed=mixed),
            as_csv=as_csv,
            as_json=as_json,
        )
        return
    found = api.results(evaluation or "", config=config, work_dir=work_dir)
    made, results = found.report, found.raw
    if as_json:
        more = {key: results.get(key, {}) for key in OF_SCORES}
        show_json({**made.model_dump(mode="json"), "scores": results.get("results", {}), **more})
    else:
        known = made.makespan_seconds is not None
        show(stdout(), made, results, settings.gpu_hour_price, ran=known, verbose=verbose)


def _write_files(
    settings: Config,
    evaluation: str | None,
    series: str | None,
    suite: str | None,
    html: Path | None,
    trace: Path | None,
    *,
    mixed: bool,
) -> None:
    from coordinator.cli.pages import write_page, write_trace
    from coordinator.page import read
    from coordinator.report.load_series import find_series

    if series is not None:
        if html is None or trace is not None:
            raise OperatorError("--trace is of one evaluation: name it, without --series")
        found = find_series(settings.work_dir, series, suite, mixed=mixed)
        write_page(html, read.of_trainings(found, settings.gpu_hour_price))
        return
    if html is not None:
        write_page(html, read.of_evaluation(settings, evaluation or ""))
    if trace is not None:
        write_trace(settings, evaluation or "", trace)


def _points(
    settings: Config, evaluation: str | None, series: str | None, suite: str | None, *, mixed: bool
) -> Series:
    from coordinator.report.learning_curves import make_series
    from coordinator.report.load_series import find_series, point_of
    from coordinator.runtime.summaries import find_record

    price = settings.gpu_hour_price
    if series is not None:
        return make_series(find_series(settings.work_dir, series, suite, mixed=mixed), price)
    record, paths = find_record(settings, evaluation or "")
    return make_series([point_of(paths, record)], price)


def _show_series(series: Series, *, as_csv: bool, as_json: bool) -> None:
    from coordinator.report.comparisons import show_series, without_step
    from coordinator.report.learning_curves import to_csv

    if as_csv:
        sys.stdout.write(to_csv(series))
    elif as_json:
        stdout().print_json(series.model_dump_json())
    else:
        show_series(stdout(), series)
        if missing := without_step(series.points):
            say(missing, "yellow", err=True)


def _export_left(settings: Config) -> None:
    from coordinator.trackers import live

    if not live.targets_of(settings):
        raise OperatorError("the settings name no tracker: set one in [trackers] of evalspan.toml")
    if errors := live.export_left(settings):
        raise EvalspanError("; ".join(errors))


@app.command()
def export(
    to: Annotated[
        Literal["tensorboard", "wandb", "mlflow", "csv", "json", "lm-eval"] | None,
        typer.Option(help="What to write."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="Folder to write to; of csv and json a file, or else stdout."),
    ] = None,
    left: Annotated[
        bool, typer.Option("--left", help="What the trackers of the settings do not have yet.")
    ] = False,
    evaluation: ONE_EVALUATION = None,
    series: SERIES = None,
    suite: SUITE = None,
    mixed: MIXED = False,
    run: Annotated[
        str | None, typer.Option(help="The tracker's run (default: the checkpoints' folder).")
    ] = None,
    project: Annotated[str, typer.Option(help="W&B project, MLflow experiment.")] = "evalspan",
    gpu_hour_price: PRICE = None,
    config: CONFIG = None,
    work_dir: WORK_DIR = None,
) -> None:
    """Write scores, makespan, GPU seconds and cost, at their training steps, into a tracker or files.

    A second export adds only new points. `lm-eval` writes lm_eval's own files. Examples:

    evalspan export --series runs/7b --to tensorboard --out tb

    evalspan export --series runs/7b --to csv --out curve.csv

    evalspan export step-1000-core-1a2b3c4d --to lm-eval --out results

    evalspan export --left
    """
    from coordinator.runtime.summaries import find_record

    settings = settings_there(config, work_dir, {"gpu_hour_price": gpu_hour_price})
    if left:
        _export_left(settings)
        return
    if to is None or (out is None and to not in FILES):
        raise OperatorError(f"say --to and --out FOLDER, or --left ({' and '.join(FILES)} need no --out)")
    if (evaluation is None) == (series is None):
        raise OperatorError("name an evaluation, or say --series FOLDER")
    if to == "wandb" and evaluation is not None:
        # W&B syncs only the last of several offline runs of one id: write the whole training
        record, _ = find_record(settings, evaluation)
        series, suite = str(Path(record.checkpoint.source).parent), record.suite.name
    found = _points(settings, evaluation, series, suite, mixed=mixed)
    done = [p for p in found.points if p.status not in ("open", "unreadable")]
    if not done:
        raise OperatorError("none of these evaluations has ended yet: there is nothing to export")
    try:
        written = _write(settings, to, out, found, done, run, project)
    except OSError as error:
        raise OperatorError(f"{error.filename or out or 'stdout'}: {error.strerror or error}") from error
    for path in written:
        say(str(path))
    running = len(found.points) - len(done)
    if running:
        typer.echo(f"{running} still running: export again when they have ended", err=True)


def _write(
    settings: Config,
    to: str,
    out: Path | None,
    found: Series,
    done: list[Point],
    run: str | None,
    project: str,
) -> list[Path]:
    """Files and folders written below `out`, or the file `out`; none where it is None: standard output."""
    from coordinator.report.learning_curves import to_csv
    from coordinator.trackers import TRACKERS, export_points, lm_eval_files

    text = to_csv(found) if to == "csv" else found.model_dump_json(indent=1) + "\n"
    if out is None:
        sys.stdout.write(text)
        return []
    if to in FILES:
        file = out if out.suffix == f".{to}" and not out.is_dir() else out / f"series.{to}"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        return [file]
    new = not out.exists()
    out.mkdir(parents=True, exist_ok=True)
    try:
        if to == "lm-eval":
            return [f for p in done for f in lm_eval_files.write(settings.work_dir / p.evaluation_id, out)]
        return export_points(TRACKERS[to], done, out, run=run, project=project)
    except OperatorError:
        if new:
            with suppress(OSError):  # not empty: it holds what was written before
                out.rmdir()
        raise
