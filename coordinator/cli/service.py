"""`evalspan daemon | submit | status | watch | logs`: the daemon, its inbox, and views of its work."""

from __future__ import annotations

import json
import logging
import os
import time
from functools import partial
from typing import TYPE_CHECKING

from coordinator.cli import lm_eval_flags
from coordinator.cli.app import (
    EVALUATION,
    Console,
    Printed,
    TerminalMessages,
    Where,
    argument,
    command,
    flag,
    option,
    say,
    show_json,
    stdout,
)
from coordinator.cli.disk import show_disk
from coordinator.cli.evaluate import CHECKPOINT, STEP
from coordinator.cli.lm_eval_flags import LmEvalCommand
from coordinator.cli.suite_options import Chosen
from coordinator.errors import OperatorError
from evaljobs import log_lines
from evaljobs.contract.folded import exists, files_in, read_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from coordinator.config.schema import Config
    from coordinator.evaluation.state import State
    from evaljobs.contract.paths import EvaluationPaths

log = logging.getLogger(__name__)

FOLLOW_SECONDS = 0.5  # between two looks at the logs
OF_DAEMON = option("Refused: set in the daemon's settings.", hidden=True)  # `api.submit` tells why


@command()
class Daemon(Where):
    """Evaluate every checkpoint that the hook, `submit` or a watched folder announces, until stopped.

    SIGTERM or Ctrl-C cancels nothing: jobs on Slurm go on, jobs of the local cluster end, and the next daemon
    resumes. Examples:

    evalspan daemon

    evalspan daemon --until-idle --work-dir /shared/evalspan-work
    """

    until_idle: bool = flag("Exit once nothing is left to do, e.g. in a batch job.")
    wait: bool = flag("Also wait for another daemon to release the work folder, not only for other commands.")

    def run(self) -> None:
        from contextlib import ExitStack, closing

        from coordinator.base.isolate import LoopGuard
        from coordinator.base.signals import Signals
        from coordinator.cli.screen.live_screen import Watcher
        from coordinator.cli.screen.standing import Shown
        from coordinator.intake.admission import missing_places, no_place
        from coordinator.intake.from_settings import check_device
        from coordinator.monitor.watch import Beside
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
        for why in (*filter(None, [no_place(settings)]), *missing_places(settings.watch)):
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
            beside = stack.enter_context(closing(Beside(settings, coordinator)))
            quiet_since = time.monotonic()
            guard = LoopGuard(log)
            coordinator.evaluations.resume_all()

            def tick() -> None:
                nonlocal quiet_since
                service.tick()
                found = coordinator.evaluations.summaries()
                running = [Shown(summary) for summary in found if summary.ended_at is None]
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
    from coordinator.intake.resubmit import reused

    name = ended.evaluation_id
    log.info("%s has ended%s: evalspan report %s", name, reused(ended), name)


def _check_watch(settings: Config, config: Path | None) -> None:
    """Refuse at the start a [watch] suite that does not load or lacks its judge."""
    from coordinator.config.loading import source_of
    from coordinator.intake.admission import loaded_suites
    from coordinator.intake.from_settings import judge_for

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
        log_lines.begin("%(message)s", handler)
    else:
        log_lines.begin("%(asctime)s %(levelname)s %(message)s")


@command(cls=LmEvalCommand)
class Submit(Chosen):
    """Submit a checkpoint to the daemon of this work folder. Submitting it again creates no second evaluation.

    A second submission may raise the priority; it resumes a cancelled or stale evaluation. Examples:

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
            lm_eval_flags.the_checkpoint(self.checkpoint, pretrained),
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
        say(sent.evaluation_id)
        if sent.note:
            say(sent.note, err=True)
        if sent.waits:
            say(sent.waits, "yellow", err=True)
            say(f"work folder: {self.place(self.settings())}", "yellow", err=True)


@command()
class Status(Printed):
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
        from coordinator.cli.screen.board import board
        from coordinator.cli.screen.listing import show_left_out
        from coordinator.cli.screen.mornings import as_json, of_trainings, standings
        from coordinator.cli.screen.sight import Sight, listed_jobs, listed_nodes
        from coordinator.cli.screen.standing import ROWS, all_of, choose, json_of, standing
        from coordinator.report.tables import print_parts
        from coordinator.runtime.summaries import find_folder, unreadable

        if self.disk:
            show_disk(self.there(), self.last, as_json=self.as_json)
            return
        settings = self.settings(makes=False)
        only = find_folder(settings, self.evaluation).root.name if self.evaluation else None
        found, now = all_of(settings), time.time()
        around = Sight(settings, self.typed("daemon")).around
        last = self.last if self.as_json else self.last or ROWS
        asked = {"only_open": self.only_open, "only_failed": self.only_failed}
        chosen, left_out = choose(found, only=only, last=last, **asked)
        open_ones = [summary for summary in found if summary.ended_at is None]
        ask, ask_nodes = partial(listed_jobs, settings), partial(listed_nodes, settings)
        shown = standing(settings, chosen, open_ones, ask, ask_nodes)
        known = standings(settings, found, chosen, now)
        if self.as_json:
            shown.sort(key=lambda one: (one.summary.accepted_at, one.summary.evaluation_id))
            rows = [json_of(one, settings.work_dir / one.summary.evaluation_id, now) for one in shown]
            trainings = [as_json(one) for one in known]
            show_json({"schema_version": 1, **around.as_json(), "trainings": trainings, "evaluations": rows})
            return
        if unread := unreadable(settings.work_dir):
            say(unread, "yellow")
        if missing := self.missing(settings):
            say(f"{missing}: `evalspan eval` or `evalspan submit` makes it")
        elif not found and not unread:
            say("no evaluations here yet: `evalspan submit` or `evalspan eval` starts one")
            say(f"work folder: {self.place(settings)}")
        elif found and not shown:
            which = "runs or waits" if self.only_open else "has failed"
            say(f"none of the {len(found)} evaluations here {which}")
        left = show_left_out(left_out, len(shown), self.typed("status"))
        below = [*left, *of_trainings(known), *around.lines(now)]
        print_parts(stdout(), *board(shown, now, whole=only is not None), *below)


@command()
class Watch(Where):
    """Show a live screen: running and waiting evaluations, the latest scores, the daemon.

    Ctrl-C leaves it, the evaluations go on. In a pipe it prints a line per change, and ends when
    nothing runs. Example:

    evalspan watch
    """

    evaluation: str | None = argument("Only this one, until it has ended.", None)

    def run(self) -> None:
        from coordinator.cli.screen.sight import watch
        from coordinator.runtime.summaries import find_folder

        settings = self.there()
        only = find_folder(settings, self.evaluation) if self.evaluation else None
        if why := watch(settings, stdout(), self.typed("daemon"), only):
            say(why)


@command()
class Logs(Where):
    """Print the log of a job, a trial, or a shard's trial; without a name, every log's last line.

    With -f it continues until the evaluation has ended, or Ctrl-C. Examples:

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
                say(f"{file.name}: {lines[-1] if lines else '(empty)'}")
            elif text or file not in shown:
                if [*shown][-1:] != [file]:
                    say(f"== {file}", "bold")
                say("\n".join(lines if file in shown else lines[-self.lines :]))
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
    return sorted({f for f in (chosen or [paths.outcome("failed", what)]) if exists(f)})
