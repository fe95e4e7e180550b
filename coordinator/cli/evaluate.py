"""`evalspan eval | prepare`: evaluate one checkpoint on one suite, or build a suite's request sets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from coordinator.cli.app import CONFIG, JSON, WORK_DIR, app, say, say_aside, settings_of, show_json, stdout
from coordinator.errors import OperatorError

if TYPE_CHECKING:
    from coordinator.config.schema import Config
    from coordinator.evaluation.records import EvaluationRecord
    from coordinator.evaluation.state import State

TRACKER_SECONDS = 60.0  # longest wait for tracker exports before the scores are printed


@app.command("eval")
def evaluate(
    checkpoint: Annotated[
        str, typer.Argument(help="Folder with config.json, safetensors and tokenizer, or a Hub id.")
    ],
    suite: Annotated[str, typer.Option("--suite", "-s", help="A suite's name, or a suite file.")],
    config: CONFIG = None,
    work_dir: WORK_DIR = None,
    cluster: Annotated[str | None, typer.Option(help="local or slurm.")] = None,
    partition: Annotated[str | None, typer.Option(help="Slurm partition of the GPU jobs.")] = None,
    account: Annotated[str | None, typer.Option(help="Slurm account.")] = None,
    qos: Annotated[str | None, typer.Option(help="Slurm QOS.")] = None,
    slots: Annotated[int | None, typer.Option(min=1, help="At most this many trials at once.")] = None,
    shards_per_task: Annotated[int | None, typer.Option(min=1, help="Force this many shards a task.")] = None,
    batch_size: Annotated[
        str | None, typer.Option(help='Overrides the suite\'s: a number or "auto".')
    ] = None,
    step: Annotated[
        int | None,
        typer.Option(help="Training step, for reports and trackers; default: by the folder's name."),
    ] = None,
    as_json: JSON = False,
) -> None:
    """Evaluate one checkpoint on one suite and print the scores and the makespan.

    Killed and run again, it goes on where it stood. Example:

    evalspan eval ckpt/step-1000 --suite core --cluster slurm --partition gpu
    """
    from coordinator.cli.interrupt import drive
    from coordinator.cluster import ClusterError
    from coordinator.intake import from_settings, hub, suites
    from coordinator.intake.validate import check_cluster
    from coordinator.runtime import wiring
    from coordinator.trackers.live import Exporter

    settings = settings_of(
        config,
        work_dir,
        {
            "cluster.kind": cluster,
            "cluster.partition": partition,
            "cluster.account": account,
            "cluster.qos": qos,
            "cluster.slots": slots,
        },
    )
    suites.load_suite(suite)  # a wrong one is refused before a model is fetched
    checkpoint = hub.local_folder(checkpoint, say_aside, allow_bin=settings.checkpoint.allow_bin)
    coordinator = wiring.coordinator_of(settings)
    site = coordinator.performer.site
    record = from_settings.record_of(
        settings,
        checkpoint,
        suite,
        from_settings.inputs_for(site, coordinator.performer.lm_eval_version),
        options=from_settings.run_options(settings).model_copy(
            update={"shards_per_task": shards_per_task, "max_trials": slots}
        ),
        step=step,
        batch_size=batch_size,
    )
    paths = site.paths.evaluation(record.evaluation_id)
    if not paths.journal.exists():
        check_suite(record, settings, suite, config=config, work_dir=work_dir)
        try:
            record = wiring.at_site(record, wiring.hosting(settings, coordinator.cluster), settings)
        except ClusterError as error:
            raise OperatorError(f"the cluster cannot be asked for its rules: {error}") from error
        check_cluster(coordinator.cluster, record)
    before = _written_at(paths.results)
    running = drive(coordinator, record, Console(stderr=as_json))
    Exporter(settings).finish(TRACKER_SECONDS)
    _finish(
        running.state,
        paths.root,
        ran=before is None or _written_at(paths.results) != before,
        as_json=as_json,
        gpu_hour_price=settings.gpu_hour_price,
    )


def check_suite(
    record: EvaluationRecord, settings: Config, suite: str, *, config: Path | None, work_dir: Path | None
) -> None:
    """Refuse a suite whose tasks or data jobs would not find.

    `suite`, `config`, `work_dir`: as typed. Shows a spinner: at first lm-eval reads thousands of
    files.
    """
    from coordinator.doctor.shared_storage import check_shared
    from coordinator.intake.from_settings import site_of
    from coordinator.intake.validate import check_tasks, prepare_command

    named = record.checkpoint.source
    prepare = prepare_command(named, suite, config=config, work_dir=work_dir, convert=record.convert)
    with Console(stderr=True).status("asking lm-eval for the suite's tasks"):
        files = check_tasks(record.suite, site_of(settings), prepare)
    if settings.cluster.kind == "slurm":
        check_shared([str(settings.work_dir), named, *record.suite.include_path, *files])


def _written_at(file: Path) -> int | None:
    """Mtime in ns; None where it is not there."""
    try:
        return file.stat().st_mtime_ns
    except OSError:
        return None


def _finish(state: State, root: Path, *, ran: bool, as_json: bool, gpu_hour_price: float | None) -> None:
    from coordinator.intake.resubmit import nothing_run
    from coordinator.report.measurements import Report
    from coordinator.report.render import show

    results = json.loads((root / "results.json").read_text())
    if not ran:
        typer.echo(nothing_run(state), err=as_json)
    if as_json:
        show_json(results)
    else:
        report = Report.model_validate_json((root / "report.json").read_bytes())
        show(stdout(), report, results, gpu_hour_price, ran=ran)
        say(f"\nResults: {root / 'results.json'}\nSamples, logs, responses: {root}")
    if state.ending.cancelled:
        raise typer.Exit(130)
    if state.failed_entries() or state.unscored_items:
        raise typer.Exit(1)


@app.command()
def prepare(
    suite: Annotated[str, typer.Option("--suite", "-s", help="A suite's name, or a suite file.")],
    checkpoint: Annotated[str, typer.Option("--tokenizer", help="The checkpoint's folder, or a Hub id.")],
    config: CONFIG = None,
    work_dir: WORK_DIR = None,
    as_json: JSON = False,
) -> None:
    """Build a suite's request sets on this machine, with data sets and metric scripts from the internet.

    Jobs run offline: they read the work folder and the Hugging Face cache. Example:

    evalspan prepare --suite core --tokenizer ckpt/step-1000
    """
    from coordinator.intake import from_settings, hub, request_sets, suites
    from coordinator.runtime.wiring import coordinator_of

    settings = settings_of(config, work_dir)
    suites.load_suite(suite)  # a wrong one is refused before a model is fetched
    checkpoint = hub.local_folder(checkpoint, say_aside, allow_bin=settings.checkpoint.allow_bin)
    performer = coordinator_of(settings).performer
    built = request_sets.prepare(
        suite,
        checkpoint,
        site=performer.site,
        model=from_settings.model_options(settings),
        inputs=from_settings.inputs_for(performer.site, performer.lm_eval_version),
    )
    if as_json:
        show_json(built)
    else:
        for entry, sets in built.items():
            say(f"{entry}: {len(sets)} request set{'s' if len(sets) != 1 else ''}")
