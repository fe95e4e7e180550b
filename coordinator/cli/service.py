"""`evalspan daemon | submit | status | watch | logs`: the daemon, its inbox, and views of its work."""

from __future__ import annotations

import logging
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from coordinator.cli.app import (
    CONFIG,
    EVALUATION,
    JSON,
    WORK_DIR,
    app,
    say,
    say_aside,
    settings_of,
    show_json,
    stdout,
)
from coordinator.errors import OperatorError
from evaljobs.contract.paths import WorkPaths

if TYPE_CHECKING:
    from coordinator.config.schema import Config

log = logging.getLogger(__name__)


@app.command()
def daemon(
    config: CONFIG = None,
    work_dir: WORK_DIR = None,
    until_idle: Annotated[
        bool, typer.Option(help="End once nothing is left to do, e.g. in a batch job.")
    ] = False,
    wait: Annotated[
        bool, typer.Option(help="If another process holds the work folder, wait until it ends.")
    ] = False,
) -> None:
    """Evaluate every checkpoint that the hook, `submit` or a watched folder announces, until stopped.

    SIGTERM or Ctrl-C cancels nothing: jobs on Slurm go on, jobs of the local cluster end, and the next daemon
    resumes. Examples:

    evalspan daemon

    evalspan daemon --until-idle --work-dir /shared/evalspan-work
    """
    from contextlib import ExitStack

    from coordinator.base.isolate import LoopGuard
    from coordinator.base.signals import Signals
    from coordinator.cli.live_screen import Watcher
    from coordinator.runtime.journal import DAEMON
    from coordinator.runtime.service import Service
    from coordinator.runtime.wiring import coordinator_of
    from coordinator.trackers.live import Exporter

    settings = settings_of(config, work_dir)
    _check_watch(settings)
    screen = Console(stderr=True)
    _log_to(screen)
    coordinator = coordinator_of(settings)
    service = Service(coordinator, settings)
    exporter = Exporter(settings)
    with ExitStack() as stack:
        signals = stack.enter_context(Signals())
        try:
            stack.enter_context(coordinator.in_charge(DAEMON, lambda: wait and not signals.received))
        except OperatorError:
            if signals.received:
                return  # stopped by a signal during the wait
            raise
        watcher = stack.enter_context(Watcher(screen))
        quiet_since = time.monotonic()
        guard = LoopGuard(log)
        coordinator.resume_all()

        def tick() -> None:
            nonlocal quiet_since
            service.tick()
            running = [r for r in coordinator.running.values() if r.state.ended_at is None]
            for ended in (r.state for r in coordinator.running.values() if r.state.ended_at is not None):
                exporter.ask()
                log.info("%s has ended: evalspan report %s", ended.evaluation_id, ended.evaluation_id)
            guard("trackers", exporter.tick)
            if coordinator.busy or service.waiting or exporter.busy:
                quiet_since = time.monotonic()
            guard("the screen", watcher.show, running, coordinator.trouble)
            coordinator.forget_ended()

        def over() -> bool:
            return bool(signals.received) or (until_idle and time.monotonic() - quiet_since > 5.0)

        coordinator.run(over, tick)


def _check_watch(settings: Config) -> None:
    """Refuse at the start a [watch] suite that does not load or lacks its judge."""
    from coordinator.intake.admission import suite_files
    from coordinator.intake.from_settings import judge_options
    from coordinator.intake.suites import load_suite
    from coordinator.intake.validate import judge_for

    watch = settings.watch
    for suite in dict.fromkeys((*filter(None, [watch.suite]), *suite_files(watch).values())):
        judge_for(load_suite(suite), partial(judge_options, settings))
    if watch.suite is None and watch.folders:
        raise OperatorError(
            "[watch] folders are set without [watch] suite: name the suite for what appears there"
        )


