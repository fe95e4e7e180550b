"""`evalspan daemon | submit | status | watch | logs`: the daemon, its inbox, and views of its work."""

from __future__ import annotations

import json
import logging
import os
import time
from functools import partial
from typing import TYPE_CHECKING

from coordinator.errors import OperatorError
from coordinator.interface.cli import lm_eval_flags
from coordinator.interface.cli.app import (
    EVALUATION,
    Console,
    SettingsCommand,
    TableCommand,
    TerminalMessages,
    argument,
    command,
    flag,
    option,
    print_text,
    show_json,
    stdout_console,
)
from coordinator.interface.cli.disk import show_disk
from coordinator.interface.cli.evaluate import CHECKPOINT, STEP
from coordinator.interface.cli.lm_eval_flags import LmEvalCommand
from coordinator.interface.cli.suite_options import SuiteCommand
from evaljobs import log_lines
from evaljobs.contract.archived_files import file_exists, files_in, read_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from coordinator.decide.evaluation.state import State
    from coordinator.site.config.schema import Config
    from evaljobs.contract.paths import EvaluationPaths

log = logging.getLogger(__name__)

FOLLOW_SECONDS = 0.5  # between two looks at the logs
OF_DAEMON = option("Refused: set in the daemon's settings.", hidden=True)  # `api.submit` tells why


@command()
class Daemon(SettingsCommand):
    """Evaluate every checkpoint that the hook, `submit` or a watched folder announces, until stopped.

    SIGTERM or Ctrl-C cancels nothing: jobs on Slurm continue, jobs of the local cluster end, and the next daemon
    resumes.

    Examples:

    evalspan daemon

    evalspan daemon --until-idle --work-dir /shared/evalspan-work
    """

    until_idle: bool = flag("Exit once nothing is left to do, e.g. in a batch job.")
    wait: bool = flag("Also wait for another daemon to release the work folder, not only for other commands.")

    def run(self) -> None:
        from contextlib import ExitStack, closing

        from coordinator.base.isolate import LoopGuard
        from coordinator.base.signals import Signals
        from coordinator.intake.admission import missing_places, refusal_of_place
        from coordinator.intake.from_settings import check_device
        from coordinator.interface.cli.screen.evaluation_views import EvaluationView
        from coordinator.interface.cli.screen.live_screen import Watcher
        from coordinator.operations.monitor.daemon_services import DaemonServices
        from coordinator.runtime.service import Service
        from coordinator.runtime.wiring import coordinator_of
        from coordinator.runtime.work_lock import DAEMON, UNTIL_IDLE, is_daemon

        settings = self.settings()
        _check_watch(settings, self.config)
        screen = Console(stderr=True)
        _log_to(screen)
        check_device(settings)
        coordinator = coordinator_of(settings)
        service = Service(coordinator, settings)
        for why in (*filter(None, [refusal_of_place(settings)]), *missing_places(settings.watch)):
            log.warning("%s", why)
        with ExitStack() as stack:
            signals = stack.enter_context(Signals())

            def patient(holder: str) -> bool:
                stays = is_daemon(holder) and not holder.startswith(UNTIL_IDLE)
                return (self.wait or not stays) and not signals.received

            try:
                name = UNTIL_IDLE if self.until_idle else DAEMON
                stack.enter_context(coordinator.in_charge(name, patient))
            except OperatorError:
                if signals.received:
                    return  # stopped by a signal during the wait
                raise
            watcher = stack.enter_context(Watcher(screen))
            beside = stack.enter_context(closing(DaemonServices(settings, coordinator)))
            quiet_since = time.monotonic()
            guard = LoopGuard(log)
            coordinator.evaluations.resume_all()

            def tick() -> None:
                nonlocal quiet_since
                service.tick()
                found = coordinator.evaluations.summaries()
                running = [EvaluationView(summary) for summary in found if summary.ended_at is None]
                gone = [summary for summary in found if summary.ended_at is not None]
                for ended in gone:
                    _log_end(coordinator.evaluations.running[ended.evaluation_id].state)
                beside.tick(service.pending_count, gone, service.announced_at(gone))
                if coordinator.evaluations.busy or service.waiting or beside.busy:
                    quiet_since = time.monotonic()
                guard("the screen", watcher.show, running, coordinator.evaluations.trouble)
                coordinator.evaluations.forget_ended()
                beside.keep_house()

            def over() -> bool:
                return bool(signals.received) or (self.until_idle and time.monotonic() - quiet_since > 5.0)

            coordinator.run(over, tick)


def _log_end(ended: State) -> None:
    from coordinator.intake.resubmit import reused_in_words

    name = ended.evaluation_id
    log.info("%s has ended%s: evalspan report %s", name, reused_in_words(ended), name)


