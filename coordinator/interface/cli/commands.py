"""`evalspan cancel | pause | resume | priority | retry | release`: commands for evaluations and nodes. `supervise`: a training."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from coordinator.errors import ExitCode, OperatorError
from coordinator.interface.cli.app import (
    EVALUATION,
    Console,
    SettingsCommand,
    argument,
    command,
    option,
    print_text,
    print_to_stderr,
    report_write_errors,
)
from evaljobs.contract.paths import EvaluationPaths, WorkPaths

if TYPE_CHECKING:
    from coordinator.decide.allocation.demand import Use
    from coordinator.intake.inbox import Notice
    from coordinator.site.config.schema import Config

WRAPPER_SCRIPT = "train-with-eval.sbatch"
MOST_MINUTES = 60.0 * 24 * 365  # largest --minutes of `release`: a year


def _ask(config: Config, evaluation: str, asked: Notice) -> None:
    """Leave the command for the process that holds the work folder, or run it here."""
    from coordinator.runtime.control import commanded_folder, leave_command
    from coordinator.runtime.submission import withdraw_submission
    from coordinator.runtime.work_lock import WorkLock

    try:
        folder = commanded_folder(config, evaluation)
    except OperatorError:
        if asked.command != "cancel" or not (waited := withdraw_submission(config, evaluation)):
            raise
        print_text(f"{waited} is withdrawn: no daemon had started it")
        return
    name, paths = folder.root.name, WorkPaths(config.work_dir)
    if nothing := _nothing_to_do(folder, asked.command):
        print_text(f"{name} has ended{nothing}")
        return
    kept = _kept(config, folder) if asked.command == "retry" else ""
    asked = asked.model_copy(update={"evaluation_id": name})
    if not (holder := WorkLock(paths.lock).holder()):
        _run(config, asked, kept)
        return
    if kept:
        print_to_stderr(kept)
    print_text(leave_command(paths, asked, holder))


def _nothing_to_do(folder: EvaluationPaths, command: str) -> str:
    """Return why a command for an ended evaluation would change nothing; "" if it would, or if it has not ended."""
    from coordinator.runtime.make_summary import find_by_journal
    from coordinator.runtime.summary import read_json, read_summary

    found = read_summary(folder) or find_by_journal(folder, time.time())
    if found is None or found.ended_at is None:
        return ""
    if command == "cancel":
        return ": there is nothing to cancel"
    left = found.errors or read_json(folder.results).get("unscored")
    return "" if left else " and is scored: there is nothing to retry"


def _kept(config: Config, folder: EvaluationPaths) -> str:
    """Return which settings a retry keeps although they have changed; otherwise ""."""
    from coordinator.intake.from_settings import model_options
    from coordinator.intake.resubmit import kept_settings_message
    from coordinator.runtime.summary import read_evaluation

    record = read_evaluation(folder)
    return "" if record is None else kept_settings_message(record, model_options(config))


def _run(config: Config, asked: Notice, kept: str) -> None:
    """Run the command here until the evaluation has ended. Exit code 1: a retry failed. `kept`: from `_kept`."""
    from coordinator.base.words import by_reason
    from coordinator.intake.resubmit import reused_in_words
    from coordinator.interface.cli.screen.evaluation_views import EvaluationView
    from coordinator.interface.cli.screen.live_screen import Watcher
    from coordinator.operations.keeping.archive import archive_all
    from coordinator.runtime.wiring import coordinator_of

    name, coordinator = asked.evaluation_id, coordinator_of(config)
    with (
        closing(coordinator.evaluations),
        coordinator.in_charge(f"evalspan {asked.command}"),
        Watcher(Console(stderr=True)) as watcher,
    ):
        try:
            coordinator.evaluations.revive(name)
        except KeyError as error:
            raise OperatorError(str(error.args[0])) from error
        if kept:
            print_to_stderr(kept)
        if asked.command == "cancel":
            coordinator.evaluations.cancel(name, asked.reason)
        else:
            coordinator.evaluations.retry(name)
        ended = coordinator.until_ended(
            name,
            lambda: watcher.show(
                [*map(EvaluationView, coordinator.evaluations.summaries())], coordinator.evaluations.trouble
            ),
        )
    archive_all(config.work_dir, [name])
    if asked.command == "cancel":
        print_text(f"{name} is cancelled")
        return
    for task, why in by_reason({e.name: e.error for e in ended.entries if e.status == "failed"}).items():
        print_text(f"{name}: {task}: {why}")
    if ended.failed_entries() or ended.unscored_items:
        raise typer.Exit(ExitCode.FAILED)
    print_text(f"{name} is scored{reused_in_words(ended)}: `evalspan report {name}`")


@command()
class Cancel(SettingsCommand):
    """Stop an evaluation: its jobs are cancelled and node memory is cleared. Scores are kept.

    Example:

    evalspan cancel step-1000-core-1a2b3c4d --reason "wrong suite"
    """

    evaluation: str = argument(EVALUATION)
    reason: str = option("Shown in the report.", default="on request")

    def run(self) -> None:
        from coordinator.intake.inbox import Notice

        _ask(self.there(), self.evaluation, Notice(command="cancel", reason=self.reason))


class _Control(SettingsCommand):
    """A command to an evaluation that has not ended."""

    evaluation: str = argument(EVALUATION)

    def send(self, **notice: Any) -> None:
        from coordinator.intake.inbox import Notice
        from coordinator.runtime.control import send_command

        print_text(send_command(self.there(), self.evaluation, Notice(**notice), self.typed("daemon")))


@command()
class Pause(_Control):
    """Free an evaluation's nodes until it is resumed. Answers are kept, and work that needs no GPU continues.

    Example:

    evalspan pause step-1000-core-1a2b3c4d --reason "GPUs for a deadline"
    """

    reason: str = option("Shown by `status` and pages.", default="on request")

    def run(self) -> None:
        self.send(command="pause", reason=self.reason)


@command()
class Resume(_Control):
    """Let a paused evaluation use nodes again.

    Example:

    evalspan resume step-1000-core-1a2b3c4d
    """

    def run(self) -> None:
        self.send(command="resume")


@command(context_settings={"ignore_unknown_options": True})
class Priority(_Control):
    """Change the priority of an evaluation: the next free nodes go to the highest.

    Examples:

    evalspan priority step-1000-core-1a2b3c4d 5

    evalspan priority step-1000-core-1a2b3c4d -1
    """

    priority: int = argument("Higher goes first; an evaluation begins with 0.")

    def run(self) -> None:
        self.send(command="priority", priority=self.priority)


@command()
class Retry(SettingsCommand):
    """Retry an evaluation's failed tasks and its items without a score; scored tasks are kept.

    Without a daemon, the tasks run here.

    Example:

    evalspan retry step-1000-core-1a2b3c4d
    """

    evaluation: str = argument(EVALUATION)

    def run(self) -> None:
        from coordinator.intake.inbox import Notice

        _ask(self.there(), self.evaluation, Notice(command="retry"))


@command()
class Release(SettingsCommand):
    """Give whole nodes back to other users; their shards run on other nodes.

    Examples:

    evalspan release node17

    evalspan release --gpus 8 --minutes 240

    evalspan release node17 --minutes 0
    """

    node: str | None = argument("Node to give back.", None)
    gpus: int = option(
        "Instead of a node: this many GPUs, wherever the least work is lost.", min=0, default=0
    )
    minutes: float = option(
        "Minutes before it may be used again; 0: use it again now.", min=0.0, max=MOST_MINUTES, default=60.0
    )

    def run(self) -> None:
        from coordinator.decide.allocation import demand
        from coordinator.intake.inbox import Notice, leave_notice
        from coordinator.intake.work_folder import refuse_guest
        from coordinator.interface.cli.screen.evaluation_views import all_summaries
        from coordinator.runtime.work_lock import WorkLock

        node, minutes = self.node, self.minutes
        _check_release(node, self.gpus, minutes)
        settings = self.there()
        paths = WorkPaths(settings.work_dir)
        refuse_guest(paths.root)
        if not WorkLock(paths.lock).held():
            if node and not minutes and _end_cordon(paths, node):
                print_text(f"{node} may be used again")
                return
            raise OperatorError(f"no daemon is running on {paths.root}: there is nothing to release")
        used = [
            demand.Use(
                evaluation_id=one.evaluation_id,
                node=there.name,
                status=there.status,
                gpus=there.gpus,
                trials=there.trials,
            )
            for one in all_summaries(settings)
            for there in one.nodes
            if one.ended_at is None and there.status != "withdrawn"
        ]
        if node:
            _check_node(settings, node, used)
        names = (node,) if node else demand.nodes_to_give_back(used, self.gpus)
        if not names:
            raise OperatorError("no evaluation is using a GPU: there is nothing to release")
        leave_notice(paths, Notice(command="release", nodes=names, seconds=60 * minutes))
        for name in names:
            print_text(_given_back(name, used, minutes))
        if (found := sum(use.gpus for use in used if use.node in names)) < self.gpus:
            print_text(
                f"evaluations use {found} GPUs, fewer than --gpus {self.gpus}: all of them are released"
            )


def _check_release(node: str | None, gpus: int, minutes: float) -> None:
    if node and gpus:
        raise OperatorError(f"only whole nodes can be released: omit --gpus, or {node}")
    if not node and not gpus:
        raise OperatorError("name a node, or pass --gpus K")
    if not math.isfinite(minutes):
        raise OperatorError("--minutes must be a finite number")
    if not node and not minutes:
        raise OperatorError("--minutes 0 lifts the cordon of a node: name it")


def _end_cordon(paths: WorkPaths, node: str) -> bool:
    """Lift a node's cordon in the file, which no daemon reads now. Return False if it is not cordoned."""
    from coordinator.decide.allocation import cordons

    now = time.time()
    if node not in cordons.read_cordons(paths.nodes, now):
        return False
    with report_write_errors(paths.nodes):
        cordons.cordon_nodes(paths.nodes, [node], now, now)
    return True