def _log_to(screen: Console) -> None:
    """On a terminal the log goes above the live screen; elsewhere, lines with their time."""
    from rich.highlighter import NullHighlighter
    from rich.logging import RichHandler

    if screen.is_terminal and not screen.is_dumb_terminal:
        handler = RichHandler(console=screen, show_path=False, markup=False, highlighter=NullHighlighter())
        logging.basicConfig(level=logging.INFO, format="%(message)s", handlers=[handler])
    else:
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")


@app.command()
def submit(
    checkpoint: Annotated[
        str, typer.Argument(help="Folder with config.json, safetensors and tokenizer, or a Hub id.")
    ],
    suite: Annotated[str, typer.Option("--suite", "-s", help="A suite's name, or a suite file.")],
    config: CONFIG = None,
    work_dir: WORK_DIR = None,
    priority: Annotated[int, typer.Option(help="Higher goes first.")] = 0,
    step: Annotated[int | None, typer.Option(help="Training step; default: by the folder's name.")] = None,
    as_json: JSON = False,
) -> None:
    """Submit a checkpoint to the daemon of this work folder. Submitting it twice is one evaluation.

    A second submission may raise the priority; it resumes a cancelled or stale evaluation. Example:

    evalspan submit ckpt/step-1000 --suite core --priority 5
    """
    from coordinator.intake import from_settings, hub, sources, suites
    from coordinator.intake.resubmit import submitted
    from coordinator.runtime.journal import Journal, WorkLock, is_daemon

    settings = settings_of(config, work_dir)
    site = from_settings.site_of(settings)
    inputs = from_settings.inputs_for(site, from_settings.lm_eval_version(settings, site))
    suites.load_suite(suite)  # a wrong one is refused before a model is fetched
    checkpoint = hub.local_folder(checkpoint, say_aside, allow_bin=settings.checkpoint.allow_bin)
    record = from_settings.record_of(settings, checkpoint, suite, inputs, priority=priority, step=step)
    paths = WorkPaths(settings.work_dir)
    known = None
    if Journal.begun(paths.evaluation(record.evaluation_id).journal):
        from coordinator.cli.evaluations import find_evaluation

        known, _, _ = find_evaluation(settings, record.evaluation_id)
    else:
        from coordinator.cli.evaluate import check_suite

        check_suite(record, settings, suite, config=config, work_dir=work_dir)
    answer = submitted(known, priority)
    if answer.announce:
        notice = sources.Notice(
            checkpoint=record.checkpoint.source,
            step=record.checkpoint.step,
            suite=str(Path(suite).resolve()) if Path(suite).is_file() else suite,
            priority=priority,
            noticed_at=time.time(),
        )
        sources.submit(paths, notice)
    if answer.again:
        from coordinator.runtime.operator_commands import Command, leave_command

        leave_command(paths, Command(command="retry", evaluation_id=record.evaluation_id))
    holder = WorkLock(paths.lock).holder()
    waits = ""
    if not is_daemon(holder) and (answer.announce or answer.again or (answer.what == "known" and not holder)):
        waits = _without_daemon(holder)
    if as_json:
        shown = {"daemon": is_daemon(holder), "what": answer.what, "note": answer.said, "waits": waits}
        show_json({"evaluation_id": record.evaluation_id, **shown})
        return
    say(record.evaluation_id)
    if answer.said:
        say(answer.said, err=True)
    if waits:
        say(waits, "yellow", err=True)


def _without_daemon(holder: str) -> str:
    """Text on what a submission waits for. `holder`: the command that holds the work folder; "": none."""
    if not holder:
        return "no daemon runs for this work folder: it waits until one is started: `evalspan daemon`"
    return (
        f"no daemon runs for this work folder, which {holder} has: it waits until one is started: "
        "`evalspan daemon --wait`"
    )


