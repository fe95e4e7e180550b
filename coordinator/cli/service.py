"""`evalspan daemon | submit | status | watch | logs`: the daemon, its inbox, and views of its work."""

from __future__ import annotations

import logging
import os
import time
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from coordinator.cli import lm_eval_flags
from coordinator.cli.app import (
    CONFIG,
    EVALUATION,
    JSON,
    WORK_DIR,
    AtTerminal,
    app,
    no_work_folder,
    place_of,
    say,
    settings_of,
    settings_there,
    show_json,
    stdout,
)
from coordinator.cli.disk import show_disk
from coordinator.cli.evaluate import CHECKPOINT, STEP
from coordinator.cli.lm_eval_flags import LmEvalCommand
from coordinator.cli.suite_options import takes_suite
from coordinator.cli.terminal import Console
from coordinator.errors import OperatorError
from evaljobs import log_lines
from evaljobs.contract.paths import WorkPaths

if TYPE_CHECKING:
    from pathlib import Path

    from coordinator.config.schema import Config
    from coordinator.evaluation.state import State
    from coordinator.intake.one_off import SuiteOptions
    from evaljobs.contract.paths import EvaluationPaths

log = logging.getLogger(__name__)

# options of `eval` that `api.submit` refuses with the reason
OF_DAEMON = Annotated[str | None, typer.Option(help="Refused: the daemon's settings say it.", hidden=True)]
SEVERAL_OF_DAEMON = Annotated[
    list[str] | None, typer.Option(help="Refused: the daemon's settings say it.", hidden=True)
]


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
    from contextlib import ExitStack, closing

    from coordinator.base.isolate import LoopGuard
    from coordinator.base.signals import Signals
    from coordinator.cli.beside import Beside
    from coordinator.cli.screen.live_screen import Watcher
    from coordinator.cli.screen.standing import Shown
    from coordinator.intake.admission import missing_places, no_place
    from coordinator.intake.from_settings import check_device
    from coordinator.runtime.service import Service
    from coordinator.runtime.wiring import coordinator_of
    from coordinator.runtime.work_lock import DAEMON

    settings = settings_of(config, work_dir)
    _check_watch(settings, config)
    screen = Console(stderr=True)
    _log_to(screen)
    check_device(settings)
    coordinator = coordinator_of(settings)
    service = Service(coordinator, settings)
    for why in (*filter(None, [no_place(settings)]), *missing_places(settings.watch)):
        log.warning("%s", why)
    with ExitStack() as stack:
        signals = stack.enter_context(Signals())
        try:
            stack.enter_context(coordinator.in_charge(DAEMON, lambda: wait and not signals.received))
        except OperatorError:
            if signals.received:
                return  # stopped by a signal during the wait
            raise
        watcher = stack.enter_context(Watcher(screen))
        beside = stack.enter_context(closing(Beside(settings, coordinator)))
        quiet_since = time.monotonic()
        guard = LoopGuard(log)
        coordinator.resume_all()

        def tick() -> None:
            nonlocal quiet_since
            service.tick()
            found = coordinator.summaries()
            running = [Shown(summary) for summary in found if summary.ended_at is None]
            gone = [summary for summary in found if summary.ended_at is not None]
            for ended in gone:
                _log_end(coordinator.running[ended.evaluation_id].state)
            beside.tick(service.pending_count, gone)
            if coordinator.busy or service.waiting or beside.busy:
                quiet_since = time.monotonic()
            guard("the screen", watcher.show, running, coordinator.trouble)
            coordinator.forget_ended()
            beside.keep_house()

        def over() -> bool:
            return bool(signals.received) or (until_idle and time.monotonic() - quiet_since > 5.0)

        coordinator.run(over, tick)


def _log_end(ended: State) -> None:
    from coordinator.intake.resubmit import reused

    name = ended.evaluation_id
    log.info("%s has ended%s: evalspan report %s", name, reused(ended), name)


def _check_watch(settings: Config, config: Path | None) -> None:
    """Refuse at the start a [watch] suite that does not load or lacks its judge."""
    from coordinator.config.loading import source_of
    from coordinator.intake.admission import loaded_suites
    from coordinator.intake.from_settings import judge_options
    from coordinator.intake.validate import judge_for

    watch = settings.watch
    for suite in loaded_suites(watch, partial(source_of, config, os.environ, "watch")):
        judge_for(suite, partial(judge_options, settings))
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
        log_lines.begin("%(message)s", handler)
    else:
        log_lines.begin("%(asctime)s %(levelname)s %(message)s")


@app.command(cls=LmEvalCommand)
@takes_suite
def submit(
    chosen: SuiteOptions,
    checkpoint: CHECKPOINT,
    config: CONFIG = None,
    work_dir: WORK_DIR = None,
    priority: Annotated[int, typer.Option(help="Higher goes first.")] = 0,
    step: STEP = None,
    model: OF_DAEMON = None,
    model_args: SEVERAL_OF_DAEMON = None,
    device: OF_DAEMON = None,
    as_json: JSON = False,
) -> None:
    """Submit a checkpoint to the daemon of this work folder. Submitting it twice is one evaluation.

    A second submission may raise the priority; it resumes a cancelled or stale evaluation. Examples:

    evalspan submit ckpt/step-1000 --suite core --priority 5

    evalspan submit ckpt/step-1000 --tasks hellaswag --limit 100
    """
    from coordinator import api

    pretrained, trial = lm_eval_flags.trial_settings(model, model_args, device)
    sent = api.submit(
        lm_eval_flags.the_checkpoint(checkpoint, pretrained),
        chosen,
        priority=priority,
        step=step,
        config=config,
        work_dir=work_dir,
        settings=trial,
        aside=AtTerminal(),
    )
    if as_json:
        show_json(sent.model_dump(include={"evaluation_id", "daemon", "what", "note", "waits"}))
        return
    say(sent.evaluation_id)
    if sent.note:
        say(sent.note, err=True)
    if sent.waits:
        say(sent.waits, "yellow", err=True)
        say(f"work folder: {place_of(settings_of(config, work_dir), config, work_dir)}", "yellow", err=True)