def _check_watch(settings: Config, config: Path | None) -> None:
    """Refuse at the start a [watch] suite that does not load or lacks its judge."""
    from coordinator.intake.admission import loaded_suites
    from coordinator.intake.from_settings import judge_for
    from coordinator.site.config.loading import source_of

    watch = settings.watch
    for suite in loaded_suites(watch, partial(source_of, config, os.environ, "watch")):
        judge_for(settings, suite)
    if watch.suite is None and watch.folders:
        raise OperatorError(
            "[watch] folders are set without [watch] suite: set the suite for checkpoints found there"
        )


def _log_to(screen: Console) -> None:
    """Send the log above the live screen on a terminal, otherwise to lines with their time."""
    from rich.highlighter import NullHighlighter
    from rich.logging import RichHandler

    if screen.is_terminal and not screen.is_dumb_terminal:
        handler = RichHandler(console=screen, show_path=False, markup=False, highlighter=NullHighlighter())
        log_lines.begin_logging("%(message)s", handler)
    else:
        log_lines.begin_logging("%(asctime)s %(levelname)s %(message)s")


@command(cls=LmEvalCommand)
class Submit(SuiteCommand):
    """Submit a checkpoint to the daemon of this work folder. Submitting it again creates no second evaluation.

    A second submission may raise the priority; it resumes a cancelled or stale evaluation.

    Examples:

    evalspan submit ckpt/step-1000 --suite core --priority 5

    evalspan submit ckpt/step-1000 --tasks hellaswag --limit 100
    """

    checkpoint: str = argument(CHECKPOINT)
    priority: int = option("Higher goes first.", default=0)
    step: int | None = STEP
    model: str | None = OF_DAEMON
    model_args: list[str] | None = OF_DAEMON
    device: str | None = OF_DAEMON

    def run(self) -> None:
        from coordinator import api

        pretrained, trial = lm_eval_flags.trial_settings(self.model, self.model_args, self.device)
        sent = api.submit(
            lm_eval_flags.checkpoint_argument(self.checkpoint, pretrained),
            **self.chosen,
            priority=self.priority,
            step=self.step,
            config=self.config,
            work_dir=self.work_dir,
            settings=trial,
            messages=TerminalMessages(),
        )
        if self.as_json:
            show_json(sent.model_dump(include={"evaluation_id", "daemon", "what", "note", "waits"}))
            return
        print_text(sent.evaluation_id)
        if sent.note:
            print_text(sent.note, err=True)
        if sent.waits:
            print_text(sent.waits, "yellow", err=True)
            print_text(f"work folder: {self.place(self.settings())}", "yellow", err=True)


@command()
class Status(TableCommand):
    """Show running, waiting and failed evaluations, the latest scores, and the daemon.

    Open evaluations come first, then the newest. The time is the elapsed time, or the makespan.

    Examples:

    evalspan status

    evalspan status --failed --last 50

    evalspan status step-1000-core-1a2b3c4d --json
    """

    evaluation: str | None = argument("Only this one, including failures since overcome.", None)
    only_open: bool = flag("Only evaluations that run or wait.", "--open")
    only_failed: bool = flag("Only evaluations with a failed task or that cannot continue.", "--failed")
    last: int | None = option("Maximum number of rows; default: 20, with --json all.", min=1)
    disk: bool = flag("Show space and files by kind and by evaluation instead.", "--disk")

    def run(self) -> None:
        from coordinator.interface.cli.screen.board import evaluation_table
        from coordinator.interface.cli.screen.evaluation_views import (
            DEFAULT_ROWS,
            all_summaries,
            choose_shown,
            evaluation_views,
            view_as_json,
        )
        from coordinator.interface.cli.screen.listing import show_left_out
        from coordinator.interface.cli.screen.training_standings import (
            as_json,
            standing_lines,
            training_standings,
        )
        from coordinator.interface.cli.screen.work_folder_view import (
            WorkFolderView,
            listed_jobs,
            listed_nodes,
        )
        from coordinator.results.report.tables import print_parts
        from coordinator.runtime.known_evaluations import find_folder, unreadable_message

        if self.disk:
            show_disk(self.there(), self.last, as_json=self.as_json)
            return
        settings = self.settings(makes=False)
        only = find_folder(settings, self.evaluation).root.name if self.evaluation is not None else None
        found, now = all_summaries(settings), time.time()
        around = WorkFolderView(settings, self.typed("daemon")).around
        last = self.last if self.as_json else self.last or DEFAULT_ROWS
        asked = {"only_open": self.only_open, "only_failed": self.only_failed}
        chosen, left_out = choose_shown(found, only=only, last=last, **asked)
        open_ones = [summary for summary in found if summary.ended_at is None]
        ask, ask_nodes = partial(listed_jobs, settings), partial(listed_nodes, settings)
        shown = evaluation_views(settings, chosen, open_ones, ask, ask_nodes)
        known = training_standings(settings, found, chosen, now)
        if self.as_json:
            shown.sort(key=lambda one: (one.summary.accepted_at, one.summary.evaluation_id))
            rows = [view_as_json(one, settings.work_dir / one.summary.evaluation_id, now) for one in shown]
            trainings = [as_json(one) for one in known]
            show_json({"schema_version": 1, **around.as_json(), "trainings": trainings, "evaluations": rows})
            return
        if unread := unreadable_message(settings.work_dir):
            print_text(unread, "yellow")
        if missing := self.missing(settings):
            print_text(f"{missing}: `evalspan eval` or `evalspan submit` makes it")
        elif not found and not unread:
            print_text("no evaluations here yet: `evalspan submit` or `evalspan eval` starts one")
            print_text(f"work folder: {self.place(settings)}")
        elif found and not shown:
            which = " and ".join(["runs or waits"] * self.only_open + ["has failed"] * self.only_failed)
            print_text(f"none of the {len(found)} evaluations here {which}")
        left = show_left_out(left_out, len(shown), self.typed("status"))
        below = [*left, *standing_lines(known), *around.lines(now)]
        print_parts(stdout_console(), *evaluation_table(shown, now, whole=only is not None), *below)


