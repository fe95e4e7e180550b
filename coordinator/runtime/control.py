"""Commands to one evaluation: pause, resume, priority. They are left for the process that runs it.

Rule: the inbox is the way of every command. Where no process has the work folder, a pause is obeyed here, since jobs of the
evaluation may hold nodes; the others wait for the next process. Called by `coordinator.api` and the command line.
"""

from __future__ import annotations

import logging
import signal
from contextlib import closing

from coordinator.base.signals import Signals
from coordinator.errors import OperatorError
from coordinator.intake.inbox import Notice, leave_notice
from coordinator.intake.pending import waits_for_daemon
from coordinator.intake.work_folder import refuse_guest
from coordinator.runtime.journal import Journal, check_format
from coordinator.runtime.known_evaluations import find_folder
from coordinator.runtime.summary import read_ended_summary
from coordinator.runtime.work_lock import WorkLock, is_daemon
from coordinator.site.config.schema import Config
from evaljobs.contract.paths import EvaluationPaths, WorkPaths

log = logging.getLogger(__name__)

ON_NODES = frozenset({"stage", "trial", "host"})  # purposes of jobs on nodes with GPUs


def commanded_folder(config: Config, evaluation: str) -> EvaluationPaths:
    """Return the folder of an evaluation that a command can reach. OperatorError."""
    refuse_guest(config.work_dir)
    folder = find_folder(config, evaluation)
    check_format(folder.journal)
    if not Journal.begun(folder.journal):
        raise OperatorError(f"{folder.journal} is empty: the evaluation was never accepted; submit it again")
    return folder


def leave_command(paths: WorkPaths, notice: Notice, holder: str) -> str:
    """Leave a command for `holder`, which has the work folder, and return what a person reads."""
    leave_notice(paths, notice)
    later = f"; where {holder}, runs another evaluation, the next daemon obeys it"
    return f"{notice.command} of {notice.evaluation_id} is asked for{'' if is_daemon(holder) else later}"


def send_command(config: Config, evaluation: str, notice: Notice, daemon: str) -> str:
    """Send a pause, resumption or priority, and return what a person reads. `daemon`: the command that starts one.

    OperatorError where the evaluation has ended.
    """
    folder, paths = commanded_folder(config, evaluation), WorkPaths(config.work_dir)
    name, notice = folder.root.name, notice.model_copy(update={"evaluation_id": folder.root.name})
    if read_ended_summary(folder) is not None:
        raise OperatorError(f"{name} has ended: no {notice.command} can change it")
    if holder := WorkLock(paths.lock).holder():
        return leave_command(paths, notice, holder)
    if notice.command == "pause":
        return _pause_here(config, name, notice.reason)
    leave_notice(paths, notice)
    return f"{notice.command} of {name} is asked for; {waits_for_daemon(holder, daemon)}"


def _pause_here(config: Config, name: str, reason: str) -> str:
    from coordinator.runtime.wiring import coordinator_of  # noqa: PLC0415 (`submit` loads no Redis client)

    coordinator = coordinator_of(config)
    with (
        closing(coordinator.evaluations),
        Signals((signal.SIGINT,)) as signals,
        coordinator.in_charge("evalspan pause"),
    ):
        try:
            coordinator.evaluations.revive(name)
            coordinator.evaluations.pause(name, reason)
        except KeyError as error:
            raise OperatorError(str(error.args[0])) from error
        state = coordinator.evaluations.running[name].state

        def on_nodes() -> int:
            return sum(info.job.purpose in ON_NODES for info in state.jobs.live.values())

        coordinator.run(lambda: not on_nodes() or bool(signals.received))
        left = on_nodes()
    if left:
        log.warning(
            "%s is paused, but %d of its jobs may still hold nodes: `evalspan pause %s` waits until none does",
            name,
            left,
            name,
        )
        raise KeyboardInterrupt
    return f"{name} is paused: none of its jobs holds a node; `evalspan resume {name}` lets it go on"