@app.command()
def status(
    evaluation: Annotated[
        str | None, typer.Argument(help="Only this one, with failures that were mended.")
    ] = None,
    config: CONFIG = None,
    work_dir: WORK_DIR = None,
    only_open: Annotated[bool, typer.Option("--open", help="Only what runs or waits.")] = False,
    only_failed: Annotated[
        bool, typer.Option("--failed", help="Only what has a failed task or cannot go on.")
    ] = False,
    last: Annotated[
        int | None, typer.Option(min=1, help="At most so many rows; default: 20, with --json all.")
    ] = None,
    disk: Annotated[
        bool, typer.Option("--disk", help="In place of that: space and files by kind and by evaluation.")
    ] = False,
    as_json: JSON = False,
) -> None:
    """Show what runs, what waits and why, the last scores, what failed, and whether a daemon runs.

    What runs or waits comes first, then the newest. The time is that so far, or the makespan.

    Examples:

    evalspan status

    evalspan status --failed --last 50

    evalspan status step-1000-core-1a2b3c4d --json
    """
    from coordinator.base.typed import typed
    from coordinator.cli.screen.board import board, show
    from coordinator.cli.screen.listing import show_left_out
    from coordinator.cli.screen.slurm_answers import (
        listed_jobs,
        listed_nodes,
        queued_daemons,
        wrapped_daemon,
    )
    from coordinator.cli.screen.standing import ROWS, Choice, all_of, json_of, standing
    from coordinator.cli.screen.surroundings import read_surroundings
    from coordinator.runtime.summaries import find_folder

    if disk:
        show_disk(settings_there(config, work_dir), last, as_json=as_json)
        return
    settings = settings_of(config, work_dir, makes=False)
    only = find_folder(settings, evaluation).root.name if evaluation else None
    found, now = all_of(settings), time.time()
    command = typed("daemon", config, work_dir)
    around = read_surroundings(
        WorkPaths(settings.work_dir),
        command,
        now,
        partial(queued_daemons, settings),
        partial(wrapped_daemon, settings, command.partition(" daemon")[2]),
    )
    asked = Choice(only=only, open=only_open, failed=only_failed, last=last if as_json else last or ROWS)
    chosen, left_out = asked.of(found)
    open_ones = [summary for summary in found if summary.ended_at is None]
    ask, ask_nodes = partial(listed_jobs, settings), partial(listed_nodes, settings)
    shown = standing(settings, chosen, open_ones, ask, ask_nodes)
    if as_json:
        shown.sort(key=lambda one: (one.summary.accepted_at, one.summary.evaluation_id))
        rows = [json_of(one, settings.work_dir / one.summary.evaluation_id, now) for one in shown]
        show_json({"schema_version": 1, **around.as_json(), "evaluations": rows})
        return
    if missing := no_work_folder(settings, config, work_dir):
        say(f"{missing}: `evalspan eval` or `evalspan submit` makes it")
    elif not found:
        say("no evaluations here yet: `evalspan submit` or `evalspan eval` starts one")
        say(f"work folder: {place_of(settings, config, work_dir)}")
    elif not chosen:
        say(f"none of the {len(found)} evaluations here {'runs or waits' if only_open else 'has failed'}")
    left = show_left_out(left_out, len(chosen), typed("status", config, work_dir))
    show(stdout(), [*board(shown, now, whole=only is not None), *left, *around.lines(now)])


@app.command()
def watch(
    evaluation: Annotated[str | None, typer.Argument(help="Only this one, until it has ended.")] = None,
    config: CONFIG = None,
    work_dir: WORK_DIR = None,
) -> None:
    """Show a live screen: what runs and waits, the last scores, the daemon.

    Ctrl-C leaves it, the evaluations go on. In a pipe it prints a line per change, and ends when
    nothing runs. Example:

    evalspan watch
    """
    from coordinator.base.typed import typed
    from coordinator.cli.screen import watching
    from coordinator.runtime.summaries import find_folder

    settings = settings_there(config, work_dir)
    only = find_folder(settings, evaluation) if evaluation else None
    if why := watching.watch(settings, stdout(), typed("daemon", config, work_dir), only):
        say(why)


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
    from coordinator.runtime.replay import find_evaluation
    from evaljobs.contract.folded import read_bytes

    settings = settings_there(config, work_dir)
    state, paths, _ = find_evaluation(settings, evaluation)
    chosen = _logs_of(state, paths, what)
    if not chosen and what is None and state.ended_at is not None:
        raise OperatorError(
            f"{state.evaluation_id} has no logs any more: `evalspan prune` removes those of old evaluations"
        )
    if not chosen:
        raise OperatorError(f"no log in {paths.logs} is of {what!r}: `evalspan logs {evaluation}` lists them")
    for file in chosen:
        text = read_bytes(file).decode(errors="replace").splitlines()
        if what is None:
            last = text[-1] if text else "(empty)"
            say(f"{file.name}: {last}")
        else:
            say(f"== {file}", "bold")
            say("\n".join(text[-lines:]))


def _logs_of(state: State, paths: EvaluationPaths, what: str | None) -> list[Path]:
    """Log files that `what` names: (part of) a job's or trial's name, or a shard of the trial."""
    from pathlib import Path

    from evaljobs.contract.folded import exists, files_in

    files = files_in(paths.logs, "*.log")
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
    return sorted({f for f in chosen if exists(f)})