@app.command()
def status(
    evaluation: Annotated[str | None, typer.Argument(help="Only this one.")] = None,
    config: CONFIG = None,
    work_dir: WORK_DIR = None,
    as_json: JSON = False,
) -> None:
    """Show what runs, what waits, what failed and why.

    Examples:

    evalspan status

    evalspan status step-1000-core-1a2b3c4d --json
    """
    from coordinator.allocation import cordons
    from coordinator.cli.evaluations import find_folder
    from coordinator.cli.standing import rows_of, show_pending, show_status
    from coordinator.intake import pending, sources
    from coordinator.report.render import seconds
    from coordinator.runtime.journal import WorkLock, is_daemon

    settings = settings_of(config, work_dir)
    paths = WorkPaths(settings.work_dir)
    rows = rows_of(settings, find_folder(settings, evaluation) if evaluation else None)
    holder = WorkLock(paths.lock).holder()
    alive = is_daemon(holder)
    now = time.time()
    checkpoints = pending.read(paths.pending)
    if not alive:
        deliveries = [*sources.from_submissions(paths), *sources.from_spool(paths)]
        checkpoints = pending.with_unread(checkpoints, deliveries, _without_daemon(holder), now)
    cordoned = {node: until - now for node, until in sorted(cordons.read(paths.nodes, now).items())}
    if as_json:
        shown = {
            "schema_version": 1,
            "daemon": alive,
            "holder": holder or None,
            "evaluations": rows,
            "kept_back_seconds": cordoned,
            **checkpoints.model_dump(mode="json", include={"waiting", "refused"}),
        }
        show_json(shown)
        return
    show_status(stdout(), rows)
    show_pending(stdout(), checkpoints, now)
    for node, left in cordoned.items():
        again = f"evalspan release {node} --minutes 0"
        said = f"{node} is cordoned: it is not taken for {seconds(left)} more (`{again}` lets it be taken)"
        say(said, "yellow")
    say(f"daemon: {'running' if alive else 'not running'}{f' ({holder})' if holder else ''}")


@app.command()
def watch(
    evaluation: Annotated[str | None, typer.Argument(help="Only this one.")] = None,
    config: CONFIG = None,
    work_dir: WORK_DIR = None,
) -> None:
    """Show a live screen of running evaluations; Ctrl-C leaves it, the evaluations go on.

    Example:

    evalspan watch
    """
    from coordinator.base.signals import Signals
    from coordinator.cli.evaluations import Follower, find_evaluation
    from coordinator.cli.live_screen import View, Watcher
    from coordinator.runtime.wiring import coordinator_of

    settings = settings_of(config, work_dir)
    performer = coordinator_of(settings).performer
    only = find_evaluation(settings, evaluation)[0].evaluation_id if evaluation else None
    follower = Follower(settings, only)
    with Signals() as signals, Watcher(stdout()) as watcher:
        while not signals.received:
            views = [View(state, performer.snapshot(state)) for state in follower.states()]
            watcher.show(views, "")
            if not views:
                break
            time.sleep(0.5)
    if not signals.received:
        say("nothing runs (any more): `evalspan status` lists what there is")


@app.command()
def logs(
    evaluation: EVALUATION,
    what: Annotated[str | None, typer.Argument(help="A job, trial or shard, or part of its name.")] = None,
    config: CONFIG = None,
    work_dir: WORK_DIR = None,
    lines: Annotated[int, typer.Option("-n", min=1, help="Last lines of each.")] = 40,
) -> None:
    """Print the log of a job, a trial, or a shard's trial; without a name, every log's last line.

    Examples:

    evalspan logs step-1000-core-1a2b3c4d

    evalspan logs step-1000-core-1a2b3c4d "hellaswag|0|12" -n 100
    """
    from coordinator.cli.evaluations import find_evaluation
    from coordinator.cli.standing import logs_of

    settings = settings_of(config, work_dir)
    state, paths, _ = find_evaluation(settings, evaluation)
    chosen = logs_of(state, paths, what)
    if not chosen:
        raise OperatorError(f"no log in {paths.logs} is of {what!r}: `evalspan logs {evaluation}` lists them")
    for file in chosen:
        text = file.read_text(errors="replace").splitlines()
        if what is None:
            last = text[-1] if text else "(empty)"
            say(f"{file.name}: {last}")
        else:
            say(f"== {file}", "bold")
            say("\n".join(text[-lines:]))