@command()
class Watch(SettingsCommand):
    """Show a live screen: running and waiting evaluations, the latest scores, the daemon.

    Ctrl-C leaves the screen; evaluations continue. In a pipe it prints a line per change, and ends when
    nothing is running.

    Example:

    evalspan watch
    """

    evaluation: str | None = argument("Only this one, until it has ended.", None)

    def run(self) -> None:
        from coordinator.interface.cli.screen.work_folder_view import draw_until_over
        from coordinator.runtime.known_evaluations import find_folder

        settings = self.there()
        only = find_folder(settings, self.evaluation) if self.evaluation is not None else None
        if why := draw_until_over(settings, stdout_console(), self.typed("daemon"), only):
            print_text(why)


@command()
class Logs(SettingsCommand):
    """Print the log of a job, a trial, or a shard's trial; without a name, every log's last line.

    With -f it continues until the evaluation has ended, or Ctrl-C.

    Examples:

    evalspan logs step-1000-core-1a2b3c4d

    evalspan logs step-1000-core-1a2b3c4d "hellaswag|0|12" -n 100

    evalspan logs step-1000-core-1a2b3c4d trial -f
    """

    evaluation: str = argument(EVALUATION)
    what: str | None = argument("A job, trial or shard, or part of its name.", None)
    lines: int = option("Number of lines from each log's end.", "-n", min=1, default=40)
    follow: bool = flag("Keep printing new lines.", "--follow", "-f")

    def run(self) -> None:
        from coordinator.base.signals import Signals
        from coordinator.runtime.replay import find_evaluation
        from coordinator.runtime.summary import read_summary

        state, paths, _ = find_evaluation(self.there(), self.evaluation)
        chosen = _logs_of(state, paths, self.what)
        if not chosen and self.what is None and state.ended_at is not None:
            raise OperatorError(
                f"{state.evaluation_id} no longer has logs: `evalspan prune` removes those of old evaluations"
            )
        if not chosen:
            raise OperatorError(
                f"no log in {paths.logs} is of {self.what!r}: `evalspan logs {self.evaluation}` lists them"
            )
        shown: dict[Path, int] = {}
        self._print(chosen, shown)
        over = state.ended_at is not None
        with Signals() as signals:
            while self.follow and not over and not signals.received:
                time.sleep(FOLLOW_SECONDS)
                over = getattr(read_summary(paths), "ended_at", None) is not None
                self._print(_logs_of(state, paths, self.what), shown)

    def _print(self, logs: Iterable[Path], shown: dict[Path, int]) -> None:
        """Print the last lines of each log, later only new ones. `shown`: log -> bytes printed, the latest log last."""
        for file in logs:
            text = read_bytes(file)[shown.get(file, 0) :]
            if self.follow:  # only complete lines
                text = text[: text.rfind(b"\n") + 1]
            said = json.loads(text)["detail"] if file.suffix == ".json" else text.decode(errors="replace")
            lines = said.splitlines()
            if self.what is None and file not in shown:
                print_text(f"{file.name}: {lines[-1] if lines else '(empty)'}")
            elif text or file not in shown:
                if [*shown][-1:] != [file]:
                    print_text(f"== {file}", "bold")
                print_text("\n".join(lines if file in shown else lines[-self.lines :]))
            shown[file] = shown.pop(file, 0) + len(text)


def _logs_of(state: State, paths: EvaluationPaths, what: str | None) -> list[Path]:
    """Return logs that `what` names: (part of) a job's or trial's name, or a shard; otherwise its outcome's file."""
    from pathlib import Path

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
    return sorted({f for f in (chosen or [paths.outcome("failed", what)]) if file_exists(f)})