def _check_node(config: Config, node: str, used: Sequence[Use]) -> None:
    """Refuse a name of no evaluation's or the cluster's nodes; pass where the cluster does not answer."""
    from coordinator.intake.catalogue import nearest_names
    from coordinator.runtime.wiring import cluster_of
    from coordinator.site.cluster import ClusterError

    if any(use.node == node for use in used):
        return
    try:
        known = [n.name for n in cluster_of(config).nodes()]
    except ClusterError:
        return
    if node not in known:
        raise OperatorError(f"the cluster has no usable node {node!r}{nearest_names(node, known)}")


def _given_back(node: str, used: Sequence[Use], minutes: float) -> str:
    from coordinator.base.words import format_seconds

    if not minutes:
        return f"{node} may be used again"
    there = [f"{u.gpus} GPUs of {u.evaluation_id}, {u.trials} trials" for u in used if u.node == node]
    in_use = "; ".join(there) or "not in use"
    return f"{node} is released ({in_use}) and cordoned for {format_seconds(60 * minutes)}"


@command(context_settings={"allow_extra_args": True})
class Supervise(SettingsCommand):
    """Run a training's COMMAND, and restart it from its newest complete checkpoint after failures that a restart can fix.

    A training that hangs is restarted, too. COMMAND finds the checkpoint in $EVALSPAN_RESUME_FROM (empty: from the
    beginning). If COMMAND is sbatch, its job is followed; after a node's failure its nodes are checked, and bad ones
    excluded.

    Examples:

    evalspan supervise --max-restarts 3 -- sbatch --nodes=4 SCRIPTS/train-with-eval.sbatch runs/7b core -- srun python train.py

    evalspan supervise --max-restarts 3 --checkpoints runs/7b -- torchrun train.py
    """

    max_restarts: int = option("Maximum number of restarts.", "--max-restarts", min=0, default=3)
    checkpoints: str = option(
        f"Folder, or a quoted glob, of its checkpoints. Default: the folder that {WRAPPER_SCRIPT} gets.",
        default="",
    )
    hang: float = option(
        "Seconds without output and heartbeat after which it hangs; 0: never.", min=0, default=1800.0
    )
    pause: float = option(
        "Seconds before a restart; doubled with each that brought no checkpoint.", min=0, default=10.0
    )

    def run(self) -> None:
        from coordinator.operations.supervise.supervision import Supervision

        if not self.rest:
            raise OperatorError("name the training's command behind --: evalspan supervise -- COMMAND")
        batch = Path(self.rest[0]).name == "sbatch"
        supervision = Supervision(
            config=self.settings({"cluster.kind": "slurm"} if batch else None),
            argv=self.rest,
            place=self._place(),
            most=self.max_restarts,
            hang_seconds=self.hang,
            first_pause=self.pause,
            say=lambda line: print_text(f"supervise: {line}", err=True),
        )
        raise typer.Exit(supervision.run())

    def _place(self) -> str:
        named = (after for word, after in pairwise(self.rest) if word.endswith(WRAPPER_SCRIPT))
        place = self.checkpoints or next(named, "")
        if not place:
            raise OperatorError("--checkpoints: name the folder where the training leaves its checkpoints")
        if Path(place).is_file():
            raise OperatorError(
                f"--checkpoints {place}: is a file: name the folder that holds the checkpoints"
            )
        return str(Path(place).absolute())
